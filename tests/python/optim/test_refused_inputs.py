"""Refused inputs raise by name, before any change, and leave the optimizer usable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, log_to

from .subject import (
    OURS,
    assert_same_bits,
    bits,
    make_params,
    set_gradients,
    snapshot,
    train,
)

BAD_PARAMETERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "complex of 16 bits": (lambda: torch.ones(3, 2, dtype=torch.complex32), "(?i)complex"),
    "two inner tensors": (lambda: TwoTensor(torch.ones(3, 2), torch.ones(3, 2)), "TwoTensor"),
    "integer": (lambda: torch.ones(3, 2, dtype=torch.int32), "int"),
    "float8": (lambda: torch.ones(3, 2).to(torch.float8_e4m3fn), "(?i)float8"),
    "meta": (lambda: torch.ones(3, 2, device="meta"), "meta"),
    "expanded": (lambda: torch.ones(1, 2).expand(3, 2), "(?i)overlap|dense|share"),
}


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
def test_refused_tensors(kind: str) -> None:
    """The error names the parameter and its kind, at construction or at the first step."""
    make, pattern = BAD_PARAMETERS[kind]
    good = nn.Parameter(torch.ones(4))
    bad = make()
    bad.requires_grad_(bad.is_floating_point() or bad.is_complex())
    before = bits(good)
    for p in (good, bad):
        p.grad = torch.ones_like(p)

    def construct_and_step() -> None:
        OURS["AdamW"]([("first", good), ("second.weight", bad)]).step()

    with pytest.raises((TypeError, ValueError, RuntimeError), match=pattern) as error:
        construct_and_step()
    assert "second.weight" in str(error.value)
    assert bits(good) == before


def test_parameters_without_names_are_numbered_over_all_groups() -> None:
    params = make_params()
    params[0].requires_grad_(False)  # has no state
    optimizer = OURS["AdamW"]([{"params": params[:1]}, {"params": params[1:]}])
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    with pytest.raises(RuntimeError, match="gradient 1 has layout Sparse"):
        optimizer.step()
    late = nn.Parameter(torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match=f"parameter {len(params)} of "):
        optimizer.add_param_group({"params": [late]})


def test_refused_gradients() -> None:
    """Nothing changes, and later steps are as if the refused step had not been tried."""
    params, reference = make_params(), make_params()
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer, same = OURS["AdamW"](named), OURS["AdamW"](reference)
    train([optimizer, same], [params, reference], 2)
    set_gradients(params)
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"gradient 1 \('p1'\) has layout Sparse"):
        optimizer.step()
    assert snapshot(optimizer) == before
    train([optimizer, same], [params, reference], 2, first_seed=2)
    assert_same_bits(params, reference)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": "1e-3"}, "lr is '1e-3', expected a number"),  # YAML reads 1e-3 as a string
        ({"lr": None}, "lr is None"),
        ({"eps": "1e-8"}, "eps is '1e-8'"),
        ({"weight_decay": [0.1]}, r"weight_decay is \[0.1\]"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\), expected two numbers"),
        ({"betas": (0.9, "0.95")}, r"betas\[1\] is '0.95'"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"eps": torch.ones(2)}, r"Tensor eps must be 1-element, but has shape \[2\]"),
        ({"rounding_seed": "1"}, "rounding_seed is '1', expected an integer"),
        ({"skip_nonfinite": None}, "skip_nonfinite is None"),
        ({"track": 1}, "track is 1, expected a bool or some of"),
        ({"stochastic_rounding": "no"}, "stochastic_rounding is 'no', expected a bool"),
        ({"write_back_gradients": None}, "write_back_gradients is None"),
        ({"process_group": "dp"}, "process_group is 'dp', expected a torch.distributed"),
    ],
)
@pytest.mark.parametrize("name", OURS)
def test_arguments_of_another_type_are_refused(name: str, arguments: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        OURS[name]([nn.Parameter(torch.ones(2))], **arguments)


@pytest.mark.parametrize("name", OURS)
def test_numbers_of_any_type_are_taken(name: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [
        OURS[name]([params[0]], lr=0.125, betas=(0.5, 0.75), eps=2**-20, weight_decay=0.25),
        OURS[name](
            [params[1]], lr=np.array(0.125), betas=np.array([0.5, 0.75]), eps=Fraction(1, 2**20),
            weight_decay=np.float32(0.25), max_grad_norm=torch.tensor(math.inf),
        ),
    ]  # fmt: skip
    log_to(lambda values: None, optimizers[1], every=1)
    train(optimizers, [[params[0]], [params[1]]], 2)
    assert_same_bits([params[0]], [params[1]])


def test_settings_of_another_type_are_refused() -> None:
    """Wrong types in a group, schedule or loss scale raise and change nothing."""
    optimizer = OURS["AdamW"]([nn.Parameter(torch.ones(2))])
    steps = {"warmup_steps": 1, "stable_steps": 1, "decay_steps": 1}
    before = optimizer.control.live("lr_factor")._base.clone()
    for call, message in [
        (lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": "1"}),
         "lr is '1'"),
        (lambda: optimizer.set_schedule(**steps | {"warmup_steps": 1.5}),
         "warmup_steps is 1.5, expected an integer"),
        (lambda: optimizer.set_schedule(**steps, min_factor="0"), "min_factor is '0'"),
        (lambda: optimizer.set_schedule(**steps, generation=1.9), "generation is 1.9"),
        (lambda: optimizer.set_loss_scale(growth_factor=None), "growth_factor is None"),
        (lambda: optimizer.set_loss_scale("8"), "init_scale is '8'"),
        (lambda: optimizer.set_loss_scale(hysteresis="2"), "hysteresis is '2'"),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=message):
            call()
    assert len(optimizer.param_groups) == 1
    assert torch.equal(optimizer.control.live("lr_factor")._base, before)


def test_a_group_given_another_type_later_is_refused() -> None:
    params = make_params([(3,)])
    optimizer = OURS["AdamW"](params)
    optimizer.init_state()
    set_gradients(params)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["betas"] = (0.9, 0.95, 0.999)
    with pytest.raises(TypeError, match=r"betas is \(0.9, 0.95, 0.999\), expected two numbers"):
        optimizer.step()
    assert snapshot(optimizer) == before
    optimizer.param_groups[0].update(betas=(0.9, 0.999), eps="small")
    with pytest.raises(TypeError, match="eps is 'small', expected a number"):
        optimizer.step()
    optimizer.param_groups[0].update(eps=1e-8, maximize="no")
    with pytest.raises(TypeError, match="maximize is 'no', expected a bool"):
        optimizer.step()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_a_moment_that_was_taken_away_is_missed(moment: str) -> None:
    """Treating a missing moment as zeros would make the next update several times too large."""
    params = make_params([(3,), (2, 4)])
    optimizer = OURS["AdamW"](params)
    train([optimizer], [params], 2)
    taken = optimizer.state[params[1]].pop(moment)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"parameter 1 has a step count and no {moment}"):
        optimizer.step()
    assert snapshot(optimizer) == before
    with pytest.raises(ValueError, match=rf"parameter 1 has a step count and no {moment}"):
        optimizer.init_state()
    optimizer.state[params[1]][moment] = taken
    optimizer.step()


def test_codes_whose_scales_were_taken_away_are_missed() -> None:
    params = make_params([(2, 64)])
    optimizer = OURS["AdamW"](params, state_dtype="int8")
    train([optimizer], [params], 2)
    for name in ("exp_avg_scale_v2", "exp_avg_sq_scale_v2"):
        del optimizer.state[params[0]][name]
    with pytest.raises(ValueError, match="has a step count and no exp_avg_scale_v2"):
        optimizer.step()


def test_duplicate_parameters_are_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = OURS["AdamW"]([p, p])
    p.grad = torch.ones(3)
    with pytest.raises((ValueError, RuntimeError), match=r"parameter.*parameter"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))


View = Callable[[torch.Tensor], torch.Tensor]
SHARED: dict[str, tuple[View, View]] = {
    "ranges": (lambda m: m[:6], lambda m: m[4:]),
    "equal views": (lambda m: m[::2], lambda m: m[::2]),
    "one element": (lambda m: m[1::3], lambda m: m[4::6]),
    "columns": (lambda m: m.view(3, 4)[:, :3], lambda m: m.view(3, 4)[:, 2:]),
    "in a gap and beyond": (lambda m: m[::3], lambda m: m[2:4]),
}
APART: dict[str, tuple[View, View]] = {
    "in turns": (lambda m: m[::2], lambda m: m[1::2]),
    "columns": (lambda m: m.view(3, 4)[:, :2], lambda m: m.view(3, 4)[:, 2:]),
    "transposed columns": (lambda m: m.view(3, 4)[:, :2].t(), lambda m: m.view(3, 4)[:, 2:]),
    "in a gap": (lambda m: m[::3], lambda m: m[1:3]),
}


def views_of(memory: torch.Tensor, views: tuple[View, View]) -> list[tuple[str, nn.Parameter]]:
    params = [(name, nn.Parameter(view(memory))) for name, view in zip("ab", views, strict=True)]
    for _, p in params:
        p.grad = torch.ones_like(p)
    return params


@pytest.mark.parametrize("views", SHARED)
def test_overlapping_parameters_are_refused(views: str) -> None:
    memory = torch.ones(12)
    with pytest.raises((ValueError, RuntimeError), match=r"parameter . \('.'\) shares memory"):
        OURS["AdamW"](views_of(memory, SHARED[views])).step()
    assert torch.equal(memory, torch.ones(12))


@pytest.mark.parametrize("views", APART)
def test_parameters_in_each_others_gaps_are_stepped(views: str) -> None:
    memory, reference = torch.ones(12), torch.ones(12)
    params = views_of(memory, APART[views])
    OURS["AdamW"](params, lr=0.5).step()
    for _, p in views_of(reference, APART[views]):
        OURS["AdamW"]([p], lr=0.5).step()
    assert torch.equal(memory, reference) and not torch.equal(memory, torch.ones(12))


def test_blocks_of_another_device_are_refused() -> None:
    def elsewhere(like: torch.Tensor) -> Any:
        arguments = {"dtype": like.dtype, "device": "xpu:0"}
        return torch.Tensor._make_wrapper_subclass(TwoTensor, like.shape, **arguments)  # type: ignore[attr-defined]

    params = make_params()
    optimizer = OURS["AdamW"](params)
    train([optimizer], [params], 1)
    control, accumulator = optimizer._block(torch.device("cpu"))
    plan = optimizer.collect().plan
    set_gradients(params)
    before = snapshot(optimizer)
    groups = optimizer.param_groups, optimizer.state
    for call in (
        lambda: plan.accumulate(0, elsewhere(accumulator)),
        lambda: plan.step(*groups, control, elsewhere(accumulator), True, None, None),
        lambda: plan.step(*groups, elsewhere(control), accumulator, True, None, None),
        lambda: plan.update([elsewhere(control)]),
    ):
        plan.collect(*groups)
        with pytest.raises(RuntimeError, match="is on xpu:0, expected cpu"):
            call()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_bad_state_is_refused(key: str) -> None:
    params = make_params()
    optimizer = OURS["AdamW"]([(f"p{i}", p) for i, p in enumerate(params)])
    train([optimizer], [params], 1)
    good = optimizer.state[params[1]][key]
    optimizer.state[params[1]][key] = torch.ones(8)
    set_gradients(params)
    others = [bits(p) for p in params]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=key):
        optimizer.step()
    assert [bits(p) for p in params] == others
    optimizer.state[params[1]][key] = good
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in params)


BAD_ARGUMENTS: dict[str, Any] = {
    "foreach": {"foreach": True},
    "second group": {},
    "pattern": {"state_dtype": "int8", "fp32_moments": ["no such name"]},
    "warning": {"master_weights": "remainder"},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
@pytest.mark.parametrize("wrap", [list, iter])
def test_a_rejected_construction_leaves_the_callers_groups(kind: str, wrap: Any) -> None:
    """A second, corrected call trains with its own arguments, as if it were the first."""
    param, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float16))
    bad = nn.Parameter(torch.ones(2).to_sparse())
    groups: list[dict[str, Any]] = [
        {"params": wrap([("a", param)]), "eps": 1e-6},
        {"params": wrap([("b", half)])},
    ]
    others = [{"params": [bad]}] if kind == "second group" else []
    with pytest.raises((TypeError, ValueError, UserWarning)):
        OURS["AdamW"](groups + others, lr=0.5, betas=(0.5, 0.5), **BAD_ARGUMENTS[kind])
    assert [sorted(group) for group in groups + others] == [["eps", "params"], ["params"]] + [
        ["params"] for _ in others
    ]
    optimizer = OURS["AdamW"](groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert optimizer.param_groups[0]["params"] == [param]
    assert optimizer.param_groups[0]["param_names"] == ["a"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rejected_group_stays_as_it_was(wrapped: bool) -> None:
    cls = torch.optim.AdamW if wrapped else OURS["AdamW"]
    optimizer: Any = cls([nn.Parameter(torch.ones(3))], lr=0.5)
    target = FSDPadaptOptimizer(optimizer) if wrapped else optimizer
    group = {"params": [nn.Parameter(torch.ones(2).to_sparse())]}
    for given in (group, {**group, "lr": -1.0}):
        with pytest.raises((TypeError, ValueError)):
            target.add_param_group(given)
    assert list(group) == ["params"]
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"skip_nonfinite": True}, "skip_nonfinite"),
        ({"state_dtype": torch.bfloat16}, "state_dtype"),
        ({"master_weights": "fp32"}, "master_weights"),
        ({"state_dtype": "int8"}, "state_dtype"),
    ],
)
def test_rebuilding_from_param_groups_does_not_lose_settings(settings: Any, missing: str) -> None:
    """Horovod's wrapper does this."""
    params = make_params()
    optimizer = OURS["AdamW"]([{"params": params[:1]}, {"params": params[1:]}], **settings)
    copied = copy.deepcopy(optimizer)
    shallow = [{**g} for g in optimizer.param_groups]
    for groups in (optimizer.param_groups, shallow, copied.param_groups):
        with pytest.raises(ValueError, match=f"with {{'{missing}'"):
            type(optimizer)(groups)
    again = type(optimizer)(optimizer.param_groups, **settings)
    train([optimizer, again], [params], 1)
    type(optimizer)([{"params": [*g["params"]]} for g in optimizer.param_groups])
    plain = OURS["AdamW"](params)
    type(plain)(plain.param_groups)


@pytest.mark.parametrize("chosen", [(), ("embedding", "weight"), "a parameter"], ids=str)
def test_rebuilding_from_param_groups_does_not_lose_fp32_moments(chosen: Any) -> None:
    model = nn.Sequential(nn.Embedding(3, 64), nn.Linear(64, 64))
    chosen = [model[1].weight, "embedding"] if chosen == "a parameter" else chosen
    optimizer = FusedAdamW(model.named_parameters(), state_dtype="int8", fp32_moments=chosen)
    assert "\nfp32_moments: " in repr(optimizer)
    for other in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(ValueError, match=r"with {'fp32_moments'"):
            FusedAdamW(other.param_groups, state_dtype="int8")
    FusedAdamW(optimizer.param_groups, state_dtype="int8", fp32_moments=chosen)
    plain = FusedAdamW(model.parameters(), fp32_moments=())  # of no effect without 8 bits
    FusedAdamW(plain.param_groups)


def test_an_optimizer_with_a_schedule_is_rebuilt_as_the_error_says() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params, lr=0.1, max_grad_norm=1.0)
    schedule = {"warmup_steps": 2, "stable_steps": 1, "decay_steps": 2}
    optimizer.set_schedule(**schedule)
    optimizer.set_loss_scale(4.0)
    way = "lists of parameters of its own, and call set_schedule and set_loss_scale again"
    with pytest.raises(ValueError, match=way):
        OURS["AdamW"](optimizer.param_groups, max_grad_norm=1.0)
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    again = OURS["AdamW"](groups, max_grad_norm=1.0)
    again.set_schedule(**schedule)
    assert again.has_schedule
