"""The tensors that this rank steps for a parameter, and the ranks that share the norm with it."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext._torch import all_reduce_coalesced, is_dtensor, is_flat, local_shard
from torchopt_ext.optim.collective import collective, comm_device, run

NormKey: TypeAlias = tuple[Any, ...]
"""The ranks over which squares are summed: equal keys for the same ranks, () for this rank."""
NormPart: TypeAlias = tuple[torch.device, NormKey]
"""What parameters have in common whose squares are summed together."""


PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that are this rank's plain tensors themselves."""


def params_of(*optimizers: Any) -> list[Any]:
    """Returns all parameters of optimizers, in the order of their groups."""
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


def local_tensor(tensor: Any) -> Any:
    """Returns this rank's plain tensor: a DTensor's shard, a wrapper subclass's inner tensor.

    torchao's subclasses for float8 and int8 training hold the weight in one inner tensor of the
    same shape and dtype, which their operators update. Any other subclass is returned unchanged.
    """
    if type(tensor) in PLAIN:
        return tensor
    if is_dtensor(tensor):
        return local_tensor(local_shard(tensor))
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    inner = inner_tensors(tensor).values()
    fitting = [t for t in inner if t.shape == tensor.shape and t.dtype == tensor.dtype]
    return fitting[0] if len(fitting) == 1 else tensor


def inner_tensors(tensor: Any) -> dict[str, Tensor]:
    """Returns the tensors in a wrapper subclass by attribute; empty for a plain tensor."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return {name: getattr(tensor, name) for name in names}


def as_placed(local: Tensor, like: Any, shape: torch.Size | None = None) -> Any:
    """Returns a rank's part as a DTensor placed as ``like``, or unchanged if ``like`` is plain.

    ``shape`` is the whole tensor's, which is then contiguous; by default it is ``like``'s.
    """
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    whole = like if shape is None else torch.empty(shape, device="meta")
    sizes: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **sizes)


def shard_of(whole: Tensor, like: Any) -> Tensor:
    """Returns a whole tensor placed as ``like``, a DTensor, without communication."""
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(
        whole.detach().to(mesh.device_type), mesh, like.placements, src_data_rank=None
    )


def mesh_groups(params: Iterable[Any]) -> list[Any]:
    """Returns the groups of each mesh dimension of DTensors: agreeing in one after the other makes
    all ranks of a mesh agree."""
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    return [
        mesh.get_group(d)
        for mesh in meshes
        for d in range(mesh.ndim)
        if mesh.get_coordinate() is not None and mesh.size(d) > 1
    ]


def same_placement(a: Any, b: Any) -> bool:
    """Returns whether two tensors lie on the same ranks in the same way; two plain tensors do."""
    if not is_dtensor(a) or not is_dtensor(b):
        return is_dtensor(a) == is_dtensor(b)
    one, other = a.device_mesh, b.device_mesh
    same_ranks = one == other or torch.equal(one.mesh, other.mesh)
    return same_ranks and bool(a.placements == b.placements)


def on_mesh_of(value: Any, like: Any) -> Any:
    """Returns a DTensor on the mesh of ``like`` if that has only another name; others unchanged."""
    renamed = is_dtensor(value) and value.device_mesh != getattr(like, "device_mesh", None)
    if not renamed or not same_placement(value, like):
        return value
    return as_placed(local_tensor(value), like, None if value.shape == like.shape else value.shape)


def placed(tensor: Any) -> str:
    """Returns a text for messages: how a tensor lies on which ranks."""
    if not is_dtensor(tensor):
        return "a plain tensor"
    mesh = tensor.device_mesh
    return f"placed {tuple(tensor.placements)} over ranks {mesh.mesh.tolist()} of {mesh}"


SHARDS_ELSEWHERE = (
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


def part_of(param: Tensor) -> NormPart:
    """Returns the device and the norm key of a parameter."""
    return local_tensor(param).device, norm_key(param)


def crosses(key: NormKey, group: Any) -> bool:
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


def counts_here(key: NormKey, group: Any) -> bool:
    """Returns whether a sum over a group counts this rank's shard and not another replica of it.

    Plain tensors always count: the ranks of the group hold different tensors.
    """
    if not key or crosses(key, group):
        return True
    mesh, split = key
    coordinate = mesh.get_coordinate() or []
    return all(index == 0 for d, index in enumerate(coordinate) if d not in split)


def local_gradients(params: list[Any], *, written: bool = False) -> list[Tensor | None]:
    """Returns this rank's part of the gradients as plain tensors, placed as the parameters.

    A gradient may be placed differently: sequence parallel gives a replicated weight a Partial
    gradient, whose local part is not the gradient. All redistributions start before any is waited
    for. Redistributions that only sum over one mesh dimension share a collective.

    Args:
        params: parameters, which may include DTensors.
        written: whether the gradients will be written. A redistributed gradient is then rejected.

    Raises:
        RuntimeError: a gradient's kind or mesh is not its parameter's, or it cannot be written.
    """
    grads = [_checked_gradient(param) for param in params]
    summed: dict[NormKey, list[int]] = {}
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if is_dtensor(grad) and grad.placements != param.placements:
            if written:
                raise RuntimeError(
                    f"a gradient with placements {grad.placements} is redistributed for its "
                    f"parameter with {param.placements}, and cannot be written back"
                )
            dimension = _sum_over(grad.placements, param.placements)
            if dimension is None:
                grads[i] = grad.redistribute(placements=param.placements, async_op=True)
            else:
                key = grad.device_mesh, dimension, grad.dtype
                summed.setdefault(key, []).append(i)
    for (mesh, dimension, _), indices in summed.items():
        locals_ = [_complete(grads[i]) for i in indices]
        totals = all_reduce_coalesced(locals_, mesh.get_group(dimension))
        for i, total in zip(indices, totals, strict=True):
            grads[i] = total
    return [None if grad is None else _complete(grad) for grad in grads]


def _checked_gradient(param: Any) -> Any:
    grad = param.grad
    if grad is not None and is_dtensor(grad) != is_dtensor(param):
        raise RuntimeError(
            f"a {type(param).__name__} parameter has a {type(grad).__name__} gradient"
        )
    if is_dtensor(grad) and grad.device_mesh != param.device_mesh:
        raise RuntimeError(f"a gradient is {placed(grad)}, its parameter {placed(param)}")
    return grad


def _sum_over(found: Any, wanted: Any) -> int | None:
    """Returns the mesh dimension if its Partial sum is the only difference of the placements."""
    differing = [d for d, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    d = differing[0]
    return d if found[d].is_partial("sum") and wanted[d].is_replicate() else None


def _complete(grad: Any) -> Any:
    """Waits for a gradient's collective (AsyncCollectiveTensor); returns its local tensor."""
    local = local_shard(grad) if is_dtensor(grad) else grad
    if type(local) is not Tensor and hasattr(local, "wait"):
        return local.wait()
    return local_tensor(local)


@torch.no_grad()
def show_writes(params: Iterable[Tensor]) -> None:
    """Shows that parameters will be written, by an operator that changes nothing.

    torch.autograd.graph.allow_mutation_on_saved_tensors then copies what backward still needs. It
    sees operators only, and not the kernels of a step.
    """
    if written := [local_tensor(param) for param in params if param.grad is not None]:
        torch._foreach_copy_(written, written)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``, ready to be read there.

    A copy to the host blocks: torch would return from a non-blocking copy before it has ended.
    """
    if tensor.device == device:
        return tensor  # faster than to(), which calls into torch first
    return tensor.to(device, non_blocking=device.type != "cpu")


def current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the stream that orders this thread's work on a device; None for the host."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def is_captured() -> bool:
    """Returns whether this thread's work on a GPU is captured in a graph."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def sent_to_host(tensor: Tensor) -> tuple[Tensor, Any] | None:
    """Starts a copy of a GPU's tensor to pinned memory; returns it and the event that ends it.

    Returns None while a graph is captured, because its replays tell the host nothing.
    """
    if is_captured():
        return None
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    sent.copy_(tensor, non_blocking=True)
    end: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(tensor.device))
    return sent, end


def squares_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns an accumulator on ``device`` with the squares of all elements of plain tensors."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        by_device.setdefault(tensor.device, []).append(real)
    total = ops.new_accumulator(device)
    for its_device, own in by_device.items():
        accumulator = ops.new_accumulator(its_device)
        ops.grad_sumsq_(own, accumulator)
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
