"""Clipping and the overflow check in the step match clip_grad_norm_ followed by torch's step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ...support.compare import assert_same_bits, bits, snapshot
from ...support.problems import make_params, set_gradients
from ...support.ways import OURS, TORCH
from .subject import assert_close_to_torch, train

SHAPES = [(40, 70), (7,), (), (3, 100), (129,)]  # rows below and above 64 elements


def clipped_reference(
    params: list[nn.Parameter], max_norm: float, **kwargs: Any
) -> torch.optim.Optimizer:
    """Returns torch's optimizer with a hook that clips before each step and keeps the norms."""
    optimizer = TORCH["AdamW"](params, fused=True, **kwargs)
    optimizer.norms = []

    def clip(*_: Any) -> None:
        optimizer.norms.append(nn.utils.clip_grad_norm_(params, max_norm))

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 50.0, 1e9])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float64, 1e-13, 1e-15), (torch.float32, 2e-6, 1e-7)],
    ids=["float64", "float32"],
)
def test_against_clip_grad_norm(
    max_norm: float, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    """Norm and parameters match for thresholds far below, near and above the norm of about 55.

    float64 agrees to a few ulps. float32 also includes clip_grad_norm_'s own rounding.
    """
    mine, theirs = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
    ours = OURS["AdamW"](mine, lr=0.01, max_grad_norm=max_norm)
    reference = clipped_reference(theirs, max_norm, lr=0.01)
    for step in range(5):
        set_gradients(mine, theirs, seed=step)
        ours.step()
        reference.step()
        norm = reference.norms[-1].double()
        torch.testing.assert_close(ours.control.grad_norm, norm, rtol=max(rtol, 1e-14), atol=0)
        factor = min(1.0, max_norm / (float(ours.control.grad_norm) + 1e-6))
        assert float(ours.control.clip_factor) == factor
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                ours.state[p][key], reference.state[q][key], rtol=rtol * 10, atol=atol
            )


def test_one_norm_for_all_groups() -> None:
    lists = [make_params(SHAPES), make_params(SHAPES)]
    built = []
    for params, cls, flags in (
        (lists[0], OURS["AdamW"], {"max_grad_norm": 0.7}),
        (lists[1], TORCH["AdamW"], {"fused": True}),
    ):
        groups = [
            {"params": params[:2], "lr": 0.01},
            {"params": params[2:4], "weight_decay": 0.3, "betas": (0.5, 0.9)},
            {"params": params[4:], "maximize": True, "amsgrad": True},
        ]
        built.append(cls(groups, **flags))
    for step in range(4):
        set_gradients(*lists, seed=step)
        norm = nn.utils.clip_grad_norm_(lists[1], 0.7)
        for optimizer in built:
            optimizer.step()
        assert float(built[0].control.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    assert_close_to_torch(*lists)


def test_mixed_dtypes_share_one_norm() -> None:
    params = (
        make_params([(5, 80)], torch.float64)
        + make_params([(9,)])
        + make_params([(3, 66)], torch.bfloat16)
        + make_params([(5, 66)], torch.float16)
    )
    optimizer = OURS["AdamW"](params, eps=1e-4, max_grad_norm=1.0)
    set_gradients(params)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
    optimizer.step()
    assert float(optimizer.control.grad_norm) == pytest.approx(exact, rel=1e-14)


def test_only_present_gradients_count() -> None:
    params = make_params(SHAPES)
    optimizer = OURS["AdamW"](params, max_grad_norm=1.0)
    set_gradients(params)
    params[0].grad = None
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params[1:]))
    optimizer.step()
    assert float(optimizer.control.grad_norm) == pytest.approx(exact, rel=1e-14)
    for p in params:
        p.grad = None
    optimizer.step()
    assert float(optimizer.control.grad_norm) == 0.0
    assert float(optimizer.control.clip_factor) == 1.0


def test_norm_changes_between_steps() -> None:
    """A changed setting applies from the next step; a threshold of None or 0 disables clipping."""
    mine, plain = make_params(SHAPES), make_params(SHAPES)
    optimizer, reference = OURS["AdamW"](mine), OURS["AdamW"](plain)
    train([optimizer, reference], [mine, plain], 2)
    assert_same_bits(mine, plain)
    optimizer.max_grad_norm = 0.5
    train([optimizer], [mine], 1, first_seed=2)
    assert 0 < float(optimizer.control.clip_factor) < 1
    for off in (None, 0.0):
        optimizer.max_grad_norm = off
        train([optimizer], [mine], 1)
        assert float(optimizer.control.clip_factor) == 1.0
        assert math.isnan(optimizer.control.grad_norm), "no norm was measured"
    optimizer.skip_nonfinite = True
    mine[0].grad[0] = math.nan
    before = snapshot(optimizer)
    optimizer.step()
    assert snapshot(optimizer) == before
    optimizer.skip_nonfinite = False
    optimizer.step()
    assert mine[0][0].isnan().all()
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_grad_norm"):
            OURS["AdamW"](make_params(), max_grad_norm=bad)
        with pytest.raises(ValueError, match="max_grad_norm"):
            optimizer.max_grad_norm = bad


@pytest.mark.parametrize("gradient", [3.0, math.inf])
def test_an_infinite_threshold_measures_without_clipping(gradient: float) -> None:
    mine, plain = make_params([(4,)]), make_params([(4,)])
    optimizer, reference = OURS["AdamW"](mine, max_grad_norm=math.inf), OURS["AdamW"](plain)
    for param in (*mine, *plain):
        param.grad = torch.tensor([gradient, 4.0, 0.0, 0.0])
    optimizer.step()
    reference.step()
    assert float(optimizer.control.grad_norm) == math.hypot(gradient, 4.0)
    assert_same_bits(mine, plain)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_nonfinite_gradient_spreads_without_the_check(value: float, max_norm: float | None) -> None:
    """The value spreads to its element, or with clipping to all clipped elements, as in torch."""
    mine, theirs = make_params(), make_params()
    ours = OURS["AdamW"](mine, max_grad_norm=max_norm)
    reference = TORCH["AdamW"](theirs, foreach=False)
    set_gradients(mine, theirs)
    for params in (mine, theirs):
        params[0].grad[1, 2] = value
    ours.step()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(theirs, max_norm)
    reference.step()
    for p, q in zip(mine, theirs, strict=True):
        assert torch.equal(p.isnan(), q.isnan())
    assert mine[0].isnan().sum() == (mine[0].numel() if max_norm and value != value else 1)
    assert all(ours.state[p]["step"] == 1 for p in mine)


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_found_inf_skips_the_step(with_scale: bool, stepped: bool) -> None:
    """A nonzero found_inf skips the step, with or without a grad_scale."""
    params = make_params()
    optimizer = OURS["AdamW"](params)
    if stepped:
        train([optimizer], [params], 2)
    set_gradients(params)
    before, count = [bits(p) for p in params], 2 if stepped else 0
    optimizer.grad_scale = torch.ones(1) if with_scale else None
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert [bits(p) for p in params] == before
    for p in params:
        state = optimizer.state[p]
        assert not state or state["step"] == count
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    assert all(optimizer.state[p]["step"] == count + 1 for p in params)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_grad_scale_divides(max_norm: float | None) -> None:
    """Gradients times a power of two, with the same grad_scale, give plain gradients' bits."""
    params, reference = make_params(), make_params()
    optimizer, plain = (OURS["AdamW"](p, max_grad_norm=max_norm) for p in (params, reference))
    for step in range(3):
        set_gradients(params, seed=step, scale=2.0**10)
        set_gradients(reference, seed=step)
        optimizer.grad_scale = torch.full((1,), 2.0**10)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        plain.step()
    assert_same_bits(params, reference)
    assert bits(optimizer.control.grad_norm) == bits(plain.control.grad_norm)
