"""FSDPadaptOptimizer on one process: the defects of the class that it replaces.

Other defects of it: test_trajectory.py, test_fsdp_optimizer_cost.py, test_offload.py,
test_fsdp_optimizer_state_dict.py, test_fsdp_optimizer_refused.py, and tests/distributed.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ..optim.subject import assert_same_bits
from .training import (
    BASES,
    BF16,
    FP16,
    FP32,
    FP64,
    KINDS,
    SHORT,
    SPECIALS,
    backward,
    coefficients,
    everything,
    ours_of,
    parameters,
    reference_of,
    train,
    weights_of,
)

SCALED: dict[str, Any] = {"initial_scale": 2.0**8, "growth_interval": 1000, "hysteresis": 1}
every_kind = pytest.mark.parametrize("kind", KINDS)


def scaled(kind: str, params: Any, **kwargs: Any) -> Any:
    return ours_of(kind, params, grad_scal_cfg=SCALED, **kwargs)


def norm_of(*tensors: Tensor | None) -> float:
    flat = [t.double().flatten() for t in tensors if t is not None]
    return float(torch.cat(flat).norm())


# ---- overflows -----------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("special", SPECIALS)
def test_an_overflow_changes_nothing(kind: str, dtype: torch.dtype, special: float) -> None:
    """At any element: no byte changes, gradients clear, the scale backs off, step() is false."""
    params = parameters(dtype, SHORT)
    ours = scaled(kind, params)
    train(ours, params, range(2))
    before = everything(ours, params)
    places = [(p, at) for p in range(3) for at in (0, params[p].numel() // 2, -1)]
    for count, (tensor, at) in enumerate(places, 1):
        given = coefficients(params, 9)
        given[tensor].view(-1)[at] = special
        backward(ours, params, given)
        assert not ours.step()
        after = everything(ours, params)
        for part in ("parameters", "weights", "state", "groups", "clip", "gradients"):
            assert after[part] == before[part], part
        assert after["skipped"] == count
        scale = max(2.0 ** (8 - count), 1.0)
        assert after["scaler"] == {
            "_scale": scale, "_growth_step": 0, "_hysteresis_step": count
        }  # fmt: skip
    train(ours, params, [3])
    assert everything(ours, params)["weights"] != before["weights"]


@every_kind
def test_the_norm_tells_what_overflowed(kind: str) -> None:
    """The flag is separate from the norm, which stays infinite or NaN and is never negative."""
    params = parameters(BF16, SHORT)
    ours = ours_of(kind, params)
    for special, told in ((math.inf, math.isinf), (-math.inf, math.isinf), (math.nan, math.isnan)):
        given = coefficients(params, 0)
        given[1][3] = special
        backward(ours, params, given)
        assert not ours.step()
        norm = ours.grad_norm
        assert norm.shape == () and norm.dtype == FP64
        assert told(float(norm))
        assert not float(norm) < 0
    train(ours, params, [1])
    assert 0 < float(ours.grad_norm) < 100


@every_kind
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_group_that_holds_nothing(kind: str, position: int) -> None:
    """Groups that are empty, without gradients or frozen add nothing; the others step."""
    held = parameters(BF16, SHORT)
    groups: list[dict[str, Any]] = [
        {"params": parameters(BF16, ((0, 4), (0,)))},
        {"params": [p.requires_grad_(False) for p in parameters(BF16, ((5,),))]},
        {"params": parameters(BF16, ((6,),))},  # never gets a gradient
    ]
    groups.insert(position, {"params": held})
    ours = ours_of(kind, groups, clip_grad_norm=0)
    alone = parameters(BF16, SHORT)
    other = ours_of(kind, alone, clip_grad_norm=0)
    for step in range(3):
        given = coefficients(held, step)
        backward(ours, held, given)
        backward(other, alone, given)
        assert ours.step() and other.step()
        exact = norm_of(*[None if c is None else c.to(BF16) for c in given])
        assert float(ours.grad_norm) == pytest.approx(exact, rel=1e-12)
    assert_same_bits(held, alone)
    empty = parameters(BF16, ((0,),))
    nothing = ours_of(kind, empty)
    train(nothing, empty, [0])
    assert float(nothing.grad_norm) == 0.0
    assert int(nothing.skipped_steps) == 0


@every_kind
def test_the_norm_survives_the_range_of_bfloat16(kind: str) -> None:
    """Gradients of 3e38, whose squares overflow float32, have a finite norm."""
    params = parameters(BF16, ((4, 4),))
    ours = FSDPadaptOptimizer(
        torch.optim.SGD(params, lr=1.0) if kind == "SGD" else FusedAdamW(params, lr=1.0)
    )
    before = [p.detach().float() for p in params]
    params[0].grad = torch.full((4, 4), 3e38, dtype=BF16)
    exact = norm_of(params[0].grad)
    assert exact > torch.finfo(FP32).max
    assert ours.step()
    assert float(ours.grad_norm) == pytest.approx(exact, rel=1e-12)
    assert int(ours.skipped_steps) == 0
    if kind == "SGD":  # clipped to norm 1: 16 gradients of 1/4
        moved = before[0] - weights_of(ours)[0]
        torch.testing.assert_close(moved, torch.full((4, 4), 0.25), rtol=1e-4, atol=0)
    else:
        assert all(w.isfinite().all() for w in weights_of(ours))
        assert_same_bits(params, [w.to(BF16) for w in weights_of(ours)])


# ---- clipping and scaling ------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("how", ["argument", "method"])
@pytest.mark.parametrize("clip", [0.5, 3.0, 1e6, 0.0, -1.0])
def test_the_threshold_is_an_argument(kind: str, how: str, clip: float) -> None:
    """Gradients become gradient / (scale * max(1, (norm + 1e-6) / clip)); clip <= 0 is off."""
    params = parameters(FP32, SHORT)
    if how == "argument":
        ours = sgd_of_one(kind, params, grad_scal_cfg=SCALED, clip_grad_norm=clip)
    else:
        ours = sgd_of_one(kind, params, grad_scal_cfg=SCALED)
        assert ours._clip_grad_norm == 1.0
        assert ours.clip_grad_norm(nn.Linear(1, 1), clip) is None
    assert ours._clip_grad_norm == clip
    given = coefficients(params, 0)
    norm = norm_of(*given)
    factor = max(1.0, (norm + 1e-6) / clip) if clip > 0 else 1.0
    before = [p.detach().clone() for p in params]
    for step in range(1, 3):  # the threshold stays
        backward(ours, params, given)
        assert ours.step()
        assert float(ours.grad_norm) == pytest.approx(norm, rel=1e-6)
        if kind == "SGD":
            for p, old, c in zip(params, before, given, strict=True):
                torch.testing.assert_close(old - p, step * c / factor, rtol=1e-4, atol=2e-6)
        else:  # after one step Adam's first moment is a tenth of the gradient
            for p, c in zip(params, given, strict=True):
                moment = ours.state[p]["exp_avg"]
                expected = (1 - 0.9**step) * c / factor
                torch.testing.assert_close(moment, expected, rtol=1e-5, atol=1e-9)


def sgd_of_one(kind: str, params: Any, **kwargs: Any) -> Any:
    base = torch.optim.SGD(params, lr=1.0) if kind == "SGD" else FusedAdamW(params, lr=1e-6)
    return FSDPadaptOptimizer(base, **kwargs)


def test_the_threshold_of_the_base_counts() -> None:
    """The base's max_grad_norm applies unless an argument overrides it, and clips once."""
    for own, given, expected in (
        (None, None, 1.0), (2.5, None, 2.5), (2.5, 7.0, 7.0), (2.5, 0.0, 0.0)
    ):  # fmt: skip
        base = FusedAdamW(parameters(BF16, SHORT), max_grad_norm=own)
        assert FSDPadaptOptimizer(base, clip_grad_norm=given)._clip_grad_norm == expected
    params = parameters(BF16, SHORT)
    ours = FSDPadaptOptimizer(FusedAdamW(params, max_grad_norm=2.5))
    given_ = coefficients(params, 0)
    backward(ours, params, given_)
    assert ours.step()
    rounded = [c.to(BF16).float() for c in given_ if c is not None]
    for p, c in zip(params, rounded, strict=True):
        expected_moment = 0.1 * c * 2.5 / (norm_of(*rounded) + 1e-6)
        torch.testing.assert_close(ours.state[p]["exp_avg"], expected_moment, rtol=1e-5, atol=1e-9)


@every_kind
def test_the_default_scale(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The scale is static for bfloat16 and float32, over any steps, and dynamic for float16."""
    for dtype in (BF16, FP32):
        params = parameters(dtype, ((3,),))
        ours = ours_of(kind, params)
        assert ours.loss_scale is ours.grad_scaler.scale
        for _ in range(1003):
            params[0].grad = torch.ones_like(params[0])
            ours.step()
        params[0].grad = torch.full_like(params[0], math.nan)
        assert not ours.step()
        assert float(ours.loss_scale) == 1.0
    params = parameters(FP16, ((3,),)) + parameters(BF16, ((3,),), seed=1)
    ours = ours_of(kind, params)
    assert float(ours.loss_scale) == 2.0**16
    for _ in range(3):
        given = coefficients(params, 0)
        given[0][1] = math.inf
        backward(ours, params, given)
        assert not ours.step()
    assert float(ours.loss_scale) == 2.0**14
    frozen = [p.requires_grad_(False) for p in parameters(FP16, ((3,),))]
    assert float(ours_of(kind, frozen + parameters(BF16, ((3,),))).loss_scale) == 1.0
    assert capfd.readouterr() == ("", "")


def test_configurations() -> None:
    """The scaler's arguments may be flat, or nested as in InternEvo."""
    flat: dict[str, Any] = {
        "initial_scale": 2.0**10, "min_scale": 2.0**9, "growth_interval": 3,
        "growth_factor": 4.0, "backoff_factor": 0.25, "max_scale": 2.0**13, "hysteresis": 1,
    }  # fmt: skip
    inner = ("initial_scale", "min_scale", "growth_interval")
    nested = {key: value for key, value in flat.items() if key not in inner}
    nested["fp16"] = {key: flat[key] for key in inner}
    kept = repr(nested)
    for config in (flat, nested):
        params = parameters(BF16, SHORT)
        ours = ours_of("SGD", params, grad_scal_cfg=config)
        trace = []
        for overflow in (False, False, False, True, True, False, False, False):
            given = coefficients(params, 0)
            if overflow:
                given[0][0] = math.nan
            backward(ours, params, given)
            ours.step()
            trace.append(math.log2(float(ours.loss_scale)))
        assert trace == [10, 10, 12, 10, 9, 9, 9, 11]
    assert repr(nested) == kept


@every_kind
def test_nothing_is_printed(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A skip is logged without reading a tensor, and other steps log nothing."""
    params = parameters(BF16, SHORT)
    ours = scaled(kind, params)
    for special in (None, math.nan, None, math.inf):
        given = coefficients(params, 0)
        if special is not None:
            given[0][0] = special
        backward(ours, params, given)
        caplog.clear()
        stepped = bool(ours.step())
        assert stepped == (special is None)
        assert not (stepped and caplog.records)
        assert not any("tensor" in record.getMessage() for record in caplog.records)
    assert capfd.readouterr() == ("", "")


@every_kind
def test_a_group_added_later(kind: str) -> None:
    """A later group gets masters at once and its own rate, and the norm covers all groups."""
    params, late = parameters(BF16, SHORT), parameters(BF16, ((9,), (2, 3)), seed=3)
    ours = scaled(kind, params)
    train(ours, params, range(2))
    others, others_late = parameters(BF16, SHORT), parameters(BF16, ((9,), (2, 3)), seed=3)
    plain = reference_of(kind, others, SCALED)
    train(plain, others, range(2))
    ours.add_param_group({"params": late, "lr": 0.3})
    plain.add_param_group({"params": others_late, "lr": 0.3})
    assert [group["lr"] for group in ours.param_groups][1] == 0.3
    assert_same_bits(weights_of(ours)[3:], [p.float() for p in late])
    for step in range(2, 5):
        given = coefficients(params + late, step)
        backward(ours, params + late, given)
        backward(plain, others + others_late, given)
        assert ours.step() and plain.step()
        assert float(ours.grad_norm) == pytest.approx(plain.grad_norm, rel=1e-6)
    for w, (_, v) in zip(weights_of(ours), plain.pairs(), strict=True):
        torch.testing.assert_close(w, v, rtol=2e-6, atol=2e-7)
    assert set(ours.state_dict()["flat_fp32_weights"]) == {0, 1}


@every_kind
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_wide_parameters_are_their_own_masters(kind: str, dtype: torch.dtype) -> None:
    """Wide parameters have no second copy: they are stepped and saved themselves."""
    params = parameters(dtype, SHORT)
    ours = scaled(kind, params)
    train(ours, params, range(3))
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(p) for p in params]
    assert len(ours.state) == 3
    for p, entry in zip(params, weights_of(ours), strict=True):
        if dtype == FP32:
            assert entry.data_ptr() == p.data_ptr()
        torch.testing.assert_close(entry.double(), p.detach().double(), rtol=1e-7, atol=0)
        assert "master_weight" not in ours.state.get(p, {})


@pytest.mark.parametrize("kind", BASES)
def test_state_from_before(kind: str) -> None:
    """State that the base has before wrapping applies to the masters from the first step."""
    params, others = parameters(BF16, SHORT), parameters(BF16, SHORT)
    base, twin = BASES[kind][0](params), BASES[kind][0](others)
    for step in range(3):
        for mine in (params, others):
            for p, c in zip(mine, coefficients(mine, step), strict=True):
                p.grad = c.to(BF16)
        base.step()
        twin.step()
    kept = {name for entry in twin.state.values() for name in entry}
    ours = FSDPadaptOptimizer(base, clip_grad_norm=0)
    for p in params:
        p.grad = None
    keys = [p for group in ours.param_groups for p in group["params"]]
    assert set(ours.state) <= set(keys)
    assert len(ours.state) == 3
    for key, q in zip(keys, others, strict=True):
        for name in kept:
            mine_, theirs = ours.state[key][name], twin.state[q][name]
            torch.testing.assert_close(mine_.float(), theirs.float(), rtol=0, atol=0)
    backward(ours, params, coefficients(params, 3))
    assert ours.step()
    if "Adam" in kind:
        assert [float(ours.state[key]["step"]) for key in keys] == [4.0] * 3
