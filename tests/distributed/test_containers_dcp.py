"""Checkpoints of the containers move bitwise between one process and FSDP2 on two.

Every process gets the same gradients, sharded like the parameters, because backward under FSDP2
sums the ranks' gradients in another order than one process does.
"""

import copy
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)
from torchopt_ext.statedict.dcp import load

if __name__ != "__main__":
    from .rank_results import assert_passed

SAVED_AT, STEPS = 3, 5


class Part(nn.Module):
    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # Two ranks do not divide 7 rows evenly, and the second rank has nothing of a single row.
        self.add_module(name, nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


class Job:
    """Two parts with a container and a schedule. The parts are sharded if there are ranks."""

    def __init__(
        self, container=OptimizersContainer, cls=FusedAdamW, dtype=torch.float32, **kwargs
    ) -> None:
        self.parts = [Part("first", 1).to(dtype), Part("second", 2).to(dtype)]
        if dist.is_initialized():
            for part in self.parts:
                # gloo has no PREMUL_SUM, which FSDP2 would use to divide gradients.
                fully_shard(part).set_force_sum_reduction_for_comms(True)
        self.optimizer = container(self.parts, cls, {"lr": 1e-2, **kwargs})
        self.lr_scheduler = LRSchedulersContainer(self.optimizer, lambda step: 1 / (step + 1))

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for part in self.parts:
            for param in part.parameters():
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                if isinstance(param, DTensor):
                    grad = distribute_tensor(grad, param.device_mesh, param.placements)
                param.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()

    def states(self) -> dict:
        models = {f"part{i}": part for i, part in enumerate(self.parts)}
        return {**models, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}


def run_job(first: int, last: int, load: Path | None, save: Path | None) -> Job:
    job = Job(max_grad_norm=0.5)
    if load:
        dcp.load(job.states(), checkpoint_id=load)
    for seed in range(first, last):
        job.step(seed)
    if save:
        dcp.save(job.states(), checkpoint_id=save)
    return job


MIXED = {
    "torch": {"cls": torch.optim.AdamW},
    "fp32": {"master_weights": "fp32"},
    "remainder": {"master_weights": "remainder"},
}


def mixed(kind: str, seeds: range) -> Job:
    job = Job(dtype=torch.bfloat16, **MIXED[kind])
    for seed in seeds:
        job.step(seed)
    return job


def flat(job: Job) -> dict:
    values = {**job.optimizer.state_dict(), **job.lr_scheduler.state_dict()}
    for part in job.parts:
        values.update(part.state_dict())
    return values


def assert_same(left: Job, right: Job) -> None:
    left, right = flat(left), flat(right)
    assert set(left) == set(right)
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


# What the two processes do


def train_and_save(path: Path) -> None:
    run_job(0, SAVED_AT, load=None, save=path / "two_before")


def resume_and_save(path: Path) -> None:
    run_job(SAVED_AT, STEPS, load=path / "one_before", save=path / "two_after")


def step_in_backward(path: Path) -> None:
    """A container that steps in backward under FSDP2 trains like the plain container."""
    plain, in_backward = Job(), Job(container=OptimizersInBackwardContainer)
    for seed in range(STEPS):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))
        for job in (plain, in_backward):
            sum(part(x).square().sum() for part in job.parts).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.lr_scheduler.step()
    assert len(in_backward.optimizer) == 12
    assert in_backward.optimizer.state_dict()["state.second.0.weight.step"] == STEPS
    for part, other in zip(plain.parts, in_backward.parts, strict=True):
        for (name, value), changed in zip(part.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(value.full_tensor(), changed.full_tensor()), name
    saved = in_backward.optimizer.state_dict()
    for key, value in plain.optimizer.state_dict().items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), saved[key].full_tensor()), key
        else:
            assert value == saved[key], key


def convert_masters(path: Path) -> None:
    for saved, kept in itertools.product(MIXED, MIXED):
        job = mixed(kept, range(1))
        load(job.states(), checkpoint_id=path / f"one_{saved}")
        job.step(SAVED_AT)
        dcp.save(job.states(), checkpoint_id=path / f"two_{saved}_{kept}")


def gather_remainders(path: Path) -> None:
    """Gathers and saves int16 remainders, which neither gloo nor NCCL sends."""
    job, options = mixed("remainder", range(2)), StateDictOptions(full_state_dict=True)
    part, optimizer = job.parts[0], job.optimizer.optimizers[0]
    before = copy.deepcopy(optimizer.state_dict()["state"])
    full = get_optimizer_state_dict(part, optimizer, options=options)
    for param, (name, entry) in zip(part.parameters(), full["state"].items(), strict=True):
        shards = optimizer.state[param]["remainder"].to(torch.int32)
        assert torch.equal(entry["remainder"], shards.full_tensor().to(torch.int16)), name
        assert entry["remainder"].dtype == torch.int16
    if dist.get_rank() == 0:  # torch's set_optimizer_state_dict would scatter int16
        dcp.save({"optim": full}, checkpoint_id=path / "full", no_dist=True)
    dist.barrier()
    optimizer.state.clear()
    load({"optim": optimizer}, checkpoint_id=path / "full")
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in before[index].items():
            local, expected = (getattr(v, "_local_tensor", v) for v in (entry[name], value))
            assert torch.equal(local, expected), name
    group = dist.new_group()
    saved = {"optim": optimizer}
    dcp.async_save(saved, checkpoint_id=path / "async", process_group=group).result()
    load(saved, checkpoint_id=path / "async", process_group=group)


def refuse_plain_state(path: Path) -> None:
    """A sharded job rejects unsharded state."""
    job = Job()
    wrong = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in job.optimizer.state_dict().items()
    }
    with pytest.raises(ValueError, match="is a plain tensor, its parameter placed"):
        job.optimizer.load_state_dict(wrong)


def refuse_flat_parameters(path: Path) -> None:
    """The first generation of FSDP is rejected."""
    part = FullyShardedDataParallel(Part("first", 1), device_id=torch.device("cpu"))
    container = OptimizersContainer([part], FusedAdamW, {"lr": 1e-2})
    for call in (container.state_dict, lambda: container.load_state_dict({})):
        with pytest.raises(NotImplementedError, match="fully_shard instead"):
            call()


def miss_a_key(path: Path) -> None:
    """Only rank 0's optimizer is in the checkpoint. Both ranks raise, neither waits."""
    optimizer = FusedAdamW([nn.Parameter(torch.ones(2))])
    optimizer.init_state()
    dcp.save({"stage0": optimizer}, checkpoint_id=path / "stages")
    with pytest.raises((ValueError, RuntimeError), match="stage1"):
        load({f"stage{dist.get_rank()}": optimizer}, checkpoint_id=path / "stages")


def fit_on_one_rank(path: Path) -> None:
    """Rank 1 has another shape than the checkpoint. Both ranks raise, and neither loads."""
    makers = {
        "torch": lambda model: torch.optim.AdamW(model.parameters()),
        "fused": lambda model: FusedAdamW(model.parameters()),
        "adapted": lambda model: FSDPadaptOptimizer(torch.optim.SGD(model.parameters())),
        "container": lambda model: OptimizersContainer([model], FusedAdamW, {}),
        "in backward": lambda model: OptimizersInBackwardContainer([model], FusedAdamW, {}),
    }
    stage = f"stage{dist.get_rank()}"
    for kind, make in makers.items():
        saved, loaded = (make(nn.Linear(size, 2)) for size in (3 + dist.get_rank(), 3))
        for optimizer in (saved, loaded):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
            optimizer.step()
        dcp.save({stage: saved}, checkpoint_id=path / kind)
        loaded.param_groups[0]["lr"] = 0.5
        before = str(loaded.state_dict())
        with pytest.raises(ValueError, match=r"has shape \(2, 4\), expected \(2, 3\)"):
            load({stage: loaded}, checkpoint_id=path / kind)
        assert str(loaded.state_dict()) == before, kind


WORK = [
    train_and_save,
    resume_and_save,
    convert_masters,
    gather_remainders,
    step_in_backward,
    refuse_plain_state,
    refuse_flat_parameters,
    miss_a_key,
    fit_on_one_rank,
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list]) -> Path:
    """The directory in which two ranks have done all of WORK."""
    path = tmp_path_factory.mktemp("containers")
    run_job(0, SAVED_AT, load=None, save=path / "one_before")
    for kind in MIXED:
        dcp.save(mixed(kind, range(SAVED_AT)).states(), checkpoint_id=path / f"one_{kind}")
    assert_passed(run_ranks(Path(__file__).name, 2, str(path)), len(WORK))
    return path


pytestmark = pytest.mark.timeout(160)


def test_saved_on_two_ranks_and_loaded_on_one(path):
    uninterrupted = run_job(0, STEPS, load=None, save=None)
    assert_same(run_job(SAVED_AT, STEPS, load=path / "two_before", save=None), uninterrupted)


def test_saved_on_one_rank_and_resumed_on_two(path):
    uninterrupted = run_job(0, STEPS, load=None, save=None)
    assert_same(run_job(STEPS, STEPS, load=path / "two_after", save=None), uninterrupted)


@pytest.mark.parametrize("saved", MIXED)
@pytest.mark.parametrize("kept", MIXED)
def test_masters_are_converted_between_one_rank_and_two(path, saved, kept):
    """A loaded checkpoint converts masters as a loaded state dict does."""
    source, expected, loaded = (
        mixed(saved, range(SAVED_AT)),
        mixed(kept, range(1)),
        mixed(kept, range(0)),
    )
    expected.optimizer.load_state_dict(source.optimizer.state_dict())
    expected.lr_scheduler.load_state_dict(source.lr_scheduler.state_dict())
    for part, other in zip(expected.parts, source.parts, strict=True):
        part.load_state_dict(other.state_dict())
    expected.step(SAVED_AT)
    load(loaded.states(), checkpoint_id=path / f"two_{saved}_{kept}")
    assert_same(loaded, expected)


if __name__ == "__main__":
    from rank_cases import run_cases

    checkpoints = Path(sys.argv[2])
    run_cases(lambda: {each.__name__: functools.partial(each, checkpoints) for each in WORK})
