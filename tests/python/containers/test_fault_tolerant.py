"""FTOptimizersContainer with torchft's Optimizer and a manager that the test controls."""

import copy
import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.containers import (
    FTOptimizersContainer,
    LRSchedulersContainer,
    OptimizersContainer,
    build_optimizers,
)
from torchopt_ext.containers.deferred_clipping import defer_clipping

from .conftest import assert_same, parameters, set_grads, train

pytest.importorskip("torchft")


class Manager:
    """Decides as the test says; `heal` is what torchft does to a group that has come back."""

    def __init__(self, *decisions):
        self.decisions, self.calls = list(decisions), []
        self.heal = lambda: None

    def start_quorum(self):
        self.calls.append("quorum")

    def should_commit(self):
        self.calls.append("commit?")
        decision = self.decisions.pop(0) if self.decisions else True
        if isinstance(decision, Exception):
            raise decision
        self.heal()
        return decision


@pytest.fixture
def manager():
    return Manager()


def build(choice, parts, manager, cls=FTOptimizersContainer, **options):
    return cls(parts, choice.cls, choice.all_kwargs(), manager, **options)


def adamw(parts, manager, **options):
    return FTOptimizersContainer(parts, FusedAdamW, {"lr": 1e-2}, manager, **options)


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("compat", [None, "torchtitan"])
def test_steps_when_the_groups_commit(choice, parts, manager, every_step, compat):
    """Or always, without torchft's optimizer. With compat it counts the step that makes state."""
    copies = copy.deepcopy(parts)
    container = build(choice, parts, manager, use_ft_optimizer=not every_step, compat=compat)
    plain = OptimizersContainer(copies, choice.cls, choice.all_kwargs(), compat=compat)
    plain.state_dict()
    seen = []
    container.register_step_post_hook(lambda *_: seen.append(1))
    manager.decisions = [True, False, True, False, False, True]
    train(container, parts, range(6))
    made = range(6) if every_step else [0, 2, 5]
    train(plain, copies, made)
    assert_same(container.state_dict(), plain.state_dict())
    assert_same(parts, copies)
    steps = len(made) + (compat is not None)
    assert container.state_dict()["state.layers.0.0.weight.step"] == steps
    assert len(seen) == len(made)
    assert manager.calls == ([] if every_step else ["commit?", "quorum"] * 6)


class Overriding(FTOptimizersContainer):
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("cls", [FTOptimizersContainer, Overriding])
@pytest.mark.parametrize("base_class_made_before", [False, True])
def test_step_hooks_fire_once_and_for_commits_only(
    choice, parts, manager, monkeypatch, cls, base_class_made_before
):
    # torch wraps a class's step in hooks when its first instance is made.
    monkeypatch.setattr(OptimizersContainer, "step", inspect.unwrap(OptimizersContainer.step))
    if base_class_made_before:
        choice.container(copy.deepcopy(parts))
    container = build(choice, parts, manager, cls)
    seen = []
    container.register_step_pre_hook(lambda opt, *_: seen.append(("pre", opt)))
    container.register_step_post_hook(lambda opt, *_: seen.append(("post", opt)))
    container.optimizers[1].register_step_post_hook(lambda opt, *_: seen.append(("inner", opt)))
    everywhere = register_optimizer_step_post_hook(lambda opt, *_: seen.append(("all", opt)))
    try:
        for decision in (True, False, True):
            seen.clear()
            manager.decisions = [decision]
            train(container, parts, [0])
            names = ["all", "inner", "post", "pre"] if decision else []
            assert sorted(name for name, _ in seen) == names
            inner = container.optimizers[1]
            assert all(opt is (inner if name == "inner" else container) for name, opt in seen)
    finally:
        everywhere.remove()


def test_a_call_after_one_that_raised_goes_through_torchft(choice, parts, manager):
    container = build(choice, parts, manager)
    before = copy.deepcopy(container.state_dict())
    manager.decisions = [RuntimeError("lighthouse is gone"), False]
    with pytest.raises(RuntimeError, match="lighthouse is gone"):
        train(container, parts, [0])
    assert not container._call_from_ft
    train(container, parts, [1])  # refused
    assert torch.equal(container.state_dict()["state.layers.0.0.weight.step"], torch.tensor(0.0))
    manager.start_quorum = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        container.zero_grad()
    del manager.start_quorum
    manager.calls.clear()
    container.zero_grad()
    container.step()
    assert manager.calls == ["quorum", "commit?"]
    assert container.state_dict().keys() == before.keys()


def test_the_state_dict_is_the_present_state(choice, parts, manager):
    container = build(choice, parts, manager)
    schedulers = LRSchedulersContainer(container, lambda step: 1 / (step + 1))
    container.init_cache_state_dict()
    assert container.cache_state_dict["param_groups.layers.0.0.weight.lr"] == 1e-2
    train(container, parts, range(3))
    schedulers.step()
    for optimizer in container:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # replaces tensors
    train(container, parts, range(3, 6))
    # Another container looks up the model's names itself.
    fresh = choice.container(parts)
    fresh.optimizers = container.optimizers
    for found in (container.state_dict(), container.cache_state_dict):
        assert_same(found, fresh.state_dict())
        assert found["param_groups.layers.0.0.weight.lr"] == 5e-3
        assert found["state.layers.2.0.weight.step"] == 6


def test_making_the_state_does_not_count_as_a_step(choice, parts, manager):
    set_grads(parts, 0)
    before = copy.deepcopy(parts)
    container = build(choice, parts, manager)
    container.init_cache_state_dict()
    assert_same(container.state_dict(), choice.container(before).state_dict())
    assert_same(parts, before)
    assert all(param.grad is not None for param in parameters(parts))


# State from torchft's thread, and recovery


def test_state_dict_needs_no_model(choice, parts, manager):
    """FSDP2 puts unsharded parameters into the modules during forward and backward."""
    container = build(choice, parts, manager)
    train(container, parts, range(2))
    expected = copy.deepcopy(container.state_dict())
    for part in parts:
        for module in part.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().clone()))
    found = []
    thread = threading.Thread(target=lambda: found.append(container.state_dict()))
    thread.start()
    thread.join()
    assert_same(found[0], expected)
    changed = {k: v + 1 if k.endswith("exp_avg") else v for k, v in expected.items()}
    container.load_state_dict(changed)
    assert_same(container.state_dict(), changed)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_group_that_comes_back_ends_with_its_peers_bits(parts, manager, deferred):
    """torchft loads the peer's state when asked for the commit, which is after backward."""
    replicas = [parts, copy.deepcopy(parts)]
    healthy, returning = containers = [adamw(replicas[0], Manager()), adamw(replicas[1], manager)]
    schedules = [LRSchedulersContainer(each, lambda step: 1 / (step + 1)) for each in containers]

    def step(replica, seed):
        container = containers[replica]
        container.zero_grad()
        set_grads(replicas[replica], seed)
        if deferred:
            defer_clipping(container).clip(0.1)
        container.step()

    for seed in range(3):
        step(0, seed)
        schedules[0].step()

    def heal():
        for part, peer in zip(*reversed(replicas), strict=True):
            part.load_state_dict(peer.state_dict())
        returning.load_state_dict(healthy.state_dict())
        schedules[1].load_state_dict(schedules[0].state_dict())
        manager.heal = lambda: None

    manager.heal = heal
    step(1, 3)
    step(0, 3)
    for seed in range(4, 6):
        for replica in (0, 1):
            schedules[replica].step()
            step(replica, seed)
    assert_same(*replicas)
    assert_same(returning.state_dict(), healthy.state_dict())
    assert returning.state_dict()["state.layers.0.0.weight.step"] == 6


def test_parameters_added_later_are_named_by_init_cache_state_dict(model, manager):
    model.layers["1"].requires_grad_(False)
    container = adamw([model], manager)
    model.layers["1"].requires_grad_(True)
    container.optimizers[0].add_param_group({"params": list(model.layers["1"].parameters())})
    with pytest.raises(ValueError, match="8 parameters, and 4 names are known: call init_cache_s"):
        container.state_dict()
    container.init_cache_state_dict()
    assert "state.layers.1.0.weight.exp_avg" in container.state_dict()


# Clipping, scaling, closures, configurations


def test_a_refused_commit_leaves_no_measured_norm(model, manager):
    other = copy.deepcopy(model)
    container = adamw([model], manager)
    plain = OptimizersContainer([other], FusedAdamW, {"lr": 1e-2})
    clipping = defer_clipping(container)
    set_grads([model], 0)
    clipping.clip(0.1)
    manager.decisions = [False]
    container.step()
    for modules, optimizer in (([model], container), ([other], plain)):
        set_grads(modules, 1)
        optimizer.step()  # without a request for clipping
    assert_same(model, other)


@pytest.mark.parametrize("master_weights", ["fp32", "remainder"])
def test_masters_follow_the_weights_that_local_sgd_writes(manager, master_weights):
    """torchft's LocalSGD and DiLoCo write weights in a hook after some steps."""
    linear = nn.Linear(64, 64).bfloat16()
    kwargs = {"lr": 1e-2, "master_weights": master_weights}
    container = FTOptimizersContainer([linear], FusedAdamW, kwargs, manager, use_ft_optimizer=False)
    averaged = [torch.randn_like(param) for param in linear.parameters()]

    def synchronize(*_):
        for param, average in zip(linear.parameters(), averaged, strict=True):
            param.data.copy_(average)

    hook = container.register_step_post_hook(synchronize)
    train(container, [linear], range(2))
    hook.remove()
    # A job without torchft continues from a checkpoint that was saved now.
    other = copy.deepcopy(linear)
    plain = OptimizersContainer([other], FusedAdamW, kwargs)
    plain.load_state_dict(container.state_dict())
    for model, optimizer in ((linear, container), (other, plain)):
        optimizer.param_groups[0]["lr"] = 0.0
        train(optimizer, [model], [2])
        assert all(map(torch.equal, model.parameters(), averaged))


def test_refused_commits_leave_the_loss_scale(model, manager):
    container = adamw([model], manager)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    manager.decisions = [False, True, False, False, True, False, True]
    scales = []
    for step in range(7):
        set_grads([model], step, scale=float(scaler.scale(torch.ones(()))))
        if step in (1, 3):  # an overflow, and one in a refused step
            model.layers["0"][0].weight.grad[0, 0] = torch.inf
        scaler.step(container)
        with pytest.raises(RuntimeError, match="has already been called"):
            scaler.step(container)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024, 512, 512, 512, 512, 512, 1024]
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_scalers_reach_the_committed_step(model, manager, scaler_class):
    other = copy.deepcopy(model)
    runs = []
    for module, decisions in ((model, [True, False, True, True]), (other, [])):
        manager.decisions = list(decisions)
        container = adamw([module], manager)
        scaler = scaler_class("cpu", init_scale=4.0)
        for seed in (0, 1, 2, 3) if decisions else (0, 2, 3):
            set_grads([module], seed, scale=float(scaler.scale(torch.ones(()))))
            if seed == 2:
                module.layers["0"][0].weight.grad[0, 0] = torch.inf
            scaler.step(container)
            scaler.update()
        runs.append((container.state_dict(), scaler.get_scale()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] == 2.0
    assert_same(model, other)


def test_a_closure_is_refused_before_anything_changes(choice, model, manager):
    container = build(choice, [model], manager)
    for args, kwargs in (((lambda: 0,), {}), ((), {"closure": lambda: 0})):
        with pytest.raises(ValueError, match="closure is not supported"):
            container.step(*args, **kwargs)
    assert manager.calls == []
    container.step(None)
    assert manager.calls == ["commit?"]


@pytest.mark.parametrize("quorum_by_optimizer", [True, False])
@pytest.mark.parametrize("form", ["job configuration", "job configuration of 0.1", "section"])
def test_build_optimizers(parts, manager, form, quorum_by_optimizer):
    fields = {"name": "AdamW", "lr": 1e-2, "eps": 1e-8, "implementation": "fused"}
    section = SimpleNamespace(**fields, early_step_in_backward=False, deferred_clipping=True)
    ft_manager = SimpleNamespace(enabled=True, manager=manager)
    job_config = SimpleNamespace(optimizer=section)
    if form == "job configuration of 0.1":
        method = None if quorum_by_optimizer else "diloco"
        job_config.fault_tolerance = SimpleNamespace(semi_sync_method=method)
    else:
        ft_manager.use_async_quorum = quorum_by_optimizer
    dims = SimpleNamespace(pp_enabled=False, ep_enabled=False)
    given = (section, dims) if form == "section" else (job_config,)
    container = build_optimizers(parts, *given, ft_manager)
    assert type(container) is FTOptimizersContainer
    set_grads(parts, 0)
    container.deferred_clipping.clip(1.0)
    container.step()
    assert manager.calls == (["commit?"] if quorum_by_optimizer else [])
    assert 0 < container.control.clip_factor < 1
