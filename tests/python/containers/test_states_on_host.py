"""Containers whose states lie on the host: same bits, one lock an entry, moved between steps."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedMuon
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.mixed_precision import offload_fsdp_optimizer

from ...support.compare import snapshot
from ...support.host_states import addresses, count_locks, let_offloading_move, places
from ...support.problems import through_file
from .conftest import assert_same, parameters

pytestmark = pytest.mark.usefixtures("params_on_gpu")

NORM = {"max_grad_norm": 0.25, "skip_nonfinite": True}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any], int]] = {  # and entries on the host
    "fp32": (torch.float32, {}, 2),
    "master": (torch.bfloat16, {"master_weights": "fp32"}, 3),
    "remainder": (torch.bfloat16, {"master_weights": "remainder"}, 3),
}
KINDS = {
    "after backward": (OptimizersContainer, NORM),
    "in backward": (OptimizersInBackwardContainer, {}),
    "in backward, norm": (OptimizersInBackwardContainer, NORM),
}
each_way = pytest.mark.parametrize("way", WAYS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def model_parts(dtype: torch.dtype) -> list[nn.Module]:
    """Returns two parts of small weights, stepped in batches, and one that is stepped alone."""
    torch.manual_seed(0)
    first = {"a": nn.Linear(5, 9), "b": nn.Linear(9, 500, bias=False), "c": nn.Linear(500, 300)}
    second = {"d": nn.Linear(300, 4), "e": nn.LayerNorm(4)}
    return [nn.Sequential(OrderedDict(layers)).to(dtype) for layers in (first, second)]


def both(kind: str, way: str, **options: Any) -> tuple[Any, Any]:
    """Returns a container with states beside the parameters, and one with ``options``."""
    dtype, held, _ = WAYS[way]
    cls, norm = KINDS[kind]
    parts = model_parts(dtype)
    arguments = {"lr": 0.02, **held, **norm}
    more = {"state_device": "cpu", **options}
    return (
        cls(copy.deepcopy(parts), FusedAdamW, arguments),
        cls(parts, FusedAdamW, {**arguments, **more}),
    )


def train(container: Any, seeds: Any) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        output = torch.randn(3, 5, dtype=container.param_groups[0]["params"][0].dtype)
        for part in container.model_parts:
            output = part(output)
        output.square().sum().backward()
        container.step()
        container.zero_grad()


def assert_same_state(*containers: Any) -> None:
    expected, *others = [snapshot(container) for container in containers]
    assert all(other == expected for other in others)


@each_kind
@each_way
def test_same_bits_and_never_beside_the_parameters(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is locked in the constructor, once for each entry, and stays the same."""
    locks = count_locks(monkeypatch)
    beside, on_host = both(kind, way)
    params = parameters(on_host.model_parts)
    assert locks == [len(params)] * WAYS[way][2]
    reserved = None
    for seed in range(3):
        for container in (beside, on_host):
            train(container, [seed])
        assert all(its == {True} for its in places(on_host).values())
        assert len(places(on_host)) == len(params)
        assert addresses(on_host) == (reserved := reserved or addresses(on_host))
    assert len(locks) == WAYS[way][2]
    assert_same_state(beside, on_host)
    element = {"fp32": 8, "master": 12, "remainder": 10}[way]
    assert on_host.host_bytes == element * sum(p.numel() for p in params)
    assert beside.host_bytes == 0


@each_kind
@each_way
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_moved_at_random_between_steps(kind: str, way: str, fraction: float) -> None:
    beside, on_host = both(kind, way, state_fraction=fraction)
    draw = random.Random(4)
    for seed in range(6):
        place = draw.choice(["cpu", "cuda", None])
        on_host.move_state(place)
        for container in (beside, on_host):
            train(container, [seed])
        assert (on_host.host_bytes > 0) == (place == "cpu")
        assert_same_state(beside, on_host)


@each_kind
def test_a_move_brings_offloaded_states_back_first(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next step would, and move them to the host once more."""
    let_offloading_move(monkeypatch)
    beside, moved = both(kind, "fp32")
    moved.move_state("cuda")
    for seed in range(3):
        for container in (beside, moved):
            train(container, [seed])
        offload_fsdp_optimizer(moved)
        assert moved.host_bytes > 0
        moved.move_state("cpu")
        held = addresses(moved)
        for container in (beside, moved):
            train(container, [10 + seed])
        assert addresses(moved) == held
        moved.move_state("cuda")
        assert moved.host_bytes == 0
    assert_same_state(beside, moved)


@each_kind
def test_a_move_locks_once_for_each_entry(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = both(kind, "master")[1]
    train(on_host, range(2))
    on_host.move_state("cuda")
    assert all(its == {False} for its in places(on_host).values())
    train(on_host, range(2, 3))
    locks = count_locks(monkeypatch)
    on_host.move_state("cpu")
    assert locks == [len(parameters(on_host.model_parts))] * 3
    train(on_host, range(3, 4))
    assert len(locks) == 3
    assert all(its == {True} for its in places(on_host).values())


@each_kind
def test_the_fraction_counts_over_all_parameters(kind: str) -> None:
    on_host = both(kind, "fp32", state_fraction=0.5)[1]
    train(on_host, range(2))
    where = places(on_host)
    params = parameters(on_host.model_parts)
    assert all(len(where[param]) == 1 for param in params)
    hosted = [param for param in params if where[param] == {True}]
    sizes = [param.numel() for param in params]
    assert sum(param.numel() for param in hosted) >= 0.5 * sum(sizes)
    # the large weight does not fit: all before and after it do
    assert [param.numel() for param in hosted] == [max(sizes)]


@each_kind
@pytest.mark.parametrize("steps", [0, 3])
def test_loading_fills_the_memory_that_is_there(
    kind: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues as the saved one does."""
    beside, source = both(kind, "master")
    for container in (beside, source):
        train(container, range(2))
    target = both(kind, "master")[1]
    train(target, range(10, 10 + steps))
    locks = count_locks(monkeypatch)
    target.load_state_dict(through_file(source.state_dict()))
    for p, q in zip(*(parameters(c.model_parts) for c in (source, target)), strict=True):
        q.data.copy_(p)
    assert_same(target.state_dict(), source.state_dict())
    for container in (beside, target):
        train(container, range(2, 4))
    assert_same_state(beside, target)
    assert not locks
    assert all(its == {True} for its in places(target).values())


def test_a_lock_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    container = both("in backward", "master")[0]
    train(container, range(2))
    before = snapshot(container)

    def fail(*_: Any) -> None:
        raise RuntimeError("cannot lock")

    with monkeypatch.context() as patched:
        patched.setattr("torchopt_ext.state.host_memory._allocated", fail)
        with pytest.raises(RuntimeError, match="cannot lock"):
            container.move_state("cpu")
    assert snapshot(container) == before and container.host_bytes == 0
    train(container, range(2, 3))
    assert all(its == {False} for its in places(container).values())


def test_what_is_rejected() -> None:
    container = both("in backward", "fp32")[1]
    with pytest.raises(RuntimeError, match="state_device='cpu'"):
        offload_fsdp_optimizer(container)
    with pytest.raises(ValueError, match="Invalid state_device: 'disk'"):
        container.move_state("disk")
    seen: list[str] = []

    def move(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="a step of this optimizer is under way"):
            container.move_state("cuda")
        seen.append("moved")

    container.optimizers[0].register_step_pre_hook(move)
    train(container, range(1))
    assert seen == ["moved"]
    theirs = OptimizersContainer(model_parts(torch.float32), torch.optim.AdamW, {})
    with pytest.raises(AttributeError, match="AdamW has no control block"):
        theirs.move_state("cpu")


def test_muon_beside_adamw() -> None:
    containers = []
    for options in ({}, {"state_device": "cpu"}):
        parts = model_parts(torch.bfloat16)
        arguments = {"lr": 0.02, "master_weights": "remainder8", **options}
        containers.append(OptimizersInBackwardContainer(parts, FusedMuon, arguments))
        train(containers[-1], range(3))
    assert_same_state(*containers)
    assert all(its == {True} for its in places(containers[1]).values())


def test_gradients_that_no_hook_saw_and_frozen_parameters() -> None:
    for kind in KINDS:
        containers = both(kind, "fp32")
        for container in containers:
            for seed in range(2):
                parts = container.model_parts
                parts[1].e.requires_grad_(seed != 0)
                generator = torch.Generator().manual_seed(seed)
                for param in parameters(parts):
                    if param.requires_grad:
                        param.grad = torch.randn(param.shape, generator=generator)
                container.step()
                container.zero_grad()
        assert_same_state(*containers)
