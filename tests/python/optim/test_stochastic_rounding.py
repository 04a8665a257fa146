"""Stochastic rounding: an exact mean, and a separate draw per element.

test_every_way.py has the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext import FusedAdamW, digest

from ...support.compare import snapshot, unchanged
from ...support.oracle import PARAM, draws, round_stochastically, words
from ...support.problems import make_params, set_gradients, train
from ...support.ways import BF16, FP32, FP64

MANY = 100_000
RANDOM: dict[str, Any] = {"stochastic_rounding": True, "weight_decay": 0.0}


def test_numbers_count_over_groups_and_over_parameters_without_gradient() -> None:
    """Freezing a parameter does not change the draws of the others."""
    params = make_params(((40,), (41,), (42,)), BF16)
    options: dict[str, Any] = {"lr": 0.02, "stochastic_rounding": True, "rounding_seed": 7}
    optimizer = FusedAdamW([{"params": params[:2]}, {"params": params[2:]}], **options)
    start = [nn.Parameter(p.detach().float()) for p in params]
    set_gradients(params)
    params[0].grad = None
    twin = FusedAdamW(start, lr=0.02)
    for p, w in zip(params[1:], start[1:], strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    twin.step()
    for number in (1, 2):
        elements = np.arange(params[number].numel(), dtype=np.uint64)
        random = draws(7, 1, number, elements, PARAM)
        assert (words(params[number]) == round_stochastically(words(start[number]), random)).all()


def neighbours(exact: Tensor) -> tuple[float, float, float]:
    """Returns a float32 value's bfloat16 neighbors and its fraction of the way between."""
    high = int(words(exact)[0]) >> 16
    low, up = (torch.tensor([h], dtype=torch.int32).to(torch.int16).view(BF16).double().item()
               for h in (high, high + 1))  # fmt: skip
    return low, up, (exact.double().item() - low) / (up - low)


@pytest.mark.parametrize("value", [1.0, -1.0, 0.75, 1.5 * 2.0**-15])
@pytest.mark.parametrize("lr", [1e-5, 1.1e-3, 2.3e-3])
def test_the_mean_is_exact(value: float, lr: float) -> None:
    """100,000 draws give only the two neighbors, with a mean within five standard errors."""
    held = []
    for count, dtype, options in ((MANY, BF16, RANDOM), (1, FP32, {"weight_decay": 0.0})):
        p = nn.Parameter(torch.full((count,), value, dtype=dtype))
        optimizer = FusedAdamW([p], lr=lr * abs(value), **options)
        p.grad = torch.full_like(p, 0.3).bfloat16().to(dtype)
        optimizer.step()
        state = optimizer.state[p]
        held.append((p.detach(), state["exp_avg"], state["exp_avg_sq"]))
    ups = []
    for actual, exact in zip(*held, strict=True):
        low, up, fraction = neighbours(exact)
        values = actual.double()
        assert set(values.unique().tolist()) == {low, up}
        ups.append(values == up)
        mean = ups[-1].double().mean().item()
        assert abs(mean - fraction) < 5 * (fraction * (1 - fraction) / MANY) ** 0.5
        assert values.mean().item() == pytest.approx(exact.item(), rel=2.0**-8 / 50)
    for other in ups[1:]:  # a moment's draw is independent of the parameter's
        both = (ups[0] & other).double().mean().item()
        expected = ups[0].double().mean().item() * other.double().mean().item()
        assert abs(both - expected) < 5 * (expected / MANY) ** 0.5


def test_what_bf16_holds_stays() -> None:
    """With lr 0 no parameter drifts, whatever is drawn."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    p = nn.Parameter(every[every.isfinite()].clone())
    optimizer = FusedAdamW([p], lr=0.0, stochastic_rounding=True, state_dtype=FP32)
    p.grad = torch.ones_like(p)  # an update of -0.0 would change -0.0
    with unchanged(p):
        for _ in range(3):
            optimizer.step()


def test_specials() -> None:
    """Infinity and NaN stay; values beyond the largest finite value may become infinity."""
    largest = torch.finfo(BF16).max
    p = nn.Parameter(torch.full((3000,), largest, dtype=BF16))
    w = nn.Parameter(torch.full((1,), largest))
    for q, options in ((p, RANDOM), (w, {"weight_decay": 0.0})):
        q.grad = torch.ones_like(q)
        FusedAdamW([q], lr=1e36, maximize=True, **options).step()
    share = (int(words(w)[0]) & 0xFFFF) / 2**16  # share of the way to infinity
    assert w.isfinite().all() and 0.2 < share < 0.8
    assert ((p == largest) | p.isposinf()).all()
    assert abs(float(p.isposinf().float().mean()) - share) < 0.05
    for special, expected in ((float("nan"), 0x7FC0), (float("inf"), 0x7F80)):
        q = nn.Parameter(torch.full((3000,), special, dtype=BF16))
        q.grad = torch.ones_like(q)
        FusedAdamW([q], lr=1e-3, **RANDOM).step()
        assert (words(q) == expected).all()


def test_seed_step_parameter_and_element_all_matter() -> None:
    """Equal values at another element or parameter, or in another step, round differently."""

    def ups(seed: int, skip: int, number: int) -> np.ndarray:
        params = [nn.Parameter(torch.ones(4000, dtype=BF16)) for _ in range(3)]
        optimizer = FusedAdamW(params, 1e-3, (0.0, 0.0), rounding_seed=seed, **RANDOM)
        for _ in range(skip + 1):
            for p in params:  # with betas of 0 every step makes the same update
                p.data.fill_(1.0)
                p.grad = torch.ones_like(p)
            optimizer.step()
        return (params[number].detach() == 1).numpy()

    patterns = [ups(0, 0, 0), ups(1, 0, 0), ups(2**32, 0, 0), ups(0, 1, 0), ups(0, 0, 1)]
    patterns.append(np.roll(patterns[0], 1))
    for i, a in enumerate(patterns):
        for b in patterns[:i]:
            by_chance = a.mean() ** 2 + (1 - a.mean()) ** 2
            assert abs((a == b).mean() - by_chance) < 0.05
    assert (patterns[0] == ups(0, 0, 0)).all()


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_other_dtypes_are_not_rounded_at_random(dtype: torch.dtype) -> None:
    runs = []
    for options in ({}, {"stochastic_rounding": True}):
        optimizer = FusedAdamW(make_params([(2, 1031)], dtype), **options)
        train(optimizer, range(2))
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_shards_whose_elements_have_no_numbers_are_rejected_at_construction() -> None:
    """A shard cut in three dimensions after the first. What numbers no elements steps it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        cut = [Shard(1), Shard(2), Shard(3)]
        weight = nn.Parameter(distribute_tensor(torch.ones(2, 4, 4, 4).bfloat16(), mesh, cut))
        with pytest.raises(ValueError, match=r"'experts' .*stochastic_rounding= and digests"):
            FusedAdamW([("experts", weight)], stochastic_rounding=True)
        optimizer = FusedAdamW([("experts", weight)], track="norms")
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with pytest.raises(ValueError, match=r"parameter 0 .*stochastic_rounding= and digests"):
            digest(optimizer)
    finally:
        dist.destroy_process_group()
