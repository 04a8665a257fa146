"""Orthogonalization on the GPU is near that in fp64, and can be captured."""

from __future__ import annotations

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
