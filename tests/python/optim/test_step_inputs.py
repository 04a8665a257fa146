"""Inputs that a step reads again each time, and memory that it leaves unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from .subject import (
    NAMES,
    OURS,
    TORCH,
    Regression,
    assert_close_to_torch,
    assert_same_bits,
    bits,
    copy_params,
    each_class,
    make_params,
    set_gradients,
    train,
)


def test_closure() -> None:
    """The closure runs once, with gradients enabled, and the step returns its value."""
    problem = Regression()
    optimizer = OURS["AdamW"](problem.params)
    enabled = []

    def closure() -> torch.Tensor:
        enabled.append(torch.is_grad_enabled())
        return problem.backward(optimizer)

    with torch.no_grad():
        first = optimizer.step(closure)
        second = optimizer.step(closure=closure)
    assert enabled == [True, True]
    assert second < first
    assert optimizer.state[problem.weight]["step"] == 2


def strided_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same values with the last dimension outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def test_gradient_with_other_strides() -> None:
    """A gradient with other strides is copied and counted; torch's fused kernels misread it."""
    mine, reference = make_params([(4, 6), (3,)]), make_params([(4, 6), (3,)])
    ours, same = OURS["AdamW"](mine), OURS["AdamW"](reference)
    for step in range(3):
        set_gradients(mine, reference, seed=step)
        if step:
            mine[0].grad = strided_like(mine[0].grad)
            assert mine[0].grad.stride() != mine[0].stride()
        ours.step()
        same.step()
        assert ours.gradients_copied == step
    assert same.gradients_copied == 0
    ours.state.clear()
    ours.step()
    same.state.clear()
    same.step()
    assert ours.gradients_copied == 3
    assert_same_bits(mine, reference)


@pytest.mark.parametrize(
    "make_gradient",
    [
        lambda p: torch.ones(()).expand(p.shape),
        lambda p: torch.ones(*p.shape, 2)[..., 0],
        lambda p: torch.ones(p.numel() + 1)[1:].view(p.shape),
    ],
    ids=["expanded", "gaps", "offset"],
)
def test_gradient_of_any_layout(make_gradient: Callable[..., torch.Tensor]) -> None:
    mine, reference = make_params([(4, 6)]), make_params([(4, 6)])
    mine[0].grad = make_gradient(mine[0])
    reference[0].grad = torch.ones(4, 6)
    OURS["AdamW"](mine).step()
    OURS["AdamW"](reference).step()
    assert_same_bits(mine, reference)


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_lazy_gradient(sign: float) -> None:
    """A gradient with a lazy negation or lazy zeros counts with its actual values."""
    mine, reference = make_params([(4, 6)]), make_params([(4, 6)])
    values = torch.rand(4, 6)
    mine[0].grad = torch._neg_view(values) if sign else torch._efficientzerotensor(4, 6)
    reference[0].grad = sign * values
    for optimizer in (
        OURS["AdamW"](mine, max_grad_norm=0.1),
        OURS["AdamW"](reference, max_grad_norm=0.1),
    ):
        optimizer.step()
    assert_same_bits(mine, reference)


@each_class
@pytest.mark.parametrize("memory_format", ["permuted", "channels_last"])
def test_dense_parameters_of_other_strides(name: str, memory_format: str) -> None:
    params = []
    for _ in range(2):
        torch.manual_seed(0)
        if memory_format == "permuted":
            params.append([nn.Parameter(torch.randn(5, 4).t())])
        else:
            data = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
            params.append([nn.Parameter(data)])
    mine, theirs = params
    ours, reference = OURS[name](mine), TORCH[name](theirs, foreach=False)
    for step in range(3):
        for p in (*mine, *theirs):
            torch.manual_seed(step)
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape))
            assert p.grad.stride() == p.stride()
        ours.step()
        reference.step()
    assert_close_to_torch(mine, theirs)
    assert ours.state[mine[0]]["exp_avg"].stride() == mine[0].stride()


@each_class
def test_mixed_dtypes(name: str) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    mine = [p for dtype in dtypes for p in make_params([(2, 3)], dtype, seed=3)]
    theirs = copy_params(mine)
    ours = OURS[name](mine, eps=1e-4)
    reference = TORCH[name](theirs, eps=1e-4, fused=True)
    train([ours, reference], [mine, theirs], 3)
    assert_close_to_torch(mine, theirs)
    for p, dtype in zip(mine, dtypes, strict=True):
        assert ours.state[p]["exp_avg"].dtype == dtype
        assert ours.state[p]["step"].dtype == torch.float32


@each_class
def test_empty_and_scalar_tensors(name: str) -> None:
    mine, theirs = (make_params([(0,), (), (3, 0), (1, 1)]) for _ in range(2))
    ours, reference = OURS[name](mine), TORCH[name](theirs, fused=True)
    train([ours, reference], [mine, theirs], 3)
    assert_close_to_torch(mine, theirs)
    assert [float(ours.state[p]["step"]) for p in mine] == [3, 3, 3, 3]


def test_amsgrad_switched_on() -> None:
    """The maximum starts at the next second moment, as if it had been zero before."""
    mine, reference = make_params(), make_params()
    ours, same = OURS["AdamW"](mine), OURS["AdamW"](reference, amsgrad=True)
    train([ours, same], [mine, reference], 2)
    ours.param_groups[0]["amsgrad"] = True
    for p, q in zip(mine, reference, strict=True):
        same.state[q]["max_exp_avg_sq"].zero_()
        with torch.no_grad():
            q.copy_(p)
    train([ours, same], [mine, reference], 2, first_seed=2)
    assert_same_bits(mine, reference)


def test_options_that_do_nothing_in_a_group_are_rejected() -> None:
    params = make_params([(2,), (3,)])
    optimizer = OURS["AdamW"](params[:1])
    for option in ("max_grad_norm", "state_dtype", "track", "process_group"):
        with pytest.raises(ValueError, match=f"{option}: arguments of FusedAdamW for all"):
            optimizer.add_param_group({"params": params[1:], option: None})
    for switch in ({"fused": False}, {"foreach": True}, {"differentiable": True}):
        with pytest.raises(ValueError, match="FusedAdamW is always fused and not differentiable"):
            optimizer.add_param_group({"params": params[1:], **switch})
    assert len(optimizer.param_groups) == 1
    train([optimizer], [params[:1]], 2)
    assert optimizer.state[params[0]]["step"] == 2


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(opt, factor=0.1, total_iters=3),
            lr_scheduler.ExponentialLR(opt, gamma=0.9),
        ],
        optimizer=opt,
    ),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, T_max=5)],
        milestones=[3],
    ),
    "warm restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "multiplicative": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    # The next two also change betas[0].
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 0.1, step_size_up=2),
}


@each_class
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(name: str, schedule: str, tensor_lr: bool) -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        rates = [torch.tensor(lr) if tensor_lr else lr for lr in (0.01, 0.03)]
        return [
            {"params": ps, "lr": lr} for ps, lr in zip((params[:2], params[2:]), rates, strict=True)
        ]

    mine, theirs = make_params(), make_params()
    ours, reference = OURS[name](groups(mine)), TORCH[name](groups(theirs), fused=True)
    schedulers = [SCHEDULERS[schedule](ours), SCHEDULERS[schedule](reference)]
    seen = []
    for step in range(8):
        set_gradients(mine, theirs, seed=step)
        ours.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step(*[1.0] * (schedule == "plateau"))
        found = [[(float(group["lr"]), group["betas"]) for group in optimizer.param_groups]
                 for optimizer in (ours, reference)]  # fmt: skip
        assert found[0] == found[1]
        seen.append(found[0])
    assert seen[0] != seen[-1]
    assert_close_to_torch(mine, theirs)


def test_lazy_modules() -> None:
    """A parameter may get its shape after the optimizer is built."""
    module = nn.LazyLinear(2)
    optimizer = OURS["AdamW"](module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[module.weight]["exp_avg"].shape == (2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_init_state(name: str) -> None:
    """init_state() creates zero moments and step counts, and does not change later training."""
    params, reference = make_params(), make_params()
    optimizer, same = OURS[name](params, amsgrad=True), OURS[name](reference, amsgrad=True)
    before = [bits(p) for p in params]
    optimizer.init_state()
    assert [bits(p) for p in params] == before
    for p in params:
        assert list(optimizer.state[p]) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        assert all(not value.any() for value in optimizer.state[p].values())
    train([optimizer, same], [params, reference], 3)
    optimizer.init_state()  # existing state stays
    assert_same_bits(params, reference)
    assert all(optimizer.state[p]["step"] == 3 for p in params)
