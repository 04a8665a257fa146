"""From a parameter to the tensor that this rank steps, and to whom it talks about its norm."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchopt_ext._torch import all_reduce_coalesced, is_dtensor, local_shard
from torchopt_ext.optim.collective import collective, comm_device, run

NormKey: TypeAlias = tuple[Any, ...]
"""Parameters with an equal key have their squares summed over the same ranks; () is this rank."""


def local_tensor(tensor: Any) -> Any:
    """The plain tensor of this rank: a DTensor's shard, a wrapper subclass's inner tensor.

    torchao's subclasses for float8 and int8 training hold the weight in one inner tensor of the
    same shape and dtype, which their operators step. Any other subclass is returned as it is.
    """
    if is_dtensor(tensor):
        tensor = local_shard(tensor)
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    inner = inner_tensors(tensor).values()
    fitting = [t for t in inner if t.shape == tensor.shape and t.dtype == tensor.dtype]
    return fitting[0] if len(fitting) == 1 else tensor


def inner_tensors(tensor: Any) -> dict[str, Tensor]:
    """The tensors in a wrapper subclass by attribute; none of a plain tensor."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return {name: getattr(tensor, name) for name in names}


def as_placed(local: Tensor, like: Any) -> Any:
    """A rank's part of a tensor as a DTensor placed as ``like`` is; itself if that is plain."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    whole = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **whole)


def same_placement(a: Any, b: Any) -> bool:
    """Whether two tensors lie on the same ranks in the same way; plain ones do."""
    if not is_dtensor(a) or not is_dtensor(b):
        return is_dtensor(a) == is_dtensor(b)
    return bool(a.device_mesh == b.device_mesh and a.placements == b.placements)


def placed(tensor: Any) -> str:
    """How a tensor lies on which ranks, for messages."""
    if not is_dtensor(tensor):
        return "a plain tensor"
    return f"placed {tuple(tensor.placements)} over ranks {tensor.device_mesh.mesh.tolist()}"


def norm_key(param: Tensor) -> NormKey:
    """The mesh and the dimensions of it over which a parameter is split; () for a plain tensor.

    Raises:
        ValueError: the parameter is Partial: its value is not known on any rank.
    """
    if not is_dtensor(param):
        return ()
    placements = param.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"cannot step a DTensor parameter with placements {placements}")
    split = tuple(d for d, placement in enumerate(placements) if not placement.is_replicate())
    return param.device_mesh, split  # type: ignore[attr-defined]


def crosses(key: NormKey, group: Any) -> bool:
    """Whether a parameter's mesh has this rank alone in common with a group, as FSDP's has with
    that of pipeline stages: the group then adds up what every mesh has summed over itself.

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
    """Whether this rank's shard, of all its replicas, is the one that a sum over a group counts.

    Plain tensors always do: ranks that are summed over hold others.
    """
    if not key or crosses(key, group):
        return True
    mesh, split = key
    coordinate = mesh.get_coordinate() or []
    return all(index == 0 for d, index in enumerate(coordinate) if d not in split)


def local_gradients(params: list[Any], *, written: bool = False) -> list[Tensor | None]:
    """The parameters' gradients as plain tensors: of a DTensor this rank's shard, placed as it is.

    A gradient may be placed otherwise: sequence parallel gives a replicated weight a Partial one,
    whose local part is not the gradient. All redistributions are started before any is waited for,
    and those that only sum over one mesh dimension travel together.

    Args:
        params: parameters, not all of them DTensors.
        written: the gradients are to be written, which cannot reach those that are redistributed.

    Raises:
        RuntimeError: a gradient is of another kind than its parameter, or cannot be written.
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
    """The mesh dimension whose Partial sum is all that separates the placements, if one is."""
    differing = [d for d, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    d = differing[0]
    return d if found[d].is_partial("sum") and wanted[d].is_replicate() else None


def _complete(grad: Any) -> Any:
    """A gradient's local tensor, after waiting for its collective (AsyncCollectiveTensor)."""
    local = local_shard(grad) if is_dtensor(grad) else grad
    if type(local) is not Tensor and hasattr(local, "wait"):
        return local.wait()
    return local_tensor(local)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, ready to be read there.

    A copy to the host has to be waited for: torch makes one that does not block asynchronous.
    """
    if tensor.device == device:
        return tensor  # sooner than to(), which makes a call into torch to find it so
    return tensor.to(device, non_blocking=device.type != "cpu")


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread's work on a device is in order; None for the host."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def is_captured() -> bool:
    """Whether what this thread does on a GPU becomes part of a graph."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def sent_to_host(tensor: Tensor) -> tuple[Tensor, Any] | None:
    """A copy of a GPU's tensor on its way to pinned memory, and the event that ends it.

    None while a graph is captured, whose replays tell the host nothing.
    """
    if is_captured():
        return None
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    sent.copy_(tensor, non_blocking=True)
    end: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(tensor.device))
    return sent, end


def all_reduce_(accumulator: Tensor, group: Any, op: Any = None) -> None:
    """Sums normalised accumulators, or whatever ``op`` is, over the ranks of a group, in place.

    Parameters may be on the CPU (FSDP2's CPUOffloadPolicy) while their ranks speak through NCCL.
    """
    sent = moved(accumulator, comm_device(group, accumulator.device))
    with collective("adding up the gradient norm"):
        op = op or torch.distributed.ReduceOp.SUM
        run(torch.distributed.all_reduce, sent, op, group=group)
    if sent is not accumulator:
        accumulator.copy_(sent)
