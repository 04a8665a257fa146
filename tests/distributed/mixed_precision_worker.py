"""FSDPadaptOptimizer on several ranks: equal bits, one decision, checkpoints that move."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mixed_precision_common import (
    BASES,
    BF16,
    DYNAMIC,
    Job,
    assert_alike,
    one_mesh,
    random_tensors,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.compare import difference
from tests.support.ranks import full_tensor, run_cases
from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    load_checkpoint,
    offload,
    offload_fsdp_optimizer,
    save_checkpoint,
)
from torchopt_ext.optim import rejection
from torchopt_ext.optim.control import Controlled

folder = Path(sys.argv[1]).parent / "mixed_precision_checkpoints"  # shared by all world sizes

# ---- bits --------------------------------------------------------------------------------------


def bits(base: str, dtype: torch.dtype) -> None:
    """Five steps on tensors sharded by rows give the bits of the steps on whole tensors."""
    config = DYNAMIC if dtype == torch.float16 else None
    sharded = Job(base, dtype, grad_scal_cfg=config).run(range(5))
    whole = Job(base, dtype, None, grad_scal_cfg=config).run(range(5))
    assert sharded.optimizer.grad_norm.equal(whole.optimizer.grad_norm)
    assert sharded.optimizer.loss_scale.equal(whole.optimizer.loss_scale)
    assert difference(whole.params, random_tensors(1, dtype)) != ""
    assert_alike(base, sharded.values(), whole.values())


def tensor_parallel(base: str) -> None:
    """Shards rows over one mesh dimension (FSDP) and columns over the other (TP).

    The norm agrees to 2^-50, and the bf16 weights are equal.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("fsdp", "tp"))
    matrices = [(33, 70), (8, 6), (5, 3)]  # the last matrix is uneven in both dimensions
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in matrices * 4]
    how = [Shard(0), Shard(1)]
    sharded = [nn.Parameter(distribute_tensor(v, mesh, how)) for v in values[:3]]
    whole = [nn.Parameter(value.clone()) for value in values[:3]]
    norms = []
    for params in (sharded, whole):
        optimizer = FSDPadaptOptimizer(BASES[base](params))
        for step in range(1, 4):
            for param, value in zip(params, values[3 * step :], strict=False):
                plain = not isinstance(param, DTensor)
                param.grad = value.clone() if plain else distribute_tensor(value, mesh, how)
            optimizer.step()
        norms.append(optimizer.grad_norm.item())
    assert norms[0] == pytest.approx(norms[1], rel=2**-50)
    assert difference([full_tensor(p) for p in sharded], [p.detach() for p in whole]) == ""


# ---- decisions ---------------------------------------------------------------------------------


def one_decision(base: str, kind: str, whole_group: bool, value: float) -> None:
    """All ranks skip if one has a non-finite gradient, each in turn. Only the scale changes.

    Every element counts once in the norm, replicas too, with or without a process group.
    """
    size, group = dist.get_world_size(), dist.group.WORLD if whole_group else None
    job = Job(base, torch.float16, kind, grad_scal_cfg=DYNAMIC, process_group=group)
    whole = Job(base, torch.float16, None, grad_scal_cfg=DYNAMIC)
    for one in (job, whole):
        one.run(range(2))
    assert job.optimizer.grad_norm.equal(whole.optimizer.grad_norm)
    before, scale = job.values(), job.optimizer.loss_scale.item()
    for rank in range(size):
        job.give(10 + rank)
        if dist.get_rank() == rank:
            job.params[0].grad._local_tensor.view(-1)[3] = value
        assert not job.optimizer.step()
    assert job.optimizer.loss_scale.item() == scale * 0.5**size
    assert job.optimizer.skipped_steps.item() == size
    assert difference(job.values(), before) == ""
    assert job.step(50)
    assert job.optimizer.grad_norm.isfinite()


def experts(base: str, whole_group: bool) -> None:
    """Steps a dense part over all ranks and one expert over each half of the ranks.

    All ranks skip if an expert that only half of the ranks hold has an infinity: they agree by the
    dense part's mesh. On the norm they agree only by a process group.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    world, mine = (
        one_mesh(),
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("e", "s"))["s"],
    )
    half = rank // (size // 2)
    weights = [torch.ones(10, 70), torch.full((6, 80), 1.0), torch.full((6, 80), 2.0)]
    dense, *each = (weight.to(BF16) for weight in weights)
    params = [
        nn.Parameter(distribute_tensor(dense, world, [Shard(0)])),
        nn.Parameter(distribute_tensor(each[half], mine, [Shard(0)])),
    ]
    group = dist.group.WORLD if whole_group else None
    optimizer = FSDPadaptOptimizer(BASES[base](params), process_group=group)
    outcomes, norms = [], []
    for step in range(3):
        params[0].grad = distribute_tensor(0.5 * dense, world, [Shard(0)])
        params[1].grad = distribute_tensor(0.25 * each[half], mine, [Shard(0)])
        if step == 1 and rank == size - 1:
            params[1].grad._local_tensor[0, 0] = float("inf")
        outcomes.append(bool(optimizer.step()))
        norms.append(optimizer.grad_norm.item())
    assert outcomes == [True, False, True]
    squares = 0.25 * 700, 480 / 16, 480 / 4
    assert not whole_group or norms[::2] == [pytest.approx(sum(squares) ** 0.5, rel=1e-14)] * 2


def small_group() -> None:
    """Steps with a process group of two of the four ranks of a parameter's mesh."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = Job("fused", process_group=halves[dist.get_rank() // 2])
    ranks = r"\[0, 1\]" if dist.get_rank() < 2 else r"\[2, 3\]"
    with pytest.raises((RuntimeError, ValueError), match=f"process_group has the ranks {ranks}"):
        job.step(0)


def plain_shards() -> None:
    """Steps plain tensors that are shards. The last rank holds none, and joins every collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for base in ("fused", "sgd"):
        params = [nn.Parameter(torch.ones(8, dtype=torch.bfloat16))] if rank < size - 1 else []
        groups = [{"params": params}]
        optimizer = FSDPadaptOptimizer(BASES[base](groups), process_group=dist.group.WORLD)
        outcomes = []
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, 2.0)
                if step == 1 and rank == 0:
                    param.grad[0] = float("inf")
            outcomes.append(bool(optimizer.step()))
        assert outcomes == [True, False, True]
        expected = (4.0 * 8 * (size - 1)) ** 0.5
        assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-14)


def without_gradient(base: str, last: bool) -> None:
    """Steps while the last rank lacks the gradient of the first or of the last parameter.

    The gradient counts on the ranks that have it, and no rank hangs.
    """
    world = one_mesh()
    wide = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("one", "all"))
    params = [
        nn.Parameter(distribute_tensor(torch.ones(8, 8, dtype=torch.bfloat16), mesh, [Shard(0)]))
        for mesh in (wide["all"], world)
    ]
    optimizer = FSDPadaptOptimizer(BASES[base](params[::-1] if last else params))
    size = dist.get_world_size()
    for _ in range(2):
        ones = torch.ones(8, 8, dtype=torch.bfloat16)
        params[1].grad = distribute_tensor(ones, world, [Shard(0)])
        if dist.get_rank() != size - 1:
            local = torch.ones_like(params[0].to_local())
            params[0].grad = DTensor.from_local(local, wide["all"], [Shard(0)], run_check=False)
        assert optimizer.step()
    rows_there = 8 - 8 // size
    norm = (64 + 8 * rows_there) ** 0.5
    assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-14)


# ---- FSDP2 and DDP -----------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 16, generator=generator).bfloat16()


def train(model: nn.Module, optimizer: FSDPadaptOptimizer, ranks: Sequence[int]) -> None:
    for step in range(4):
        for accumulated in range(2):
            for rank in ranks:
                loss = model(batch(2 * step + accumulated, rank)).square().mean()
                optimizer.backward(loss / len(ranks))
        optimizer.step()


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    for module in (*model.children(), model):
        if not isinstance(module, nn.Tanh):
            fully_shard(module, mesh=one_mesh(), **options)
    return model


NETWORKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": fully_sharded,
    "offloaded fsdp": lambda model: fully_sharded(
        model, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
}


def real_training(kind: str, base: str) -> None:
    """FSDP2 and DDP train close to one process that sees all ranks' batches: bf16 sums have another
    order."""
    alone, model = network(), network()
    reference = FSDPadaptOptimizer(BASES[base](alone.parameters()))
    train(alone, reference, range(dist.get_world_size()))
    wrapped = NETWORKS[kind](model)
    optimizer = FSDPadaptOptimizer(BASES[base](model.parameters()))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(wrapped, optimizer, [dist.get_rank()])
    scheduler.step()
    weights, expected, starts = (
        [full_tensor(p).float() for p in each.parameters()] for each in (model, alone, network())
    )
    moved = min((a - b).abs().max() for a, b in zip(expected, starts, strict=True))
    assert moved > 0.005
    assert max((a - b).abs().max() for a, b in zip(weights, expected, strict=True)) < 0.3 * moved


def moved_shards(base: str) -> None:
    """Offloads after every step. Memory that is not in the offloaded buffers acts as a device."""
    kept: set[int] = set()
    real_init = offload._Kept.__init__

    def init(self: Any, tensors: Any) -> None:
        real_init(self, tensors)
        kept.update(memory.data_ptr() for memory in self.memory)

    job, plain = Job(base), Job(base)
    with (
        mock.patch.object(offload._Kept, "__init__", init),
        mock.patch.object(
            offload, "is_on_device", lambda t: t.numel() > 1 and t.data_ptr() not in kept
        ),
    ):
        for step in range(4):
            job.step(step)
            plain.step(step)
            offload_fsdp_optimizer(job.optimizer)
            tensors = [t for kind in offload.KINDS for t in offload.tensors_of(job.optimizer, kind)]
            local = [t.to_local() for t in tensors if isinstance(t, DTensor)]
            assert all(t.data_ptr() in kept for t in local if t.numel() > 1)
        assert difference(job.values(), plain.values()) == ""
        job.step(4)
        plain.step(4)
    assert difference(job.values(), plain.values()) == ""


def rejected_as_on_a_gpu(base: str) -> None:
    """Rejects a step on the last rank while other ranks learn of it only by waiting; then steps.

    Scales and gradients stay equal.
    """
    last = dist.get_world_size() - 1
    params = [nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(4))]
    optim = {"fused": FusedAdamW, "sgd": torch.optim.SGD}[base](params, lr=0.01)
    config = {"initial_scale": 8.0, "hysteresis": 1}
    optimizer = FSDPadaptOptimizer(optim, grad_scal_cfg=config, process_group=dist.group.WORLD)
    end = SimpleNamespace(query=lambda: True)
    with (
        mock.patch.object(rejection.RejectedSteps, "is_known", return_value=False),
        mock.patch.object(rejection, "sent_to_host", lambda flags: (flags.clone(), end)),
        mock.patch.object(Controlled, "known", return_value=None),
    ):
        optimizer.backward(torch.stack([param.square().sum() for param in params]).sum())
        if rejects := dist.get_rank() == last:
            params[0].grad = params[0].detach().to_sparse()
        message = "(?i)sparse" if rejects else f"rank {last} rejected the step"
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert optimizer.loss_scale.item() == 8.0
        assert all(param.grad is not None for param in params)
        optimizer.zero_grad()
        optimizer.backward(torch.stack([param.square().sum() for param in params]).sum())
        assert optimizer.step()


def resharded(base: str) -> None:
    """A step is rejected if a parameter's placement changed after the optimizer was made."""
    job = Job(base).run(range(1))
    param, how = job.params[0], (one_mesh(), [Shard(1)])
    torch.utils.swap_tensors(
        param, nn.Parameter(distribute_tensor(random_tensors(1, job.dtype)[0], *how))
    )
    job.give(1)
    param.grad = distribute_tensor(random_tensors(101, job.dtype)[0], *how)
    before = [full_tensor(p).clone() for p in job.params]
    with pytest.raises((RuntimeError, ValueError), match=r"parameter 0.*Shard\(dim=1\)"):
        job.optimizer.step()
    assert difference([full_tensor(p) for p in job.params], before) == ""


# ---- checkpoints -------------------------------------------------------------------------------


def chain(base: str) -> None:
    """Trains on 4 or 2 ranks, then resumes on fewer, as if never interrupted.

    An unsharded optimizer loads the checkpoint.
    """
    path, stop = folder / base, {4: 3, 2: 6, 1: 9}[dist.get_world_size()]
    steps = range(stop - 3 if path.exists() else 0, stop)
    dtype = BF16 if base == "remainder" else torch.float16
    job, unsharded, whole = (
        Job(base, dtype, kind, grad_scal_cfg=DYNAMIC) for kind in ("rows", None, None)
    )
    if steps.start:
        load_checkpoint(job.optimizer, path)
    job.run(steps)
    save_checkpoint(job.optimizer, path)
    whole.run(range(steps.stop))
    load_checkpoint(unsharded.optimizer, path)
    assert_alike(base, job.values(), whole.values())
    assert job.optimizer.grad_scaler.state_dict() == whole.optimizer.grad_scaler.state_dict()
    assert difference(unsharded.values(), job.values()) == ""
    assert not list(folder.glob(f"{base}.*")), "nothing is left behind"


def rank_files(base: str) -> None:
    """LightRFT's files, one per rank, load. If a rank cannot read its file, all ranks raise and
    none changes."""
    path = folder / f"ranks-{base}-{dist.get_world_size()}"
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    job, fresh = Job(base).run(range(3)), Job(base)
    torch.save(job.optimizer.state_dict(), path / f"_rank{dist.get_rank()}")
    load_checkpoint(fresh.optimizer, path)
    assert difference(fresh.values(), job.values()) == ""
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        whole = (path / f"_rank{last}").read_bytes()
        (path / f"_rank{last}").write_bytes(whole[: len(whole) // 2])
    before = fresh.values()
    with pytest.raises((RuntimeError, ValueError), match=f"_rank{last}"):
        load_checkpoint(fresh.optimizer, path)
    assert difference(fresh.values(), before) == ""


def bad_checkpoints() -> None:
    """What one rank cannot load or save is rejected on all ranks, and nothing changes."""
    job, other = (Job("fused", kind=kind).run(range(2)) for kind in ("rows", "replicated"))
    before, path = job.values(), folder / f"hook-{dist.get_world_size()}"
    states = other.optimizer.state_dict()
    with pytest.raises(ValueError, match=r"saved weight of parameter 0.*Replicate\(\)"):
        job.optimizer.load_state_dict(states)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(job.optimizer, folder / "nothing")
    assert difference(job.values(), before) == ""
    save_checkpoint(job.optimizer, path)
    job.run(range(2, 3))
    if dist.get_rank() == 1:
        job.optimizer.register_state_dict_pre_hook(lambda _: 1 / 0)
    with pytest.raises((ValueError, ZeroDivisionError), match="division by zero"):
        save_checkpoint(job.optimizer, path)
    fresh = Job("fused")
    load_checkpoint(fresh.optimizer, path)
    assert difference(fresh.values(), before) == ""


def cases() -> dict[str, Callable[[], None]]:
    size, each = dist.get_world_size(), ("fused", "sgd")
    folder.mkdir(exist_ok=True)
    rows: list[tuple[Any, ...]] = [(chain, base) for base in BASES]
    if size > 1:
        both = [*itertools.product(each, (False, True))]
        kinds = ["rows", "replicated", *(["hybrid"] if size == 4 else [])]
        rows += [(bits, base, BF16) for base in BASES]
        rows += [(bits, base, torch.float16) for base in BASES if base != "remainder"]
        rows += [
            (one_decision, base, kind, in_group, float("inf" if in_group else "nan"))
            for (base, in_group), kind in itertools.product(both, kinds)
        ]
        rows += [(one_decision, "adamw", "rows", False, float("-inf"))]
        rows += [(moved_shards, base) for base in (*each, "remainder")]
        rows += [
            (case, base) for case in (rank_files, rejected_as_on_a_gpu, resharded) for base in each
        ]
        rows += [(without_gradient, *row) for row in both]
        rows += [(real_training, *row) for row in itertools.product(NETWORKS, each)]
        rows += [(plain_shards,), (bad_checkpoints,)]
        if size == 4:
            rows += [(small_group,), *((experts, *row) for row in both)]
            rows += [(tensor_parallel, base) for base in each]
    return {
        " ".join(map(str, (case.__name__, *arguments))): functools.partial(case, *arguments)
        for case, *arguments in rows
    }


if __name__ == "__main__":
    run_cases(cases)
