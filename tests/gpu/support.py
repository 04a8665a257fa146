"""Misaligned parameters, the same on the CPU and on the GPU, and their steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

marks = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no GPU"
    ),
]

# Long and short rows, scalars, an empty tensor, and odd sizes that misalign the next tensor.
SHAPES = [(300, 257), (3, 4096), (70001,), (7, 63), (1,), (), (0, 3), (129, 65)]


def carved(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Returns adjacent tensors in one allocation, from its second element on."""
    generator = torch.Generator().manual_seed(seed)
    numels = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.randn(1 + sum(numels), 1 + dtype.is_complex, generator=generator)
    flat = (torch.view_as_complex(flat) if dtype.is_complex else flat[:, 0]).to(dtype, copy=True)
    pieces = flat[1:].split(numels)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def on(device: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors on ``device``, each at the same offset in its allocation."""
    flat = tensors[0]._base
    assert flat is not None
    moved = torch.empty_like(flat, device=device).copy_(flat)
    return [moved.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors]


def make_params(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(t) for t in on(device, carved(SHAPES, dtype, 0))]


def set_gradients(params: Sequence[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Sets the same gradients on any device. Scales that are powers of two are exact."""
    device = params[0].device.type
    dtype = params[0].grad_dtype
    grads = carved([tuple(p.shape) for p in params], dtype or params[0].dtype, 1000 + seed)
    for param, grad in zip(params, on(device, grads), strict=True):
        param.grad = grad * scale if scale != 1.0 else grad


def step_by_graph(optimizer: Optimizer) -> None:
    """Captures a step and replays it once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)  # without numpy


def everything(params: Sequence[nn.Parameter], optimizer: Optimizer) -> list[bytes]:
    """Returns all bits of parameters and state."""
    found = []
    for param in params:
        state: dict[str, Any] = optimizer.state.get(param, {})
        kept = [state[name] for name in sorted(state)]
        found += [bits(x) if isinstance(x, Tensor) else repr(x).encode() for x in (param, *kept)]
    return found
