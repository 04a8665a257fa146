"""What optimizer state and param groups hold, as JSON: reading it runs nothing, unlike pickle.

None, bool, str, finite floats and ints of 64 bits are themselves; everything else is a list of a
tag and what the tag stands for, e.g. ``["tuple", [1, 2]]``.
"""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_DICTS = (dict, OrderedDict, defaultdict)
_KEYS = (str, int, bool, float, type(None))
_MAX_DEPTH = 64  # far below Python's recursion limit; also what ends a reference cycle


def encode(value: Any, where: str) -> tuple[str, list[Tensor]]:
    """Text for `value`, and the tensors in it, which the text refers to by position.

    None, bool, int, float, complex, str, list, tuple, torch.Size (as a tuple), dict with keys of
    str, int, bool, float, None and tuples of these, OrderedDict and defaultdict (as a dict),
    torch.dtype, torch.device and, at any depth, tensors: the very objects, in order of appearance.

    Args:
        where: what `value` is, for errors: "state of parameter 3".

    Raises:
        TypeError: something else is in `value`, or it refers to itself.
    """
    tensors: list[Tensor] = []
    coded = _encode(value, where, [], tensors)
    return json.dumps(coded, ensure_ascii=False, allow_nan=False), tensors


def decode(text: str, tensors: Sequence[Any]) -> Any:
    """The value that `encode` made `text` of, with `tensors` where it had tensors.

    Raises:
        ValueError: the text is not from `encode`, or there are not as many tensors as it refers to.
    """
    used: list[int] = []
    try:
        value = _decode(json.loads(text), tensors, used)
    except (ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
        raise ValueError(f"malformed optimizer metadata: {_shown(text)}: {error}") from error
    if used != list(range(len(tensors))):
        raise ValueError(
            f"malformed optimizer metadata: {_shown(text)}: refers to tensors {used[:8]}, expected "
            f"each of {len(tensors)} once and in order"
        )
    return value


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


def _encode(value: Any, where: str, path: list[Any], tensors: list[Tensor]) -> Any:
    def part(item: Any, key: Any) -> Any:
        return _encode(item, where, [*path, key], tensors)

    if len(path) > _MAX_DEPTH:
        at = _place(where, path[:3])
        raise TypeError(f"{at}...: nested deeper than {_MAX_DEPTH} levels, or refers to itself")
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    # Exact types: a subclass, such as an enum, would arrive as something else.
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:  # Python limits the digits of decimal text, and only of decimal
        return value if -(2**63) <= value < 2**63 else ["int", hex(value)]
    if kind is float:
        return value if isfinite(value) else ["float", str(value)]
    if kind is complex:
        return ["complex", [part(value.real, "real"), part(value.imag, "imag")]]
    if kind is list:
        return ["list", [part(item, i) for i, item in enumerate(value)]]
    if kind in (tuple, torch.Size):
        return ["tuple", [part(item, i) for i, item in enumerate(value)]]
    if kind in _DICTS:
        for key in value:
            if not _is_key(key):
                raise TypeError(
                    f"{_place(where, path)}: cannot send a dict with a key of type {_name(key)}; "
                    "keys may be strings, numbers, None and tuples of these"
                )
        return ["dict", [[part(key, key), part(item, key)] for key, item in value.items()]]
    if kind is torch.dtype:
        return ["dtype", str(value)]
    if kind is torch.device:
        return ["device", str(value)]
    raise TypeError(
        f"{_place(where, path)}: cannot send a {_name(value)}; state may hold tensors, numbers, "
        "strings, lists, tuples, dicts"
    )


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_key, key)))


def _place(where: str, path: list[Any]) -> str:
    return f"{where} {''.join(f'[{key!r}]' for key in path)}".rstrip()


def _name(value: Any) -> str:
    kind = type(value)
    known = kind.__module__ in ("builtins", "torch")
    return kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"


def _decode(coded: Any, tensors: Sequence[Any], used: list[int]) -> Any:
    if not isinstance(coded, list):
        if isinstance(coded, dict) or (isinstance(coded, float) and not isfinite(coded)):
            raise ValueError(f"found {coded!r}, expected a number, a string or a tagged list")
        return coded
    tag, content = coded
    if tag == "tensor":
        used.append(content)
        if type(content) is not int or not 0 <= content < len(tensors):
            raise ValueError(f"refers to tensor {content!r}, {len(tensors)} were given")
        return tensors[content]
    if tag in ("list", "tuple", "dict", "complex"):
        if not isinstance(content, list):
            raise ValueError(f"found {content!r} in a {tag}, expected a list")
        if tag == "dict":
            return _decode_dict(content, tensors, used)
        items = [_decode(item, tensors, used) for item in content]
        if tag == "complex":
            return complex(*items)
        return items if tag == "list" else tuple(items)
    if not isinstance(content, str):
        raise ValueError(f"found {content!r} in {tag!r}, expected a string")
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float(content)
    if tag == "dtype":
        return _DTYPES[content]
    if tag == "device":
        return torch.device(content)
    raise ValueError(f"found tag {tag!r}, which encode does not write")


def _decode_dict(content: list[Any], tensors: Sequence[Any], used: list[int]) -> dict[Any, Any]:
    items = [(_decode(k, tensors, used), _decode(v, tensors, used)) for k, v in content]
    result = dict(items)
    if len(result) != len(items):
        raise ValueError("a dict has a key twice")
    return result
