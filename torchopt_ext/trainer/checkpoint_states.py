"""What checkpoints hold beside model, optimizer and schedule: random numbers, data position."""

import copy
import io
import json
import math
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from torchopt_ext._torch import is_dtensor, set_element
from torchopt_ext.statedict.dcp import INDEXED
from torchopt_ext.trainer.distributed import seed_generators

_PLAIN = (bool, int, float, complex, str, type(None))
_KNOWN = (Tensor, dict, list, tuple, OrderedDict, Counter)
"""What torch loads without running code of the file, if it has no attributes of its own."""
_WHOLE = "torchopt_ext.whole"
"""Begins a tuple whose second item is a value that DCP would divide. It does not divide tuples."""


class ModelState:
    """The parts' live parameters and buffers by name in the whole model."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self._parts = [(part, _Names()) for part in model_parts]

    def __call__(self) -> dict[str, Any]:
        """What DCP saves.

        Raises:
            ValueError: two parts have the same name.
        """
        merged: dict[str, Any] = {}
        for part, names in self._parts:
            own = names.state_of(part)
            if both := sorted(merged.keys() & own.keys()):
                raise ValueError(f"more than one model part has {both}")
            merged |= own
        return merged


class _Names:
    """get_model_state_dict, which is asked again only where a module's keys have changed: it takes
    30 us a key, which a save would add to a training step."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._renamed: dict[str, str] = {}  # those that wrappers have changed

    def state_of(self, part: nn.Module) -> dict[str, Any]:
        own = part.state_dict()
        if list(own) != self._keys:
            named = get_model_state_dict(part)
            old, new = (key for key in own if key not in named), (n for n in named if n not in own)
            self._keys, self._renamed = list(own), dict(zip(old, new, strict=True))
        kept = {key: value for key, value in own.items() if key not in self._renamed}
        return kept | {new: own[old] for old, new in self._renamed.items()}


def set_model_state(model_parts: list[nn.Module], state: dict[str, Any]) -> None:
    """Gives each part its entries of :class:`ModelState`'s, as they are or as they were saved."""
    for part in model_parts:
        own = {name: restored(state[name]) for name in get_model_state_dict(part)}
        set_model_state_dict(part, own, options=StateDictOptions(strict=False))


def model_entry(value: Any, name: str) -> Any:
    """What to save of an entry of a model's state: what is no tensor as one entry.

    Such is what modules' get_extra_state returns. The model that loads it may have other items.

    Raises:
        TypeError: it could not be loaded again; names what of it.
    """
    if torch.is_tensor(value):
        return value
    value = loadable(value, name, whole=True)
    return value if type(value) in (*_PLAIN, bytes) else (_WHOLE, value)


def model_to_load(live: dict[str, Any], metadata: Metadata, where: Any) -> dict[str, Any]:
    """A model's state for DCP to load into, where what is no tensor gives way to what was saved.

    DCP has divided it in a checkpoint of torchtitan's, or of this package before it saved such
    values as one entry, and has then no entry for an empty dict.

    Raises:
        ValueError: the checkpoint at `where` lacks entries; names them.
    """
    others = {name for name, value in live.items() if not torch.is_tensor(value)}
    found: dict[str, Any] = {}
    for name, path in (metadata.planner_data or {}).items():
        if path[0] in others:
            stored = metadata.state_dict_metadata.get(name)
            value = None
            if isinstance(stored, TensorStorageMetadata):
                value = torch.empty(stored.size, dtype=stored.properties.dtype)
            set_element(found, path, value)
    empty = {name for name in others if isinstance(live[name], Mapping) and not live[name]}
    if missing := sorted(live.keys() - metadata.state_dict_metadata.keys() - found.keys() - empty):
        raise ValueError(f"{where} lacks of the model: {', '.join(missing)}")
    return live | found


def converted(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Copies with floating-point tensors in a dtype."""
    return {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in state.items()
    }


def saved_names(metadata: Metadata, key: str) -> list[str]:
    """The names right below a key of what was saved."""
    paths = [path for path in (metadata.planner_data or {}).values() if path[0] == key]
    return list(dict.fromkeys(str(path[1]) for path in paths if len(path) > 1))


def packed(value: Any) -> bytes:
    """A nested value as one entry; DCP would make an entry of each item, of fixed number."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def loadable(
    value: Any, where: str, *, whole: bool = False, strict: bool = False, nested: bool = False
) -> Any:
    """A state with numpy's numbers as Python's, in which all can be loaded again.

    DCP divides dicts, makes text of their keys, and loads the items that the running job has, too.
    So a dict inside of the state becomes a tuple, which :func:`restored` undoes, unless it has
    tensors. One with keys that are no strings becomes a tuple in any case.

    Args:
        whole: DCP does not divide the value, so that keys and classes are saved, too.
        strict: the state is an optimizer's, which :mod:`torchopt_ext.statedict.dcp` loads as it was
            divided. Keys that it cannot make of text again are rejected.
        nested: the value is inside of the state.

    Raises:
        TypeError: something would need code of the file to run, as numpy's arrays do, or would come
            back in part or otherwise; names it.
    """
    if type(value) in _PLAIN or (type(value) is bytes and value):  # torch cannot load b"" again
        return value
    is_list = type(value) in (list, tuple)
    if is_list or isinstance(value, Mapping):
        whole = whole or type(value) is tuple
        if not is_list:
            texts = all(issubclass(kind, str) for kind in {*map(type, value)})
            apart = not texts or (nested and bool(value) and _is_without_tensors(value))
            if apart and not whole and not strict:
                return (_WHOLE, loadable(value, where, whole=True))
            if whole or not texts:
                _check_keys(value, where, whole=whole)
        function = partial(loadable, whole=whole, strict=strict, nested=True)
        value = _replaced(value, where, function)
    elif isinstance(value, Tensor):
        if whole and is_dtensor(value):
            raise TypeError(
                f"{where} is a DTensor inside of a value that one rank saves for all: expected a "
                "plain tensor"
            )
    else:
        if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
            value = value.item()
        whole = type(value) not in _PLAIN
    if whole and not _is_known(value):
        _check_loadable(value, where)
    return value


def _is_without_tensors(value: Any) -> bool:
    """Whether it is also of classes that can be saved."""
    if isinstance(value, Mapping):
        return type(value) in _KNOWN and all(map(_is_without_tensors, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_without_tensors, value))
    return not isinstance(value, Tensor)


def restored(value: Any) -> Any:
    """The state that :func:`loadable` or :func:`model_entry` was given, of what was loaded."""
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], str):
        return value[1] if value[0] == _WHOLE else value
    if isinstance(value, Mapping) or type(value) is list:
        return _replaced(value, "", lambda item, _: restored(item))
    return value


def state_to_load(live: Any, where: str, metadata: Metadata) -> Any:
    """A running job's state for DCP to load into, with one place for what is one entry."""
    if type(live) is not list and not isinstance(live, Mapping):
        return live
    if where in metadata.state_dict_metadata:
        return None
    return _replaced(live, where, partial(state_to_load, metadata=metadata))


def _replaced(value: Any, where: str, function: Callable[[Any, str], Any]) -> Any:
    """A dict, list or tuple with what a function makes of its items, given the place of each.

    A copy if anything changes. Plain items are not asked about.
    """
    items = enumerate(value) if type(value) in (list, tuple) else value.items()
    changed = {}
    for key, item in items:
        if type(item) not in _PLAIN and (new := function(item, f"{where}.{key}")) is not item:
            changed[key] = new
    if not changed:
        return value
    if type(value) is tuple:
        return tuple(changed.get(n, item) for n, item in enumerate(value))
    copied = copy.copy(value)
    for key, item in changed.items():
        copied[key] = item
    return copied


def _check_keys(value: Mapping[Any, Any], where: str, *, whole: bool) -> None:
    for key in value:
        if whole and type(key) not in _PLAIN:
            _check_loadable(key, f"the key {key!r} of {where}")
        if not whole and not isinstance(key, str) and where.partition(".")[2] not in INDEXED:
            raise TypeError(f"{where} has the key {key!r}, expected strings as keys")


def _is_known(value: Any) -> bool:
    return type(value) in _KNOWN and not getattr(value, "__dict__", None)


def _check_loadable(value: Any, where: str) -> None:
    """Saves and loads a value, in memory."""
    try:
        unpacked(packed(value), where)
    except (MemoryError, torch.OutOfMemoryError):  # says nothing about the value
        raise
    except Exception as error:  # pickling runs code of the value, which raises any kind
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{where} is a {kind}, which could not be loaded again without running code of the "
            "file: expected plain values, tensors, and dicts, lists and tuples of them"
        ) from error


def unpacked(data: Any, what: str) -> Any:
    """The value of :func:`packed`, without running code of the file.

    Raises:
        ValueError: it is something else.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file or another's pickle raises any kind
        text = f"{what} was not saved by this package ({type(error).__name__}: {error})"
        raise ValueError(text) from error


def layout(parallelism: Any, ranks: int) -> str:
    """Which rank does which part of the work, from the configuration's section."""
    names = (
        *("data_parallel_replicate", "data_parallel_shard", "context_parallel"),
        *("tensor_parallel", "pipeline_parallel"),
    )
    degrees = {name: getattr(parallelism, f"{name}_degree") for name in names}
    if degrees["data_parallel_shard"] == -1:
        degrees["data_parallel_shard"] = ranks // -math.prod(degrees.values())
    return json.dumps(degrees)


class DataPosition:
    """The position of a data loader, one entry for each key of its state dict.

    Of a parallel loader's state dict the keys differ by data-parallel rank, as torchtitan's
    ``dp_rank_0``; what several ranks have under one key is saved once.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def state_dict(self) -> dict[str, bytes]:
        """Raises TypeError if something of it could not be loaded again; names it."""
        packed_values = {}
        for key, value in self._dataloader.state_dict().items():
            packed_values[str(key)] = packed(loadable(value, f"dataloader.{key}", whole=True))
        return packed_values

    def names_to_load(self, metadata: Metadata) -> list[str]:
        """All: with another number of ranks the loader may need, or refuses, other ranks'."""
        return saved_names(metadata, "dataloader")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = {key: unpacked(data, f"dataloader.{key}") for key, data in state.items()}
        self._dataloader.load_state_dict(found)


class RandomState:
    """This rank's generators: torch's of CPU and current device, Python's, numpy's if imported.

    Args:
        rank: global.
        layout: as :func:`layout` says; states of another one are not loaded, for it divides the
            work otherwise.
    """

    def __init__(self, rank: int, layout: str) -> None:
        self._key, self._layout = f"rank_{rank}", layout

    def state_dict(self) -> dict[str, Any]:
        return {"layout": self._layout, self._key: packed(generator_states())}

    def names_to_load(self, metadata: Metadata) -> list[str]:
        return [name for name in ("layout", self._key) if name in saved_names(metadata, "rng")]

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """False: they are of another layout, and this rank's generators were not set."""
        if state.get("layout") != self._layout or self._key not in state:
            return False
        set_generator_states(unpacked(state[self._key], f"rng.{self._key}"))
        return True


def generator_states() -> dict[str, Any]:
    """The states of this process's generators."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Sets what of :func:`generator_states` this process has."""
    torch.set_rng_state(states["cpu"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(states["numpy"]))


def reseed(step: int) -> None:
    """Seeds the generators for a step: ranks of equal seeds stay equal, no step repeats another."""
    seed_generators((torch.initial_seed() + step) % 2**63)
