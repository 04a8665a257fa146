"""The control block has the values of docs/numerics.md in Python doubles."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext import _C, ops

FIELDS = ("grad_norm", "clip_factor", "grad_factor", "found_inf", "skip")


def accumulator_of(doubles: list[float]) -> torch.Tensor:
    accumulator = ops.new_accumulator()
    _C.accumulator_add(accumulator, torch.tensor(doubles, dtype=torch.float64))
    return accumulator


def fields(control: torch.Tensor) -> dict[str, float]:
    return dict(zip(ops.CONTROL_FIELDS, control.tolist(), strict=True))


def exact_total(doubles: list[float]) -> float:
    if any(math.isnan(x) for x in doubles):
        return math.nan
    if any(math.isinf(x) for x in doubles):
        return math.inf
    try:
        return float(sum((Fraction(x) for x in doubles), Fraction(0)))
    except OverflowError:
        return math.inf


def specified(
    doubles: list[float],
    max_grad_norm: float,
    skip_nonfinite: bool,
    grad_scale: float | None,
    found_inf: float | None,
) -> dict[str, float]:
    """docs/numerics.md, section 4."""
    scale = 1.0 if grad_scale is None else grad_scale
    grad_norm = math.sqrt(exact_total(doubles)) / scale
    clip_factor = max_grad_norm / (grad_norm + 1e-6) if max_grad_norm > 0 else 1.0
    clip_factor = 1.0 if clip_factor > 1 else clip_factor
    nonfinite = not math.isfinite(exact_total(doubles)) or bool(found_inf)
    return {
        "grad_norm": grad_norm,
        "clip_factor": clip_factor,
        "grad_factor": clip_factor * (1 / scale),
        "found_inf": float(nonfinite),
        "skip": float(nonfinite and (skip_nonfinite or bool(found_inf))),
    }


def same(a: dict[str, float], b: dict[str, float]) -> bool:
    return all(x == b[k] or (math.isnan(x) and math.isnan(b[k])) for k, x in a.items())


def scalar(x: float | None) -> torch.Tensor | None:
    return None if x is None else torch.tensor(x)


@given(
    doubles=st.lists(st.floats(min_value=0), max_size=5),
    max_grad_norm=st.one_of(st.sampled_from([0.0, -1.0, 1.0, math.inf]), st.floats(1e-300, 1e300)),
    skip_nonfinite=st.booleans(),
    grad_scale=st.one_of(st.none(), st.sampled_from([1.0, 65536.0, 2.0**-30, 3.0, 1000.1])),
    found_inf=st.sampled_from([None, 0.0, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_values(
    doubles: list[float],
    max_grad_norm: float,
    skip_nonfinite: bool,
    grad_scale: float | None,
    found_inf: float | None,
) -> None:
    if grad_scale is not None:
        grad_scale = torch.tensor(grad_scale).item()  # a scaler's scale is float32
    control = ops.new_control(max_grad_norm=max_grad_norm, skip_nonfinite=skip_nonfinite)
    accumulator = accumulator_of(doubles)
    before = accumulator.tolist()
    ops.control_update_(control, accumulator, scalar(grad_scale), scalar(found_inf))
    got = fields(control)
    want = specified(doubles, max_grad_norm, skip_nonfinite, grad_scale, found_inf)
    assert same({k: got[k] for k in FIELDS}, want)
    assert got["max_grad_norm"] == max_grad_norm
    assert got["skip_nonfinite"] == float(skip_nonfinite)
    assert accumulator.tolist() == before


def test_new_control_multiplies_by_one_and_does_not_skip() -> None:
    control = ops.new_control()
    assert control.dtype == torch.float64
    ones = {"clip_factor", "grad_factor", "grad_scale", "loss_scale", "lr_factor"}
    assert fields(control) == {name: float(name in ones) for name in ops.CONTROL_FIELDS}
    given = fields(ops.new_control(growth_interval=5.0, loss_scale=8.0))
    assert (given["growth_interval"], given["loss_scale"]) == (5, 8)
    with pytest.raises(ValueError, match="no field 'growth'"):
        ops.new_control(growth=1.0)


def test_counters() -> None:
    control = ops.new_control(skip_nonfinite=True)
    good, bad = accumulator_of([4.0]), accumulator_of([math.nan])
    for accumulator in (good, bad, bad, good):
        ops.control_update_(control, accumulator)
    got = fields(control)
    assert (got["steps"], got["skipped_steps"]) == (4, 2)
    assert (got["grad_norm"], got["skip"], got["found_inf"]) == (2, 0, 0)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e10])
def test_clip_agrees_with_torch(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([0.6 * norm, 0.8 * norm], dtype=torch.float64)
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_([parameter.grad], accumulator)
    control = ops.new_control(max_grad_norm=1.0)
    ops.control_update_(control, accumulator)
    ours = parameter.grad * fields(control)["grad_factor"]
    total = torch.nn.utils.clip_grad_norm_([parameter], 1.0, foreach=False)
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-15, atol=0)
    assert fields(control)["grad_norm"] == pytest.approx(total.item(), rel=1e-15)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_nonfinite_gradient(special: float, skip_nonfinite: bool) -> None:
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_([torch.ones(10), torch.tensor([1.0, special])], accumulator)
    control = ops.new_control(max_grad_norm=1.0, skip_nonfinite=skip_nonfinite)
    ops.control_update_(control, accumulator)
    got = fields(control)
    assert got["found_inf"] == 1
    assert got["skip"] == float(skip_nonfinite)
    assert math.isnan(got["clip_factor"]) if math.isnan(special) else got["clip_factor"] == 0
