"""What a step reads anew each time, and what it leaves alone."""

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
    ours_only,
    set_gradients,
    train,
)


def pair(name: str, **kwargs: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, Any, Any]:
    """Ours and torch's fused optimizer on equal parameters."""
    mine, theirs = make_params(), make_params()
    return OURS[name](mine, **kwargs), TORCH[name](theirs, fused=True, **kwargs), mine, theirs


@each_class
def test_frozen_parameters(name: str) -> None:
    """A parameter without requires_grad is accepted, stays, and joins once it has a gradient."""
    ours, reference, mine, theirs = pair(name)
    for params in (mine, theirs):
        params[1].requires_grad_(False)
    frozen = bits(mine[1])
    for step in range(4):
        if step == 2:
            for params in (mine, theirs):
                params[1].requires_grad_(True)
        set_gradients(mine, theirs, seed=step)
        for params in (mine, theirs):
            if step < 2:
                params[1].grad = None
        ours.step()
        reference.step()
        if step < 2:
            assert bits(mine[1]) == frozen
            assert mine[1] not in ours.state
    assert_close_to_torch(mine, theirs)
    assert [float(ours.state[p]["step"]) for p in mine] == [4, 2, 4, 4]


@each_class
def test_closure(name: str) -> None:
    """The closure runs once, with gradients enabled, and its value is returned."""
    problem = Regression()
    optimizer = OURS[name](problem.params)
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


@each_class
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(name: str, set_to_none: bool) -> None:
    ours, reference, mine, theirs = pair(name)
    for step in range(4):
        for optimizer, params in ((ours, mine), (reference, theirs)):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == (set_to_none or step == 0) for p in params)
            if step != 1:
                sum((p * p).sum() for p in params).backward()
            optimizer.step()
    assert_close_to_torch(mine, theirs)
    expected = 3 if set_to_none else 4
    assert all(ours.state[p]["step"] == expected for p in mine)


@each_class
def test_gradients_replaced_or_kept(name: str) -> None:
    """New gradient tensors each step, and one tensor written in place, give the same bits."""
    replaced, kept = make_params(), make_params()
    optimizers = [OURS[name](replaced), OURS[name](kept)]
    buffers = [torch.empty_like(p) for p in kept]
    for step in range(4):
        set_gradients(replaced, seed=step)
        for p, q, buffer in zip(replaced, kept, buffers, strict=True):
            q.grad = buffer.copy_(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(replaced, kept)


@each_class
def test_data_swap(name: str) -> None:
    """``p.data`` set to another tensor is the parameter from then on; its state stays."""
    ours, reference, mine, theirs = pair(name)
    train([ours, reference], [mine, theirs], 2)
    old = mine[0].data
    old_bits = bits(old)
    for params in (mine, theirs):
        params[0].data = torch.full_like(params[0], 0.25)
    train([ours, reference], [mine, theirs], 2, first_seed=2)
    assert_close_to_torch(mine, theirs)
    assert bits(old) == old_bits
    assert ours.state[mine[0]]["step"] == 4


@each_class
def test_data_changed_in_place(name: str) -> None:
    ours, reference, mine, theirs = pair(name)
    train([ours, reference], [mine, theirs], 2)
    with torch.no_grad():
        for params in (mine, theirs):
            params[0].mul_(0.5)
    train([ours, reference], [mine, theirs], 2, first_seed=2)
    assert_close_to_torch(mine, theirs)


@each_class
def test_cleared_state(name: str) -> None:
    ours, reference, mine, theirs = pair(name, amsgrad=True)
    train([ours, reference], [mine, theirs], 3)
    ours.state.clear()
    reference.state.clear()
    train([ours, reference], [mine, theirs], 2, first_seed=3)
    assert_close_to_torch(mine, theirs)
    for p, q in zip(mine, theirs, strict=True):
        assert ours.state[p]["step"] == reference.state[q]["step"] == 2
        assert_close_to_torch(
            [ours.state[p]["exp_avg"], ours.state[p]["max_exp_avg_sq"]],
            [reference.state[q]["exp_avg"], reference.state[q]["max_exp_avg_sq"]],
        )


@each_class
def test_state_of_one_parameter_removed(name: str) -> None:
    ours, reference, mine, theirs = pair(name)
    train([ours, reference], [mine, theirs], 3)
    del ours.state[mine[1]]
    del reference.state[theirs[1]]
    train([ours, reference], [mine, theirs], 2, first_seed=3)
    assert_close_to_torch(mine, theirs)
    assert [float(ours.state[p]["step"]) for p in mine] == [5, 2, 5, 5]


REPLACED = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]


@each_class
@pytest.mark.parametrize("key", REPLACED)
@pytest.mark.parametrize("in_place", [True, False])
def test_replaced_state_entry(name: str, key: str, in_place: bool) -> None:
    """A state entry written in place or replaced by another tensor counts in the next step."""
    ours, reference, mine, theirs = pair(name, amsgrad=True)
    train([ours, reference], [mine, theirs], 2)
    for optimizer, params in ((ours, mine), (reference, theirs)):
        entry = optimizer.state[params[0]]
        value = entry[key] * 3 + 0.5 if key != "step" else torch.tensor(100.0)
        if in_place:
            entry[key].copy_(value)
        else:
            entry[key] = value
    train([ours, reference], [mine, theirs], 2, first_seed=2)
    assert_close_to_torch(mine, theirs)
    for p, q in zip(mine, theirs, strict=True):
        for entry in REPLACED:
            assert_close_to_torch([ours.state[p][entry]], [reference.state[q][entry]])
    assert ours.state[mine[0]]["step"] == (102 if key == "step" else 4)
    assert ours.state[mine[1]]["step"] == 4  # step counts do not run into each other


def strided_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the last dimension outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


@ours_only  # torch's fused kernels read a gradient of other strides in the wrong order
@each_class
def test_gradient_with_other_strides(name: str) -> None:
    """Such a gradient is copied for the step, and counted."""
    mine, reference = make_params([(4, 6), (3,)]), make_params([(4, 6), (3,)])
    ours, same = OURS[name](mine), OURS[name](reference)
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


@ours_only
@each_class
@pytest.mark.parametrize(
    "make_gradient",
    [
        lambda p: torch.ones(()).expand(p.shape),
        lambda p: torch.ones(*p.shape, 2)[..., 0],
        lambda p: torch.ones(p.numel() + 1)[1:].view(p.shape),
    ],
    ids=["expanded", "gaps", "offset"],
)
def test_gradient_of_any_layout(name: str, make_gradient: Callable[..., torch.Tensor]) -> None:
    mine, reference = make_params([(4, 6)]), make_params([(4, 6)])
    mine[0].grad = make_gradient(mine[0])
    reference[0].grad = torch.ones(4, 6)
    OURS[name](mine).step()
    OURS[name](reference).step()
    assert_same_bits(mine, reference)


@ours_only  # torch's fused kernels refuse both, its other implementations take them
@each_class
@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_lazy_gradient(name: str, sign: float) -> None:
    """A gradient whose sign or zeros torch has not written out yet counts as what it stands for."""
    mine, reference = make_params([(4, 6)]), make_params([(4, 6)])
    values = torch.rand(4, 6)
    mine[0].grad = torch._neg_view(values) if sign else torch._efficientzerotensor(4, 6)
    reference[0].grad = sign * values
    for optimizer in (
        OURS[name](mine, max_grad_norm=0.1),
        OURS[name](reference, max_grad_norm=0.1),
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


EDITS: dict[str, Any] = {
    "lr": 0.05,
    "betas": (0.5, 0.7),
    "eps": 1e-2,
    "weight_decay": 0.3,
    "maximize": True,
}


@each_class
@pytest.mark.parametrize("key", EDITS)
def test_group_edited_in_place(name: str, key: str) -> None:
    """A hyperparameter set in one group counts from the next step, in that group only."""
    shapes = [(3, 4), (7,)]
    mine, theirs = make_params(shapes), make_params(shapes)
    ours = OURS[name]([{"params": [mine[0]]}, {"params": [mine[1]]}])
    reference = TORCH[name]([{"params": [theirs[0]]}, {"params": [theirs[1]]}], fused=True)
    train([ours, reference], [mine, theirs], 2)
    for optimizer in (ours, reference):
        optimizer.param_groups[1][key] = EDITS[key]
    train([ours, reference], [mine, theirs], 3, first_seed=2)
    assert_close_to_torch(mine, theirs)


@ours_only  # torch raises KeyError at the next step
@each_class
def test_amsgrad_switched_on(name: str) -> None:
    """The maximum starts at the second moment's next value, as if it had been zero until then."""
    mine, reference = make_params(), make_params()
    ours, same = OURS[name](mine), OURS[name](reference, amsgrad=True)
    train([ours, same], [mine, reference], 2)
    ours.param_groups[0]["amsgrad"] = True
    for p, q in zip(mine, reference, strict=True):
        same.state[q]["max_exp_avg_sq"].zero_()
        with torch.no_grad():
            q.copy_(p)
    train([ours, same], [mine, reference], 2, first_seed=2)
    assert_same_bits(mine, reference)


@each_class
def test_group_replaced_or_parameters_moved(name: str) -> None:
    """Groups are read at each step: a parameter may move to another group or leave."""
    shapes = [(3, 4), (7,), (2,)]
    mine, theirs = make_params(shapes), make_params(shapes)
    ours, reference = OURS[name](mine), TORCH[name](theirs, fused=True)
    train([ours, reference], [mine, theirs], 2)
    for optimizer in (ours, reference):
        group = optimizer.param_groups[0]
        optimizer.param_groups.append({**group, "params": [group["params"].pop(0)], "lr": 0.1})
        group["params"].pop(0)
    train([ours, reference], [mine, theirs], 2, first_seed=2)
    assert_close_to_torch(mine, theirs)
    assert [float(ours.state[p]["step"]) for p in mine] == [4, 2, 4]


@each_class
def test_add_param_group(name: str) -> None:
    """A group added later starts at step 0 with its own hyperparameters, others by default."""
    ours, reference, mine, theirs = pair(name, weight_decay=0.1)
    train([ours, reference], [mine, theirs], 2)
    late = [make_params([(6, 2)], seed=9), make_params([(6, 2)], seed=9)]
    for optimizer, params in zip((ours, reference), late, strict=True):
        optimizer.add_param_group({"params": params, "lr": 0.02})
    mine, theirs = mine + late[0], theirs + late[1]
    train([ours, reference], [mine, theirs], 3, first_seed=2)
    assert_close_to_torch(mine, theirs)
    assert ours.param_groups[1]["weight_decay"] == 0.1
    assert [float(ours.state[p]["step"]) for p in mine] == [5, 5, 5, 5, 3]


@each_class
def test_add_param_group_errors(name: str) -> None:
    params = make_params([(2,), (3,)])
    optimizer = OURS[name](params[:1])
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group(params[1:])
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(params[1:])})
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        optimizer.add_param_group({"params": [3.0]})
    with pytest.raises(ValueError, match="non-leaf"):
        optimizer.add_param_group({"params": [params[1] * 2]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})
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
    # these two also move betas[0]
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 0.1, step_size_up=2),
}


@each_class
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(name: str, schedule: str, tensor_lr: bool) -> None:
    def lr() -> Any:
        return torch.tensor(0.01) if tensor_lr else 0.01

    mine, theirs = make_params(), make_params()
    ours = OURS[name](mine, lr=lr())
    reference = TORCH[name](theirs, lr=lr(), fused=True)
    schedulers = [SCHEDULERS[schedule](ours), SCHEDULERS[schedule](reference)]
    rates = []
    for step in range(8):
        set_gradients(mine, theirs, seed=step)
        ours.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
        rates.append(float(ours.param_groups[0]["lr"]))
        assert rates[-1] == float(reference.param_groups[0]["lr"])
        assert ours.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    assert len(set(rates)) > 1
    assert_close_to_torch(mine, theirs)


@each_class
def test_lazy_modules(name: str) -> None:
    """A parameter may get its shape after the optimizer was built."""
    module = nn.LazyLinear(2)
    optimizer = OURS[name](module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[module.weight]["exp_avg"].shape == (2, 3)


@ours_only
@pytest.mark.parametrize("name", NAMES)
def test_init_state(name: str) -> None:
    """State without a step: counts at 0, moments zero; training then goes as without it."""
    params, reference = make_params(), make_params()
    optimizer, same = OURS[name](params, amsgrad=True), OURS[name](reference, amsgrad=True)
    before = [bits(p) for p in params]
    optimizer.init_state()
    assert [bits(p) for p in params] == before
    for p in params:
        assert list(optimizer.state[p]) == REPLACED
        assert all(not value.any() for value in optimizer.state[p].values())
    train([optimizer, same], [params, reference], 3)
    optimizer.init_state()  # existing state stays
    assert_same_bits(params, reference)
    assert all(optimizer.state[p]["step"] == 3 for p in params)
