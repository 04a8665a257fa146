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
from torchopt_ext.containers.deferred_clipping import defer_clipping


def in_backward(choice, parts):
    return OptimizersInBackwardContainer(parts, choice.cls, choice.all_kwargs())


def both(parts, backwards_per_step=1, no_decay=(), **kwargs):
    """Returns a container that steps in backward, and a plain container of copies."""
    copies, kwargs = copy.deepcopy(parts), {"lr": 1e-2, **kwargs}
    container = OptimizersInBackwardContainer(
        parts, FusedAdamW, kwargs, backwards_per_step=backwards_per_step, no_decay=no_decay
    )
    return container, OptimizersContainer(copies, FusedAdamW, kwargs, no_decay=no_decay), copies


def parameters(parts):
    return [param for part in parts for param in part.parameters()]


def backward(parts, seed, scale=lambda loss: loss):
    """Runs one backward through all parts in a row."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    for part in parts:
        x = part(x)
    scale(x.square().sum()).backward()


@pytest.fixture
def same_training(choice, assert_same):
    """Returns a function that trains the parts in backward like copies in a plain container."""

    def same_training(parts, seeds=range(3)):
        copies = copy.deepcopy(parts)
        container, plain = in_backward(choice, parts), choice.container(copies)
        for seed in seeds:
            backward(parts, seed)
            container.step()
            container.zero_grad()
            backward(copies, seed)
            plain.step()
            plain.zero_grad()
        assert_same(parts, copies)
        assert_same(container.state_dict(), plain.state_dict())
        return container

    return same_training


def test_trains_like_the_plain_container(same_training, parts):
    container = same_training(parts)
    assert len(container) == len(list(container)) == 12
    assert all(len(opt.param_groups[0]["params"]) == 1 for opt in container)


def test_gradients_are_gone_after_backward(choice, parts):
    container = in_backward(choice, parts)
    before = copy.deepcopy(parts)
    backward(parts, 0)
    container.step()
    params = [p for part in parts for p in part.parameters()]
    assert all(p.grad is None for p in params)
    assert not any(map(torch.equal, params, (p for part in before for p in part.parameters())))
    assert torch.nn.utils.clip_grad_norm_(params, 1.0) == 0


def test_parameters_may_be_frozen(same_training, parts):
    parts[0].layers["0"][0].weight.requires_grad_(False)
    parts[1].requires_grad_(False)
    assert len(same_training(parts)) == 7


def test_nothing_to_train_is_refused(choice, parts):
    for part in parts:
        part.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model parts is trainable"):
        in_backward(choice, parts)


def test_a_tied_parameter_is_stepped_once_per_backward(same_training, model):
    model.layers["1"][0].weight = model.layers["0"][0].weight
    container = same_training([model])
    assert len(container) == 7
    assert container.state[model.layers["0"][0].weight]["step"] == 3


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
def test_gradients_that_no_hook_has_seen(choice, parts, args, kwargs, assert_same):
    """Gradients that were set, as FSDP1 does, are used by step() or dropped by zero_grad()."""
    copies = copy.deepcopy(parts)
    container, plain = in_backward(choice, parts), choice.container(copies)
    for models in (parts, copies):
        for param in parameters(models)[1:]:
            param.grad = torch.full_like(param, 0.5)
    assert container.step(*args, **kwargs) is None
    plain.step()
    assert_same(parts, copies)
    parameters(parts)[0].grad = torch.ones(5, 5)
    assert container.zero_grad(*args, **kwargs) is None
    container.step()
    assert_same(parts, copies)


def test_hooks_fire_once_per_step_after_the_updates(choice, parts):
    container = in_backward(choice, parts)
    seen = []
    container.register_step_pre_hook(lambda opt, *_: seen.append(("pre", opt)))
    container.register_step_post_hook(lambda opt, *_: seen.append(("post", opt)))
    backward(parts, 0)
    assert seen == []
    container.step()
    assert seen == [("pre", container), ("post", container)]


# Gradient accumulation


@pytest.mark.parametrize("norm", [{}, {"max_grad_norm": 0.25}])
def test_accumulates_gradients(parts, norm, assert_same):
    container, plain, copies = both(parts, 3, **norm)
    for step in range(2):
        for microbatch in range(3):
            before = copy.deepcopy(parts)
            backward(parts, 10 * step + microbatch)
            backward(copies, 10 * step + microbatch)
            same = all(map(torch.equal, parameters(parts), parameters(before)))
            assert same == (microbatch < 2)
        container.step()
        plain.step()
        plain.zero_grad()
        assert_same(container.state_dict(), plain.state_dict())
    assert all(map(torch.equal, parameters(parts), parameters(copies)))


@pytest.mark.parametrize("norm", [{}, {"max_grad_norm": 0.25}])
def test_a_parameter_of_one_microbatch_is_updated_in_step(parts, norm):
    container, plain, copies = both(parts, 2, **norm)
    for models in (parts, copies):
        backward(models, 0)
        backward(models[1:], 1)
    container.step()
    plain.step()
    assert all(map(torch.equal, parameters(parts), parameters(copies)))
    assert all(param.grad is None for param in parameters(parts))


def test_gradients_of_a_step_not_wanted_can_be_cleared(parts):
    container = OptimizersInBackwardContainer(parts, FusedAdamW, {}, backwards_per_step=2)
    before = copy.deepcopy(parts)
    backward(parts, 0)
    container.zero_grad()
    backward(parts, 1)
    assert all(map(torch.equal, parameters(parts), parameters(before)))
    assert container.state_dict()["state.layers.0.0.weight.step"] == 0


# Clipping and overflow


@pytest.mark.parametrize("single", [True, False])
def test_gradients_are_clipped_as_in_the_plain_container(parts, assert_same, single):
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
        assert all(param.grad is None for param in parameters(parts))
        container.step()
    assert_same(container.state_dict(), plain.state_dict())
    assert len(container) == len(parts)


def test_skips_what_is_not_finite(parts):
    container = OptimizersInBackwardContainer(parts, FusedAdamW, {"skip_nonfinite": True})
    before = copy.deepcopy(parts)
    handle = parts[1].layers["2"][0].weight.register_hook(lambda grad: grad * torch.nan)
    backward(parts, 0)
    assert all(map(torch.equal, parameters(parts), parameters(before)))
    handle.remove()
    backward(parts, 1)
    assert not any(map(torch.equal, parameters(parts), parameters(before)))
    assert container.control.skipped_steps == 1


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("overflow", [True, False])
def test_a_scaler_with_the_update_in_step(parts, scaler_class, overflow):
    container, plain, copies = both(parts, None, max_grad_norm=0.25)
    scales = []
    for optimizer, models in ((container, parts), (plain, copies)):
        scaler = scaler_class("cpu", init_scale=2.0**10)
        for seed in range(2):
            backward(models, seed, lambda loss, s=scaler: s.scale(loss))
            if overflow and seed == 1:
                models[0].layers["0"][0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == 2.0 ** (9 if overflow else 10)
    assert all(map(torch.equal, parameters(parts), parameters(copies)))
    assert container.state[parts[0].layers["0"][0].weight]["step"] == (1 if overflow else 2)


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
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


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_unscaled_gradients_and_the_containers_step(scaler_class):
    """Sharpness-aware loops unscale, and then call the optimizer's step() without the scaler."""
    container, plain, (copied,) = both([nn.Linear(1024, 512)], None, max_grad_norm=0.25)
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))
    (model,) = container.model_parts
    for own, optimizer in ((model, container), (copied, plain)):
        scaler = scaler_class("cpu", init_scale=2.0**10)
        scaler.scale(own(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([param.grad for param in own.parameters()])
        optimizer.step()
        torch.testing.assert_close(optimizer.control.grad_norm.float(), norm)
    assert all(map(torch.equal, model.parameters(), copied.parameters()))


@pytest.mark.parametrize("change", ["scaled", "not finite", "replaced", "dropped", "all by hand"])
def test_gradients_that_change_before_step(parts, assert_same, change):
    container, plain, copies = both(
        parts, max_grad_norm=0.25, skip_nonfinite=True, backwards_per_step=None
    )
    for seed in range(3):
        for own, optimizer in ((parts, container), (copies, plain)):
            if seed != 1 or change != "all by hand":
                backward(own, seed)
            params = parameters(own)
            if seed == 1:
                match change:
                    case "scaled":
                        params[0].grad.mul_(1000)
                    case "not finite":
                        params[1].grad[0] = torch.inf
                    case "replaced":
                        params[0].grad = torch.ones_like(params[0])
                    case "dropped":
                        params[0].grad = None
                    case "all by hand":
                        for param in params:
                            param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(container.control.grad_norm, plain.control.grad_norm)
        assert all(param.grad is None for param in parameters(parts))
    assert float(container.control.skipped_steps) == (change == "not finite")
    assert_same(parts, copies)


def test_hooks_that_come_later_may_change_gradients(parts):
    container, plain, copies = both(parts, max_grad_norm=1.0)

    def scale(param):
        param.grad.mul_(20)

    for param in parameters(parts) + parameters(copies):
        param.register_post_accumulate_grad_hook(scale)
    backward(parts, 0)
    backward(copies, 0)
    plain.step()
    assert torch.equal(container.control.grad_norm, plain.control.grad_norm)


@pytest.mark.parametrize("backwards", [1, 2, None])
def test_a_norm_that_is_asked_for_no_more(parts, assert_same, backwards):
    container, plain, copies = both(parts, backwards, max_grad_norm=0.25)
    for threshold in (0.25, None, 0.25):
        for own, optimizer in ((parts, container), (copies, plain)):
            optimizer.max_grad_norm = threshold
            for seed in range(backwards or 1):
                backward(own, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(parts, copies)
    assert_same(container.state_dict(), plain.state_dict())


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


@pytest.mark.parametrize("norm", [{}, {"max_grad_norm": 0.25}])
def test_reentrant_checkpointing(parts, norm):
    """Inner backward calls end before the outer backward has all gradients."""
    container, plain, copies = both(parts, **norm)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for models in (parts, copies):
        hidden = checkpoint(models[0].layers["0"], x, use_reentrant=True).tanh()
        hidden = models[0].layers["1"](hidden).tanh()
        checkpoint(models[1], hidden, use_reentrant=True).square().sum().backward()
    plain.step()
    assert all(map(torch.equal, parameters(parts), parameters(copies)))
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
    assert all(map(torch.equal, parameters(parts), parameters(copies)))


@pytest.mark.parametrize("stepped", [False, True])
def test_follows_a_schedule(choice, parts, recwarn, stepped):
    container = in_backward(choice, parts)
    schedulers = LRSchedulersContainer(container, lambda step: 1.0 if step == 0 else 0.0)
    backward(parts, 0)
    if stepped:
        container.step()
    schedulers.step()
    before = copy.deepcopy(parts)
    backward(parts, 1)
    for part, other in zip(parts, before, strict=True):
        assert all(map(torch.equal, part.parameters(), other.parameters()))
    assert [str(warning.message) for warning in recwarn] == []
    assert set(schedulers.get_metrics()) == {"lr/" + choice.cls.__name__.removeprefix("Fused")}


# State dict


def test_state_dict_before_the_first_backward(choice, parts, assert_same):
    copies = copy.deepcopy(parts)
    container, plain = in_backward(choice, parts), choice.container(copies)
    assert_same(container.state_dict(), plain.state_dict())
    for seed in range(2):
        backward(parts, seed)
        backward(copies, seed)
        plain.step()
        plain.zero_grad()
    assert_same(parts, copies)


def test_all_parameters_state_is_loaded(choice, parts, train, assert_same):
    copies = copy.deepcopy(parts)
    plain = choice.container(copies)
    train(plain, copies, [0, 1])
    saved = copy.deepcopy(plain.state_dict())
    container = in_backward(choice, parts)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    # Both continue from the same weights.
    for part, other in zip(parts, copies, strict=True):
        part.load_state_dict(other.state_dict())
    backward(parts, 5)
    backward(copies, 5)
    plain.step()
    assert_same(parts, copies)


def test_parameters_may_have_hyperparameters_of_their_own(choice, parts):
    container = in_backward(choice, parts)
    saved = container.state_dict()
    saved["param_groups.layers.0.0.weight.lr"] = 0.5
    container.load_state_dict(saved)
    assert sorted(group["lr"] for group in container.param_groups)[-2:] == [1e-2, 0.5]


@pytest.mark.parametrize("kwargs", [{}, {"max_grad_norm": 1.0}])
def test_torchtitans_state_of_one_parameter(parts, kwargs, caplog):
    """torchtitan saves one parameter's state (a resume with 0.2.2 departed by 0.03 in trials)."""
    model = parts[0]
    container = OptimizersInBackwardContainer([model], FusedAdamW, {"lr": 1e-2, **kwargs})
    backward([model], 0)
    container.step()
    whole = copy.deepcopy(container.state_dict())
    first = "layers.0.0.weight"
    one = {key: value for key, value in whole.items() if f".{first}." in key}
    one[f"param_groups.{first}.lr"] = 0.5
    container.load_state_dict(dict(one))
    assert f"optimizer state of '{first}' only" in caplog.text
    assert "7 other parameters start anew, from 'layers.0.0.bias' to 'layers.1.1.bias'" in (
        caplog.text
    )
    loaded = container.state_dict()
    for key, value in loaded.items():
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
    ],
)
def test_when_to_update_that_cannot_be(parts, kwargs, backwards, message):
    with pytest.raises((TypeError, ValueError), match=message):
        OptimizersInBackwardContainer(parts, FusedAdamW, kwargs, backwards_per_step=backwards)


def test_a_refused_container_leaves_no_hook_behind(parts, assert_same):
    with pytest.raises(ValueError, match="weight_decay"):
        OptimizersInBackwardContainer(parts, torch.optim.AdamW, {"weight_decay": -1.0})
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


def test_a_scheduler_finds_that_all_have_stepped(choice, parts):
    """Optimizers whose parameters never had a gradient count as stepped too."""
    container = in_backward(choice, parts)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in container]
    parts[0](torch.ones(1, 5)).sum().backward()
    container.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("converted", [slice(None), slice(1)], ids=["all parts", "the first"])
@pytest.mark.parametrize("norm", [None, 0.5])
def test_a_conversion_that_swaps_tensors(parts, assert_same, norm, converted):
    """Swapped tensors have no hooks, so the next step() detects the swap and updates."""
    *containers, copies = both(parts, max_grad_norm=norm)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for part in (*parts[converted], *copies[converted]):
            part.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for seed in range(3):
        for own, container in ((parts, containers[0]), (copies, containers[1])):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
            for part in own:
                x = part(x.to(next(part.parameters()).dtype))
            x.square().sum().backward()
            container.step()
            container.zero_grad()
    assert_same(parts, copies)
    assert all(param.grad is None for param in parameters(parts))


def test_the_threshold_is_the_inner_optimizers(parts):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2})
    container.max_grad_norm = 0.5
    assert [o.max_grad_norm for o in container] == [0.5] * len(container)
    with pytest.raises(ValueError, match="pass max_grad_norm to its constructor"):
        OptimizersInBackwardContainer(parts, FusedAdamW, {}).max_grad_norm = 1.0
    OptimizersInBackwardContainer(parts, FusedAdamW, {}).max_grad_norm = 0  # off
    with pytest.raises(AttributeError, match="no control block"):
        OptimizersContainer(parts, torch.optim.AdamW, {}).max_grad_norm = 1.0
    container.max_grad_norm = None
    defer_clipping(container)
    with pytest.raises(ValueError, match="deferred_clipping sets max_grad_norm"):
        container.max_grad_norm = 1.0
