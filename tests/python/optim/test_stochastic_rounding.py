"""Stochastic rounding: the documented bits, an exact mean, and a separate draw per element."""

from __future__ import annotations

import copy
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

from .independent import (
    EXP_AVG,
    EXP_AVG_SQ,
    MAX_EXP_AVG_SQ,
    PARAM,
    draws,
    floats,
    is_upper_tie,
    join,
    round_stochastically,
    round_to_24_bits_stochastically,
    round_to_bf16,
    words,
)
from .subject import OURS, assert_same_bits, bits, make_params, set_gradients, snapshot

BF16, FP32 = torch.bfloat16, torch.float32
# One element, odd sizes, more than a tile (512), and more than a chunk (32,768).
SHAPES = ((3, 4), (7,), (), (2, 1031), (1, 33_003))
DRAWS = {
    "exp_avg": EXP_AVG,
    "exp_avg_sq": EXP_AVG_SQ,
    "max_exp_avg_sq": MAX_EXP_AVG_SQ,
}


def float32_twin(
    params: list[nn.Parameter], optimizer: Any, **kwargs: Any
) -> tuple[list[nn.Parameter], Any]:
    """Returns an optimizer that rounds nothing to bfloat16, with the given optimizer's state."""
    wide = [nn.Parameter(p.detach().float()) for p in params]
    twin = OURS["AdamW"](wide, **kwargs)
    twin.load_state_dict(optimizer.state_dict())
    for p, w in zip(params, wide, strict=True):
        w.grad = None if p.grad is None else p.grad.float()
    return wide, twin


@pytest.mark.parametrize(
    ("seed", "state_dtype", "amsgrad"),
    [(0, BF16, False), (12345, None, True), (2**32, FP32, True), (2**64 - 3, BF16, True)],
    ids=str,
)
def test_bits_of_a_step(seed: int, state_dtype: torch.dtype | None, amsgrad: bool) -> None:
    """The float32 result is rounded with the draws of seed, step, parameter and element."""
    params = make_params(SHAPES, BF16)
    kwargs: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "amsgrad": amsgrad}
    optimizer = OURS["AdamW"](
        params, stochastic_rounding=True, rounding_seed=seed, state_dtype=state_dtype, **kwargs
    )
    differing = 0
    for step in range(1, 5):
        set_gradients(params, seed=step)
        wide, twin = float32_twin(params, optimizer, **kwargs)
        twin.step()
        optimizer.step()
        for number, (p, w) in enumerate(zip(params, wide, strict=True)):
            elements = np.arange(p.numel(), dtype=np.uint64)
            exact = words(w)
            expected = round_stochastically(exact, draws(seed, step, number, elements, PARAM))
            assert (words(p) == expected).all()
            differing += int((expected != round_to_bf16(exact)).sum())
            for key in twin.state[w].keys() - {"step"}:
                found, exact = optimizer.state[p][key], words(twin.state[w][key])
                if state_dtype == FP32:
                    assert (words(found) == exact).all()
                else:
                    random = draws(seed, step, number, elements, DRAWS[key])
                    assert (words(found) == round_stochastically(exact, random)).all()
    assert differing > 1000


@pytest.mark.parametrize("kind", ["fp32", "remainder"])
def test_a_parameter_with_a_master_is_rounded_to_nearest(kind: str) -> None:
    """With a master weight only bfloat16 moments are rounded stochastically."""
    params, others = make_params(SHAPES, BF16), make_params(SHAPES, BF16)
    kwargs: dict[str, Any] = {"lr": 0.02, "master_weights": kind}
    ours = OURS["AdamW"](params, stochastic_rounding=True, state_dtype=BF16, **kwargs)
    wide = OURS["AdamW"](others, state_dtype=FP32, **kwargs)
    for step in range(1, 4):
        wide.load_state_dict(ours.state_dict())
        set_gradients(params, others, seed=step)
        ours.step()
        wide.step()
        assert_same_bits(params, others)
        for number, (p, q) in enumerate(zip(params, others, strict=True)):
            elements = np.arange(p.numel(), dtype=np.uint64)
            for key in ("exp_avg", "exp_avg_sq"):
                exact, random = words(wide.state[q][key]), draws(0, step, number, elements,
                                                                 DRAWS[key])  # fmt: skip
                assert (words(ours.state[p][key]) == round_stochastically(exact, random)).all()


def test_an_8_bit_remainder_is_rounded_at_random() -> None:
    """Each weight becomes a neighboring pair, and the parameter is the pair's nearest."""
    params = make_params(SHAPES, BF16)
    ours = OURS["AdamW"](
        params, lr=0.02, master_weights="remainder8", stochastic_rounding=True, rounding_seed=5
    )
    differing = ties = 0
    for step in range(1, 4):
        set_gradients(params, seed=step)
        ours.init_state()
        held = [floats(join(p, ours.state[p]["remainder8"])).view_as(p) for p in params]
        wide = [nn.Parameter(w) for w in held]
        twin = OURS["AdamW"](wide, lr=0.02)
        saved = ours.state_dict()
        for entry in saved["state"].values():
            entry.pop("remainder8")
        twin.load_state_dict(saved)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()  # type: ignore[union-attr]
        ours.step()
        twin.step()
        for number, (p, w) in enumerate(zip(params, wide, strict=True)):
            random = draws(5, step, number, np.arange(p.numel(), dtype=np.uint64), PARAM)
            exact = words(w)
            expected = round_to_24_bits_stochastically(exact, random)
            assert (join(p, ours.state[p]["remainder8"]) == expected).all()
            assert (words(p) == round_to_bf16(expected)).all()
            differing += int((expected != (exact & ~np.uint64(0xFF))).sum())
            ties += int(is_upper_tie(exact & ~np.uint64(0xFF)).sum())
    assert differing > 1000
    assert ties > 0


def test_numbers_count_over_groups_and_over_parameters_without_gradient() -> None:
    """Freezing a parameter does not change the draws of the others."""
    params = make_params(((40,), (41,), (42,)), BF16)
    kwargs: dict[str, Any] = {"lr": 0.02, "stochastic_rounding": True, "rounding_seed": 7}
    optimizer = OURS["AdamW"]([{"params": params[:2]}, {"params": params[2:]}], **kwargs)
    start = [nn.Parameter(p.detach().float()) for p in params]
    set_gradients(params)
    params[0].grad = None
    twin = OURS["AdamW"](start, lr=0.02)
    for p, w in zip(params[1:], start[1:], strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    twin.step()
    for number in (1, 2):
        elements = np.arange(params[number].numel(), dtype=np.uint64)
        random = draws(7, 1, number, elements, PARAM)
        assert (words(params[number]) == round_stochastically(words(start[number]), random)).all()


# ---- the mean ------------------------------------------------------------------------------------

MANY = 100_000


def rounded_copies(value: float, lr: float, seed: int = 0, count: int = MANY) -> tuple[Any, ...]:
    """Returns stored parameter and moments of equal elements, and their float32 values."""
    p = nn.Parameter(torch.full((count,), value, dtype=BF16))
    w = nn.Parameter(torch.full((1,), value))
    ours = OURS["AdamW"]([p], lr=lr, weight_decay=0.0, stochastic_rounding=True,
                         rounding_seed=seed)  # fmt: skip
    exact = OURS["AdamW"]([w], lr=lr, weight_decay=0.0)
    p.grad, w.grad = torch.full_like(p, 0.3), torch.full_like(p[:1], 0.3).float()
    ours.step()
    exact.step()
    return (p.detach(), ours.state[p]), (w.detach(), exact.state[w])


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
    stored, exact = rounded_copies(value, lr * abs(value))
    pairs = [(stored[0], exact[0])]
    pairs += [(stored[1][key], exact[1][key]) for key in ("exp_avg", "exp_avg_sq")]
    ups = []
    for found, wanted in pairs:
        low, up, fraction = neighbours(wanted)
        values = found.double()
        assert set(values.unique().tolist()) == {low, up}
        ups.append(values == up)
        mean = ups[-1].double().mean().item()
        assert abs(mean - fraction) < 5 * (fraction * (1 - fraction) / MANY) ** 0.5
        assert values.mean().item() == pytest.approx(wanted.item(), rel=2.0**-8 / 50)
    for other in ups[1:]:  # a moment's draw is independent of the parameter's
        both = (ups[0] & other).double().mean().item()
        expected = ups[0].double().mean().item() * other.double().mean().item()
        assert abs(both - expected) < 5 * (expected / MANY) ** 0.5


def test_what_bf16_holds_stays() -> None:
    """With lr 0 no parameter drifts, whatever is drawn."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    p = nn.Parameter(every[every.isfinite()].clone())
    before = bits(p)
    optimizer = OURS["AdamW"]([p], lr=0.0, stochastic_rounding=True, state_dtype=FP32)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert bits(p) == before


def test_specials() -> None:
    """Infinity and NaN stay; values beyond the largest finite value may become infinity."""
    largest = torch.finfo(BF16).max
    p = nn.Parameter(torch.full((3000,), largest, dtype=BF16))
    w = nn.Parameter(torch.full((1,), largest))
    optimizers = [OURS["AdamW"]([q], lr=1e36, weight_decay=0.0, maximize=True,
                                stochastic_rounding=q is p) for q in (p, w)]  # fmt: skip
    p.grad, w.grad = torch.ones_like(p), torch.ones_like(w)
    for optimizer in optimizers:
        optimizer.step()
    share = (int(words(w)[0]) & 0xFFFF) / 2**16  # share of the way to infinity
    assert w.isfinite().all() and 0.2 < share < 0.8
    assert ((p == largest) | p.isposinf()).all()
    assert abs(float(p.isposinf().float().mean()) - share) < 0.05

    for special, expected in ((float("nan"), 0x7FC0), (float("inf"), 0x7F80)):
        q = nn.Parameter(torch.full((3000,), special, dtype=BF16))
        optimizer = OURS["AdamW"]([q], lr=1e-3, weight_decay=0.0, stochastic_rounding=True)
        q.grad = torch.ones_like(q)
        optimizer.step()
        assert (words(q) == expected).all()


# ---- what draws depend on ------------------------------------------------------------------------


def run(seed: int, steps: int, **kwargs: Any) -> tuple[list[nn.Parameter], Any]:
    params = make_params(SHAPES, BF16)
    optimizer = OURS["AdamW"](
        params, lr=0.02, stochastic_rounding=True, rounding_seed=seed, **kwargs
    )
    for step in range(steps):
        set_gradients(params, seed=step)
        optimizer.step()
    return params, optimizer


def test_seed_step_parameter_and_element_all_matter() -> None:
    """Equal values at another element or parameter, or in another step, round differently."""

    def ups(seed: int, skip: int, number: int) -> np.ndarray:
        params = [nn.Parameter(torch.ones(4000, dtype=BF16)) for _ in range(3)]
        optimizer = OURS["AdamW"](params, lr=1e-3, weight_decay=0.0, stochastic_rounding=True,
                                  rounding_seed=seed, betas=(0.0, 0.0))  # fmt: skip
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
            agreement = (a == b).mean()
            share = a.mean()
            by_chance = share**2 + (1 - share) ** 2
            assert abs(agreement - by_chance) < 0.05
    assert (patterns[0] == ups(0, 0, 0)).all()


def test_threads_do_not_matter() -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(snapshot(run(3, 3, state_dtype=BF16)[1]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("how", ["state dict", "deepcopy"])
def test_a_resumed_run_draws_the_same(how: str) -> None:
    """A resumed run needs only the seed and the step count to draw the same."""
    _, straight = run(5, 5)
    params, optimizer = run(5, 3)
    if how == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
        params = optimizer.param_groups[0]["params"]
    else:
        saved = optimizer.state_dict()
        optimizer = OURS["AdamW"](params, lr=0.02, stochastic_rounding=True, rounding_seed=5)
        optimizer.load_state_dict(saved)
    for step in (3, 4):
        set_gradients(params, seed=step)
        optimizer.step()
    assert snapshot(optimizer) == snapshot(straight)


def test_other_dtypes_are_not_rounded_at_random() -> None:
    for dtype in (FP32, torch.float64):
        params, others = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
        optimizers = [OURS["AdamW"](params, stochastic_rounding=True), OURS["AdamW"](others)]
        for step in range(2):
            set_gradients(params, others, seed=step)
            for optimizer in optimizers:
                optimizer.step()
        assert snapshot(optimizers[0]) == snapshot(optimizers[1])


def test_training_that_nearest_rounding_stalls() -> None:
    """Updates of 1/78 of half an ulp are lost by nearest rounding and kept on average here."""
    moved = {}
    for kind, dtype, kwargs in (
        ("nearest", BF16, {}),
        ("stochastic", BF16, {"stochastic_rounding": True}),
        ("float32", FP32, {}),
    ):
        weight = nn.Parameter(torch.ones(2000, dtype=dtype))
        optimizer = OURS["AdamW"]([weight], lr=2.5e-5, weight_decay=0.0, **kwargs)
        for _ in range(400):
            optimizer.zero_grad()
            weight.float().square().sum().backward()
            optimizer.step()
        moved[kind] = 1 - weight.detach().double().mean().item()
    assert moved["nearest"] == 0
    assert moved["float32"] == pytest.approx(0.01, rel=0.01)
    assert moved["stochastic"] == pytest.approx(moved["float32"], rel=0.05)


def test_shards_whose_elements_have_no_numbers_are_refused_at_construction() -> None:
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
