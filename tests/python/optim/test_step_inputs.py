"""Inputs that a step reads again each time, and memory that it leaves unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torchopt_ext import FusedAdamW, FusedMuon, FusedOptimizer, log_to

from ...support.compare import assert_same_bits, bits, snapshot, unchanged
from ...support.problems import copy_params, make_params, params_of, set_gradients, train
from ...support.ways import BF16, OURS, TORCH, each_class
from .subject import Regression, assert_close_to_torch


@pytest.mark.parametrize("kind", ["AdamW", "Muon and AdamW"])
def test_closure(kind: str) -> None:
    """The closure runs once, with gradients enabled, and the step returns its value."""
    problem = Regression()
    groups = [{"params": [param]} for param in problem.params]
    if kind == "AdamW":
        optimizer: FusedOptimizer = FusedAdamW(groups)
    else:
        optimizer = FusedMuon([groups[0], {**groups[1], "algorithm": "adamw"}])
    enabled = []

    def closure() -> Tensor:
        enabled.append(torch.is_grad_enabled())
        return problem.backward(optimizer)

    with torch.no_grad():
        first = optimizer.step(closure)
        second = optimizer.step(closure=closure)
    assert enabled == [True, True]
    assert second < first
    assert [optimizer.state[p]["step"] for p in problem.params] == [2, 2]


def test_gradients_with_other_strides_are_copied_and_counted() -> None:
    """torch's fused kernels misread them."""
    mine, reference = make_params([(4, 6), (3,)]), make_params([(4, 6), (3,)])
    ours, same = FusedAdamW(mine), FusedAdamW(reference)
    for step in range(4):
        set_gradients(mine, reference, seed=step)
        if step:
            mine[0].grad = mine[0].grad.t().contiguous().t()
        if step == 3:
            ours.state.clear()
            same.state.clear()
        ours.step()
        same.step()
        assert (ours.gradients_copied, same.gradients_copied) == (step, 0)
    assert_same_bits(mine, reference)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda g: g[:1, :1].expand(4, 6),
    "gaps": lambda g: torch.stack([g, g], -1)[..., 0],
    "offset": lambda g: torch.cat([g.new_ones(1), g.flatten()])[1:].view(4, 6),
    "lazy negation": lambda g: torch._neg_view(g),
    "lazy zeros": lambda g: torch._efficientzerotensor(4, 6),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_any_layout(kind: str) -> None:
    mine, reference = make_params([(4, 6)]), make_params([(4, 6)])
    mine[0].grad = GRADIENTS[kind](torch.rand(4, 6))
    reference[0].grad = mine[0].grad.clone().resolve_neg() + 0.0
    for params in (mine, reference):
        FusedAdamW(params, max_grad_norm=0.1).step()
    assert_same_bits(mine, reference)


@pytest.mark.parametrize("first", [BF16, torch.float32])
def test_a_gradient_of_another_dtype_after_a_copied_one(first: torch.dtype) -> None:
    second = torch.float32 if first == BF16 else BF16
    moments = []
    for layouts in (("dense", "dense", "dense"), ("dense", "transposed", "dense")):
        p = nn.Parameter(torch.ones(4, 6, dtype=BF16))
        p.grad_dtype = None
        optimizer = FusedAdamW([p], state_dtype=torch.float32)
        for dtype, layout in zip((first, second, first), layouts, strict=True):
            g = torch.linspace(-1, 1, 24).view(4, 6).to(BF16).to(dtype)
            p.grad = g if layout == "dense" else g.t().contiguous().t()
            optimizer.step()
        moments.append(optimizer.state[p]["exp_avg"])
    assert moments[0].equal(moments[1])


PARAMETERS: dict[str, Callable[[], list[nn.Parameter]]] = {
    "permuted": lambda: [nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4).t())],
    "channels_last": lambda: [
        nn.Parameter(torch.linspace(-1, 1, 120).view(2, 3, 4, 5).to(
            memory_format=torch.channels_last))
    ],
    "four dtypes": lambda: [
        p for dtype in (torch.float64, torch.float32, torch.float16, BF16)
        for p in make_params([(2, 3)], dtype, seed=3)
    ],
    "empty and scalar": lambda: make_params([(0,), (), (3, 0), (1, 1)]),
}  # fmt: skip


@each_class
@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_of_any_layout_and_dtype(name: str, kind: str) -> None:
    mine, theirs = PARAMETERS[kind](), PARAMETERS[kind]()
    ours, reference = OURS[name](mine, eps=1e-4), TORCH[name](theirs, eps=1e-4, foreach=False)
    for step in range(3):
        set_gradients(mine, seed=step)
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.empty_like(p).copy_(p.grad)
            q.grad = p.grad.clone()
            assert p.grad.stride() == p.stride()
        ours.step()
        reference.step()
    assert_close_to_torch(mine, theirs)
    for p in mine:
        moment, step = ours.state[p]["exp_avg"], ours.state[p]["step"]
        assert (moment.stride(), moment.dtype) == (p.stride(), p.dtype)
        assert (step.dtype, float(step)) == (torch.float32, 3)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, T_max=5)],
        milestones=[3],
    ),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10),  # and betas
}


@each_class
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(name: str, schedule: str, tensor_lr: bool) -> None:
    runs = []
    for cls, flags in ((OURS[name], {}), (TORCH[name], {"fused": True})):
        params = make_params()
        rates = [torch.tensor(lr) if tensor_lr else lr for lr in (0.01, 0.03)]
        groups = [{"params": params[:2], "lr": rates[0]}, {"params": params[2:], "lr": rates[1]}]
        optimizer = cls(groups, **flags)
        scheduler, seen = SCHEDULERS[schedule](optimizer), []
        for step in range(8):
            train(optimizer, [step])
            scheduler.step(*[1.0] * (schedule == "plateau"))
            seen.append([(float(g["lr"]), g["betas"]) for g in optimizer.param_groups])
        runs.append((params, seen))
    (mine, ours), (theirs, expected) = runs
    assert ours == expected and ours[0] != ours[-1]
    assert_close_to_torch(mine, theirs)


@each_class
def test_numbers_of_any_type_are_taken(name: str) -> None:
    numbers: dict[str, Any] = {
        "lr": np.array(0.125), "betas": np.array([0.5, 0.75]), "eps": Fraction(1, 2**20),
        "weight_decay": np.float32(0.25), "max_grad_norm": torch.tensor(math.inf),
    }  # fmt: skip
    plain = OURS[name](make_params(), 0.125, (0.5, 0.75), 2**-20, 0.25)
    optimizer = OURS[name](make_params(), **numbers)
    log_to(lambda values: None, optimizer, every=1)
    for each in (optimizer, plain):
        train(each, range(2))
    assert_same_bits(params_of(optimizer), params_of(plain))
    optimizer.param_groups[0].update(lr=np.float32(0.25), weight_decay=0.25)
    optimizer.step()
    resumed = OURS[name](make_params())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == 0.25


def test_lazy_modules_and_tuples() -> None:
    """A parameter may get its shape after the optimizer is built, and stand in a tuple."""
    module = nn.LazyLinear(2)
    optimizer = FusedAdamW(module.parameters())
    optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.step()
    assert optimizer.state[module.weight]["exp_avg"].shape == (2, 3)
    assert optimizer.state[module.weight]["step"] == 2


@each_class
def test_init_state(name: str) -> None:
    """init_state() creates zero moments and step counts, and does not change later training."""
    optimizer, same = (OURS[name](make_params(), amsgrad=True) for _ in range(2))
    with unchanged(*params_of(optimizer)):
        optimizer.init_state()
    for state in optimizer.state.values():
        assert list(state) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        assert all(not value.any() for value in state.values())
    for each in (optimizer, same):
        train(each, range(3))
    with unchanged(optimizer):
        optimizer.init_state()
    assert snapshot(optimizer) == snapshot(same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, BF16], ids=str)
def test_the_default_dtype_decides_nothing(dtype: torch.dtype) -> None:
    def run() -> list[bytes]:
        optimizer = FusedAdamW(make_params([(3, 70)]), lr=1e-2, state_dtype="int8")
        train(optimizer, [0])
        floats = FusedAdamW(copy_params(params_of(optimizer)))
        floats.load_state_dict(optimizer.state_dict())  # exact
        floats.state[params_of(floats)[0]]["step"] = 1001.0  # as in older versions
        train(floats, [1])
        again = FusedAdamW(copy_params(params_of(floats)), state_dtype="int8")
        again.load_state_dict(floats.state_dict())
        again.add_param_group({"params": make_params([(2,)])})
        again.init_state()
        return [bits(t) for o in (optimizer, floats, again) for s in o.state.values()
                for t in s.values()]  # fmt: skip

    expected, before = run(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert run() == expected
    finally:
        torch.set_default_dtype(before)
