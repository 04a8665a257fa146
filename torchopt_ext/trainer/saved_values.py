"""Saves values so that they load unchanged from a checkpoint, without running code of its files.

DCP splits dicts and lists into entries, turns their keys into text, and loads only the items that
the running job also has. It does not split tuples.
"""

import copy
import io
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchopt_ext._torch import is_dtensor, set_element
from torchopt_ext.statedict.dcp import INDEXED

PLAIN = (bool, int, float, complex, str, type(None))
_LOADABLE = (Tensor, dict, list, tuple, OrderedDict, Counter)
"""Types that torch loads without running code of the file, if values have no attributes."""
_WHOLE = "torchopt_ext.whole"
"""The first item of a tuple whose second item is a value that DCP would split."""


def divided(value: Any, where: str, *, strict: bool = False, nested: bool = False) -> Any:
    """Returns a state that DCP can split, and from which every value can be loaded again.

    A dict inside the state becomes a tuple, which :func:`restored` undoes, if it has no tensors or
    has keys that are not strings. :mod:`torchopt_ext.statedict.dcp` loads an optimizer's state as
    it was split: `strict` rejects keys that cannot be restored from text, with a TypeError.
    """
    if isinstance(value, Tensor):
        return value
    inner = partial(divided, strict=strict, nested=True)
    if type(value) is list:
        return _replaced(value, where, inner)
    if not isinstance(value, Mapping):
        return one_entry(value, where)
    texts = all(issubclass(kind, str) for kind in {*map(type, value)})
    if not strict and (not texts or (nested and _is_without_tensors(value))):
        return undivided(value, where)
    for key in value:
        if not isinstance(key, str) and where.partition(".")[2] not in INDEXED:
            raise TypeError(f"{where} has the key {key!r}, expected strings as keys")
    return _replaced(value, where, inner)


def undivided(value: Any, where: str) -> Any:
    """Returns a value in a form that DCP saves as one entry. :func:`restored` undoes the form."""
    value = one_entry(value, where)
    return value if type(value) in (*PLAIN, bytes) else (_WHOLE, value)


def one_entry(value: Any, where: str) -> Any:
    """Converts numpy's numbers in a value to Python's, and checks that the value can be loaded.

    Raises TypeError, naming a part that is a DTensor or needs code of the file to load.
    """
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        value = value.item()
    if type(value) in PLAIN or (type(value) is bytes and value):  # torch cannot load b"" again
        return value
    if isinstance(value, Tensor) and is_dtensor(value):
        raise TypeError(
            f"{where} is a DTensor inside of a value that one rank saves for all: expected a plain "
            "tensor"
        )
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in PLAIN:
                _check_loadable(key, f"the key {key!r} of {where}")
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        value = _replaced(value, where, one_entry)
    if type(value) not in _LOADABLE or getattr(value, "__dict__", None):
        _check_loadable(value, where)
    return value


def _is_without_tensors(value: Any) -> bool:
    """Returns whether a value has no tensors, and no dicts of classes that cannot be saved."""
    if isinstance(value, Mapping):
        return type(value) in _LOADABLE and all(map(_is_without_tensors, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_without_tensors, value))
    return not isinstance(value, Tensor)


def restored(value: Any) -> Any:
    """Returns the original of a loaded state from :func:`divided` or :func:`undivided`."""
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], str):
        return value[1] if value[0] == _WHOLE else value
    if isinstance(value, Mapping) or type(value) is list:
        return _replaced(value, "", lambda item, _: restored(item))
    return value


def entries_to_load(keys: Set[str], live: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Returns the states that a checkpoint has at some keys, for DCP to load into.

    Only a tensor that is divided among ranks is the live one; others are new, on the host.
    """
    states: dict[str, Any] = {}
    for name, path in (metadata.planner_data or {}).items():
        if path[0] not in keys:
            continue
        stored, value = metadata.state_dict_metadata.get(name), _at(live, path)
        if type(value) is Tensor or not isinstance(value, Tensor):
            value = None
        if value is None and isinstance(stored, TensorStorageMetadata):
            value = torch.empty(stored.size, dtype=stored.properties.dtype)
        set_element(states, path, value)
    return states


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    """Returns a nested state's item, or None."""
    try:
        for key in path:
            value = value[key]
        return value
    except (KeyError, IndexError, TypeError):
        return None


def without_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the items of a state for which DCP saves nothing: empty dicts and lists of them."""

    def is_saved(value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(is_saved, value.values()))
        return type(value) is not list or not value or any(map(is_saved, value))

    return {name: value for name, value in state.items() if not is_saved(value)}


def _replaced(value: Any, where: str, function: Callable[[Any, str], Any]) -> Any:
    """Applies a function to each item of a dict, list or tuple, and to the item's path.

    Returns a copy if any item changes. Plain items are not passed to the function.
    """
    items = enumerate(value) if type(value) in (list, tuple) else value.items()
    changed = {}
    for key, item in items:
        if type(item) not in PLAIN and (new := function(item, f"{where}.{key}")) is not item:
            changed[key] = new
    if not changed:
        return value
    if type(value) is tuple:
        return tuple(changed.get(n, item) for n, item in enumerate(value))
    copied = copy.copy(value)
    for key, item in changed.items():
        copied[key] = item
    return copied


def _check_loadable(value: Any, where: str) -> None:
    """Checks that a value can be saved and loaded, in memory."""
    try:
        unpacked(packed(value), where)
    except (MemoryError, torch.OutOfMemoryError):  # says nothing about the value
        raise
    except Exception as error:  # pickling runs the value's code, which may raise any kind
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{where} is a {kind}, which could not be loaded again without running code of the "
            "file: expected plain values, tensors, and dicts, lists and tuples of them"
        ) from error


def packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpacked(data: Any, what: str) -> Any:
    """Returns the value that :func:`packed` got, without running code of the file."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file or a foreign pickle may raise any kind
        text = f"{what} was not saved by this package ({type(error).__name__}: {error})"
        raise ValueError(text) from error
