"""What all operators keep: rejections without changes, and one graph under torch.compile."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.compare import assert_same


def memory(tensor: Tensor) -> bytes | None:
    """Returns all bytes of a tensor's storage, or None on the meta device."""
    if tensor.layout != torch.strided:
        return memory(tensor.coalesce().values())
    if tensor.is_meta:
        return None
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


@contextmanager
def rejected(tensors: Iterable[Tensor], *words: str) -> Iterator[None]:
    """Asserts that the block raises with every word, and changes no tensor and no version."""
    before = [(x, memory(x), x._version) for x in tensors]
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)) as info:
        yield
    for word in words:
        assert re.search(word, str(info.value)), str(info.value)
    for x, content, version in before:
        assert (memory(x), x._version) == (content, version)


WRONG = {
    "sparse": (lambda x: x.to_sparse(), "[Ss]parse"),
    "complex": (lambda x: x.to(torch.complex64), "[Cc]omplex"),
    "integer": (lambda x: x.to(torch.int32), "[Ii]nt"),
    "float64": (lambda x: x.double(), "float64|[Dd]ouble"),
    "meta": (lambda x: x.to("meta"), "meta"),
    "shape": (lambda x: x[:-1].clone(), "shape"),
    "more dimensions": (lambda x: x.unsqueeze(0), "shape"),
    "gaps": (lambda x: torch.stack([x, x], -1)[..., 0], "strides"),
    "repeated": (lambda x: x[:1].clone().expand(x.shape), "strides"),
}
"""What is wrong with a tensor, and a word of the error."""


def assert_compiles_to_one_graph(
    run: Callable[..., Any], make: Callable[[], tuple[Any, ...]], backend: str
) -> None:
    """Asserts that compiled code writes and returns what eager code does, twice."""
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for _ in range(2):
        ours, eager = make(), make()
        assert_same(compiled(*ours), run(*eager))
        assert_same(ours, eager)


each_backend = pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],  # half a minute
)
