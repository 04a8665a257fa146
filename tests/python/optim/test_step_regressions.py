"""Regression tests of the step, each a minimal reproduction."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchopt_ext import FusedAdamW, GradScaler, ops
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.optim import fused_step
from torchopt_ext.optim.context import StepContext

BF16 = torch.bfloat16


def param(*shape: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    p = nn.Parameter(torch.full(shape, value, dtype=dtype))
    p.grad = torch.full(shape, 0.5, dtype=dtype)
    return p


def scaled_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.scale(torch.zeros(1))
    scaler.step(optimizer)
    scaler.update()


def test_a_setting_changed_between_scaled_steps_does_not_switch_the_check_off() -> None:
    p = param(3)
    optimizer, scaler = FusedAdamW([p]), GradScaler("cpu")
    scaled_step(scaler, optimizer)
    optimizer.skip_nonfinite = False
    before = p.detach().clone()
    p.grad.fill_(math.inf)
    scaled_step(scaler, optimizer)
    assert p.equal(before)
    optimizer.step()  # without a scaler nothing is skipped
    assert not p.isfinite().all()


@pytest.mark.parametrize("in_between", ["deepcopy", "nothing"])
def test_what_a_scaler_asked_for_does_not_outlive_it(in_between: str) -> None:
    p = param(3)
    optimizer = FusedAdamW([p], max_grad_norm=1.0)
    scaled_step(GradScaler("cpu"), optimizer)
    if in_between == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.ones(3)
    p.grad.fill_(math.nan)
    optimizer.step()
    assert optimizer.control.skip == 0
    assert p.isnan().all()


@pytest.mark.parametrize("first", [BF16, torch.float32])
def test_a_gradient_of_another_type_after_a_copied_one(first: torch.dtype) -> None:
    second = torch.float32 if first == BF16 else BF16
    results = []
    for layouts in (("dense", "dense", "dense"), ("dense", "transposed", "dense")):
        p = nn.Parameter(torch.ones(4, 6, dtype=BF16))
        p.grad_dtype = None
        optimizer = FusedAdamW([p], state_dtype=torch.float32)
        for dtype, layout in zip((first, second, first), layouts, strict=True):
            g = torch.linspace(-1, 1, 24).view(4, 6).to(BF16).to(dtype)
            p.grad = g if layout == "dense" else g.t().contiguous().t()
            optimizer.step()
        results.append(optimizer.state[p]["exp_avg"])
    assert results[0].equal(results[1])


@pytest.mark.parametrize("name", ["step", "remainder", "exp_avg"])
def test_freed_state_is_refused(name: str) -> None:
    p = param(8, dtype=BF16)
    optimizer = FusedAdamW([p], master_weights="remainder")
    optimizer.step()
    optimizer.state[p][name] = optimizer.state[p][name].clone()
    optimizer.step()
    optimizer.state[p][name].untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match=r"storage freed|step .* has no memory"):
        optimizer.step()


def test_a_remainder_does_not_complete_a_float16_parameter() -> None:
    p, q = param(4, dtype=BF16), param(4, dtype=torch.float16)
    saved = FusedAdamW([p], master_weights="remainder")
    saved.step()
    optimizer = FusedAdamW([q], master_weights="fp32")
    with pytest.raises(ValueError, match="float16"):
        optimizer.load_state_dict(saved.state_dict())
    optimizer.step()


def test_a_master_weight_is_converted_by_a_step_and_not_by_looking() -> None:
    p = param(4, value=1.0, dtype=BF16)
    saved = FusedAdamW([p], lr=0.01, master_weights="fp32")
    saved.step()
    q = param(4, value=3.0, dtype=BF16)  # its model is loaded only later
    optimizer = FusedAdamW([q], lr=0.01, master_weights="remainder")
    optimizer.load_state_dict(saved.state_dict())
    optimizer.init_state()
    assert q.eq(3).all()
    assert set(optimizer.state_dict()["state"][0]) >= {"master_weight"}
    q.data.copy_(p)
    for one in (p, q):
        one.grad = torch.full((4,), 0.25, dtype=BF16)
    saved.step()
    optimizer.step()
    assert q.equal(p)
    assert "master_weight" not in optimizer.state[q]


def test_of_two_master_entries_the_one_that_is_used_stays() -> None:
    p = param(4, dtype=BF16)
    optimizer = FusedAdamW([p], master_weights="fp32")
    optimizer.step()
    optimizer.state[p]["remainder"] = torch.zeros(4, dtype=torch.int16)
    optimizer.step()
    assert "remainder" not in optimizer.state[p]


def test_telemetry_keeps_its_names_when_state_is_added() -> None:
    p, q = param(2), param(3)
    p.grad = None
    optimizer = FusedAdamW([("p", p), ("q", q)], track=True)
    optimizer.step()
    optimizer.init_state()
    assert optimizer.telemetry.names == ["q"]
    optimizer.state.clear()
    assert optimizer.telemetry.names == ["q"]


def test_parameters_of_a_container_draw_differently() -> None:
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)]).to(BF16)
    for layer in model:
        nn.init.constant_(layer.weight, 1.0)
    options = {"lr": 1e-3, "stochastic_rounding": True}
    container = OptimizersInBackwardContainer([model], FusedAdamW, options)
    sum(layer.weight.float().sum() for layer in model).backward()
    container.step()
    assert not model[0].weight.equal(model[1].weight)


def test_an_interval_of_zero_does_not_grow() -> None:
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=0)
    p = param(2)
    for _ in range(3):
        scaled_step(scaler, FusedAdamW([p]))
    assert scaler.get_scale() == 2.0


def test_a_step_before_update_does_not_hide_an_overflow() -> None:
    p = param(2)
    optimizer, scaler = FusedAdamW([p]), GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(1))
    p.grad.fill_(math.inf)
    scaler.step(optimizer)
    p.grad.fill_(1.0)
    optimizer.step()
    scaler.update()
    assert scaler.get_scale() == 1.0


def test_a_part_without_gradients_knows_the_decision() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    container = OptimizersContainer(parts, FusedAdamW, {"max_grad_norm": 1.0})
    for p in parts[1].parameters():
        p.grad = torch.full_like(p, math.inf)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaled_step(scaler, container)
    assert [float(opt.control.found_inf) for opt in container.optimizers] == [1.0, 1.0]
    assert scaler.get_scale() == 1.0


def test_the_own_loss_scale_follows_overflows() -> None:
    p = param(2)
    optimizer = FusedAdamW([p], lr=0.1)
    optimizer.set_loss_scale(8.0, growth_interval=2)
    reference = param(2)
    plain = FusedAdamW([reference], lr=0.1)
    scales = []
    for overflow in (False, False, True, False, False):
        scale = float(optimizer.control.loss_scale)
        p.grad = torch.full((2,), math.inf if overflow else 0.5 * scale)
        optimizer.step()
        if not overflow:
            plain.step()
        scales.append(float(optimizer.control.loss_scale))
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]
    assert p.equal(reference)
    resumed = FusedAdamW([param(2)])
    resumed.set_loss_scale(1.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert float(resumed.control.loss_scale) == 16.0


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("bad", [torch.ones((), dtype=torch.float64), torch.ones(2)], ids=str)
def test_a_bad_scaler_tensor_stops_all_optimizers(name: str, bad: torch.Tensor) -> None:
    params = [param(2), param(2)]
    optimizers = [FusedAdamW([p]) for p in params]
    with pytest.raises(RuntimeError, match=f"{name} is not one float32 element on cpu"):
        fused_step(optimizers, StepContext(**{name: bad}))
    assert all(p.equal(torch.ones(2)) for p in params)


@pytest.mark.parametrize("which", [0, 1])
def test_a_scaler_tensor_without_memory_is_refused(which: int) -> None:
    control, accumulator = ops.new_control(), ops.new_accumulator()
    given = [torch.ones(()), torch.zeros(())]
    given[which].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="or has had its storage freed"):
        ops.control_update_(control, accumulator, *given)


def test_a_gradient_without_memory_of_its_own_is_refused_by_name() -> None:
    p = param(2)
    p.grad = TwoTensor(torch.ones(2), torch.ones(2))
    optimizer = FusedAdamW([("layer.weight", p)])
    message = r"gradient 0 \('layer.weight'\) is a tensor subclass without memory of its own"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize("kind", ["other gradient", "other parameter", "parameter", "moment"])
def test_gradients_written_back_are_not_what_a_step_writes_besides(kind: str) -> None:
    p, q = param(4), param(4)
    optimizer = FusedAdamW([p, q], max_grad_norm=0.1, write_back_gradients=True)
    optimizer.step()
    moment = optimizer.state[q]["exp_avg"]
    q.grad = {
        "other gradient": p.grad, "other parameter": p.data, "parameter": q.data, "moment": moment,
    }[kind]  # fmt: skip
    before = [t.detach().clone() for t in (p, q, moment, p.grad)]
    with pytest.raises(RuntimeError, match="gradient 1 shares memory with"):
        optimizer.step()
    assert all(t.equal(old) for t, old in zip((p, q, moment, p.grad), before, strict=True))


def test_an_optimizer_that_is_listed_twice_is_not_stepped() -> None:
    p, q = param(2), param(2)
    optimizer, other = FusedAdamW([p]), FusedAdamW([q])
    with pytest.raises(ValueError, match="optimizer 2 is listed twice"):
        fused_step([other, optimizer, optimizer])
    assert p.equal(torch.ones(2))
    assert q.equal(torch.ones(2))
    fused_step([other, optimizer])  # not still held by the failed call


@pytest.mark.parametrize("lr", ["freed", "sparse"])
def test_a_learning_rate_without_memory_stops_all_optimizers(lr: str) -> None:
    params = [param(2), param(2)]
    first, second = optimizers = [FusedAdamW([p], lr=torch.tensor(0.1)) for p in params]
    if lr == "freed":
        second.param_groups[0]["lr"].untyped_storage().resize_(0)
    else:
        second.param_groups[0]["lr"] = torch.ones(1).to_sparse()
    with pytest.raises(RuntimeError, match="lr has no memory to be read"):
        fused_step(optimizers)
    assert all(p.equal(torch.ones(2)) for p in params)
    assert float(first.control.steps) == 0


def test_parameters_in_a_tuple() -> None:
    p = param(2)
    optimizer = FusedAdamW([p])
    optimizer.param_groups[0]["params"] = (p,)
    optimizer.step()
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_a_number_of_numpy_is_a_learning_rate_that_loads() -> None:
    optimizer = FusedAdamW([param(2)])
    optimizer.param_groups[0]["lr"] = np.float32(0.25)
    optimizer.step()
    resumed = FusedAdamW([param(2)])
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == 0.25


def test_a_copy_knows_its_last_norm_and_a_load_what_was_copied() -> None:
    p = param(2, 3)
    optimizer = FusedAdamW([p], max_grad_norm=1.0)
    p.grad = torch.ones(3, 2).t()
    optimizer.step()
    assert float(copy.deepcopy(optimizer).control.grad_norm) == float(optimizer.control.grad_norm)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.gradients_copied == 1


def test_a_hook_may_give_the_state_dict_another_layout() -> None:
    optimizer = FusedAdamW([param(2)])
    optimizer.step()
    optimizer.register_state_dict_post_hook(lambda o, packed: {"wrapped": packed})
    assert optimizer.state_dict()["wrapped"]["state"][0]["step"] == 1


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match="integer"):
        FusedAdamW([param(2)], rounding_seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_the_default_dtype_decides_nothing(dtype: torch.dtype) -> None:
    def run() -> list[bytes]:
        p = param(3, 70)
        optimizer = FusedAdamW([p], lr=1e-2, state_dtype="int8")
        optimizer.step()
        floats = FusedAdamW([param(3, 70)])
        floats.load_state_dict(optimizer.state_dict())  # exact
        floats.state[floats.param_groups[0]["params"][0]]["step"] = 1001.0  # as in older versions
        floats.step()
        again = FusedAdamW([param(3, 70)], state_dtype="int8")
        again.load_state_dict(floats.state_dict())
        states = [*optimizer.state.values(), *floats.state.values(), *again.state.values()]
        return [t.numpy().tobytes() for state in states for t in state.values()]

    expected = run()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = run()
    finally:
        torch.set_default_dtype(before)
    assert found == expected
