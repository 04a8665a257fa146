"""The gradient norm: over which ranks squares are summed, and sums of squares."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext._torch import is_dtensor, is_flat
from torchopt_ext.state.collective import collective, comm_device, run
from torchopt_ext.state.devices import moved
from torchopt_ext.state.local import local_tensor

NormKey: TypeAlias = tuple[Any, ...]
"""The ranks over which squares are summed: equal keys for the same ranks, () for this rank."""
NormGroup: TypeAlias = tuple[torch.device, NormKey]
"""Device and ranks over which squares are summed."""
FSDP1_HELP = (
    "is flattened by FullyShardedDataParallel, so other ranks have other shards: pass "
    "process_group=, the ranks that hold them, for a common norm and decision to skip (with "
    "NO_SHARD, where ranks hold replicas: a group of this rank alone)"
)


def is_flattened(param: Any) -> bool:
    """Returns whether FullyShardedDataParallel (FSDP1) of several ranks made a parameter flat."""
    if not (is_flat(param) and torch.distributed.is_available()):
        return False
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def norm_key(param: Tensor) -> NormKey:
    """Returns the mesh and the mesh dimensions that split a parameter; () for a plain tensor."""
    if not is_dtensor(param):
        return ()
    placements = enumerate(param.placements)  # type: ignore[attr-defined]
    split = tuple(d for d, placement in placements if not placement.is_replicate())
    return param.device_mesh, split  # type: ignore[attr-defined]


def part_of(param: Tensor) -> NormGroup:
    """Returns the device and the norm key of a parameter."""
    return local_tensor(param).device, norm_key(param)


def shares_only_this_rank(key: NormKey, group: Any) -> bool:
    """Returns whether a parameter's mesh has only this rank in common with a group, as FSDP's mesh
    has with the group of pipeline stages: the group then adds up the sums of the meshes.

    Raises:
        ValueError: some, but not all, other ranks of the mesh are in the group.
    """
    if not key or group is None:
        return False
    ranks = set(key[0].mesh.flatten().tolist())
    members = torch.distributed.get_process_group_ranks(group)
    common = ranks.intersection(members)
    if len(common) == 1 < len(ranks):
        return True
    if common != ranks:
        raise ValueError(
            f"process_group has the ranks {members}, a parameter's mesh {sorted(ranks)}: expected "
            f"all of the mesh or this rank alone in the group"
        )
    return False


def is_counted_replica(key: NormKey, group: Any) -> bool:
    """Returns whether a sum over a group counts this rank's shard and not another replica of it.

    Plain tensors always count: the ranks of the group hold different tensors.
    """
    if not key or shares_only_this_rank(key, group):
        return True
    mesh, split = key
    coordinate = mesh.get_coordinate() or []
    return all(index == 0 for d, index in enumerate(coordinate) if d not in split)


def squares_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns an accumulator on ``device`` with the squares of all elements of plain tensors."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        by_device.setdefault(tensor.device, []).append(real)
    total = ops.new_accumulator(device)
    for its_device, held in by_device.items():
        accumulator = ops.new_accumulator(its_device)
        ops.grad_sumsq_(held, accumulator)
        total += moved(accumulator, device)
    return total


def all_reduce_(accumulator: Tensor, group: Any, op: Any = None) -> None:
    """Reduces normalized accumulators over the ranks of a group, in place: by ``op`` or as a sum.

    Parameters may be on the CPU (FSDP2's CPUOffloadPolicy) while their ranks communicate by NCCL.
    """
    sent = moved(accumulator, comm_device(group, accumulator.device))
    with collective("adding up the gradient norm"):
        op = op or torch.distributed.ReduceOp.SUM
        run(torch.distributed.all_reduce, sent, op, group=group)
    if sent is not accumulator:
        accumulator.copy_(sent)
