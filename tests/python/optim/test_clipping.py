"""Clipping and the overflow check in the step match clip_grad_norm_ followed by torch's step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchopt_ext import FusedAdamW

from ...support.compare import assert_same_bits, snapshot
from ...support.problems import make_params, params_of, set_gradients, train
from ...support.ways import BF16, FP16, FP32, FP64

SHAPES = [(40, 70), (7,), (), (3, 100), (129,)]  # rows below and above 64 elements


def clipped_reference(
    params: list[nn.Parameter], max_norm: float, **kwargs: Any
) -> torch.optim.Optimizer:
    """Returns torch's optimizer with a hook that clips before each step and keeps the norms."""
    optimizer = torch.optim.AdamW(params, fused=True, **kwargs)
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
    ours = FusedAdamW(mine, lr=0.01, max_grad_norm=max_norm)
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


def test_the_norm_is_of_the_gradients_that_are_there() -> None:
    """Of all dtypes together."""
    shapes = {FP64: (5, 80), FP32: (9,), BF16: (3, 66), FP16: (5, 66)}
    params = [p for dtype, shape in shapes.items() for p in make_params([shape], dtype)]
    optimizer = FusedAdamW(params, eps=1e-4, max_grad_norm=1.0)
    set_gradients(params)
    for absent in ((), (0,), range(4)):
        for i in absent:
            params[i].grad = None
        squares = [float(p.grad.double().square().sum()) for p in params if p.grad is not None]
        optimizer.step()
        exact = math.sqrt(sum(squares))
        assert float(optimizer.control.grad_norm) == pytest.approx(exact, rel=1e-14)
    assert float(optimizer.control.clip_factor) == 1.0


def test_settings_change_between_steps() -> None:
    """A changed setting applies from the next step; a threshold of None or 0 disables clipping."""
    optimizer, plain = FusedAdamW(make_params(SHAPES)), FusedAdamW(make_params(SHAPES))
    for each in (optimizer, plain):
        train(each, range(2))
    assert snapshot(optimizer) == snapshot(plain)
    optimizer.max_grad_norm = 0.5
    train(optimizer, [2])
    assert 0 < float(optimizer.control.clip_factor) < 1
    for off in (None, 0.0):
        optimizer.max_grad_norm = off
        train(optimizer, [0])
        assert float(optimizer.control.clip_factor) == 1.0
        assert math.isnan(optimizer.control.grad_norm), "no norm was measured"
    optimizer.skip_nonfinite = True
    before = snapshot(optimizer)
    train(optimizer, [0], scale=math.nan)
    assert snapshot(optimizer) == before
    optimizer.skip_nonfinite = False
    train(optimizer, [0], scale=math.nan)
    assert all(p.isnan().all() for p in params_of(optimizer))


@pytest.mark.parametrize("gradient", [3.0, math.inf])
def test_an_infinite_threshold_measures_without_clipping(gradient: float) -> None:
    runs = []
    for norm in (math.inf, None):
        (param,) = make_params([(4,)])
        param.grad = torch.tensor([gradient, 4.0, 0.0, 0.0])
        optimizer = FusedAdamW([param], max_grad_norm=norm)
        optimizer.step()
        runs.append((param, optimizer))
    assert float(runs[0][1].control.grad_norm) == math.hypot(gradient, 4.0)
    assert_same_bits([runs[0][0]], [runs[1][0]])


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_nonfinite_gradient_spreads_without_the_check(value: float, max_norm: float | None) -> None:
    """The value spreads to its element, or with clipping to all clipped elements, as in torch."""
    mine, theirs = make_params(), make_params()
    ours = FusedAdamW(mine, max_grad_norm=max_norm)
    reference = torch.optim.AdamW(theirs, foreach=False)
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


@pytest.mark.parametrize("special", [None, math.inf])
def test_a_group_counts_one_of_its_replicas(
    second_of_two_ranks: DeviceMesh, special: float | None
) -> None:
    """This rank has the second replica, so that its squares count elsewhere, but not its infinity.

    The group's all-reduce does nothing here: the norm is what this rank adds.
    """
    whole = nn.Parameter(DTensor.from_local(torch.ones(3), second_of_two_ranks, [Replicate()]))
    plain = nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([whole, plain], max_grad_norm=1.0, process_group=dist.group.WORLD)
    for _ in range(2):
        local = torch.full((3,), 5.0)
        local[0] = special or 5.0
        whole.grad = DTensor.from_local(local, second_of_two_ranks, [Replicate()])
        plain.grad = torch.full((4,), 2.0)
        optimizer.step()
    assert float(optimizer.control.grad_norm) == (4.0 if special is None else math.inf)
    assert float(optimizer.control.found_inf) == (special is not None)
