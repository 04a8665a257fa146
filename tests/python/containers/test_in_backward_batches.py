"""OptimizersInBackwardContainer steps small parameters together with the effect of single steps."""

import copy
import functools
import gc
import random
import weakref

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
    batches,
)
from torchopt_ext.optim.planned import PlannedStep

from .conftest import assert_same, backward, parameters


def train(container, parts, seeds=range(3), every=lambda seed: None):
    for seed in seeds:
        every(seed)
        backward(parts, seed)
        container.step()


# Trainings: each gives the container another reason to step parameters separately.


def other_hyperparameters(container, parts):
    container.param_groups[2]["lr"] = 0.5
    train(container, parts)
    container.param_groups[3]["betas"] = (0.5, 0.5)
    train(container, parts)
    container.param_groups[2]["lr"], container.param_groups[3]["betas"] = 1e-2, (0.9, 0.999)
    train(container, parts)


def other_settings(container, parts):
    train(container, parts)
    container.optimizers[1].max_grad_norm = 0.1
    container.optimizers[0].skip_nonfinite = True
    train(container, parts)
    container.optimizers[1].max_grad_norm = None
    container.optimizers[0].skip_nonfinite = False
    train(container, parts)


def other_scale(container, parts):
    container.optimizers[2].grad_scale = torch.tensor(4.0)
    train(container, parts)


def patched_step(container, parts):
    optimizer = container.optimizers[3]
    step, calls = optimizer.step, []
    optimizer.step = lambda: (calls.append(1), step())
    train(container, parts)
    return calls


def hooks(container, parts):
    seen = []
    handle = container.optimizers[4].register_step_post_hook(lambda *_: seen.append("own"))
    container.register_step_post_hook(lambda *_: seen.append("container"))
    train(container, parts)
    handle.remove()
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    train(container, parts)
    handle.remove()
    train(container, parts)
    return seen


def scheduler(container, parts):
    schedulers = LRSchedulersContainer(container, lambda step: 0.5**step)
    for seed in range(3):
        train(container, parts, [seed])
        schedulers.step()


def frozen_for_a_step(container, parts):
    bias = parts[0].layers["1"][0].bias
    train(container, parts, every=lambda seed: bias.requires_grad_(seed != 1))


def unreached_with_a_gradient(container, parts):
    parts[0].layers["0"][0].bias.grad = torch.ones(5)
    train(container, parts[1:] * 2)
    return [param.grad for param in parameters(parts)]


def second_gradient(container, parts):
    """Each gradient steps the shared parameters of reentrant checkpoints."""
    layer = parts[0].layers["0"]
    for seed in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        x = checkpoint(layer, parts[1](x), use_reentrant=True)
        checkpoint(layer, parts[1](x), use_reentrant=True).square().sum().backward()
    return [state["step"].item() for state in container.state.values()]


def hooks_called_by_hand(container, parts):
    """FSDP2 also calls hooks by hand: for each use of a module, and at the end of backward."""
    param = parts[1].layers["2"][0].bias

    def again():
        param.grad = torch.full((5,), 0.5)
        for _ in range(2):  # the second time without a gradient
            for hook in param._post_accumulate_grad_hooks.values():
                hook(param)

    def now_and_later(grad):
        again()
        torch.autograd.Variable._execution_engine.queue_callback(again)

    parts[0].layers["0"][0].weight.register_hook(now_and_later)
    train(container, parts)
    again()
    return [state["step"].item() for state in container.state.values()]


def state_replaced(container, parts):
    train(container, parts)
    saved = copy.deepcopy(container.state_dict())
    train(container, parts)
    container.load_state_dict(saved)
    train(container, parts)
    optimizer = container.optimizers[5]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    container.optimizers[6].state.clear()
    train(container, parts)


TRAININGS = [
    train, other_hyperparameters, other_settings, other_scale, patched_step, hooks, scheduler,
    frozen_for_a_step, unreached_with_a_gradient, second_gradient, hooks_called_by_hand,
    state_replaced,
]  # fmt: skip
BF16 = torch.bfloat16
ARGUMENTS = {
    "fp32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "tensor lr": (torch.float32, {"lr": torch.tensor(1e-2)}),
    "random rounding": (BF16, {"stochastic_rounding": True, "state_dtype": BF16}),
    "remainder": (BF16, {"master_weights": "remainder"}),
    "accumulated": (torch.float32, {"backwards_per_step": 2}),
    "norm": (torch.float32, {"max_grad_norm": 0.25}),
}
CASES = [(training, "fp32") for training in TRAININGS] + [(train, name) for name in ARGUMENTS][1:]
# Bytes of a small parameter, of a batch, and of waiting gradients. A weight has 100, others 20.
SIZES = {
    "one batch": (2**18, 2**20, 2**21),
    "several": (2**18, 300, 600),
    "cut short": (2**18, 2**20, 150),
    "weights apart": (50, 2**20, 2**21),
}


@pytest.fixture
def built(monkeypatch):
    def built(models, arguments, small=2**18, batch=2**20, waiting=2**21):
        limits = {"SMALL_BYTES": small, "BATCH_BYTES": batch, "WAITING_BYTES": waiting}
        for name, value in limits.items():
            monkeypatch.setattr(batches, name, value)
        kwargs = {"lr": 1e-2, **arguments}
        backwards = kwargs.pop("backwards_per_step", 1)
        return OptimizersInBackwardContainer(
            models, FusedAdamW, kwargs, backwards_per_step=backwards
        )

    return built


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("training", "name"), CASES)
def test_batches_do_not_show(parts, built, training, name, sizes):
    dtype, arguments = ARGUMENTS[name]
    parts = [part.to(dtype) for part in parts]
    copies = copy.deepcopy(parts)
    alone = built(copies, arguments, small=-1)
    expected = training(alone, copies)
    together = built(parts, arguments, *SIZES[sizes])
    assert str(training(together, parts)) == str(expected)
    assert_same(parts, copies)
    assert_same(together.state_dict(), alone.state_dict())
    for one, other in zip(together, alone, strict=True):
        assert repr(one.control) == repr(other.control)
        assert one.param_groups[0].keys() == other.param_groups[0].keys()


def test_one_call_a_batch(parts, built, monkeypatch):
    container, calls = built(parts, {}), []
    local_step = PlannedStep._local_step
    monkeypatch.setattr(
        PlannedStep, "_local_step", lambda *args: calls.append(1) or local_step(*args)
    )
    train(container, parts, [0])
    assert len(container) == 12 and len(calls) == 1
    calls.clear()
    container = built(copy.deepcopy(parts), {}, small=50)
    train(container, container.model_parts, [0])
    assert len(calls) == 3 + 1  # the weights of linear layers, and one batch of all others


def test_a_batch_without_gradients_is_left_alone(parts, built):
    """For example, no microbatch used a branch of the model."""
    copies = copy.deepcopy(parts)
    container = built(parts, {"backwards_per_step": 2}, batch=300)
    plain = OptimizersContainer(copies, FusedAdamW, {"lr": 1e-2})
    for layer in "0", "1":
        for models in (parts, copies):
            models[0].layers[layer](torch.ones(1, 5)).sum().backward()
    for optimizer in (container, plain):
        optimizer.step()
    assert_same(parts, copies)
    assert all(param.grad is None for param in parameters(parts))


@pytest.mark.parametrize("order", ["forwards", "backwards", "at random"])
def test_few_gradients_wait(built, order):
    """Few of 64 parameters of 400 bytes wait, in any order of backward."""
    params = torch.nn.ParameterList([torch.ones(100) for _ in range(64)])
    living, most = weakref.WeakSet(), [0]

    def note(param):
        living.add(param.grad)
        most[0] = max(most[0], len(living))

    for param in params:
        param.register_post_accumulate_grad_hook(note)
    container = built([params], {}, 2**18, 1000, 2000)
    used = list(params)[:: -1 if order == "forwards" else 1]
    if order == "at random":
        random.Random(0).shuffle(used)
    functools.reduce(torch.mul, used).sum().backward()
    assert [state["step"] for state in container.state.values()] == [1] * 64
    assert 2 <= most[0] <= 2000 // 400 + 1


def test_a_backward_that_raises_takes_its_gradients_along(parts, built):
    gradients = weakref.WeakSet()
    for param in parameters(parts):
        param.register_post_accumulate_grad_hook(lambda param: gradients.add(param.grad))
    copies = copy.deepcopy(parts)
    container, expected = built(parts, {}), built(copies, {}, small=-1)
    train(expected, copies, [1, 2])

    def fail(grad):
        assert len(gradients) > 8
        raise ZeroDivisionError

    handle = parts[0].layers["0"][0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        train(container, parts, [0])
    handle.remove()
    gc.collect()
    assert len(gradients) == 0
    container.step()
    train(container, parts, [1, 2])
    assert_same(parts, copies)
    assert_same(container.state_dict(), expected.state_dict())


def test_a_step_that_raises_changes_nothing_of_its_batch(parts, built):
    container = built(parts, {})
    train(container, parts)
    before, state = copy.deepcopy(parts), container.state[parts[0].layers["0"][0].weight]
    good, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg"):
        train(container, parts, [3])
    assert_same(parts, before)
    assert all(param.grad is None for param in parameters(parts))
    state["exp_avg"] = good
    train(container, parts, [3])
    assert [state["step"] for state in container.state.values()] == [4] * 12
