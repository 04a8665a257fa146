"""OptimizersContainer behaves as the optimizers that it holds, and as one optimizer."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR
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


def test_is_an_optimizer_and_stateful_with_one_optimizer_per_part(choice, parts):
    container = choice.container(parts)
    assert isinstance(container, torch.optim.Optimizer)
    assert isinstance(container, Stateful)
    assert len(container) == 2
    assert list(container) == container.optimizers
    assert container.model_parts is parts
    assert all(type(optimizer) is choice.cls for optimizer in container)
    for part, optimizer in zip(parts, container, strict=True):
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
            id(p) for p in part.parameters()
        ]
    assert container.defaults["lr"] == 1e-2
    assert container.init_cache_state_dict() is None


def test_steps_like_separate_optimizers(choice, parts, set_grads, assert_same):
    copies = copy.deepcopy(parts)
    container = choice.container(parts)
    separate = [choice.optimizer(part.parameters()) for part in copies]
    for seed in range(4):
        set_grads(parts, seed)
        set_grads(copies, seed)
        assert container.step() is None
        for optimizer in separate:
            optimizer.step()
    assert_same(parts, copies)


def test_zero_grad_forwards_its_arguments(choice, parts, set_grads):
    container = choice.container(parts)
    set_grads(parts, 0)
    container.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for part in parts for p in part.parameters())
    container.zero_grad()
    assert all(p.grad is None for part in parts for p in part.parameters())


# Hooks


def test_hooks_fire_once_per_step_around_the_update(choice, parts, set_grads):
    container = choice.container(parts)
    weight = next(parts[1].parameters())
    seen = []
    container.register_step_pre_hook(lambda *args: seen.append(("pre", args, weight.clone())))
    container.register_step_post_hook(lambda *args: seen.append(("post", args, weight.clone())))
    set_grads(parts, 0)
    before = weight.clone()
    container.step()
    assert [name for name, _, _ in seen] == ["pre", "post"]
    assert torch.equal(seen[0][2], before)
    assert torch.equal(seen[1][2], weight)
    assert not torch.equal(before, weight)
    # The arguments are the optimizer, then step's own, which torch passes with self.
    assert all(args[0] is container and args[2] == {} for _, args, _ in seen)


def test_inner_optimizers_have_hooks_of_their_own_and_the_container_the_global_ones(
    choice, parts, set_grads
):
    container = choice.container(parts)
    seen = []

    def noted(name):
        return lambda optimizer, *_: seen.append((name, optimizer))

    for optimizer in container:
        optimizer.register_step_pre_hook(noted("pre"))
        optimizer.register_step_post_hook(noted("post"))
    handles = [
        register_optimizer_step_pre_hook(noted("first")),
        register_optimizer_step_post_hook(noted("last")),
    ]
    set_grads(parts, 0)
    container.step()
    for handle in handles:
        handle.remove()
    for optimizer in container:
        assert [name for name, opt in seen if opt is optimizer] == ["pre", "post"]
    assert (seen[0], seen[-1]) == (("first", container), ("last", container))
    assert len(seen) == 6


class Counting(OptimizersContainer):
    """A subclass as a user would write it."""

    calls = 0

    def step(self, *args, **kwargs):
        self.calls += 1
        return super().step(*args, **kwargs)


class CountingTwice(Counting):
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("cls", [Counting, CountingTwice])
def test_hooks_of_a_subclass_that_calls_super_fire_once(choice, parts, set_grads, cls):
    choice.container(parts)  # torch patches a class's step when the first instance is made
    container = cls(parts, choice.cls, choice.all_kwargs())
    seen = []
    container.register_step_pre_hook(lambda *_: seen.append("pre"))
    container.register_step_post_hook(lambda *_: seen.append("post"))
    for seed in range(2):
        set_grads(parts, seed)
        container.step()
    assert seen == ["pre", "post"] * 2
    assert container.calls == 2


def test_hooks_fire_again_after_a_step_that_raised(choice, parts, set_grads):
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


def test_a_closure_runs_once_with_one_optimizer_and_its_loss_is_returned(choice, model):
    container = choice.container([model])
    before = copy.deepcopy(model.state_dict())
    calls = []

    def closure():
        calls.append(1)
        container.zero_grad()
        loss = model(torch.ones(3, 5)).square().sum()
        loss.backward()
        return loss

    assert container.step(closure) > 0
    assert container.step(closure=closure) > 0
    assert len(calls) == 2
    assert not torch.equal(before["layers.0.0.weight"], model.layers["0"][0].weight)


@pytest.mark.parametrize("kind", [OptimizersContainer, OptimizersInBackwardContainer])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(FusedAdamW, {}), (FusedAdamW, {"max_grad_norm": 0.1}), (torch.optim.AdamW, {})],
)
@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_runs_once_with_several_optimizers(
    parts, kind, cls, options, as_keyword, assert_same
):
    """As a loop that computes gradients first; Lightning always passes a closure."""
    other = copy.deepcopy(parts)
    container, expected = (kind(own, cls, {"lr": 0.1, **options}) for own in (parts, other))
    calls = []

    def loss_of(own, optimizers):
        optimizers.zero_grad()
        loss = sum(part(torch.ones(3, 5)).square().sum() for part in own)
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


def test_param_groups_are_the_inner_optimizers_own(choice, parts, train):
    container = choice.container(parts)
    assert [p for group in container.param_groups for p in group["params"]] == [
        p for part in parts for p in part.parameters()
    ]
    for group in container.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    before = [p.clone() for p in parts[1].parameters()]
    train(container, parts, [0])
    for param, old in zip(parts[1].parameters(), before, strict=True):
        assert torch.equal(param, old)


def test_param_groups_follow_a_load_into_an_inner_optimizer(choice, parts, train):
    container = choice.container(parts)
    train(container, parts, [0])
    saved = copy.deepcopy(container.optimizers[0].state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    container.optimizers[0].load_state_dict(saved)
    assert [group["lr"] for group in container.param_groups] == [0.5, 1e-2]


def test_a_scheduler_of_the_container_itself_reaches_the_inner_optimizers(choice, parts, set_grads):
    container = choice.container(parts)
    scheduler = LambdaLR(container, lambda step: 0.5**step)
    set_grads(parts, 0)
    container.step()
    scheduler.step()
    assert [group["lr"] for opt in container for group in opt.param_groups] == [5e-3, 5e-3]


def test_state_of_the_container_is_its_optimizers(choice, parts, train):
    container = choice.container(parts)
    assert container.state == {}
    train(container, parts, [0, 1])
    params = [p for part in parts for p in part.parameters()]
    assert set(container.state) == set(params)
    for optimizer in container:
        for param in optimizer.param_groups[0]["params"]:
            (name, *_) = choice.states
            assert container.state[param][name] is optimizer.state[param][name]
            assert container.state[param]["step"] == 2


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


# Which parameters


def test_frozen_parameters_are_left_out(choice, parts, train):
    parts[0].layers["1"].requires_grad_(False)
    container = choice.container(parts)
    trained = {p for group in container.param_groups for p in group["params"]}
    assert trained == {p for part in parts for p in part.parameters() if p.requires_grad}
    train(container, parts, [0])


def test_a_part_may_have_no_trainable_parameters(choice, parts, train):
    parts[0].requires_grad_(False)
    container = choice.container(parts)
    schedulers = LRSchedulersContainer(container, lambda step: 0.5**step)
    before = copy.deepcopy(parts)
    assert len(container) == len(schedulers) == 2
    train(container, parts, [0])
    schedulers.step()
    assert all(map(torch.equal, parts[0].parameters(), before[0].parameters()))
    assert not any(map(torch.equal, parts[1].parameters(), before[1].parameters()))
    assert {key.split(".")[2] for key in container.state_dict()} == {"2"}
    container.load_state_dict(container.state_dict())


def test_nothing_to_train_at_all(choice, parts):
    for part in parts:
        part.requires_grad_(False)
    container = choice.container(parts)
    container.step()
    container.zero_grad()
    assert container.state_dict() == {}
    container.load_state_dict({})


def test_a_tied_parameter_is_in_its_part_once(choice, model, train):
    model.layers["1"][0].weight = model.layers["0"][0].weight
    container = choice.container([model])
    (group,) = container.param_groups
    assert len(group["params"]) == len(set(group["params"])) == 7
    train(container, [model], [0])
    assert container.state[model.layers["0"][0].weight]["step"] == 1


def test_a_parameter_shared_by_two_parts_is_refused(choice, parts):
    parts[1].layers["2"][0].weight = parts[0].layers["1"][0].weight
    with pytest.raises(
        ValueError,
        match=r"'layers\.2\.0\.weight' of model part 1 is also 'layers\.1\.0\.weight' of model "
        "part 0: two optimizers would step it",
    ):
        choice.container(parts)


def test_a_meta_parameter_is_refused(choice, parts):
    parts[1].to("meta")
    with pytest.raises(
        ValueError, match=r"'layers\.2\.0\.weight' of model part 1 is on the meta device"
    ):
        choice.container(parts)
    parts[1].requires_grad_(False)  # the optimizer ignores frozen parameters
    choice.container(parts)


def test_what_is_no_list_of_modules_is_refused(choice, parts):
    with pytest.raises(TypeError, match=r"model_parts is of type .*, expected a list of modules"):
        choice.container(parts[0])
    with pytest.raises(TypeError, match="model part 0 is of type Parameter, expected a module"):
        choice.container(parts[0].parameters())


# Contracts for subclasses


def test_validate_length_names_both_counts(choice, parts):
    container = choice.container(parts)
    container._validate_length(2)
    with pytest.raises(AssertionError, match="expected 3 optimizers, got 2"):
        container._validate_length(3)


def test_post_init_can_be_overridden_as_in_torchtitan(choice, parts, set_grads):
    seen = []

    class Own(OptimizersContainer):
        def _post_init(self, all_params, optimizer_kwargs):
            seen.append((len(all_params), optimizer_kwargs))
            torch.optim.Optimizer.__init__(self, all_params, optimizer_kwargs)

    kwargs = choice.all_kwargs()
    container = Own(parts, choice.cls, kwargs)
    assert seen == [(12, kwargs)]
    fired = []
    container.register_step_post_hook(lambda *_: fired.append(1))
    set_grads(parts, 0)
    container.step()
    assert fired == [1]
    assert len(container.param_groups) == 2


def test_a_subclass_can_make_its_optimizers(choice, parts, set_grads):
    class Own(OptimizersContainer):
        def __init__(self, model_parts, optimizer_cls, optimizer_kwargs):
            self.model_parts = model_parts
            every = [list(part.parameters()) for part in model_parts]
            self.optimizers = [optimizer_cls(params, **optimizer_kwargs) for params in every]
            self._validate_length(len(model_parts))
            self._post_init([p for params in every for p in params], optimizer_kwargs)

    container = Own(parts, choice.cls, choice.all_kwargs())
    set_grads(parts, 0)
    container.step()
    saved = copy.deepcopy(container.state_dict())
    container.load_state_dict(saved)
    assert saved.keys() == choice.container(parts).state_dict().keys()


def test_the_arguments_are_not_kept_or_changed(choice, parts):
    kwargs = choice.all_kwargs()
    before = dict(kwargs)
    container = OptimizersContainer(parts, choice.cls, kwargs)
    assert kwargs == before
    container.defaults["lr"] = 7.0
    assert kwargs == before


# One norm over all parts


def test_a_nonfinite_gradient_in_one_part_skips_all_parts(parts, set_grads, assert_same):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2, "skip_nonfinite": True})
    set_grads(parts, 0)
    container.step()
    before = copy.deepcopy(parts)
    for value in (torch.nan, torch.inf, -torch.inf):
        set_grads(parts, 1)
        parts[1].layers["2"][1].bias.grad[3] = value
        container.step()
        assert_same(parts, before)
        assert all(state["step"] == 1 for state in container.state.values())
    set_grads(parts, 1)
    container.step()
    assert all(state["step"] == 2 for state in container.state.values())


@pytest.mark.parametrize("kwargs", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}])
def test_the_joint_step_fires_hooks_and_follows_a_schedule(parts, set_grads, recwarn, kwargs):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2, **kwargs})
    schedulers = LRSchedulersContainer(container, lambda step: 0.0 if step else 1.0)
    seen = []
    container.register_step_post_hook(lambda *_: seen.append("container"))
    for optimizer in container:
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    set_grads(parts, 0)
    container.step()
    assert sorted(seen) == ["container", "post", "post", "pre", "pre"]
    assert seen[-1] == "container"
    schedulers.step()
    assert [str(warning.message) for warning in recwarn] == []
    before = [p.clone() for part in parts for p in part.parameters()]
    container.step()  # the factor is 0
    after = [p for part in parts for p in part.parameters()]
    assert all(map(torch.equal, before, after))


def test_without_a_norm_each_optimizer_makes_its_own_step(parts):
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


def test_clipping_arguments_are_torchs_typeerror_with_torchs_classes(parts):
    with pytest.raises(TypeError, match="max_grad_norm"):
        OptimizersContainer(parts, torch.optim.AdamW, {"max_grad_norm": 1.0})


def test_a_rejected_step_changes_no_part(parts, set_grads, assert_same, one_rank):
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


@pytest.mark.parametrize("cls", [OptimizersContainer, OptimizersInBackwardContainer])
def test_inner_optimizers_know_the_models_names(model, cls):
    """Messages and telemetry use names without the wrappers of activation checkpointing."""
    plain = [name for name, _ in model.named_parameters()]
    model.layers["0"] = checkpoint_wrapper(model.layers["0"])
    container = cls([model], FusedAdamW, {"lr": 1e-2, "track": True})
    names = [name for optimizer in container for name in named(optimizer)]
    assert names == plain
    assert all("param_names" not in group for group in container.param_groups)


def named(optimizer):
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.telemetry.names


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


def test_one_cycle_finds_the_optimizers_betas(choice, parts):
    container = OptimizersContainer(parts, choice.cls, {"lr": 1e-2})
    torch.optim.lr_scheduler.OneCycleLR(container, max_lr=1.0, total_steps=9)
    key = choice.in_its_words("betas")
    assert {np.ravel(group[key])[0] for group in container.param_groups} == {0.95}
