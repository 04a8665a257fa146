"""Values that a checkpoint loads again as they were saved, without running code of its files.

DCP divides dicts and lists into entries, makes text of their keys, and loads only the items that
the running job has, too. It does not divide tuples.
"""

import copy
import io
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from torchopt_ext._torch import is_dtensor
from torchopt_ext.statedict.dcp import INDEXED

_PLAIN = (bool, int, float, complex, str, type(None))
_KNOWN = (Tensor, dict, list, tuple, OrderedDict, Counter)
"""What torch loads without running code of the file, if it has no attributes of its own."""
_WHOLE = "torchopt_ext.whole"
"""Begins a tuple whose second item is a value that DCP would divide."""


def divided(value: Any, where: str, *, strict: bool = False, nested: bool = False) -> Any:
    """A state that DCP divides, in which all can be loaded again.

    A dict inside of the state becomes a tuple, which :func:`restored` undoes, unless it has
    tensors. One with keys that are no strings becomes a tuple in any case.

    Args:
        strict: the state is an optimizer's, which :mod:`torchopt_ext.statedict.dcp` loads as it was
            divided. Keys that it cannot make of text again are rejected.
        nested: the value is inside of the state.

    Raises:
        TypeError: something would come back in part or otherwise, or as :func:`one_entry`.
    """
    if isinstance(value, Tensor):
        return value
    inner = partial(divided, strict=strict, nested=True)
    if type(value) is list:
        return _replaced(value, where, inner)
    if not isinstance(value, Mapping):
        return one_entry(value, where)
    texts = all(issubclass(kind, str) for kind in {*map(type, value)})
    if not strict and (not texts or (nested and bool(value) and _is_without_tensors(value))):
        return undivided(value, where)
    for key in value:
        if not isinstance(key, str) and where.partition(".")[2] not in INDEXED:
            raise TypeError(f"{where} has the key {key!r}, expected strings as keys")
    return _replaced(value, where, inner)


def undivided(value: Any, where: str) -> Any:
    """A value for DCP to save as one entry, which :func:`restored` gives back.

    Raises:
        TypeError: as :func:`one_entry`.
    """
    value = one_entry(value, where)
    return value if type(value) in (*_PLAIN, bytes) else (_WHOLE, value)


def one_entry(value: Any, where: str) -> Any:
    """A value with numpy's numbers as Python's, of which keys and classes are saved, too.

    Raises:
        TypeError: something would need code of the file to run, as numpy's arrays do, or is a
            DTensor; names it.
    """
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        value = value.item()
    if type(value) in _PLAIN or (type(value) is bytes and value):  # torch cannot load b"" again
        return value
    if isinstance(value, Tensor) and is_dtensor(value):
        raise TypeError(
            f"{where} is a DTensor inside of a value that one rank saves for all: expected a plain "
            "tensor"
        )
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _PLAIN:
                _check_loadable(key, f"the key {key!r} of {where}")
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        value = _replaced(value, where, one_entry)
    if type(value) not in _KNOWN or getattr(value, "__dict__", None):
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
    """The state that :func:`divided` or :func:`undivided` was given, of what was loaded."""
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


def packed(value: Any) -> bytes:
    """A nested value as one entry; DCP would make an entry of each item, of fixed number."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


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
