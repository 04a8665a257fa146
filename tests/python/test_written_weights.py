"""Weights that user code writes between steps take effect, in every class that keeps fp32 masters.

Where an element was written, its master is the written weight from the next step on. All other
masters keep their bits.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchopt_ext import FSDPadaptOptimizer, FusedAdam, FusedAdamW
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.state.local import local_tensor
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ..support.compare import assert_same_bits
from ..support.ranks import counted_calls

pytestmark = pytest.mark.usefixtures("one_rank")

LR = {"lr": 0.01, "weight_decay": 0.1}
FP32 = {**LR, "master_weights": "fp32"}


def zero(model: nn.Module, **kwargs: Any) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, **kwargs, **FP32)


def adapt(base: Any) -> Any:
    return FSDPadaptOptimizer(base, clip_grad_norm=0.0)


CLASSES: dict[str, Callable[[nn.Module], Any]] = {
    "FusedAdamW": lambda model: FusedAdamW(model.parameters(), **FP32),
    "FusedAdam": lambda model: FusedAdam(model.parameters(), max_grad_norm=1e9, **FP32),
    "DTensor": lambda model: FusedAdamW(fully_shard(model).parameters(), **FP32),
    "adapted fused": lambda model: adapt(FusedAdamW(model.parameters(), **LR)),
    "adapted torch": lambda model: adapt(torch.optim.AdamW(model.parameters(), **LR)),
    "adapted DTensor": lambda model: adapt(
        torch.optim.AdamW(fully_shard(model).parameters(), **LR)
    ),
    "ZeRO greedy": zero,
    "ZeRO view": lambda model: zero(model, parameters_as_bucket_view=True),
    "ZeRO balanced": lambda model: zero(model, partition="balanced", bucket_elements=64),
    "container": lambda model: OptimizersContainer([model], FusedAdamW, FP32),
    "in backward": lambda model: OptimizersInBackwardContainer([model], FusedAdamW, FP32),
    "in backward, norm": lambda model: OptimizersInBackwardContainer(
        [model], FusedAdamW, {**FP32, "max_grad_norm": 1e9}
    ),
}


def mask(model: nn.Module) -> None:
    for p in model.parameters():
        p[::2] *= 0.0


def exchange(model: nn.Module, between: Callable[[], object] = lambda: None) -> None:
    """As for an evaluation with averaged weights."""
    usual = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.copy_(0.7 * p + 0.1)
    between()
    for p, value in zip(model.parameters(), usual, strict=True):
        p.copy_(value)


def other_optimizer(kernel: str) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        kernels: Any = {"foreach": kernel == "foreach", "fused": kernel == "fused"}
        torch.optim.Adam(model.parameters(), lr=0.05, **kernels).step()
        model.zero_grad()

    return step


def replace_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * -1.25


def replace_memory_by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def replace_memory_at_its_address(model: nn.Module) -> None:
    """As the allocator may place what is loaded after weights were freed."""
    for p in model.parameters():
        memory = torch.from_numpy(p.detach().view(torch.int16).numpy()).view(p.dtype)
        p.data = memory.mul_(-1.25)


def read_otherwise(model: nn.Module) -> None:
    """Reads the same memory by columns, as `p.data = p.data.t()` does for a square weight."""
    for p in model.parameters():
        p.data = p.data.as_strided(p.shape, [math.prod(p.shape[:d]) for d in range(p.dim())])


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(
        {name: p * 1.5 for name, p in model.state_dict().items()}
    ),
    "clamp_": lambda model: [p.clamp_(-0.1, 0.1) for p in model.parameters()],
    "mask": mask,
    "rows": lambda model: next(model.parameters())[1:3].fill_(0.25),
    "exchange": exchange,
    "optimizer": other_optimizer("for-loop"),
    "foreach optimizer": other_optimizer("foreach"),
    "fused optimizer": other_optimizer("fused"),
    "state dict": lambda model: [  # as torch.distributed.checkpoint.load reads
        local_tensor(value).mul_(0.5) for value in get_model_state_dict(model).values()
    ],
    "shard": lambda model: [local_tensor(p).mul_(0.5) for p in model.parameters()],
    "detach": lambda model: [p.detach().neg_() for p in model.parameters()],
    "init": lambda model: [nn.init.constant_(p, 0.5) for p in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_([*model.parameters()], 0.5),
    "memory": replace_memory,
    "address": replace_memory_at_its_address,
    "strides": read_otherwise,
    "vector": replace_memory_by_vector,
}
# They count no change, or change nothing.
NOT_ON_DTENSORS = ("foreach", "memory", "address", "strides", "vector")


class Job:
    """A small bf16 model and one of the optimizers, trained by gradients that bf16 holds."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.kind = kind
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(dtype)
        for p in self.model.parameters():
            p.data = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
        torchs = torch.optim.AdamW(self.model.parameters(), **LR)
        self.optimizer = CLASSES[kind](self.model) if dtype == torch.bfloat16 else torchs
        self.steps = 0

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.steps)
            self.steps += 1
            loss = torch.zeros(())
            for p in self.model.parameters():
                factors = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
                shard = p.to_local() if isinstance(p, DTensor) else p
                loss = loss + (shard * factors).sum().float()
            getattr(self.optimizer, "backward", Tensor.backward)(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [local_tensor(p).detach().clone() for p in self.model.parameters()]

    def saved(self) -> Any:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict()
        return self.optimizer.state_dict()

    def masters(self) -> list[Tensor]:
        """Returns the masters as the state dict has them."""
        saved = self.saved()
        if isinstance(self.optimizer, FSDPadaptOptimizer):
            masters = [w for group in saved["flat_fp32_weights"].values() for w in group]
        elif "state" in saved:
            masters = [saved["state"][i]["master_weight"] for i in sorted(saved["state"])]
        else:
            names = [name for name, _ in self.model.named_parameters()]
            masters = [saved[f"state.{name}.master_weight"] for name in names]
        return [local_tensor(w).clone() for w in masters]


def assert_train_alike(*jobs: Job) -> None:
    """Asserts that the jobs have the same bits after two more steps."""
    for job in jobs:
        job.steps = jobs[-1].steps
        job.step(2)
    for job in jobs[:-1]:
        assert_same_bits(job.weights(), jobs[-1].weights())
        assert_same_bits(job.masters(), jobs[-1].masters())


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect_where_it_was_made(write: str, kind: str) -> None:
    if "DTensor" in kind and write in NOT_ON_DTENSORS:
        pytest.skip("nothing tells of the change")
    if "balanced" in kind and write == "strides":
        pytest.skip("rejected: balanced buckets hold elements in the order that they had")
    job, fresh, torchs = Job(kind), Job(kind), Job(kind, torch.float32)
    for one in (job, fresh, torchs):
        one.step(3)
    before, masters = job.weights(), job.masters()
    for one in (job, torchs):
        with torch.no_grad():
            WRITES[write](one.model)
    written = job.weights()
    expected = [
        torch.where(now == old, master, now.float())
        for now, old, master in zip(written, before, masters, strict=True)
    ]
    assert (write == "exchange") == all(map(torch.equal, written, before))
    if "adapted" in kind:  # its masters set the weights that load them
        assert_same_bits(job.masters(), expected)
    fresh.optimizer.refresh_masters(
        from_=dict(zip(fresh.model.parameters(), expected, strict=True))
    )
    torchs.step(2)
    assert_train_alike(job, fresh)
    torch.testing.assert_close(
        [w.float() for w in job.weights()], torchs.weights(), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_writes_of_the_library_are_no_writes_of_user_code(kind: str) -> None:
    """Masters are compared with weights after a load, and where user code has written: one weight,
    once."""
    job = Job(kind)
    job.step(2)
    saved = copy.deepcopy(job.saved())
    with counted_calls(torch.ops.aten.where.self) as passes:
        job.step(2)
        assert not passes
        job.optimizer.load_state_dict(saved)
        job.step(2)
        assert len(passes) == (0 if "adapted" in kind else len([*job.model.parameters()]))
        passes.clear()
        with torch.no_grad():
            next(job.model.parameters()).add_(1.0)
        job.step(3)
        assert len(passes) == 1


def copied(job: Job) -> None:
    job.model, job.optimizer = copy.deepcopy((job.model, job.optimizer))


def pickled(job: Job) -> None:
    job.model, job.optimizer = pickle.loads(pickle.dumps((job.model, job.optimizer)))


def offloaded(job: Job) -> None:
    """By hand, as frameworks do it: the tensors are replaced, not their memory."""
    for entry in job.optimizer.state.values():
        entry.update({k: v.clone() for k, v in entry.items() if isinstance(v, Tensor)})


def resumed(job: Job, first: str) -> None:
    weights, state = copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.saved())
    other = Job(job.kind)
    other.step(1)
    loads = [
        lambda: other.model.load_state_dict(weights),
        lambda: other.optimizer.load_state_dict(state),
    ]
    for load in loads if first == "weights" else loads[::-1]:
        load()
    job.model, job.optimizer = other.model, other.optimizer


SINGLE = [kind for kind in CLASSES if "container" not in kind and "backward" not in kind]
UNSHARDED = [kind for kind in SINGLE if "DTensor" not in kind]
AFTER_A_WRITE: dict[str, tuple[list[str], Callable[[Job], None]]] = {
    "copied": (UNSHARDED, copied),
    "pickled": ([kind for kind in UNSHARDED if "ZeRO" not in kind], pickled),
    "offloaded": (["FusedAdamW"], offloaded),
    "resumed, weights first": (SINGLE, lambda job: resumed(job, "weights")),
    "resumed, optimizer first": (SINGLE, lambda job: resumed(job, "optimizer")),
}


@pytest.mark.parametrize(
    ("what", "kind"), [(w, kind) for w, (kinds, _) in AFTER_A_WRITE.items() for kind in kinds]
)
def test_what_comes_after_a_write_keeps_it(what: str, kind: str) -> None:
    job, stayed = Job(kind), Job(kind)
    for one in (job, stayed):
        one.step(2)
        with torch.no_grad():
            mask(one.model)
    AFTER_A_WRITE[what][1](job)
    assert_train_alike(job, stayed)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if "adapted" not in kind])
@pytest.mark.parametrize("fresh", [False, True], ids=["live", "fresh"])
@pytest.mark.parametrize("first", ["weights", "optimizer"])
def test_weights_that_loaded_masters_do_not_round_to_are_kept(
    first: str, fresh: bool, kind: str
) -> None:
    """As averaged weights that are loaded with the optimizer's checkpoint."""
    job = Job(kind)
    job.step(2)
    state = copy.deepcopy(job.saved())
    averaged = {name: 0.9 * p for name, p in job.model.state_dict().items()}
    job = Job(kind) if fresh else job
    loads = [
        lambda: job.model.load_state_dict(averaged),
        lambda: job.optimizer.load_state_dict(state),
    ]
    for load in loads if first == "weights" else loads[::-1]:
        load()
    expected = job.weights()
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    job.step()
    assert_same_bits(job.weights(), expected)
    assert_same_bits(job.masters(), [w.float() for w in expected])


@pytest.mark.parametrize("kind", CLASSES)
def test_a_state_dict_leaves_masters_to_the_step(kind: str) -> None:
    """As where averaged weights are saved, and the job then continues with its own."""
    job, stayed = Job(kind), Job(kind)
    for one in (job, stayed):
        one.step(2)
    with torch.no_grad():
        exchange(job.model, job.masters)
    assert_train_alike(job, stayed)


@pytest.mark.parametrize("kind", ["FusedAdamW", "DTensor"])
def test_a_checkpoint_is_read_into_a_state_dict_of_written_weights(kind: str) -> None:
    job, stayed = Job(kind), Job(kind)
    for one in (job, stayed):
        one.step(2)
    weights = copy.deepcopy(job.model.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(job.model, job.optimizer))
    job.step()
    job.model.load_state_dict(weights)
    read = get_optimizer_state_dict(job.model, job.optimizer)
    for name, entry in read["state"].items():
        for key, value in entry.items():
            local_tensor(value).copy_(local_tensor(saved["state"][name][key]))
    set_optimizer_state_dict(job.model, job.optimizer, read)
    assert_train_alike(job, stayed)


def test_masters_that_exist_before_weights_are_loaded() -> None:
    """As where a job makes all state first, in order to load into it."""
    job, fresh = Job("FusedAdamW"), Job("FusedAdamW")
    job.optimizer.init_state()
    for one in (job, fresh):
        WRITES["load_state_dict"](one.model)
    assert_train_alike(job, fresh)
