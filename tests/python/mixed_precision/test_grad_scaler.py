"""torchopt_ext.GradScaler and torch's, each with its own and with the other's optimizers."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchopt_ext import FusedAdamW, FusedSGD, GradScaler
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim.context import IDLE

from ...support.compare import assert_same_bits, bits, snapshot
from ...support.problems import make_params, set_gradients
from .scaling import PATTERN, drive, plant, scaler_of


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
    scaler_of(torch.amp.GradScaler, init_scale=2.0**-140).step(optimizer)
    assert snapshot(optimizer) == before


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
    before = [(bits(p.grad), p.grad.data_ptr()) for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert [(bits(p.grad), p.grad.data_ptr()) for p in params] == before
    assert float(optimizer.control.clip_factor) < 1


REPAIRS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 0.3),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 1.0),
    "nan_to_num_": lambda params: [p.grad.nan_to_num_(0.0, 0.0, 0.0) for p in params],
    "zero": lambda params: [p.grad.zero_() for p in params],
}


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("repair", REPAIRS)
def test_gradients_change_between_unscale_and_step(repair: str, overflow: bool) -> None:
    """As with torch's scaler, an overflow that unscale_ saw skips even if gradients look good."""
    results = []
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        params = make_params()
        optimizer = FusedAdamW(params, lr=0.02)
        scaler = scaler_of(scaler_class)
        drive(scaler, optimizer, params, [False])
        before = snapshot(optimizer)
        set_gradients(params, seed=4, scale=scaler.get_scale())
        if overflow:
            plant(params, 3)
        scaler.unscale_(optimizer)
        assert overflow or params[0].grad.abs().max() < 10
        REPAIRS[repair](params)
        scaler.step(optimizer)
        scaler.update()
        assert (snapshot(optimizer) == before) == overflow
        results.append((scaler.get_scale(), snapshot(optimizer)))
    assert results[0] == results[1]
    assert results[0][0] == (2.0**9 if overflow else 2.0**11)


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
    params, unused = make_params(), FusedAdamW(make_params())
    scaler = scaler_of(scaler_class)
    drive(scaler, [FusedAdamW(params), unused], params, [False])
    assert not unused.state
    scaler.unscale_(unused)
    unused.step()
    with pytest.raises(AssertionError, match="No inf checks"):  # only the scaler's step has some
        scaler.update()


def in_double(params: list[nn.Parameter]) -> None:
    params[1].grad, good = None, params[1].grad
    params[1].grad_dtype = None
    params[1].grad = good.double()  # type: ignore[union-attr]


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("why", ["hook", "gradient"])
def test_a_step_that_raises_leaves_scaler_and_optimizer_usable(scaler_class: Any, why: str) -> None:
    """torch's scaler would multiply the next step's scale with a scale that it finds."""
    params, plain = make_params(), make_params()
    optimizer, reference = FusedAdamW(params), FusedAdamW(plain)
    scaler = scaler_of(scaler_class)
    for step, overflow in enumerate((False, True, False)):
        set_gradients(params, seed=step, scale=scaler.get_scale())
        if why == "gradient":
            in_double(params)
        elif overflow:
            plant(params, step)
        handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0 if why == "hook" else None)
        with pytest.raises((ZeroDivisionError, RuntimeError), match=r"zero|dtype"):
            scaler.step(optimizer)
        handle.remove()
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        assert optimizer._context is IDLE
        set_gradients(params, plain, seed=step)
        if overflow:  # the failed step used up what the scaler saw
            scaler.update()
            optimizer.step()
        else:
            for p in params:
                p.grad *= scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
        reference.step()
        assert_same_bits(params, plain)


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


@pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("first", ["container", "part"])
@pytest.mark.parametrize("then", ["step", "unscale_"])
def test_gradients_are_unscaled_once(cls: Any, first: str, then: str) -> None:
    """A container and its parts have the same gradients."""
    parts = parts_of()
    container = OptimizersContainer(parts, cls, {"lr": 0.02})
    one, other = container, container.optimizers[1]
    if first == "part":
        one, other = other, one
    scaler = scaler_of(GradScaler)
    params = all_params(parts)
    before = [bits(p) for p in params]
    set_gradients(params)
    scaler.unscale_(one)
    unscaled = [bits(p.grad) for p in params]
    with pytest.raises(RuntimeError, match=r"unscale_\(\) and step\(\) the same object"):
        getattr(scaler, then)(other)
    assert ([bits(p) for p in params], [bits(p.grad) for p in params]) == (before, unscaled)
    scaler.step(one)
    scaler.update()
    set_gradients(params)
    scaler.step(other)  # nothing is kept beyond update()


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
