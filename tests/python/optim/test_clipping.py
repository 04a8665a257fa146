"""Clipping and the overflow check inside the step, against clip_grad_norm_ and a step after it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn

from .subject import (
    OURS,
    TORCH,
    assert_close_to_torch,
    assert_same_bits,
    bits,
    copy_params,
    each_class,
    make_params,
    ours_only,
    set_gradients,
    snapshot,
    train,
)

pytestmark = ours_only

SHAPES = [(40, 70), (7,), (), (3, 100), (129,)]  # rows below and above 64 elements


def clipped_reference(
    name: str, params: list[nn.Parameter], max_norm: float, **kwargs: Any
) -> torch.optim.Optimizer:
    """torch's optimizer, its gradients clipped before each step; the norms are kept."""
    optimizer = TORCH[name](params, fused=True, **kwargs)
    optimizer.norms = []

    def clip(*_: Any) -> None:
        optimizer.norms.append(nn.utils.clip_grad_norm_(params, max_norm))

    optimizer.register_step_pre_hook(clip)
    return optimizer


@each_class
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 50.0, 1e9])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float64, 1e-13, 1e-15), (torch.float32, 2e-6, 1e-7)],
    ids=["float64", "float32"],
)
def test_against_clip_grad_norm(
    name: str, max_norm: float, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    """Same norm, same parameters, with thresholds far below, near and above the norm of about 55.

    In float64 to a few ulps; in float32 clip_grad_norm_'s own rounding shows.
    """
    mine, theirs = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
    ours = OURS[name](mine, lr=0.01, max_grad_norm=max_norm)
    reference = clipped_reference(name, theirs, max_norm, lr=0.01)
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


@each_class
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_gradients(name: str, dtype: torch.dtype) -> None:
    """The norm is exact where torch's has the precision of the gradients."""
    params = make_params(SHAPES, dtype)
    optimizer = OURS[name](params, eps=1e-4, max_grad_norm=1.0)
    set_gradients(params)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
    optimizer.step()
    assert float(optimizer.control.grad_norm) == pytest.approx(exact, rel=1e-14)


@each_class
def test_threshold_not_reached_changes_no_bit(name: str) -> None:
    clipped, plain = make_params(SHAPES), make_params(SHAPES)
    optimizers = [OURS[name](clipped, max_grad_norm=1e9), OURS[name](plain)]
    train(optimizers, [clipped, plain], 3)
    assert_same_bits(clipped, plain)
    assert float(optimizers[0].control.clip_factor) == 1.0


@each_class
def test_gradients_are_untouched(name: str) -> None:
    params = make_params(SHAPES)
    optimizer = OURS[name](params, max_grad_norm=1e-3, skip_nonfinite=True)
    set_gradients(params)
    before = [bits(p.grad) for p in params]
    optimizer.step()
    assert [bits(p.grad) for p in params] == before
    assert float(optimizer.control.clip_factor) < 1e-3


@each_class
def test_one_norm_for_all_groups(name: str) -> None:
    """Groups differ in everything but the norm, which is over all of them."""
    lists = [make_params(SHAPES), make_params(SHAPES)]
    built = []
    for params, cls, flags in (
        (lists[0], OURS[name], {"max_grad_norm": 0.7}),
        (lists[1], TORCH[name], {"fused": True}),
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


@each_class
def test_mixed_dtypes_share_one_norm(name: str) -> None:
    params = (
        make_params([(5, 80)], torch.float64)
        + make_params([(9,)])
        + make_params([(3, 66)], torch.bfloat16)
    )
    optimizer = OURS[name](params, max_grad_norm=1.0)
    set_gradients(params)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
    optimizer.step()
    assert float(optimizer.control.grad_norm) == pytest.approx(exact, rel=1e-14)


@each_class
def test_only_present_gradients_count(name: str) -> None:
    params = make_params(SHAPES)
    optimizer = OURS[name](params, max_grad_norm=1.0)
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


@hypothesis.given(
    values=strategies.lists(
        strategies.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=63
    ),
    seed=strategies.integers(0, 100),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_norm_of_short_rows_is_exact(values: list[float], seed: int) -> None:
    """Any float32 gradient of a 1-D parameter: the root of the exact sum, in any order."""
    exact = sum((Fraction(v) ** 2 for v in values), Fraction(0))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    for gradient in (torch.tensor(values), torch.tensor(values)[order]):
        p = nn.Parameter(torch.zeros(len(values)))
        p.grad = gradient
        optimizer = OURS["AdamW"]([p], max_grad_norm=1.0)
        optimizer.step()
        assert float(optimizer.control.grad_norm) == math.sqrt(float(exact))


@each_class
def test_norm_changes_between_steps(name: str) -> None:
    """A threshold set later counts from the next step; None and 0 switch clipping off."""
    mine, plain = make_params(SHAPES), make_params(SHAPES)
    optimizer, reference = OURS[name](mine), OURS[name](plain)
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
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_grad_norm"):
            OURS[name](make_params(), max_grad_norm=bad)
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


POSITIONS = [
    (tensor, index)
    for tensor, numel in enumerate([130, 7, 1, 66])
    for index in range(numel)
    if numel < 10 or index % 13 == 0 or index in (1, 15, 16, 31, 63, 64, 65, numel - 1)
]


@each_class
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_nonfinite_gradient_skips_the_step(name: str, value: float, max_norm: float | None) -> None:
    """Wherever it is, every byte of parameters, moments and step counts stays."""
    params = make_params([(2, 65), (7,), (), (66,)])
    optimizer = OURS[name](params, skip_nonfinite=True, max_grad_norm=max_norm, amsgrad=True)
    train([optimizer], [params], 2)
    before = snapshot(optimizer)
    for count, (tensor, index) in enumerate(POSITIONS, start=1):
        set_gradients(params, seed=count)
        params[tensor].grad.view(-1)[index] = value
        optimizer.step()
        assert snapshot(optimizer) == before, (tensor, index)
        assert float(optimizer.control.found_inf) == 1
        assert float(optimizer.control.skipped_steps) == count
    train([optimizer], [params], 1)
    assert float(optimizer.control.found_inf) == 0
    assert all(optimizer.state[p]["step"] == 3 for p in params)


@each_class
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_nonfinite_gradient_spreads_without_the_check(
    name: str, value: float, max_norm: float | None
) -> None:
    """As in torch: into its element alone, or with clipping into everything it clips."""
    mine, theirs = make_params(), make_params()
    ours = OURS[name](mine, max_grad_norm=max_norm)
    reference = TORCH[name](theirs, foreach=False)
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


@each_class
def test_finite_gradients_with_an_infinite_square_are_finite(name: str) -> None:
    """float32's largest value squared is an ordinary double; torch's norm is infinite here."""
    params = make_params([(2, 70), (3,)])
    optimizer = OURS[name](params, skip_nonfinite=True, max_grad_norm=1.0)
    largest = torch.finfo(torch.float32).max
    for p in params:
        p.grad = torch.full_like(p, largest)
    optimizer.step()
    assert float(optimizer.control.found_inf) == 0
    expected = largest * math.sqrt(143)
    assert float(optimizer.control.grad_norm) == pytest.approx(expected, rel=1e-14)
    assert all(p.isfinite().all() for p in params)
    assert all(optimizer.state[p]["step"] == 1 for p in params)


@each_class
def test_norm_does_not_depend_on_order(name: str) -> None:
    """Tensors in another order, rows split into tensors, gradients that are not dense."""
    whole = make_params([(6, 100), (50,)])
    set_gradients(whole)
    split = [nn.Parameter(row.detach().clone()) for row in whole[0].split([1, 2, 3])]
    for p, gradient in zip(split, whole[0].grad.split([1, 2, 3]), strict=True):
        p.grad = gradient.clone()
    split = [split[2], *copy_params(whole[1:]), split[0], split[1]]
    split[1].grad = whole[1].grad.clone()
    strided = copy_params(whole)
    for p, q in zip(strided, whole, strict=True):
        p.grad = torch.stack([q.grad, q.grad], -1)[..., 0]
    norms = []
    for params in (whole, split, strided):
        optimizer = OURS[name](params, max_grad_norm=1.0)
        optimizer.step()
        norms.append(float(optimizer.control.grad_norm))
    assert norms[0] == norms[1] == norms[2] > 0


@each_class
def test_control_reads_are_views_of_the_last_step(name: str) -> None:
    params = make_params()
    optimizer = OURS[name](params, max_grad_norm=1.0)
    norm = optimizer.control.grad_norm
    assert norm.shape == ()
    assert norm.dtype == torch.float64
    train([optimizer], [params], 1)
    first = float(norm)
    train([optimizer], [params], 1, first_seed=1)
    assert float(norm) != first
    with pytest.raises(AttributeError, match="grad_norm"):
        optimizer.control.no_such_field  # noqa: B018


def test_joint_step_takes_one_decision() -> None:
    """Two optimizers stepped together have the norm of both, and skip together."""
    from torchopt_ext.optim import fused_step

    params, reference = make_params(SHAPES), make_params(SHAPES)
    parts = [params[:2], params[2:]]
    pair = [OURS["AdamW"](part, max_grad_norm=0.5, skip_nonfinite=True) for part in parts]
    whole = OURS["AdamW"](reference, max_grad_norm=0.5, skip_nonfinite=True)
    for step in range(3):
        set_gradients(params, reference, seed=step)
        fused_step(pair)
        whole.step()
        assert {float(o.control.grad_norm) for o in pair} == {float(whole.control.grad_norm)}
    assert_same_bits(params, reference)
    before = [snapshot(o) for o in pair]
    set_gradients(params)
    params[0].grad.view(-1)[0] = math.nan
    fused_step(pair)
    assert [snapshot(o) for o in pair] == before
    with pytest.raises(ValueError, match="max_grad_norm"):
        fused_step([pair[0], whole, OURS["AdamW"](make_params(), max_grad_norm=0.1)])


@each_class
def test_settings_can_be_changed_between_steps(name: str) -> None:
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = OURS[name]([param])
    param.grad = torch.full_like(param, 10.0)
    optimizer.step()
    assert optimizer.control.clip_factor == 1
    optimizer.max_grad_norm = 1.0
    optimizer.step()
    assert optimizer.control.clip_factor == pytest.approx(0.01)
    optimizer.skip_nonfinite = True
    param.grad[3] = float("nan")
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param, before) and optimizer.control.skipped_steps == 1
    optimizer.skip_nonfinite = False
    optimizer.step()
    assert param.isnan().all()
