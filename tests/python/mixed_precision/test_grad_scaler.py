"""torchopt_ext.GradScaler and torch's, each with its own and with the other's optimizers."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchopt_ext import FusedAdamW, FusedSGD, GradScaler
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim.context import IDLE

from ..optim.subject import (
    assert_same_bits,
    bits,
    copy_params,
    make_params,
    set_gradients,
    snapshot,
)
from .scaling import PATTERN, SPECIALS, drive, plant, scaler_of


def parts_of(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 70)]


def container_of(parts: list[nn.Module], **kwargs: Any) -> OptimizersContainer[Any]:
    return OptimizersContainer(parts, FusedAdamW, {"lr": 0.02, **kwargs})


def all_params(parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for part in parts for p in part.parameters()]


# ---- as torch's ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"growth_interval": 1},
        {"growth_interval": 3, "growth_factor": 1.7, "backoff_factor": 0.3},
        {"init_scale": 2.0**126},  # growth to infinity is refused
    ],
    ids=str,
)
@pytest.mark.parametrize("kwargs", [{}, {"max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("kind", "their_kind"), [(FusedAdamW, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)]
)
def test_scales_and_steps_are_torchs(
    kind: Any, their_kind: Any, settings: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    """40 steps match, for our optimizer under either scaler and torch's under torch's."""
    extreme = "init_scale" in settings  # gradients over- or underflow without planting, in all runs
    mine, under_torchs, theirs = make_params(), make_params(), make_params()
    ours = kind(mine, lr=0.02, **kwargs)
    other = kind(under_torchs, lr=0.02, **kwargs)
    torchs = their_kind(theirs, lr=0.02, fused=True)
    trace = drive(scaler_of(GradScaler, **settings), ours, mine, PATTERN)
    expected = drive(scaler_of(torch.amp.GradScaler, **settings), torchs, theirs, PATTERN)
    assert trace == expected
    assert len({scale for scale, _ in trace}) > 1
    stock = scaler_of(torch.amp.GradScaler, **settings)
    assert drive(stock, other, under_torchs, PATTERN) == expected
    assert snapshot(ours) == snapshot(other)
    for p, q in zip(mine, theirs, strict=True):
        if kind is FusedAdamW:  # SGD of torch counts no steps
            assert float(ours.state[p]["step"]) == float(torchs.state[q]["step"])
    if not kwargs and not extreme:
        for p, q in zip(mine, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_scale_stays_a_normal_number_and_recovers() -> None:
    """torch's scale falls to 0, and the next good step makes every weight NaN."""
    params, reference = make_params(), make_params()
    optimizer, plain = (FusedAdamW(each, lr=0.02) for each in (params, reference))
    scaler = scaler_of(GradScaler, init_scale=2.0**-120, growth_interval=1)
    drive(scaler, optimizer, params, [True] * 10)
    assert scaler.get_scale() == 2.0**-126
    assert_same_bits(params, reference)
    for optimizer_, scale in ((optimizer, 2.0**-126), (plain, 1.0)):
        for p in optimizer_.param_groups[0]["params"]:
            p.grad = torch.full_like(p, scale)
    scaler.step(optimizer)
    plain.step()
    scaler.update()
    assert_same_bits(params, reference)
    assert scaler.get_scale() == 2.0**-125


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_scale_whose_reciprocal_is_infinite_changes_nothing(clip: float | None) -> None:
    """torch's scaler can reach such a scale, and torch's own optimizers would get NaNs."""
    params = make_params()
    optimizer = FusedAdamW(params, lr=0.02, max_grad_norm=clip)
    set_gradients(params)
    optimizer.init_state()
    before = snapshot(optimizer)
    scaler = scaler_of(torch.amp.GradScaler, init_scale=2.0**-140)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("init_scale", [0.0, -1.0, math.nan, math.inf, 1e-46, 1e39])
def test_a_wrong_first_scale_is_refused(init_scale: float) -> None:
    with pytest.raises(ValueError, match="Invalid init_scale"):
        GradScaler("cpu", init_scale=init_scale)
    GradScaler("cpu", init_scale=init_scale, enabled=False)
    with pytest.raises(ValueError, match=r"Invalid init_scale: 65536, expected .* to 1024"):
        GradScaler("cpu", max_scale=1024.0)


@pytest.mark.parametrize("kwargs", [{}, {"max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_parts_of_a_container_decide_jointly(scaler_class: Any, kwargs: dict[str, Any]) -> None:
    """An overflow in one part skips all parts, as in one optimizer over all parameters."""
    parts, reference = parts_of(), parts_of()
    container, params = container_of(parts, **kwargs), all_params(parts)
    whole = all_params(reference)
    single = FusedAdamW(whole, lr=0.02, **kwargs)
    trace = drive(scaler_of(scaler_class), container, params, PATTERN)
    assert trace == drive(scaler_of(torch.amp.GradScaler), single, whole, PATTERN)
    assert_same_bits(params, whole)
    good = PATTERN.count(False)
    assert {float(container.state[p]["step"]) for p in params} == {float(good)}
    for optimizer in [container, *container.optimizers]:
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        assert not optimizer.__dict__.get("check_overflow", False)
    # The norm covers the unscaled gradients of all parts.
    for unscale in (False, True):
        set_gradients(params, seed=50, scale=2.0**10)
        exact = sum(p.grad.double().square().sum() for p in params).sqrt() / 2.0**10
        scaler = scaler_of(scaler_class)
        if unscale:
            scaler.unscale_(container)
            found = sum(p.grad.double().square().sum() for p in params).sqrt()
            torch.testing.assert_close(found, exact, rtol=1e-14, atol=0)
        scaler.step(container)
        if scaler_class is GradScaler or kwargs:
            torch.testing.assert_close(container.control.grad_norm, exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("special", SPECIALS)
def test_an_overflow_leaves_every_byte(scaler_class: Any, special: float) -> None:
    parts = parts_of()
    container, params = container_of(parts, amsgrad=True), all_params(parts)
    scaler = scaler_of(scaler_class, growth_interval=100)
    drive(scaler, container, params, [False, False])
    before = [snapshot(optimizer) for optimizer in container.optimizers]
    for p in params:
        for at in (0, p.numel() // 2, p.numel() - 1):
            set_gradients(params, seed=9)
            p.grad.view(-1)[at] = special
            scaler.step(container)
            scaler.update()
            assert [snapshot(optimizer) for optimizer in container.optimizers] == before
    assert scaler.get_scale() == 2.0 ** (10 - 3 * len(params))


def test_own_skipping_stays_on_after_a_scaled_step() -> None:
    params = make_params()
    optimizer = FusedAdamW(params, skip_nonfinite=True)
    drive(scaler_of(GradScaler), optimizer, params, [False, True])
    before = snapshot(optimizer)
    set_gradients(params)
    params[0].grad[0, 0] = math.nan
    optimizer.step()
    assert snapshot(optimizer) == before


# ---- gradients in memory -------------------------------------------------------------------------


def test_gradients_stay_as_they_are() -> None:
    params = make_params()
    optimizer = FusedAdamW(params, max_grad_norm=0.1)
    scaler = scaler_of(GradScaler)
    set_gradients(params, scale=2.0**10)
    before = [bits(p.grad) for p in params]
    memory = [p.grad.data_ptr() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert [bits(p.grad) for p in params] == before
    assert [p.grad.data_ptr() for p in params] == memory
    assert float(optimizer.control.clip_factor) < 1


@pytest.mark.parametrize("overflow", [False, True])
def test_unscale_then_torchs_clipping_then_step(overflow: bool) -> None:
    """As with torch's scaler, a found overflow skips even if gradients look clipped."""
    results = []
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        params = make_params()
        optimizer = FusedAdamW(params, lr=0.02)
        scaler = scaler_of(scaler_class)
        drive(scaler, optimizer, params, [False])
        set_gradients(params, seed=4, scale=scaler.get_scale())
        if overflow:
            plant(params, 3)
        scaler.unscale_(optimizer)
        assert overflow or params[0].grad.abs().max() < 10
        norm = torch.nn.utils.clip_grad_norm_(params, 0.3)
        scaler.step(optimizer)
        scaler.update()
        results.append((float(norm), scaler.get_scale(), snapshot(optimizer)))
    assert results[0][1:] == results[1][1:]
    assert results[0][0] == results[1][0] or overflow
    assert results[0][1] == (2.0**9 if overflow else 2.0**11)


@pytest.mark.parametrize("repair", ["clip_grad_value_", "nan_to_num_", "zero"])
def test_an_overflow_seen_by_unscale_is_not_forgotten(repair: str) -> None:
    """Later changes to the gradients do not make the step a good one."""
    results = []
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        params = make_params()
        optimizer = FusedAdamW(params, lr=0.02)
        scaler = scaler_of(scaler_class)
        drive(scaler, optimizer, params, [False])
        before = snapshot(optimizer)
        set_gradients(params, seed=4, scale=scaler.get_scale())
        params[-1].grad.view(-1)[-1] = math.inf
        scaler.unscale_(optimizer)
        if repair == "clip_grad_value_":
            torch.nn.utils.clip_grad_value_(params, 1.0)
        elif repair == "nan_to_num_":
            params[-1].grad.nan_to_num_(posinf=0.0)
        else:
            params[-1].grad.zero_()
        scaler.step(optimizer)
        scaler.update()
        results.append((scaler.get_scale(), snapshot(optimizer) == before))
    assert results[1] == (2.0**9, True)
    assert results[0] == results[1]


def test_a_scale_set_on_the_optimizer_multiplies() -> None:
    """The scales multiply, as in torch, for gradients that something else has scaled too."""
    results = []
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        params = make_params()
        optimizer = FusedAdamW(params, lr=0.02)
        scaler = scaler_of(scaler_class)
        set_gradients(params, scale=2.0**13)
        optimizer.grad_scale = torch.tensor(8.0)
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        results.append(snapshot(optimizer))
    plain = make_params()
    reference = FusedAdamW(plain, lr=0.02)
    set_gradients(plain)
    reference.step()
    assert results[0] == results[1] == snapshot(reference)


def test_float16_gradients() -> None:
    """torch's scaler refuses float16 gradients; masters make a float32 copy unnecessary."""
    low = make_params(dtype=torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in low]
    ours = FusedAdamW(low, lr=0.02, master_weights="fp32")
    twin = FusedAdamW(wide, lr=0.02)
    for p, w in zip(low, wide, strict=True):
        w.grad = torch.full(w.shape, 2.0**-26)  # zero in float16
        p.grad = (w.grad * 2.0**10).half()
    scaler_of(GradScaler).step(ours)
    twin.step()
    assert_same_bits([ours.state[p]["master_weight"] for p in low], wide)


# ---- several optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_optimizers_of_different_kinds_under_one_scaler(bad: int | None) -> None:
    """Each skips separately, and an overflow in either backs the scale off, as in torch."""
    results = []
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        groups = [make_params(seed=0), make_params(seed=1)]
        optimizers = [FusedAdamW(groups[0], lr=0.02), torch.optim.SGD(groups[1], lr=0.02)]
        scaler = scaler_of(scaler_class)
        trace = []
        for step in range(6):
            set_gradients(*groups, seed=step, scale=scaler.get_scale())
            if bad is not None and step in (2, 3):
                plant(groups[bad], step)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            trace.append((scaler.get_scale(), scaler._get_growth_tracker()))
        results.append((trace, [bits(p) for group in groups for p in group]))
    assert results[0] == results[1]
    assert (results[0][0][2][0] < 2.0**11) == (bad is not None)


# ---- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_an_optimizer_without_gradients_does_nothing(scaler_class: Any) -> None:
    """torch's scaler passes the number 0 as found_inf for such an optimizer."""
    used, unused = (torch.nn.Linear(4, 4) for _ in range(2))
    both = [FusedAdamW(model.parameters()) for model in (used, unused)]
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(used(torch.ones(1, 4)).sum()).backward()
    for optimizer in both:
        scaler.step(optimizer)
    scaler.update()
    assert len(both[0].state) == 2
    assert not both[1].state


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_a_step_that_raises_leaves_no_scale(scaler_class: Any) -> None:
    """torch's scaler would multiply the next step's scale with a scale that it finds."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = FusedAdamW([param]), scaler_class("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    scaler.step(optimizer)
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.full((4,), 0.1))
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    scaler.update()
    param.grad = torch.full((4,), torch.inf)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    scaler.update()
    handle.remove()
    param.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


def test_disabled_scaler() -> None:
    params, plain = make_params(), make_params()
    optimizer, reference = FusedAdamW(params), FusedAdamW(plain)
    scaler = GradScaler("cpu", enabled=False, hysteresis=2)
    set_gradients(params, plain)
    assert scaler.scale(params[0]) is params[0]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    reference.step()
    assert snapshot(optimizer) == snapshot(reference)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert not scaler.is_enabled()
    scaler.load_state_dict({})
    pickle.loads(pickle.dumps(scaler))


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0, "2"])
def test_a_state_dict_without_a_scale(scale: Any) -> None:
    """A scale that is not a positive number would ruin all gradients."""
    scaler = GradScaler("cpu")
    saved = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match="scale is"):
        scaler.load_state_dict(saved | {"scale": scale, "_growth_tracker": 5})
    with pytest.raises(TypeError, match="_hysteresis_tracker is nan, expected an integer"):
        scaler.load_state_dict(saved | {"scale": 2.0, "_hysteresis_tracker": math.nan})
    with pytest.raises(KeyError, match="growth_interval"):
        scaler.load_state_dict({"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5})
    assert scaler.state_dict() == saved


def test_calls_in_the_wrong_order() -> None:
    params = make_params()
    optimizer, scaler = FusedAdamW(params), GradScaler("cpu")
    set_gradients(params)
    with pytest.raises(AssertionError):  # no loss was scaled yet
        scaler.step(optimizer)
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    before = [bits(p) for p in params]
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=lambda: 0.0)
    assert [bits(p) for p in params] == before
    scaler.step(optimizer, None)  # as Accelerate calls it: None is no closure
    scaler.update()
    scaler.step(optimizer, closure=None)
    after = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.unscale_(optimizer)
    assert snapshot(optimizer) == after
    scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_update_after_unscale_of_no_gradient(scaler_class: Any) -> None:
    """Only a step by the scaler would know of overflows."""
    optimizer, scaler = FusedAdamW(make_params()), scaler_class("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    optimizer.step()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


def test_a_failed_step_leaves_scaler_and_optimizer_usable() -> None:
    params, plain = make_params(), make_params()
    optimizer, scaler = FusedAdamW(params), scaler_of(GradScaler)
    reference = FusedAdamW(plain)
    set_gradients(params, scale=2.0**10)
    good = params[1].grad
    params[1].grad = None
    params[1].grad_dtype = None
    params[1].grad = good.double()
    with pytest.raises(RuntimeError, match="dtype"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert optimizer._context is IDLE
    params[1].grad = good
    scaler.step(optimizer)
    scaler.update()
    set_gradients(plain)
    reference.step()
    assert_same_bits(params, plain)


def test_an_update_without_memory() -> None:
    """A dry run with fake tensors works, with an optimizer that supports it."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.randn(5))
        scaler = GradScaler("cpu")
        scaler.scale(weight.sum()).backward()
        scaler.step(torch.optim.AdamW([weight], fused=True))
        scaler.update()


def test_a_profiler_sees_the_update() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer, scaler = FusedAdamW([weight]), GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.step(optimizer)
        scaler.update()
    assert "torchopt_ext::loss_scale_update_" in {event.name for event in profile.events()}


def test_what_is_written_to_the_growth_tracker_counts() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer, scaler = FusedAdamW([weight]), GradScaler("cpu", growth_interval=3)
    scaler.scale(weight.sum()).backward()
    scaler._growth_tracker.fill_(2)  # type: ignore[attr-defined]  # as torch's load_state_dict
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**17


def test_copied_parameters_do_not_matter() -> None:
    """A scaler belongs to no optimizer, so another may take over between updates."""
    params = make_params()
    scaler = scaler_of(GradScaler)
    drive(scaler, FusedAdamW(params), params, [False])
    others = copy_params(params)
    trace = drive(scaler, FusedAdamW(others), others, [False, True])
    assert [float.fromhex(scale) for scale, _ in trace] == [2.0**11, 2.0**10]


def test_a_scaler_in_use_loads_the_count_of_overflows() -> None:
    """The next overflow then lowers the scale as in the scaler that was saved."""
    scalers = [GradScaler("cpu", init_scale=4.0, hysteresis=3) for _ in range(2)]
    for scaler, overflows in zip(scalers, (2, 0), strict=True):
        params = make_params()
        optimizer = FusedAdamW(params)
        for step in range(3):
            scaler.scale(torch.ones(1))
            set_gradients(params, seed=step)
            if step < overflows:
                params[0].grad[0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    scalers[1].load_state_dict(scalers[0].state_dict())
    params[0].grad[0, 0] = torch.inf  # type: ignore[index]
    scalers[1].scale(torch.ones(1))
    scalers[1].step(optimizer)
    scalers[1].update()
    assert scalers[1].get_scale() == 2.0
