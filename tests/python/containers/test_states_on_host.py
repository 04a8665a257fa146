"""Containers and FSDPadaptOptimizer with states on the host: same bits, moved, saved, loaded."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedLion, FusedMuon
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    load_checkpoint,
    offload_fsdp_optimizer,
    optimizer_on_device,
    save_checkpoint,
)
from torchopt_ext.optim import host_steps
from torchopt_ext.optim.bandwidths import Bandwidths

from ...support.compare import snapshot, unchanged
from ...support.host_states import addresses, count_locks, let_offloading_move, places
from ...support.late_stream import LateStreams, stand_for_a_gpu
from ...support.problems import through_file
from .conftest import parameters

pytestmark = pytest.mark.usefixtures("params_on_gpu")

BF16 = torch.bfloat16
EIGHT_BITS = {"master_weights": "remainder8", "state_dtype": "int8", "fp32_moments": ()}
WAYS: dict[str, tuple[torch.dtype, Any, dict[str, Any], int]] = {  # and entries on the host
    "fp32": (torch.float32, FusedAdamW, {}, 2),
    "master": (BF16, FusedAdamW, {"master_weights": "fp32"}, 3),
    "remainder": (BF16, FusedAdamW, {"master_weights": "remainder"}, 3),
    "8 bits": (BF16, FusedAdamW, EIGHT_BITS, 5),
    "lion": (BF16, FusedLion, {"master_weights": "fp32", "state_dtype": "bf16"}, 2),
}
NORM = {"max_grad_norm": 0.25, "skip_nonfinite": True}
SCALER = {"initial_scale": 2.0**8, "growth_interval": 3, "hysteresis": 1}


def adapted(parts: list[nn.Module], cls: Any, options: dict[str, Any]) -> FSDPadaptOptimizer:
    """fp32 masters are its default."""
    inner = cls(parameters(parts), **{k: v for k, v in options.items() if v != "fp32"})
    return FSDPadaptOptimizer(inner, grad_scal_cfg=SCALER, clip_grad_norm=0.5)


KINDS: dict[str, Callable[[list[nn.Module], Any, dict[str, Any]], Any]] = {
    "after backward": lambda parts, cls, options: OptimizersContainer(parts, cls, options | NORM),
    "in backward": OptimizersInBackwardContainer,
    "in backward, norm": lambda parts, cls, options: OptimizersInBackwardContainer(
        parts, cls, options | NORM
    ),
    "adapted": adapted,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_case = pytest.mark.parametrize(
    "case",
    [*product(["adapted"], WAYS), *zip([*KINDS][:3], ["fp32", "master", "remainder"], strict=True)],
)


class Scaled(nn.Module):
    """Has a parameter without dimensions, as step counts are."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Job:
    """Two parts of small weights, stepped in batches, and one that is stepped alone."""

    def __init__(self, kind: str, way: str, **options: Any) -> None:
        torch.manual_seed(0)
        first = {"a": nn.Linear(5, 9), "b": nn.Linear(9, 500, bias=False), "c": nn.Linear(500, 300)}
        second = {"d": nn.Linear(300, 4), "e": nn.LayerNorm(4), "f": Scaled()}
        dtype, cls, held, self.entries = WAYS[way]
        self.parts = [nn.Sequential(OrderedDict(layers)).to(dtype) for layers in (first, second)]
        self.params = parameters(self.parts)
        self.optimizer: Any = KINDS[kind](self.parts, cls, {"lr": 0.02, **held, **options})

    def train(self, seeds: Any) -> None:
        """Makes steps. That of seed 2 overflows where an overflow skips the step."""
        skips = not isinstance(self.optimizer, OptimizersInBackwardContainer)
        for seed in seeds:
            torch.manual_seed(seed)
            output = torch.randn(3, 5, dtype=self.params[0].dtype)
            for part in self.parts:
                output = part(output)
            loss = output.float().square().sum() * (torch.inf if seed == 2 and skips else 1.0)
            getattr(self.optimizer, "backward", torch.Tensor.backward)(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def holders(self) -> list[Any]:
        """The optimizers that hold states."""
        return getattr(self.optimizer, "optimizers", [self.optimizer])

    @property
    def places(self) -> dict[Any, set[bool]]:
        return places(self.holders)

    @property
    def addresses(self) -> list[int]:
        return addresses(self.holders)

    def is_on_host(self) -> bool:
        return all(its == {True} for its in self.places.values())


def both(kind: str, way: str, **options: Any) -> tuple[Job, Job]:
    """Returns a job with states beside the parameters, and one with ``options``."""
    return Job(kind, way), Job(kind, way, **{"state_device": "cpu", **options})


def train(jobs: Any, seeds: Any) -> None:
    for job in jobs:
        job.train(seeds)


def assert_same(*jobs: Job) -> None:
    expected, *others = [snapshot(job.optimizer) for job in jobs]
    assert all(other == expected for other in others)


@each_case
def test_same_bits_and_never_beside_the_parameters(
    case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory is locked in the constructor, once for each entry, and stays the same."""
    locks = count_locks(monkeypatch)
    beside, on_host = both(*case)
    if case[0] != "adapted":  # whose masters come later
        assert locks == [len(on_host.params)] * on_host.entries
    locks.clear()
    reserved = None
    for seed in range(5):
        train((beside, on_host), [seed])
        assert on_host.is_on_host() and len(on_host.places) == len(on_host.params)
        assert on_host.addresses == (reserved := reserved or on_host.addresses)
    assert not locks
    assert_same(beside, on_host)
    held = [
        value for one in on_host.holders for state in one.state.values() for value in state.values()
    ]
    in_memory = sum(value.nbytes for value in held if value.data_ptr() in on_host.addresses)
    assert on_host.optimizer.host_bytes == in_memory > 0 == beside.optimizer.host_bytes


@each_case
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_moved_at_random_between_steps(
    case: tuple[str, str], fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after offload_fsdp_optimizer, whose state the next step would bring back."""
    let_offloading_move(monkeypatch)
    beside, on_host = both(*case, state_fraction=fraction)
    draw = random.Random(4)
    for seed in range(6):
        place = draw.choice(["cpu", "cuda", None])
        on_host.optimizer.move_state(place)
        held = on_host.addresses
        train((beside, on_host), [seed])
        assert (on_host.optimizer.host_bytes > 0) == (place == "cpu")
        assert on_host.addresses == held or not seed
        assert_same(beside, on_host)
        if place != "cpu":
            offload_fsdp_optimizer(on_host.optimizer)
            assert on_host.optimizer.host_bytes > 0


@each_kind
def test_a_move_locks_once_for_each_entry(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = both(kind, "master")[1]
    on_host.train(range(2))
    on_host.optimizer.move_state("cuda")
    assert all(its == {False} for its in on_host.places.values())
    on_host.train(range(3, 4))
    locks = count_locks(monkeypatch)
    on_host.optimizer.move_state("cpu")
    assert locks == [len(on_host.params)] * 3
    on_host.train(range(4, 5))
    assert len(locks) == 3 and on_host.is_on_host()


def test_no_more_is_locked_than_the_states_take() -> None:
    """FSDPadaptOptimizer adds masters, with which moments are fp32."""
    job = Job("adapted", "master", state_device="cpu")
    reserved = job.optimizer.optim._storage.host._reserved.values()
    elements = sum(param.numel() for param in job.params)
    assert sum(memory.nbytes for memory in reserved) == 12 * elements
    job.train(range(1))
    assert not reserved and job.optimizer.host_bytes == 12 * elements


@each_kind
def test_the_fraction_counts_over_all_parameters(kind: str) -> None:
    on_host = both(kind, "fp32", state_fraction=0.5)[1]
    on_host.train(range(2))
    assert all(len(on_host.places[param]) == 1 for param in on_host.params)
    hosted = [param.numel() for param in on_host.params if on_host.places[param] == {True}]
    sizes = [param.numel() for param in on_host.params]
    # The large weight does not fit: all before and after it do.
    assert sum(hosted) >= 0.5 * sum(sizes) and hosted == [max(sizes)]


@each_case
@pytest.mark.parametrize("steps", [0, 3])
def test_state_dicts_cross(
    case: tuple[str, str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues as the saved one does. A container fills the memory that is there."""
    for source, target in (both(*case), reversed(both(*case))):
        source.train(range(4))
        target.train(range(10, 10 + steps))
        locks = count_locks(monkeypatch)
        target.optimizer.load_state_dict(through_file(source.optimizer.state_dict()))
        for p, q in zip(source.params, target.params, strict=True):
            q.data.copy_(p)
        train((source, target), range(4, 6))
        assert_same(source, target)
        assert locks == [] or case[0] == "adapted"
        assert max(source, target, key=lambda job: job.optimizer.host_bytes).is_on_host()


def test_a_later_load_of_the_wrapper_locks_once_for_each_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside, on_host = both("adapted", "master")
    train((beside, on_host), range(2))
    locks = count_locks(monkeypatch)
    on_host.optimizer.load_state_dict(through_file(beside.optimizer.state_dict()))
    on_host.train(range(3, 4))
    assert locks == [len(on_host.params)] * 3


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_of_the_wrapper_cross(way: str, tmp_path: Path, one_rank: None) -> None:
    for source, target in (both("adapted", way), reversed(both("adapted", way))):
        source.train(range(4))
        save_checkpoint(source.optimizer, str(tmp_path / "optimizer"))
        load_checkpoint(target.optimizer, str(tmp_path / "optimizer"))
        for p, q in zip(source.params, target.params, strict=True):
            q.data.copy_(p)
        train((source, target), range(4, 6))
        assert_same(source, target)


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_written_and_copies(way: str) -> None:
    jobs = both("adapted", way)
    for job in jobs:
        job.train(range(2))
        with torch.no_grad():
            job.params[0].mul_(1.5)
        job.train(range(3, 4))
        job.params[0].data.mul_(0.5)
        job.optimizer.refresh_masters()
        job.train(range(4, 5))
    every = [*jobs, copy.deepcopy(jobs[1]), pickle.loads(pickle.dumps(jobs[1]))]
    train(every, range(5, 6))
    assert_same(*every)
    assert {job.optimizer.host_bytes for job in every[1:]} == {jobs[1].optimizer.host_bytes}


def test_a_lock_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("in backward", "master")
    job.train(range(2))

    def fail(*_: Any) -> None:
        raise RuntimeError("cannot lock")

    with monkeypatch.context() as patched, unchanged(job.optimizer):
        patched.setattr("torchopt_ext.state.host_memory._allocated", fail)
        with pytest.raises(RuntimeError, match="cannot lock"):
            job.optimizer.move_state("cpu")
    assert job.optimizer.host_bytes == 0
    job.train(range(3, 4))
    assert all(its == {False} for its in job.places.values())


@pytest.mark.parametrize("kind", ["after backward", "in backward", "adapted"])
def test_what_is_rejected(kind: str) -> None:
    """Offloading, whose states are on the host already, and moves to nowhere or during a step."""
    job = both(kind, "fp32")[1]
    job.train(range(2))
    with unchanged(job.optimizer):
        with pytest.raises(RuntimeError, match="state_device='cpu'"):
            offload_fsdp_optimizer(job.optimizer)
        with (
            pytest.raises(RuntimeError, match="state_device='cpu'"),
            optimizer_on_device(job.optimizer),
        ):
            pytest.fail("the block ran")
        with pytest.raises(ValueError, match="Invalid state_device: 'disk'"):
            job.optimizer.move_state("disk")
    seen: list[str] = []

    def move(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="a step of this optimizer is under way"):
            job.optimizer.move_state("cuda")
        seen.append("moved")

    job.holders[0].register_step_pre_hook(move)
    job.train(range(3, 4))
    assert seen == ["moved"] and job.is_on_host()


@pytest.mark.parametrize("norm", [{}, NORM])
@pytest.mark.parametrize("path", ["mapped", "staged", "host", "auto"])
def test_paths_in_backward(path: str, norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook waits for no copies; with a norm one step ends backward, by any path."""
    stand_for_a_gpu(monkeypatch, late := LateStreams(early=0.3))
    monkeypatch.setattr(host_steps, "bandwidths", lambda _: Bandwidths(1.0, 1000.0))
    beside, on_host = {**norm}, {**norm, "state_device": "cpu", "offload_step": path}
    if path in ("staged", "host") and not norm:
        with pytest.raises(ValueError, match=f"'{path}' needs buffers .*: use 'mapped'"):
            Job("in backward", "master", **on_host)
        return
    jobs = Job("in backward", "master", **beside), Job("in backward", "master", **on_host)
    late.optimizers += jobs[1].holders
    train(jobs, range(3))
    assert_same(*jobs)
    taken = {optimizer.offload_path for optimizer in jobs[1].holders}
    assert taken == {{"auto": "host" if norm else "mapped"}.get(path, path)}


def test_other_optimizers_have_no_place_for_states() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(AttributeError, match="AdamW has no control block"):
        OptimizersContainer([model], torch.optim.AdamW, {}).move_state("cpu")
    with pytest.raises(TypeError, match="a AdamW steps states beside its parameters"):
        FSDPadaptOptimizer(torch.optim.AdamW(model.parameters())).move_state("cpu")


def test_muon_beside_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"master_weights": "remainder8"}
    monkeypatch.setitem(WAYS, "muon", (BF16, FusedMuon, held, 0))
    jobs = both("in backward", "muon")
    train(jobs, range(3))
    assert_same(*jobs)
    assert jobs[1].is_on_host()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "adapted"])
def test_gradients_that_no_hook_saw_and_frozen_parameters(kind: str) -> None:
    jobs = both(kind, "fp32")
    for job, seed in product(jobs, range(2)):
        job.parts[1].e.requires_grad_(seed != 0)
        generator = torch.Generator().manual_seed(seed)
        for param in job.params:
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=generator)
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert_same(*jobs)
