"""Orthogonalization on the GPU is near that in fp64, and can be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchopt_ext import orthogonalize

from .support import marks

pytestmark = marks


@pytest.mark.parametrize("shape", [(64, 64), (3, 40, 90), (90, 40)], ids=str)
@pytest.mark.parametrize("preset", ["jordan", "polar_express"])
def test_near_fp64(preset: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-2), (torch.bfloat16, 0.1)):
        ours = orthogonalize(x.to("cuda", dtype), preset)
        assert ours.dtype == dtype
        expected = orthogonalize(x.to(dtype).double(), preset)
        assert float(torch.linalg.matrix_norm(ours.cpu().double() - expected, 2).max()) < tolerance


@pytest.mark.parametrize("shape", [(32, 32), (40, 90), (90, 40), (256, 768)], ids=str)
def test_a_batch_is_its_matrices(shape: tuple[int, int], record_property: Any) -> None:
    """Nothing promises the same bits: cuBLAS may choose a kernel by the size of a batch. The test's
    properties say where it has them."""
    torch.manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        batch = torch.randn(9, *shape, device="cuda").to(dtype)
        single = torch.stack([orthogonalize(x) for x in batch])
        ours = orthogonalize(batch)
        record_property(f"same bits in {dtype}", torch.equal(ours, single))
        torch.testing.assert_close(ours, single, rtol=0.0, atol=0.05)


def test_a_graph_captures_it() -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16)
    eager = orthogonalize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = orthogonalize(x)
    captured.zero_()
    graph.replay()
    torch.testing.assert_close(captured, eager, rtol=0.0, atol=0.05)
