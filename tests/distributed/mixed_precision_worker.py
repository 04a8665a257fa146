"""FSDPadaptOptimizer on several ranks: equal bits, one decision, checkpoints that move."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mixed_precision_checkpoints import checkpoint_cases
from mixed_precision_common import (
    BASES,
    DYNAMIC,
    Job,
    assert_alike,
    full_gradients,
    full_weights,
    one_mesh,
)
from rank_cases import difference, full_tensor, run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    offload,
    offload_fsdp_optimizer,
    optimizer_on_device,
)
from torchopt_ext.optim import rejection
from torchopt_ext.optim.control import Controlled

# ---- bits --------------------------------------------------------------------------------------


def bits(base: str, dtype: torch.dtype) -> None:
    """Five steps on tensors sharded by rows give the bits of the steps on whole tensors."""
    config = DYNAMIC if dtype == torch.float16 else None
    sharded = Job(base, dtype, one_mesh(), grad_scal_cfg=config).run(range(5))
    whole = Job(base, dtype, grad_scal_cfg=config).run(range(5))
    assert sharded.optimizer.grad_norm.equal(whole.optimizer.grad_norm)
    assert sharded.optimizer.loss_scale.equal(whole.optimizer.loss_scale)
    assert difference(whole.params, full_weights(dtype)) != ""
    assert_alike(base, sharded.values(), whole.values())


def placements(kind: str) -> None:
    """Every element counts once in the norm of other placements, with or without a group."""
    size = dist.get_world_size()
    if kind == "replicated":
        mesh, how = one_mesh(), [Replicate()]
    elif kind == "rows":
        mesh, how = one_mesh(), [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        how = [Replicate(), Shard(0)]
    whole = Job("fused")
    whole.step(0)
    for base, group in itertools.product(("adamw", "fused"), (None, dist.group.WORLD)):
        job = Job(base, mesh=mesh, placements=how, process_group=group)
        job.step(0)
        assert job.optimizer.grad_norm.equal(whole.optimizer.grad_norm), (base, group)


# ---- decisions ---------------------------------------------------------------------------------


def planted(base: str, value: float) -> None:
    """All ranks skip if one has a non-finite gradient, each in turn. Only the scale changes."""
    size = dist.get_world_size()
    job = Job(base, torch.float16, one_mesh(), grad_scal_cfg=DYNAMIC)
    job.run(range(2))
    before = job.values()
    scale = job.optimizer.loss_scale.item()
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


def planted_on_replicas(base: str, whole_group: bool, hybrid: bool) -> None:
    """All ranks skip if one replica has a NaN, each in turn, although replicas count once."""
    size = dist.get_world_size()
    mesh, how = one_mesh(), [Replicate()]
    if hybrid:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        how = [Replicate(), Shard(0)]
    group = dist.group.WORLD if whole_group else None
    job = Job(base, mesh=mesh, placements=how, process_group=group)
    for rank in range(size):
        job.give(rank)
        if dist.get_rank() == rank:
            job.params[0].grad._local_tensor.view(-1)[1] = float("nan")
        assert not job.optimizer.step()
    assert difference([full_tensor(param) for param in job.params], full_weights(job.dtype)) == ""


def separate_experts(base: str) -> None:
    """Steps experts on separate meshes and a dense part on all ranks, without a process group.

    Ranks agree on the decision by the dense part's mesh, but not on the norm.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("expert", "shard"))["shard"]
    params = [
        nn.Parameter(distribute_tensor(torch.ones(8, 70, dtype=torch.bfloat16), mesh, [Shard(0)]))
        for mesh in (one_mesh(), mine)
    ]
    optimizer = FSDPadaptOptimizer(BASES[base](params))
    outcomes = []
    for step in range(3):
        for param, mesh in zip(params, (one_mesh(), mine), strict=True):
            ones = torch.ones(8, 70, dtype=torch.bfloat16)
            param.grad = distribute_tensor(ones, mesh, [Shard(0)])
        if step == 1 and rank == size - 1:
            params[1].grad._local_tensor[0, 0] = float("inf")
        outcomes.append(bool(optimizer.step()))
    assert outcomes == [True, False, True]


def small_group() -> None:
    """Steps with a process group of two of the four ranks of a parameter's mesh."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = Job("fused", mesh=one_mesh(), process_group=halves[dist.get_rank() // 2])
    job.give(0)
    ranks = r"\[0, 1\]" if dist.get_rank() < 2 else r"\[2, 3\]"
    with pytest.raises((RuntimeError, ValueError), match=f"process_group has the ranks {ranks}"):
        job.optimizer.step()


def two_meshes(base: str) -> None:
    """Steps a dense part over all ranks and one expert over each half of the ranks.

    All ranks skip if an expert that only half of the ranks hold has a NaN.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    world = one_mesh()
    halves = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("expert", "shard"))
    mine = halves["shard"]
    half = rank // (size // 2)
    experts = [torch.full((6, 80), float(n + 1), dtype=torch.bfloat16) for n in range(2)]
    dense = torch.ones(10, 70, dtype=torch.bfloat16)
    of_experts = [torch.full_like(expert, 0.25 * expert[0, 0]) for expert in experts]
    gradients = [torch.full_like(dense, 0.5), *of_experts]
    params = [
        nn.Parameter(distribute_tensor(dense, world, [Shard(0)])),
        nn.Parameter(distribute_tensor(experts[half], mine, [Shard(0)])),
    ]
    optimizer = FSDPadaptOptimizer(BASES[base](params), process_group=dist.group.WORLD)
    outcomes, norms = [], []
    for step in range(3):
        params[0].grad = distribute_tensor(gradients[0], world, [Shard(0)])
        params[1].grad = distribute_tensor(gradients[1 + half], mine, [Shard(0)])
        if step == 1 and rank == size - 1:  # in an expert that only half of the ranks hold
            params[1].grad._local_tensor[0, 0] = float("nan")
        outcomes.append(bool(optimizer.step()))
        norms.append(optimizer.grad_norm.item())
    whole = FSDPadaptOptimizer(BASES[base]([nn.Parameter(t.clone()) for t in (dense, *experts)]))
    for param, grad in zip(whole.params_by_group[0], gradients, strict=True):
        param.grad = grad.clone()
    whole.step()
    assert outcomes == [True, False, True]
    assert norms[::2] == [whole.grad_norm.item()] * 2


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


def real_training(kind: str, base: str) -> None:
    """FSDP2 and DDP train close to one process that sees all ranks' batches: bf16 sums have another
    order."""
    ranks = range(dist.get_world_size())
    alone = network()
    reference = FSDPadaptOptimizer(BASES[base](alone.parameters()))
    train(alone, reference, ranks)
    model: nn.Module = network()
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        policy = CPUOffloadPolicy(pin_memory=False) if kind == "offloaded fsdp" else None
        wrap = functools.partial(fully_shard, mesh=one_mesh())
        if policy is not None:
            wrap = functools.partial(wrap, offload_policy=policy)
        for layer in model:
            if isinstance(layer, nn.Linear):
                wrap(layer)
        wrapped = wrap(model)
    optimizer = FSDPadaptOptimizer(BASES[base](model.parameters()))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(wrapped, optimizer, [dist.get_rank()])
    scheduler.step()
    weights = [full_tensor(p).float() for p in model.parameters()]
    expected = [p.detach().float() for p in alone.parameters()]
    starts = [p.detach().float() for p in network().parameters()]
    moved = min((a - b).abs().max() for a, b in zip(expected, starts, strict=True))
    assert moved > 0.005
    assert max((a - b).abs().max() for a, b in zip(weights, expected, strict=True)) < 0.3 * moved

    def masters() -> list[Tensor]:
        saved = optimizer.state_dict()["flat_fp32_weights"]
        return [full_tensor(weight) for own in saved.values() for weight in own]

    before = masters()
    offload_fsdp_optimizer(optimizer)
    with optimizer_on_device(optimizer):
        assert difference(masters(), before) == ""


def moved_shards(base: str) -> None:
    """Offloads after every step. Memory that is not in the offloaded buffers acts as a device."""
    kept: set[int] = set()
    real_init = offload._Kept.__init__

    def init(self: Any, tensors: Any) -> None:
        real_init(self, tensors)
        kept.update(memory.data_ptr() for memory in self.memory)

    job, plain = Job(base, mesh=one_mesh()), Job(base, mesh=one_mesh())
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
        mock.patch.object(rejection.Verdict, "is_known", return_value=False),
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
    job = Job(base, mesh=one_mesh()).run(range(1))
    param = job.params[0]
    moved = distribute_tensor(full_weights(job.dtype)[0], one_mesh(), [Shard(1)])
    torch.utils.swap_tensors(param, nn.Parameter(moved))
    job.give(1)
    param.grad = distribute_tensor(full_gradients(1, job.dtype)[0], one_mesh(), [Shard(1)])
    before = [full_tensor(p).clone() for p in job.params]
    with pytest.raises((RuntimeError, ValueError), match=r"parameter 0.*Shard\(dim=1\)"):
        job.optimizer.step()
    assert difference([full_tensor(p) for p in job.params], before) == ""


def cases() -> dict[str, Callable[[], None]]:
    size = dist.get_world_size()
    found = checkpoint_cases()
    if size == 1:
        return found
    for base in BASES:
        found[f"bits {base} bfloat16"] = functools.partial(bits, base, torch.bfloat16)
        if base != "remainder":
            found[f"bits {base} float16"] = functools.partial(bits, base, torch.float16)
        if base in ("fused", "adamw", "sgd"):
            found[f"planted nan {base}"] = functools.partial(planted, base, float("nan"))
            found[f"planted inf {base}"] = functools.partial(planted, base, float("inf"))
    for kind in ("replicated", "rows", *(["hybrid"] if size == 4 else [])):
        found[f"placements {kind}"] = functools.partial(placements, kind)
    found["plain shards"] = plain_shards
    for base in ("fused", "remainder", "sgd"):
        found[f"moved shards {base}"] = functools.partial(moved_shards, base)
    for base in ("fused", "sgd"):
        found[f"rejected {base}"] = functools.partial(rejected_as_on_a_gpu, base)
        for last in (False, True):
            name = f"without {'last' if last else 'first'} gradient {base}"
            found[name] = functools.partial(without_gradient, base, last)
        found[f"resharded {base}"] = functools.partial(resharded, base)
        for kind in ("fsdp", "offloaded fsdp", "ddp"):
            found[f"{kind} {base}"] = functools.partial(real_training, kind, base)
        if size == 4:
            found["small group"] = small_group
            for in_group in (False, True):
                for kind in ("hybrid", "replicated"):
                    name = f"{kind} replicas{' in a group' if in_group else ''} {base}"
                    found[name] = functools.partial(
                        planted_on_replicas, base, in_group, kind == "hybrid"
                    )
            found[f"tensor parallel {base}"] = functools.partial(tensor_parallel, base)
            found[f"separate experts {base}"] = functools.partial(separate_experts, base)
            found[f"two meshes {base}"] = functools.partial(two_meshes, base)
    return found


if __name__ == "__main__":
    run_cases(cases)
