"""Deferred clipping: the call before the step only measures, and the step clips once."""

import copy
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from torchopt_ext import FusedAdam, FusedAdamW, GradScaler
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.containers.deferred_clipping import defer_clipping
from torchopt_ext.integrations.torchtitan_clipping import take_over, watch

MAX_NORM = 0.25


def torchtitans(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None,
                pp_mesh=None, ep_enabled=False):  # fmt: skip
    """Does what torchtitan's function does on one process."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


@pytest.fixture
def titan():
    module = SimpleNamespace(clip_grad_norm_=torchtitans)
    take_over(module)
    return module


def container_of(parts, cls=FusedAdamW, **kwargs):
    container = OptimizersContainer(parts, cls, {"lr": 1e-2, **kwargs})
    watch(container)
    return container


def deferring(parts, **kwargs):
    container = container_of(parts, **kwargs)
    defer_clipping(container)
    return container


def parameters(parts):
    return [p for part in parts for p in part.parameters()]


def gradients(parts):
    return [p.grad.clone() for p in parameters(parts) if p.grad is not None]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
def test_equals_clipping_in_the_step_to_the_bit(parts, set_grads, titan, assert_same, single, cls):
    parts = parts[:1] if single else parts
    copies = copy.deepcopy(parts)
    container, inside = deferring(parts, cls=cls), container_of(copies, cls, max_grad_norm=MAX_NORM)
    norms = []
    for seed in range(3):
        set_grads(parts, seed)
        set_grads(copies, seed)
        before = gradients(parts)
        norms.append(titan.clip_grad_norm_(parameters(parts), MAX_NORM, foreach=True))
        expected = torch.cat([g.flatten() for g in before]).double().norm()
        torch.testing.assert_close(norms[-1], expected, rtol=1e-12, atol=0)  # before the step
        container.step()
        assert all(map(torch.equal, gradients(parts), before))
        inside.step()
        assert torch.equal(container.control.grad_norm, norms[-1])
        assert container.control.clip_factor == inside.control.clip_factor < 1
        container.zero_grad()
        assert_same(parts, copies)
    assert len(set(map(float, norms))) == 3  # later calls do not change earlier norms


@pytest.mark.parametrize("deferred", [True, False])
def test_parameters_from_a_generator_are_clipped(parts, set_grads, titan, deferred):
    """A generator was read for the norm, and then empty for clipping (torchtitan#1258)."""
    container = deferring(parts) if deferred else container_of(parts)
    set_grads(parts, 0)
    titan.clip_grad_norm_((p for p in parameters(parts)), MAX_NORM)
    container.step()
    moments = [state["exp_avg"].flatten() for state in container.state.values()]
    assert float(torch.cat(moments).norm()) == pytest.approx(0.1 * MAX_NORM, rel=1e-5)


def test_a_call_counts_for_one_step(parts, set_grads, titan):
    container = deferring(parts)
    set_grads(parts, 0)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    container.step()
    assert container.control.clip_factor < 1
    container.step()
    assert container.control.clip_factor == 1
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    container.zero_grad(set_to_none=False)
    set_grads(parts, 0)
    container.step()
    assert container.control.clip_factor == 1


def test_a_failed_step_leaves_the_call_for_the_next(parts, set_grads, titan):
    container = deferring(parts)
    set_grads(parts, 0)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    first = parts[0].layers["0"][0].weight
    good, first.grad = first.grad, None
    first.grad = good.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        container.step()
    first.grad = good
    container.step()
    assert container.control.clip_factor < 1


def test_an_infinite_threshold_measures_only(parts, set_grads, titan):
    container = deferring(parts)
    set_grads(parts, 0)
    norm = titan.clip_grad_norm_(parameters(parts), float("inf"))
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients(parts)]).norm()))
    container.step()
    assert container.control.clip_factor == 1


@pytest.mark.parametrize("thresholds", [(MAX_NORM, math.inf), (MAX_NORM, 1.0), (1.0, MAX_NORM)])
def test_the_smallest_of_several_thresholds_counts(parts, set_grads, titan, thresholds):
    """A second call with infinity is a usual way to log a norm."""
    container = deferring(parts)
    set_grads(parts, 0)
    norms = [titan.clip_grad_norm_(parameters(parts), max_norm) for max_norm in thresholds]
    assert norms[0] == norms[1] > max(MAX_NORM, thresholds[0])
    container.step()
    assert container.control.clip_factor == pytest.approx(MAX_NORM / float(norms[0]))
    titan.clip_grad_norm_(parameters(parts), math.inf)  # the step has used the thresholds
    container.step()
    assert container.control.clip_factor == 1


def test_no_gradients(parts, titan):
    container = deferring(parts)
    before = copy.deepcopy(parts)
    assert titan.clip_grad_norm_(parameters(parts), MAX_NORM) == 0
    container.step()
    assert all(map(torch.equal, parameters(parts), parameters(before)))


def test_skips_what_is_not_finite(parts, set_grads, titan):
    container = deferring(parts, skip_nonfinite=True)
    set_grads(parts, 0)
    parts[1].layers["2"][0].weight.grad[0, 0] = torch.nan
    before = copy.deepcopy(parts)
    assert titan.clip_grad_norm_(parameters(parts), MAX_NORM).isnan()
    container.step()
    assert container.control.skip == 1
    assert all(map(torch.equal, parameters(parts), parameters(before)))


@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaled_step_clips_unscaled_gradients(parts, set_grads, titan, assert_same, unscale):
    """A scaled step measures again, as ranks exchange the scaler's flag with the sums."""
    copies = copy.deepcopy(parts)
    container, inside = deferring(parts), container_of(copies, max_grad_norm=MAX_NORM)
    scaler = GradScaler("cpu", init_scale=4.0)
    set_grads(parts, 0)
    set_grads(copies, 0)
    scaler.scale(torch.zeros(()))  # creates the scale
    for param in parameters(parts):
        param.grad *= 4.0
    if unscale:
        scaler.unscale_(container)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    scaler.step(container)
    inside.step()
    assert container.control.clip_factor == inside.control.clip_factor < 1
    assert_same(parts, copies)


def test_a_closures_gradients_are_clipped(model, set_grads, titan):
    container = deferring([model])
    set_grads([model], 0)
    titan.clip_grad_norm_(parameters([model]), MAX_NORM)

    def closure():
        for param in model.parameters():
            param.grad.mul_(1000.0)

    container.step(closure)
    norm = torch.cat([g.flatten() for g in gradients([model])]).double().norm()
    torch.testing.assert_close(container.control.grad_norm, norm)


def test_after_clipping_in_backward_its_norm_is_returned(parts, titan):
    """torchtitan's container also leaves no gradients, so that a norm of 0 was logged."""
    kwargs = {"lr": 1e-2, "max_grad_norm": MAX_NORM}
    container = OptimizersInBackwardContainer(parts, FusedAdamW, kwargs)
    watch(container)
    parts[1](parts[0](torch.ones(2, 5))).square().sum().backward()
    norm = titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    assert torch.equal(norm, container.control.grad_norm)
    assert norm > MAX_NORM
    container.step()
    assert titan.clip_grad_norm_(parameters(parts[:1]), MAX_NORM) == 0  # torchtitan's result
    kept = weakref.ref(container)
    del container
    assert kept() is None  # before the garbage collector runs


# Calls left to torchtitan


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_norm": 0.0},
        {"max_norm": 1.0, "norm_type": float("inf")},
        {"max_norm": 1.0, "error_if_nonfinite": True},
    ],
)
def test_other_norms_are_left_to_torchtitan(parts, set_grads, titan, arguments):
    container, copies = deferring(parts), copy.deepcopy(parts)
    set_grads(parts, 0)
    set_grads(copies, 0)
    found = titan.clip_grad_norm_(parameters(parts), **arguments)
    assert torch.equal(found, torchtitans(parameters(copies), **arguments))
    assert all(map(torch.equal, gradients(parts), gradients(copies)))
    container.step()
    assert container.control.clip_factor == 1  # not clipped a second time


@pytest.mark.parametrize("more", [True, False])
def test_other_parameters_are_left_to_torchtitan(parts, set_grads, titan, more):
    container = deferring(parts[:1] if more else parts)
    set_grads(parts, 0)
    before = gradients(parts)
    titan.clip_grad_norm_(parameters(parts if more else parts[:1]), MAX_NORM)
    assert not all(map(torch.equal, gradients(parts), before))
    container.step()
    assert container.control.clip_factor == 1


def test_frozen_parameters_may_come_along(parts, set_grads, titan):
    parts[0].layers["0"][0].weight.requires_grad_(False)
    container = deferring(parts)
    set_grads(parts, 0)
    before = gradients(parts)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    container.step()
    assert container.control.clip_factor < 1
    assert all(map(torch.equal, gradients(parts), before))


def test_without_it_torchtitans_clipping_is_as_before(parts, set_grads, titan):
    plain, gone = container_of(parts), deferring(parts)
    del gone
    set_grads(parts, 0)
    before = gradients(parts)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    assert not all(map(torch.equal, gradients(parts), before))
    assert plain.deferred_clipping is None


def test_the_latest_of_several_containers_clips(parts, set_grads, titan):
    old, new = deferring(parts), deferring(parts)
    set_grads(parts, 0)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    new.step()
    assert new.optimizers[0].max_grad_norm == MAX_NORM
    assert old.optimizers[0].max_grad_norm is None
    del new
    set_grads(parts, 1)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    old.step()
    assert old.optimizers[0].max_grad_norm == MAX_NORM


@pytest.mark.parametrize("in_backward", [True, False])
def test_the_latest_container_decides_that_its_gradients_are_clipped_at_once(
    parts, set_grads, titan, in_backward
):
    """An older container may exist until the garbage collector runs."""
    old = deferring(parts)
    cls = OptimizersInBackwardContainer if in_backward else OptimizersContainer
    new = cls(parts, FusedAdamW, {"lr": 1e-2})
    watch(new)
    set_grads(parts, 0)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    norm = torch.cat([g.flatten() for g in gradients(parts)]).norm()
    assert float(norm) == pytest.approx(MAX_NORM, rel=1e-4)
    watch(old)  # asks for the older one again
    set_grads(parts, 0)
    before = gradients(parts)
    titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    assert all(map(torch.equal, gradients(parts), before))
    del new  # lived until here


def test_taking_over_twice_changes_nothing(titan):
    once = titan.clip_grad_norm_
    take_over(titan)
    assert titan.clip_grad_norm_ is once


# Errors


def test_optimizers_that_cannot(parts):
    with pytest.raises(TypeError, match="needs an OptimizersContainer, found a FusedAdamW"):
        defer_clipping(FusedAdamW(parts[0].parameters()))
    with pytest.raises(TypeError, match="found a OptimizersInBackwardContainer"):
        defer_clipping(OptimizersInBackwardContainer(parts, FusedAdamW, {}))
    with pytest.raises(ValueError, match="needs fused optimizers, found AdamW"):
        defer_clipping(OptimizersContainer(parts, torch.optim.AdamW, {}))
    with pytest.raises(ValueError, match=r"max_grad_norm is 0\.25: leave out one"):
        deferring(parts, max_grad_norm=MAX_NORM)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_threshold_that_clips_nothing(parts, max_norm):
    with pytest.raises(ValueError, match="expected a number above 0"):
        deferring(parts).deferred_clipping.clip(max_norm)


def test_a_gradient_that_does_not_fit_changes_nothing(parts, set_grads, titan):
    container = deferring(parts)
    set_grads(parts, 0)
    first = parts[0].layers["0"][0].weight
    first.grad = first.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        titan.clip_grad_norm_(parameters(parts), MAX_NORM)
    set_grads(parts, 0)
    container.step()
    assert container.control.clip_factor == 1
