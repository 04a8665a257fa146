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

from .conftest import assert_same, backward, parameters, set_grads

MAX_NORM = 0.25


def torchtitans(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None,
                pp_mesh=None, ep_enabled=False):  # fmt: skip
    """Does what torchtitan's function does on one process."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


@pytest.fixture
def clip():
    """torchtitan's function, taken over once although asked for twice."""
    module = SimpleNamespace(clip_grad_norm_=torchtitans)
    take_over(module)
    once = module.clip_grad_norm_
    take_over(module)
    assert module.clip_grad_norm_ is once
    return once


def container_of(parts, cls=FusedAdamW, kind=OptimizersContainer, **kwargs):
    container = kind(parts, cls, {"lr": 1e-2, **kwargs})
    watch(container)
    return container


def deferring(parts, **kwargs):
    container = container_of(parts, **kwargs)
    defer_clipping(container)
    return container


def gradients(parts):
    return [p.grad.clone() for p in parameters(parts) if p.grad is not None]


def norm_of(parts):
    return torch.cat([g.flatten() for g in gradients(parts)]).double().norm()


def factor_after(container, parts, seed=0):
    """Steps with a seed's gradients, and returns the clip factor."""
    set_grads(parts, seed)
    container.step()
    return float(container.control.clip_factor)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
def test_equals_clipping_in_the_step_to_the_bit(parts, clip, single, cls):
    parts = parts[:1] if single else parts
    copies = copy.deepcopy(parts)
    container, inside = deferring(parts, cls=cls), container_of(copies, cls, max_grad_norm=MAX_NORM)
    norms = []
    for seed in range(3):
        for models in (parts, copies):
            set_grads(models, seed)
        before, expected = gradients(parts), norm_of(parts)
        given = parameters(parts)
        # A generator can be read once: for the norm, and not again for clipping (torchtitan#1258).
        norms.append(clip((p for p in given) if seed else given, MAX_NORM, foreach=True))
        torch.testing.assert_close(norms[-1], expected, rtol=1e-12, atol=0)  # before the step
        container.step()
        assert_same(gradients(parts), before)
        inside.step()
        assert torch.equal(container.control.grad_norm, norms[-1])
        assert container.control.clip_factor == inside.control.clip_factor < 1
        container.zero_grad()
        assert_same(parts, copies)
    assert len(set(map(float, norms))) == 3  # later calls do not change earlier norms


def test_a_call_counts_for_one_step(parts, clip):
    container = deferring(parts)
    set_grads(parts, 0)
    clip(parameters(parts), MAX_NORM)
    assert factor_after(container, parts) < 1
    assert factor_after(container, parts) == 1
    clip(parameters(parts), MAX_NORM)
    container.zero_grad(set_to_none=False)
    assert factor_after(container, parts) == 1


@pytest.mark.parametrize("raises", ["clipping", "step"])
def test_a_gradient_that_does_not_fit_is_rejected(parts, clip, raises):
    """A call that failed counts for no step. A step that failed leaves the call for the next."""
    container = deferring(parts)
    set_grads(parts, 0)
    weight = parts[0].layers["0"][0].weight
    good, weight.grad = weight.grad, None
    if raises == "step":
        weight.grad = good
        clip(parameters(parts), MAX_NORM)
        weight.grad = None
    weight.grad = good.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        container.step() if raises == "step" else clip(parameters(parts), MAX_NORM)
    weight.grad = good
    container.step()
    assert (container.control.clip_factor < 1) == (raises == "step")


@pytest.mark.parametrize("thresholds", [(math.inf,), (MAX_NORM, math.inf), (1.0, MAX_NORM)])
def test_the_smallest_of_several_thresholds_counts(parts, clip, thresholds):
    """A second call with infinity is a usual way to log a norm."""
    container = deferring(parts)
    set_grads(parts, 0)
    norms = [float(clip(parameters(parts), max_norm)) for max_norm in thresholds]
    assert norms == pytest.approx([float(norm_of(parts))] * len(thresholds), rel=1e-12)
    expected = min(1.0, min(thresholds) / norms[0])
    assert factor_after(container, parts) == pytest.approx(expected)
    clip(parameters(parts), math.inf)  # the step has used the thresholds
    assert factor_after(container, parts) == 1


def test_no_gradients_and_gradients_that_are_not_finite(parts, clip):
    container = deferring(parts, skip_nonfinite=True)
    before = copy.deepcopy(parts)
    assert clip(parameters(parts), MAX_NORM) == 0
    container.step()
    set_grads(parts, 0)
    parts[1].layers["2"][0].weight.grad[0, 0] = torch.nan
    assert clip(parameters(parts), MAX_NORM).isnan()
    container.step()
    assert container.control.skip == 1
    assert not any(state["step"] for state in container.state.values())
    assert_same(parts, before)


@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaled_step_clips_unscaled_gradients(parts, clip, unscale):
    """A scaled step measures again, as ranks exchange the scaler's flag with the sums."""
    copies = copy.deepcopy(parts)
    container, inside = deferring(parts), container_of(copies, max_grad_norm=MAX_NORM)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # creates the scale
    set_grads(parts, 0, scale=4.0)
    set_grads(copies, 0)
    if unscale:
        scaler.unscale_(container)
    clip(parameters(parts), MAX_NORM)
    scaler.step(container)
    inside.step()
    assert container.control.clip_factor == inside.control.clip_factor < 1
    assert_same(parts, copies)


def test_a_closures_gradients_are_clipped(model, clip):
    container = deferring([model])
    set_grads([model], 0)
    clip(parameters([model]), MAX_NORM)
    container.step(lambda: set_grads([model], 0, scale=1000.0))
    torch.testing.assert_close(container.control.grad_norm, norm_of([model]))


def test_after_clipping_in_backward_its_norm_is_returned(parts, clip):
    """Backward leaves no gradients, of which torchtitan's function would return the norm 0."""
    container = container_of(parts, kind=OptimizersInBackwardContainer, max_grad_norm=MAX_NORM)
    backward(parts, 0)
    norm = clip(parameters(parts), MAX_NORM)
    assert torch.equal(norm, container.control.grad_norm) and norm > MAX_NORM
    container.step()
    assert clip(parameters(parts[:1]), MAX_NORM) == 0  # torchtitan's result
    kept = weakref.ref(container)
    del container
    assert kept() is None  # before the garbage collector runs


# Calls left to torchtitan


@pytest.mark.parametrize(
    ("deferred", "clipped", "arguments"),
    [
        (2, 2, {"max_norm": 0.0}),
        (2, 2, {"max_norm": 1.0, "norm_type": math.inf}),
        (2, 2, {"max_norm": 1.0, "error_if_nonfinite": True}),
        (1, 2, {"max_norm": MAX_NORM}),
        (2, 1, {"max_norm": MAX_NORM}),
        (0, 2, {"max_norm": MAX_NORM}),
    ],
    ids=str,
)
def test_what_it_cannot_defer_is_left_to_torchtitan(parts, clip, deferred, clipped, arguments):
    """Other norms, other parameters than the container's, and containers that do not defer."""
    container = deferring(parts[:deferred]) if deferred else container_of(parts)
    gone, copies = deferring(parts), copy.deepcopy(parts)
    del gone
    for models in (parts, copies):
        set_grads(models, 0)
    found = clip(parameters(parts[:clipped]), **arguments)
    assert torch.equal(found, torchtitans(parameters(copies[:clipped]), **arguments))
    assert_same(gradients(parts), gradients(copies))
    container.step()
    assert container.control.clip_factor == 1  # not clipped a second time


def test_frozen_parameters_may_come_along(parts, clip):
    parts[0].layers["0"][0].weight.requires_grad_(False)
    container = deferring(parts)
    set_grads(parts, 0)
    before = gradients(parts)
    clip(parameters(parts), MAX_NORM)
    container.step()
    assert container.control.clip_factor < 1
    assert_same(gradients(parts), before)


@pytest.mark.parametrize("newer", ["defers", "clips at once", "in backward"])
def test_the_latest_of_several_containers_decides(parts, clip, newer):
    """An older container may exist until the garbage collector runs."""
    old = deferring(parts)
    kind = OptimizersInBackwardContainer if newer == "in backward" else OptimizersContainer
    new = container_of(parts, kind=kind)
    if newer == "defers":
        defer_clipping(new)
    set_grads(parts, 0)
    before = norm_of(parts)
    clip(parameters(parts), MAX_NORM)
    expected = before if newer == "defers" else MAX_NORM
    assert float(norm_of(parts)) == pytest.approx(float(expected), rel=1e-4)
    assert new.optimizers[0].max_grad_norm == (MAX_NORM if newer == "defers" else None)
    assert old.optimizers[0].max_grad_norm is None
    watch(old)  # asks for the older one again
    set_grads(parts, 0)
    clip(parameters(parts), MAX_NORM)
    assert norm_of(parts) == before
    assert old.optimizers[0].max_grad_norm == MAX_NORM
    del new  # lived until here


# Errors


def test_optimizers_that_cannot(parts):
    for container, error, message in (
        (FusedAdamW(parts[0].parameters()), TypeError, "an OptimizersContainer, found a FusedAdam"),
        (
            OptimizersInBackwardContainer(parts, FusedAdamW, {}),
            TypeError,
            "found a OptimizersInBackwardContainer",
        ),
        (
            OptimizersContainer(parts, torch.optim.AdamW, {}),
            ValueError,
            "needs fused optimizers, found AdamW",
        ),
        (
            container_of(parts, max_grad_norm=MAX_NORM),
            ValueError,
            r"max_grad_norm is 0\.25: leave out one",
        ),
    ):
        with pytest.raises(error, match=message):
            defer_clipping(container)
    container = deferring(parts)
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="expected a number above 0"):
            container.deferred_clipping.clip(threshold)
    with pytest.raises(ValueError, match="deferred_clipping sets max_grad_norm"):
        container.max_grad_norm = 1.0
