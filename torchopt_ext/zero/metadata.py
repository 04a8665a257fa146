"""Optimizer state without its tensors as JSON. Unlike pickle, reading it runs no code.

None, bool, int, float, str and list are JSON's own. Any other value is an object with one key that
names its type, e.g. ``{"tuple": [1, 2]}``.
"""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
DICTS = (dict, OrderedDict, defaultdict)


def encode(value: Any, where: str) -> tuple[str, list[Tensor]]:
    """Encodes ``value`` as text. Returns the text and its tensors, which it refers to by position.

    Args:
        value: tensors, numbers, strings, None, lists, tuples, dicts, dtypes and devices, nested;
            torch.Size arrives as a tuple, OrderedDict and defaultdict as a dict.
        where: what ``value`` is, for errors: "state of parameter 3".

    Raises:
        TypeError: ``value`` contains another type, or a subclass of an accepted type.
        RecursionError: ``value`` is nested too deeply.
    """
    tensors: list[Tensor] = []

    def coded(value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if kind is list:
            return [coded(item) for item in value]
        if kind in (tuple, torch.Size):
            return {"tuple": [coded(item) for item in value]}
        if kind in DICTS:
            return {"dict": [[coded(key), coded(item)] for key, item in value.items()]}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (torch.dtype, torch.device):
            return {kind.__name__: str(value)}
        raise TypeError(
            f"{where}: cannot send a {kind.__qualname__}; state may hold tensors, numbers, "
            f"strings, lists, tuples, dicts"
        )

    return json.dumps(coded(value), ensure_ascii=False), tensors


def decode(text: str, tensors: Sequence[Any]) -> Any:
    """Decodes text from :func:`encode`, with ``tensors`` in place of the encoded tensors."""
    known: dict[str, Any] = {"tensor": dict(enumerate(tensors)), "dtype": DTYPES}

    def value_of(tag: str, content: Any) -> Any:
        """Decodes one JSON object. The objects inside ``content`` are decoded already."""
        if tag == "dict":
            return dict(content)
        if tag in ("tuple", "complex"):
            return tuple(content) if tag == "tuple" else complex(*content)
        if tag == "device":
            return torch.device(content)
        return known[tag][content]

    return json.loads(text, object_pairs_hook=lambda pairs: value_of(*pairs[0]))
