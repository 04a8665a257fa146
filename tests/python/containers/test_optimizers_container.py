"""OptimizersContainer behaves as the optimizers that it holds, and as one optimizer."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)

from .conftest import CHOICES, assert_same, parameters, set_grads, train

BOTH = [OptimizersContainer, OptimizersInBackwardContainer]


def test_is_one_optimizer_over_one_for_each_part(choice, parts):
    kwargs = choice.all_kwargs()
    container = OptimizersContainer(parts, choice.cls, kwargs)
    assert isinstance(container, torch.optim.Optimizer) and isinstance(container, Stateful)
    assert len(container) == 2 and list(container) == container.optimizers
    assert all(type(optimizer) is choice.cls for optimizer in container)
    assert container.model_parts is parts
    assert container.init_cache_state_dict() is None
    container.defaults["lr"] = 7.0
    assert kwargs == choice.all_kwargs()
    container._validate_length(2)
    with pytest.raises(AssertionError, match="expected 3 optimizers, got 2"):
        container._validate_length(3)


@pytest.mark.parametrize("change", ["none", "tied", "frozen", "a frozen part"])
def test_steps_like_separate_optimizers(choice, parts, change):
    match change:
        case "tied":
            parts[0].layers["1"][0].weight = parts[0].layers["0"][0].weight
        case "frozen":
            parts[0].layers["1"].requires_grad_(False)
        case "a frozen part":
            parts[0].requires_grad_(False)
    copies = copy.deepcopy(parts)
    trained = [[p for p in part.parameters() if p.requires_grad] for part in copies]
    container = choice.container(parts)
    separate = [choice.optimizer(params) for params in trained if params]
    assert container.state == {}
    for seed in range(4):
        for models in (parts, copies):
            set_grads(models, seed)
        assert container.step() is None
        for optimizer in separate:
            optimizer.step()
    assert_same(parts, copies)
    expected = [id(p) for p in parameters(parts) if p.requires_grad]
    assert [id(p) for group in container.param_groups for p in group["params"]] == expected
    assert set(map(id, container.state)) == set(expected)
    for optimizer in container:
        for param in optimizer.param_groups[0]["params"]:
            (name, *_) = choice.states
            assert container.state[param][name] is optimizer.state[param][name]
            assert container.state[param]["step"] == 4
    LRSchedulersContainer(container, lambda step: 0.5**step).step()
    container.load_state_dict(container.state_dict())
    assert {group["lr"] for group in container.param_groups} == {5e-3}
    container.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in parameters(parts) if p.requires_grad)
    container.zero_grad()
    assert all(p.grad is None for p in parameters(parts))


def test_nothing_to_train_at_all(choice, parts):
    for part in parts:
        part.requires_grad_(False)
    container = choice.container(parts)
    container.step()
    container.zero_grad()
    container.load_state_dict({})
    assert container.state_dict() == {}


# Hooks


class Counting(OptimizersContainer):
    """A subclass as a user would write it."""

    calls = 0

    def step(self, *args, **kwargs):
        self.calls += 1
        return super().step(*args, **kwargs)


class CountingTwice(Counting):
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


JOINT = [{}, {"max_grad_norm": 1.0}, {"skip_nonfinite": True}]
HOOKED = [(c, j) for c in CHOICES.values() for j in JOINT if not j or "Fused" in c.cls.__name__]


@pytest.mark.parametrize(("choice", "joint"), HOOKED)
@pytest.mark.parametrize("cls", [OptimizersContainer, Counting, CountingTwice])
def test_hooks_fire_once_per_step_around_the_update(choice, parts, cls, joint):
    """Each inner optimizer's hooks, too, and global hooks once, with the container."""
    choice.container(parts)  # torch patches a class's step when the first instance is made
    container = cls(parts, choice.cls, choice.all_kwargs() | joint)
    weight = parts[1].layers["2"][0].weight
    seen = []

    def noted(name):
        return lambda *args: seen.append((name, args, weight.clone()))

    for optimizer in (container, *container):
        optimizer.register_step_pre_hook(noted("pre"))
        optimizer.register_step_post_hook(noted("post"))
    handles = [
        register_optimizer_step_pre_hook(noted("first")),
        register_optimizer_step_post_hook(noted("last")),
    ]
    set_grads(parts, 0)
    before = weight.clone()
    container.step()
    for handle in handles:
        handle.remove()
    calls = [(name, args[0]) for name, args, _ in seen]
    assert calls[:2] == [("first", container), ("pre", container)]
    assert calls[-2:] == [("post", container), ("last", container)]
    for optimizer in container:
        assert [name for name, opt in calls[2:-2] if opt is optimizer] == ["pre", "post"]
    assert len(calls) == 8
    assert torch.equal(seen[0][2], before) and not torch.equal(before, weight)
    assert torch.equal(seen[-1][2], weight)
    # The arguments are the optimizer, then step's own, which torch passes with self.
    assert all(args[2] == {} for _, args, _ in seen)
    assert getattr(container, "calls", 1) == 1


def test_hooks_fire_again_after_a_step_that_raised(choice, parts):
    container = choice.container(parts)
    seen = []

    def refuse(*_):
        seen.append(1)
        if len(seen) == 1:
            raise RuntimeError("refused")

    container.register_step_pre_hook(refuse)
    set_grads(parts, 0)
    with pytest.raises(RuntimeError, match="refused"):
        container.step()
    container.step()
    assert seen == [1, 1]


# Closures


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(FusedAdamW, {}), (FusedAdamW, {"max_grad_norm": 0.1}), (torch.optim.AdamW, {})],
)
@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_a_closure_runs_once(parts, kind, cls, options, as_keyword, single):
    """As a loop that computes gradients first; Lightning always passes a closure."""
    parts = parts[: 1 if single else 2]
    other = copy.deepcopy(parts)
    container, expected = (kind(models, cls, {"lr": 0.1, **options}) for models in (parts, other))
    calls = []

    def loss_of(models, optimizers):
        optimizers.zero_grad()
        loss = sum(part(torch.ones(3, 5)).square().sum() for part in models)
        loss.backward()
        return loss

    def closure():
        calls.append(1)
        return loss_of(parts, container)

    for _ in range(3):
        loss = container.step(closure=closure) if as_keyword else container.step(closure)
        assert loss == loss_of(other, expected)
        expected.step()
    assert len(calls) == 3
    assert_same(parts, other)
    container.step(None)
    container.step(closure=None)


def test_an_optimizer_that_needs_a_closure_is_refused_beside_others(parts):
    container = OptimizersContainer(parts, torch.optim.LBFGS, {})
    with pytest.raises(TypeError, match="closure"):
        container.step(lambda: pytest.fail("it ran"))


# The container's own param_groups and state


def test_param_groups_are_the_inner_optimizers_own(choice, parts):
    container = choice.container(parts)
    saved = copy.deepcopy(container.optimizers[0].state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    container.optimizers[0].load_state_dict(saved)
    assert [group["lr"] for group in container.param_groups] == [0.5, 1e-2]
    LambdaLR(container, lambda step: 0.5)
    assert [opt.param_groups[0]["lr"] for opt in container] == [0.25, 5e-3]
    OneCycleLR(container, max_lr=1.0, total_steps=9)  # finds the optimizers' betas
    key = choice.in_its_words("betas")
    assert {np.ravel(group[key])[0] for group in container.param_groups} == {0.95}
    for group in container.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    before = copy.deepcopy(parts)
    train(container, parts, [0])
    assert_same(parts, before)


def test_add_param_group_is_left_to_the_inner_optimizers(choice, parts):
    container = choice.container(parts)
    extra = nn.Parameter(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"container\.optimizers"):
        container.add_param_group({"params": [extra]})
    container.optimizers[1].add_param_group({"params": [extra], "lr": 0.25})
    assert [group["lr"] for group in container.param_groups] == [1e-2, 1e-2, 0.25]
    with pytest.raises(ValueError, match=r"parameters of shapes \[\(3,\)\] are not in "):
        container.state_dict()  # it has no name


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_copying_a_container_is_refused(choice, parts, how):
    with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
        how(choice.container(parts))


def test_parts_that_cannot_be_trained_are_rejected(choice, parts):
    for given, message in (
        (parts[0], r"model_parts is of type .*, expected a list of modules"),
        (parts[0].parameters(), "model part 0 is of type Parameter, expected a module"),
    ):
        with pytest.raises(TypeError, match=message):
            choice.container(given)
    weight = parts[1].layers["2"][0].weight
    parts[1].layers["2"][0].weight = parts[0].layers["1"][0].weight
    shared = (
        r"'layers\.2\.0\.weight' of model part 1 is also 'layers\.1\.0\.weight' of model part 0: "
        "two optimizers would step it"
    )
    with pytest.raises(ValueError, match=shared):
        choice.container(parts)
    parts[1].layers["2"][0].weight = weight
    parts[1].to("meta")
    on_meta = r"'layers\.2\.0\.weight' of model part 1 is on the meta device"
    with pytest.raises(ValueError, match=on_meta):
        choice.container(parts)
    parts[1].requires_grad_(False)  # the optimizer ignores frozen parameters
    choice.container(parts)


# Contracts for subclasses


def test_post_init_can_be_overridden_as_in_torchtitan(choice, parts):
    seen = []

    class Own(OptimizersContainer):
        def _post_init(self, all_params, optimizer_kwargs):
            seen.append((len(all_params), optimizer_kwargs))
            torch.optim.Optimizer.__init__(self, all_params, optimizer_kwargs)

    container = choice.container(parts, Own)
    assert seen == [(12, choice.all_kwargs())]
    container.register_step_post_hook(lambda *_: seen.append(1))
    train(container, parts, [0])
    assert seen[1:] == [1]
    assert len(container.param_groups) == 2


def test_a_subclass_can_make_its_optimizers(choice, parts):
    class Own(OptimizersContainer):
        def __init__(self, model_parts, optimizer_cls, optimizer_kwargs):
            self.model_parts = model_parts
            every = [list(part.parameters()) for part in model_parts]
            self.optimizers = [optimizer_cls(params, **optimizer_kwargs) for params in every]
            self._validate_length(len(model_parts))
            self._post_init([p for params in every for p in params], optimizer_kwargs)

    container = choice.container(parts, Own)
    train(container, parts, [0])
    saved = copy.deepcopy(container.state_dict())
    container.load_state_dict(saved)
    assert saved.keys() == choice.container(parts).state_dict().keys()


# One norm over all parts


@pytest.mark.parametrize("kwargs", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}])
def test_the_joint_step_follows_a_schedule(parts, recwarn, kwargs):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2, **kwargs})
    schedulers = LRSchedulersContainer(container, lambda step: 0.0 if step else 1.0)
    train(container, parts, [0])
    schedulers.step()
    assert [str(warning.message) for warning in recwarn] == []
    before = copy.deepcopy(parts)
    train(container, parts, [1])  # the factor is 0
    assert_same(parts, before)


def test_steps_that_are_overridden_are_called_or_refused(parts):
    calls = []

    class Own(FusedAdamW):
        def step(self, closure=None):
            calls.append(self)

    container = OptimizersContainer(parts, Own, {"lr": 1e-2})
    container.step()
    assert calls == container.optimizers
    container.optimizers[0] = FusedAdamW(parts[0].parameters())
    container.step()
    assert calls[2:] == container.optimizers[1:]
    container.max_grad_norm = 1.0
    with pytest.raises(TypeError, match=r"Own overrides or replaces step\(\), which one decision"):
        container.step()


def test_the_threshold_is_the_inner_optimizers(parts):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2})
    container.max_grad_norm = 0.5
    assert [o.max_grad_norm for o in container] == [0.5] * len(container)
    theirs = OptimizersContainer(parts, torch.optim.AdamW, {})
    with pytest.raises(AttributeError, match="no control block"):
        theirs.max_grad_norm = 1.0
    with pytest.raises(TypeError, match="max_grad_norm"):
        OptimizersContainer(parts, torch.optim.AdamW, {"max_grad_norm": 1.0})


@pytest.mark.usefixtures("one_rank")
def test_a_rejected_step_changes_no_part(parts):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2})
    before = copy.deepcopy(parts)
    set_grads(parts, 0)
    weight = parts[1].layers["2"][0].weight
    weight.grad = torch.eye(5).to_sparse()
    with pytest.raises(RuntimeError, match=r"gradient 0 \('layers.2.0.weight'\) has layout Sparse"):
        container.step()
    assert_same(parts, before)
    weight.grad = torch.eye(5)
    container.step()
    container.optimizers[0].process_group = torch.distributed.group.WORLD  # no norm: may differ
    container.step()
    assert {float(state["step"]) for state in container.state.values()} == {2.0}


def test_weights_that_do_not_fit_leave_all_masters(parts):
    """Also those of parameters that a framework has replaced in the groups."""
    named = [(name, param) for part in parts for name, param in part.named_parameters()]
    weights = {name: param.detach() + 2.0**-20 for name, param in named}
    low = [part.bfloat16() for part in parts]
    container = OptimizersContainer(low, FusedAdamW, {"master_weights": "fp32"})
    container.refresh_masters(from_=weights)
    masters = {param: state["master_weight"] for param, state in container.state.items()}
    params = container.optimizers[0].param_groups[0]["params"]
    params[0] = parts[0].layers["0"][0].weight = nn.Parameter(params[0].detach().clone())
    with pytest.raises(ValueError, match=r"layers\.2\.1\.bias"):
        container.refresh_masters(from_=weights | {"layers.2.1.bias": torch.zeros(3)})
    assert all(container.state[p]["master_weight"] is masters[p] for p in masters)


@pytest.mark.parametrize("cls", BOTH)
def test_inner_optimizers_know_the_models_names_and_numbers(parts, cls):
    """Messages, telemetry and random rounding use them, without wrappers of checkpointing."""
    plain = [name for part in parts for name, _ in part.named_parameters()]
    parts[0].layers["0"] = checkpoint_wrapper(parts[0].layers["0"])
    container = cls(parts, FusedAdamW, {"lr": 1e-2, "track": True})
    names, numbers = [], []
    for optimizer in container:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        names += optimizer.telemetry.names
        numbers.append(optimizer._first_parameter_number)
    assert names == plain
    assert numbers == (list(range(12)) if cls is OptimizersInBackwardContainer else [0, 8])
    assert all("param_names" not in group for group in container.param_groups)


@pytest.mark.parametrize("norm", [None, 1.0])
def test_any_number_of_parts(norm):
    parts = [nn.ParameterList([torch.ones(1)]) for _ in range(1200)]
    container = OptimizersContainer(parts, FusedAdamW, {"max_grad_norm": norm})
    for part in parts:
        part[0].grad = torch.ones(1)
    container.step()
    assert {float(state["step"]) for state in container.state.values()} == {1.0}
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        container.step(other=1)
