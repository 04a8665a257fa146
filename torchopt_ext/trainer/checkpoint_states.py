"""What checkpoints hold of the model, the data position and the random numbers."""

import json
import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from torchopt_ext._torch import set_element
from torchopt_ext.trainer.distributed import seed_generators
from torchopt_ext.trainer.saved_values import one_entry, packed, restored, undivided, unpacked


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
    return value if torch.is_tensor(value) else undivided(value, name)


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
        raise ValueError(f"{where} lacks entries of the model: {', '.join(missing)}")
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
            packed_values[str(key)] = packed(one_entry(value, f"dataloader.{key}"))
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
