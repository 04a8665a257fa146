"""Operators on tensors of more than 2**31 elements."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from exact_reference import same_bits

from torchopt_ext import FusedMuon, ops, orthogonalize

from ...support import oracle

N = 2**31 + 5000
GIB = 2**30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def zeros(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns zeros whose pages take memory only when written, unlike torch.zeros.

    A mapping that is shared, as by default, takes memory when it is read, too.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * count, flags=flags), dtype=dtype)


@pytest.mark.parametrize("shape", [(N,), (1, N), (N // 8, 8), (8, N // 8)], ids=str)
def test_sum_of_squares(shape: tuple[int, ...]) -> None:
    flat = zeros(N)
    x = flat.view(shape)
    for k, i in enumerate((0, 2**31 - 1, 2**31, 2**31 + 4097, N - 1)):
        flat[i] = 2.0**k
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_([x], accumulator)
    assert ops.accumulator_total(accumulator).item() == sum(4.0**k for k in range(5))
    flat[N - 2] = float("inf")
    ops.grad_sumsq_([x], accumulator)
    assert accumulator[68:].tolist() == [1, 0]


def test_adam() -> None:
    if available_memory() < 14 * GIB:  # p, m and v
        pytest.skip("needs 14 GiB of free memory")
    p, g, m, v = (zeros(N) for _ in range(4))
    places = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 4097, N - 2, N - 1])
    values = torch.arange(1, 9).to(torch.bfloat16)
    for tensor, scale in ((p, 1), (g, 0.5), (m, 0.25), (v, 0.125)):
        tensor[places] = values * scale
    before = [x[places] for x in (p, g, m, v)]
    step, group = torch.tensor(2.0), {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}
    ops.adam_(
        [p], [g], [m], [v], [], [step], ops.new_control(),
        **group, beta1=0.9, beta2=0.99, decoupled_weight_decay=True, maximize=False,
    )  # fmt: skip
    param, states = oracle.step("adamw", group | {"betas": (0.9, 0.99)}, 3, *before[:2], before[2:])
    for got, expected in zip((p, m, v), (param, *states), strict=True):
        assert same_bits(got[places], expected)
        got[places] = 0
        # Zero gradients leave zeros. Check them in parts, to need no more memory.
        assert all(not part.any() for part in got.split(2**28))
    assert step.item() == 3


WIDE = (8, N // 8)
COLUMNS = torch.tensor([0, 1, 5000, 2**27, 2**28 - 1, 2**28, 2**28 + 1, WIDE[1] - 2, WIDE[1] - 1])
"""All others are zero, so that what a matrix becomes is what these columns alone become."""


def test_orthogonalize() -> None:
    """Two matrices of four rows, since the workspace is as large as one."""
    if available_memory() < 14 * GIB:  # the result and the workspace
        pytest.skip("needs 14 GiB of free memory")
    torch.manual_seed(0)
    few, x = torch.randn(2, 4, len(COLUMNS)), zeros(N, torch.float32).view(2, 4, -1)
    x[..., COLUMNS] = few
    ours = orthogonalize(x)
    assert same_bits(ours[..., COLUMNS], orthogonalize(few))
    ours[..., COLUMNS] = 0
    assert all(not part.any() for part in ours.view(-1).split(2**28))


def test_muon() -> None:
    """The passes before and after the products, which would take more memory."""
    if available_memory() < 14 * GIB:  # weights, momentum and directions
        pytest.skip("needs 14 GiB of free memory")
    torch.manual_seed(1)
    values, gradient = (torch.randn(8, len(COLUMNS)).bfloat16() for _ in range(2))
    whole, few = zeros(N).view(WIDE), values.clone()
    whole[:, COLUMNS] = values
    whole.grad, few.grad = zeros(N).view(WIDE), gradient
    whole.grad[:, COLUMNS] = gradient
    options = {"orthogonalize": lambda u: u, "orthogonalize_dtype": torch.bfloat16}
    for param in (few, whole):
        FusedMuon([param.requires_grad_()], lr=0.1, adjust_lr_fn=lambda m, n: 0.5, **options).step()
    whole = whole.detach()
    assert same_bits(whole[:, COLUMNS], few.detach())
    assert not torch.equal(few.detach(), values)
    whole[:, COLUMNS] = 0
    assert all(not part.any() for part in whole.view(-1).split(2**28))
