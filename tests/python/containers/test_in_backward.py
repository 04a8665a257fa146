"""OptimizersInBackwardContainer trains the same, with each update inside backward."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchopt_ext import FusedAdam, FusedAdamW, GradScaler
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)

from .conftest import assert_same, backward, parameters, train

SCALERS = pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
NORMS = pytest.mark.parametrize("norm", [{}, {"max_grad_norm": 0.25}])


def in_backward(choice, parts):
    return choice.container(parts, OptimizersInBackwardContainer)


def both(parts, backwards_per_step=1, no_decay=(), **kwargs):
    """Returns a container that steps in backward, and a plain container of copies."""
    copies, kwargs = copy.deepcopy(parts), {"lr": 1e-2, **kwargs}
    container = OptimizersInBackwardContainer(
        parts, FusedAdamW, kwargs, backwards_per_step=backwards_per_step, no_decay=no_decay
    )
    return container, OptimizersContainer(copies, FusedAdamW, kwargs, no_decay=no_decay), copies


def no_gradients(parts):
    return all(param.grad is None for param in parameters(parts))


@pytest.mark.parametrize("change", ["none", "tied", "frozen"])
def test_trains_like_the_plain_container(choice, parts, change):
    match change:
        case "tied":
            parts[0].layers["1"][0].weight = parts[0].layers["0"][0].weight
        case "frozen":
            parts[0].layers["0"][0].weight.requires_grad_(False)
            parts[1].requires_grad_(False)
    copies = copy.deepcopy(parts)
    container, plain = in_backward(choice, parts), choice.container(copies)
    seen = []
    container.register_step_pre_hook(lambda opt, *_: seen.append(("pre", opt)))
    container.register_step_post_hook(lambda opt, *_: seen.append(("post", opt)))
    assert_same(container.state_dict(), plain.state_dict())
    for seed in range(3):
        for models in (parts, copies):
            backward(models, seed)
        plain.step()
        plain.zero_grad()
        assert_same(parts, copies)
        assert no_gradients(parts) and not seen
        assert nn.utils.clip_grad_norm_(parameters(parts), 1.0) == 0
        container.step()
        container.zero_grad()
        assert seen == [("pre", container), ("post", container)]
        seen.clear()
    assert_same(container.state_dict(), plain.state_dict())
    assert {float(state["step"]) for state in container.state.values()} == {3.0}
    count = {"none": 12, "tied": 11, "frozen": 7}[change]
    assert [len(opt.param_groups[0]["params"]) for opt in container] == [1] * count


def test_a_parameter_frozen_later_is_no_longer_stepped(choice, parts):
    container = in_backward(choice, parts)
    backward(parts, 0)
    weight = parts[0].layers["0"][0].weight.requires_grad_(False)
    before = weight.clone()
    backward(parts, 1)
    assert torch.equal(weight, before)
    assert container.state[weight]["step"] == 1


@pytest.mark.parametrize("args", [(), (None,), (1, 2)])
@pytest.mark.parametrize("kwargs", [{}, {"set_to_none": True, "closure": None}])
def test_gradients_that_no_hook_has_seen(choice, parts, args, kwargs):
    """Gradients that were set, as FSDP1 does, are used by step() or dropped by zero_grad()."""
    copies = copy.deepcopy(parts)
    container, plain = in_backward(choice, parts), choice.container(copies)
    for param in parameters(parts)[1:] + parameters(copies)[1:]:
        param.grad = torch.full_like(param, 0.5)
    assert container.step(*args, **kwargs) is None
    plain.step()
    assert_same(parts, copies)
    parameters(parts)[0].grad = torch.ones(5, 5)
    assert container.zero_grad(*args, **kwargs) is None
    container.step()
    assert_same(parts, copies)


# Gradient accumulation


@NORMS
def test_accumulates_gradients(parts, norm):
    """Also without step(), which updates a parameter that got a gradient of one microbatch only."""
    container, plain, copies = both(parts, 3, **norm)
    backward(parts, 7)
    container.zero_grad()
    for step, first in enumerate((0, 0, 1, 0)):
        for microbatch in range(3):
            assert_same(parts, copies)
            for models in (parts, copies):
                backward(models[first if microbatch else 0 :], 10 * step + microbatch)
        plain.step()
        plain.zero_grad()
        if first:
            container.step()
        assert_same(parts, copies)
        assert_same(container.state_dict(), plain.state_dict())
        assert no_gradients(parts)


# Clipping and overflow


@pytest.mark.parametrize("single", [True, False])
def test_gradients_are_clipped_as_in_the_plain_container(parts, single):
    parts = parts[: 1 if single else 2]
    container, plain, copies = both(parts, max_grad_norm=0.25, no_decay=["bias"])
    for seed in range(3):
        backward(copies, seed)
        plain.step()
        plain.zero_grad()
        backward(parts, seed)
        assert_same(parts, copies)  # before step() is called
        assert torch.equal(container.control.grad_norm, plain.control.grad_norm)
        assert container.control.clip_factor < 1
        assert no_gradients(parts)
        container.step()
    assert_same(container.state_dict(), plain.state_dict())
    assert len(container) == len(parts)


def test_skips_what_is_not_finite(parts):
    container = OptimizersInBackwardContainer(parts, FusedAdamW, {"skip_nonfinite": True})
    before = copy.deepcopy(parts)
    handle = parts[1].layers["2"][0].weight.register_hook(lambda grad: grad * torch.nan)
    backward(parts, 0)
    assert_same(parts, before)
    handle.remove()
    backward(parts, 1)
    assert not any(map(torch.equal, parameters(parts), parameters(before)))
    assert container.control.skipped_steps == 1


@SCALERS
@pytest.mark.parametrize("overflow", [True, False])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_with_the_update_in_step(parts, scaler_class, overflow, unscaled):
    """Sharpness-aware loops unscale, and then call the optimizer's step() without the scaler."""
    container, plain, copies = both(parts, None, max_grad_norm=0.25)
    scales = []
    for optimizer, models in ((container, parts), (plain, copies)):
        scaler = scaler_class("cpu", init_scale=2.0**10)
        for seed in range(2):
            backward(models, seed, lambda loss, s=scaler: s.scale(loss))
            if overflow and seed == 1:
                models[0].layers["0"][0].weight.grad[0, 0] = torch.inf
            if unscaled and not (overflow and seed == 1):
                scaler.unscale_(optimizer)
                norm = nn.utils.get_total_norm([param.grad for param in parameters(models)])
                optimizer.step()
                torch.testing.assert_close(optimizer.control.grad_norm.float(), norm)
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == 2.0 ** (9 if overflow else 10)
    assert_same(parts, copies)
    assert container.state[parts[0].layers["0"][0].weight]["step"] == (1 if overflow else 2)


@SCALERS
def test_a_scaler_is_refused_where_backward_updates(choice, parts, scaler_class):
    """Adam cancels the scale, except in eps, but not an overflow."""
    container = in_backward(choice, parts)

    def unscale_and_step(scaler):
        scaler.unscale_(container)
        container.step()
        scaler.update()

    for use in (lambda scaler: scaler.step(container), unscale_and_step):
        scaler = scaler_class("cpu")
        backward(parts, 0, scaler.scale)
        with pytest.raises((AssertionError, RuntimeError), match=r"No inf checks|steps in back"):
            use(scaler)


def scale(param):
    param.grad.mul_(1000)


CHANGES = {
    "scaled": lambda params: scale(params[0]),
    "not finite": lambda params: params[1].grad[0].fill_(torch.inf),
    "replaced": lambda params: setattr(params[0], "grad", torch.ones_like(params[0])),
    "dropped": lambda params: setattr(params[0], "grad", None),
    "all by hand": lambda params: [setattr(p, "grad", torch.ones_like(p)) for p in params],
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_change_before_step(parts, change):
    container, plain, copies = both(parts, None, max_grad_norm=0.25, skip_nonfinite=True)
    for seed in range(3):
        for models, optimizer in ((parts, container), (copies, plain)):
            if seed != 1 or change != "all by hand":
                backward(models, seed)
            if seed == 1:
                CHANGES[change](parameters(models))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(container.control.grad_norm, plain.control.grad_norm)
        assert no_gradients(parts)
    assert float(container.control.skipped_steps) == (change == "not finite")
    assert_same(parts, copies)


def test_hooks_that_come_later_may_change_gradients(parts):
    container, plain, copies = both(parts, max_grad_norm=1.0)
    for param in parameters(parts) + parameters(copies):
        param.register_post_accumulate_grad_hook(scale)
    backward(parts, 0)
    backward(copies, 0)
    plain.step()
    assert torch.equal(container.control.grad_norm, plain.control.grad_norm)


@pytest.mark.parametrize("backwards", [1, 2, None])
def test_the_threshold_may_change(parts, backwards):
    container, plain, copies = both(parts, backwards, max_grad_norm=0.25)
    for threshold in (0.25, None, 0.25):
        for models, optimizer in ((parts, container), (copies, plain)):
            optimizer.max_grad_norm = threshold
            for seed in range(backwards or 1):
                backward(models, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(parts, copies)
    assert_same(container.state_dict(), plain.state_dict())
    without = OptimizersInBackwardContainer(parts, FusedAdamW, {})
    without.max_grad_norm = 0  # off
    with pytest.raises(ValueError, match="pass max_grad_norm to its constructor"):
        without.max_grad_norm = 1.0


def test_complex_parameters_are_clipped():
    params = [nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(2)]
    options = {"max_grad_norm": 0.5}
    container = OptimizersInBackwardContainer([nn.ParameterList(params[:1])], FusedAdamW, options)
    plain = FusedAdamW(params[1:], **options)
    for param in params:
        (param.conj() * (2 - 1j)).real.sum().backward()  # the gradient is lazily conjugated
    plain.step()
    assert torch.equal(*params)
    assert torch.equal(container.control.grad_norm, plain.control.grad_norm)


@NORMS
def test_reentrant_checkpointing(parts, norm):
    """Inner backward calls end before the outer backward has all gradients."""
    container, plain, copies = both(parts, **norm)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for models in (parts, copies):
        hidden = checkpoint(models[0].layers["0"], x, use_reentrant=True).tanh()
        hidden = models[0].layers["1"](hidden).tanh()
        checkpoint(models[1], hidden, use_reentrant=True).square().sum().backward()
    plain.step()
    assert_same(parts, copies)
    if norm:
        assert torch.equal(container.control.grad_norm, plain.control.grad_norm)


def test_a_failed_update_can_be_made_again(parts):
    container, plain, copies = both(parts, max_grad_norm=0.25)
    for seed in range(2):
        backward(copies, seed)
        plain.step()
        plain.zero_grad()
    backward(parts, 0)
    state = container.state[parts[0].layers["0"][0].weight]
    good, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg"):
        backward(parts, 1)
    state["exp_avg"] = good
    container.step()
    assert_same(parts, copies)


@pytest.mark.parametrize("stepped", [False, True])
def test_follows_schedules(choice, parts, recwarn, stepped):
    """torch's scheduler of an optimizer whose parameter got no gradient finds that it stepped."""
    container = in_backward(choice, parts)
    schedulers = LRSchedulersContainer(container, lambda step: 1.0 if step == 0 else 0.0)
    backward(parts, 0)
    if stepped:
        container.step()
    schedulers.step()
    before = copy.deepcopy(parts)
    backward(parts, 1)
    assert_same(parts, before)
    assert [str(warning.message) for warning in recwarn] == []
    assert set(schedulers.get_metrics()) == {"lr/" + choice.cls.__name__.removeprefix("Fused")}
    fresh = in_backward(choice, parts)
    stock = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in fresh]
    backward(parts[:1], 0)
    fresh.step()
    with warnings.catch_warnings(action="error"):
        for schedule in stock:
            schedule.step()


# State dict


def test_all_parameters_state_is_loaded(choice, parts):
    copies = copy.deepcopy(parts)
    plain = choice.container(copies)
    train(plain, copies, [0, 1])
    saved = copy.deepcopy(plain.state_dict())
    container = in_backward(choice, parts)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    for part, other in zip(parts, copies, strict=True):
        part.load_state_dict(other.state_dict())
    backward(parts, 5)
    backward(copies, 5)
    plain.step()
    assert_same(parts, copies)
    # Parameters may have hyperparameters of their own.
    container.load_state_dict(saved | {"param_groups.layers.0.0.weight.lr": 0.5})
    assert sorted(group["lr"] for group in container.param_groups)[-2:] == [1e-2, 0.5]


@NORMS
def test_torchtitans_state_of_one_parameter(parts, norm, caplog):
    """torchtitan saves one parameter's state (a resume with 0.2.2 departed by 0.03 in trials)."""
    model = parts[0]
    container = OptimizersInBackwardContainer([model], FusedAdamW, {"lr": 1e-2, **norm})
    backward([model], 0)
    container.step()
    whole = copy.deepcopy(container.state_dict())
    first = "layers.0.0.weight"
    one = {key: value for key, value in whole.items() if f".{first}." in key}
    one[f"param_groups.{first}.lr"] = 0.5
    container.load_state_dict(dict(one))
    assert f"optimizer state of '{first}' only" in caplog.text
    anew = "7 other parameters start anew, from 'layers.0.0.bias' to 'layers.1.1.bias'"
    assert anew in caplog.text
    for key, value in container.state_dict().items():
        if key.endswith(".lr"):
            assert value == 0.5
        elif key.startswith("state."):
            assert torch.equal(value, one.get(key, torch.zeros_like(value))), key
    with pytest.raises(KeyError, match="is missing"):
        container.load_state_dict({k: v for k, v in whole.items() if f".{first}." not in k})


# Refusals


@pytest.mark.parametrize(
    ("kwargs", "backwards", "message"),
    [
        ({}, 0, "backwards_per_step is 0, expected 1 or more"),
        ({}, 1.5, "backwards_per_step is 1.5, expected an integer"),
        ({}, None, "keeps all gradients until"),
        ({"max_grad_norm": 1.0, "process_group": object()}, 1, "pass backwards_per_step=None"),
        ({"weight_decay": -1.0}, 1, "weight_decay"),
    ],
)
def test_a_refused_container_leaves_no_hook_behind(parts, kwargs, backwards, message):
    with pytest.raises((TypeError, ValueError), match=message):
        OptimizersInBackwardContainer(parts, FusedAdamW, kwargs, backwards_per_step=backwards)
    before = copy.deepcopy(parts)
    backward(parts, 0)
    assert_same(parts, before)


def test_what_would_not_be_honoured_is_rejected(choice, parts):
    """Added groups would get no gradients, and each parameter's optimizer counts its own steps."""
    container = in_backward(choice, parts)
    for owner in (container, container.optimizers[3]):
        with pytest.raises(NotImplementedError, match="build one for the grown model"):
            owner.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(container.param_groups) == 12
    if isinstance(container.optimizers[0], FusedAdam):
        with pytest.raises(NotImplementedError, match="take LRSchedulersContainer"):
            container.optimizers[0].set_schedule(warmup_steps=1, stable_steps=1, decay_steps=1)
        with pytest.raises(NotImplementedError, match="container with skip_nonfinite=True"):
            container.optimizers[0].set_loss_scale()
    for part in parts:
        part.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model parts is trainable"):
        in_backward(choice, parts)


@pytest.mark.parametrize("converted", [slice(None), slice(1)], ids=["all parts", "the first"])
@pytest.mark.parametrize("norm", [None, 0.5])
def test_a_conversion_that_swaps_tensors(parts, norm, converted):
    """Swapped tensors have no hooks, so the next step() detects the swap and updates."""
    container, plain, copies = both(parts, max_grad_norm=norm)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for part in (*parts[converted], *copies[converted]):
            part.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for seed in range(3):
        for models, optimizer in ((parts, container), (copies, plain)):
            backward(models, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(parts, copies)
    assert no_gradients(parts)


def test_the_tensor_that_a_parameter_was_swapped_with(parts):
    """It has the parameter's hook but is nobody's parameter, so its gradient stays."""
    container, *_ = both(parts)
    param = next(parts[0].parameters())
    other = nn.Parameter(torch.ones_like(param))
    torch.utils.swap_tensors(param, other)
    before = other.detach().clone()
    other.sum().backward()
    container.step()
    assert_same([other.detach(), other.grad], [before, torch.ones_like(before)])
