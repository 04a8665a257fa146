"""Optimizer state without its tensors as a pickle of plain values, which runs nothing when read."""

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = (complex, OrderedDict, defaultdict, torch.Size, torch.dtype, torch.device)
"""What may be sent besides tensors and exact instances of Python's own plain types."""

NAMES = {
    *((kind.__module__, kind.__qualname__) for kind in (*KINDS, dict, list, int, float)),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""Modules and names that may be read: those of kinds, dtypes, and what a defaultdict calls."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self.where = where
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def reducer_override(self, value: Any) -> Any:
        """Rejects what would arrive as something else, such as an enum, or could run code."""
        kind = type(value)
        if kind in KINDS or (kind is type and (value.__module__, value.__qualname__) in NAMES):
            return NotImplemented
        raise TypeError(
            f"{self.where}: cannot send a {kind.__qualname__}; state may hold tensors, numbers, "
            f"strings, lists, tuples, dicts"
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"optimizer metadata refers to {module}.{name}")
        return super().find_class(module, name)


def encode(value: Any, where: str) -> tuple[str, list[Tensor]]:
    """Text for ``value``, and the tensors in it, which the text refers to by position.

    Args:
        value: tensors, numbers, text, bytes, None, lists, tuples, sets, dicts, ``KINDS``, nested.
        where: what it is, for errors: "state of parameter 3".

    Raises:
        TypeError: something else is in it, also a subclass of these.
        RecursionError: it is nested too deep.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, where)
    pickler.dump(value)
    return file.getvalue().decode("latin-1"), pickler.tensors


def decode(text: str, tensors: Sequence[Any]) -> Any:
    """The value that :func:`encode` made ``text`` of, with ``tensors`` where it had tensors.

    Raises:
        pickle.UnpicklingError: it refers to something that ``encode`` does not send.
    """
    unpickler = _Unpickler(io.BytesIO(text.encode("latin-1")))
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
    return unpickler.load()
