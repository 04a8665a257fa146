"""torch.amp.GradScaler: the attributes it sets, and whole training steps with it on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
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


@each_class
@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_found_inf_skips_the_step(name: str, with_scale: bool, stepped: bool) -> None:
    params = make_params()
    optimizer = OURS[name](params)
    if stepped:
        train([optimizer], [params], 2)
    set_gradients(params)
    before, count = [bits(p) for p in params], 2 if stepped else 0
    optimizer.grad_scale = torch.ones(1) if with_scale else None
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert [bits(p) for p in params] == before
    for p in params:
        state = optimizer.state[p]
        assert not state or state["step"] == count
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    assert all(optimizer.state[p]["step"] == count + 1 for p in params)


@each_class
def test_grad_scale_divides(name: str) -> None:
    """Gradients times a power of two, with that scale, give the bits of plain gradients."""
    params, reference = make_params(), make_params()
    optimizer, plain = OURS[name](params), OURS[name](reference)
    for step in range(3):
        set_gradients(params, seed=step, scale=2.0**10)
        set_gradients(reference, seed=step)
        optimizer.grad_scale = torch.full((1,), 2.0**10)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        plain.step()
    assert_same_bits(params, reference)


@ours_only
@each_class
def test_scaled_norm_is_of_the_unscaled_gradients(name: str) -> None:
    params, reference = make_params(), make_params()
    optimizer = OURS[name](params, max_grad_norm=0.5)
    plain = OURS[name](reference, max_grad_norm=0.5)
    set_gradients(params, scale=2.0**10)
    set_gradients(reference)
    optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 2.0**10), torch.zeros(())
    optimizer.step()
    plain.step()
    assert float(optimizer.control.grad_norm) == float(plain.control.grad_norm)
    assert_same_bits(params, reference)


@each_class
@pytest.mark.parametrize("unscale", ["in the step", "explicitly"])
@pytest.mark.parametrize("clip", [False, True])
def test_training_with_grad_scaler(name: str, unscale: str, clip: bool) -> None:
    """Like torch's fused optimizer over steps of which one overflows: same scales, same skips."""
    if clip and unscale == "in the step":
        pytest.skip("clip_grad_norm_ needs unscaled gradients")
    results = []
    for cls in (OURS[name], TORCH[name]):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = cls(model.parameters(), lr=0.05, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        scales, losses = [], []
        for step in range(8):
            optimizer.zero_grad()
            loss = model(torch.full((4, 6), 0.5)).square().mean()
            scaler.scale(loss).backward()
            if step == 3:
                model.bias.grad[1] = math.inf
            if unscale == "explicitly":
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
        results.append((scales, steps, losses, list(model.parameters())))
    (scales, steps, losses, mine), (their_scales, their_steps, _, theirs) = results
    assert scales == their_scales
    assert scales[3] < scales[2]  # the overflow was noticed
    assert steps == their_steps == [7, 7]
    assert losses[-1] < losses[0]
    assert_close_to_torch(mine, theirs)


@each_class
def test_disabled_grad_scaler(name: str) -> None:
    params, reference = make_params(), make_params()
    optimizer, plain = OURS[name](params), OURS[name](reference)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    set_gradients(params, reference)
    scaler.step(optimizer)
    plain.step()
    assert_same_bits(params, reference)


@ours_only
@each_class
def test_scaler_and_own_clipping(name: str) -> None:
    """Stock scaler outside, clipping inside: as unscale_, clip_grad_norm_ and a step."""
    scale = 2.0**8
    mine, theirs = make_params(), make_params()
    ours = OURS[name](mine, lr=0.05, max_grad_norm=0.3)
    reference = TORCH[name](theirs, lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    scaler.scale(torch.ones(1))  # creates the scale
    for step in range(4):
        set_gradients(mine, seed=step, scale=scale)
        set_gradients(theirs, seed=step)
        norm = nn.utils.clip_grad_norm_(theirs, 0.3)
        scaler.step(ours)
        scaler.update()
        reference.step()
        torch.testing.assert_close(ours.control.grad_norm.float(), norm)
    assert_close_to_torch(mine, theirs)


@ours_only
@each_class
def test_skipped_step_leaves_every_byte(name: str) -> None:
    params = make_params()
    optimizer = OURS[name](params, amsgrad=True)
    train([optimizer], [params], 2)
    reference = copy_params(params)
    set_gradients(params)
    params[0].grad.view(-1)[3] = math.nan
    before = snapshot(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    assert snapshot(optimizer) == before
    assert_same_bits(params, reference)
    assert float(optimizer.control.skipped_steps) == 1
