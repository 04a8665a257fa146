"""From a DTensor to what this rank holds of it, and to whom it has to talk about its norm."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

NormKey: TypeAlias = tuple[Any, ...]
"""Parameters with an equal key have their squares summed over the same ranks; () is this rank."""


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor, without importing torch.distributed for plain tensors."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local_tensor(tensor: Any) -> Any:
    """This rank's shard of a DTensor; anything else as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


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
    return (param.device_mesh, split) if split else ()  # type: ignore[attr-defined]


def local_gradient(param: Any) -> Tensor | None:
    """A parameter's gradient as a plain tensor: of a DTensor this rank's shard, placed as it is.

    A gradient may be placed otherwise: sequence parallel gives a replicated weight a Partial one,
    whose local part is not the gradient.
    """
    grad = param.grad
    if grad is None:
        return None
    if is_dtensor(grad) != is_dtensor(param):
        raise RuntimeError(
            f"a {type(param).__name__} parameter has a {type(grad).__name__} gradient"
        )
    if is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    local = local_tensor(grad)
    # A collective still under way hides in an AsyncCollectiveTensor.
    return local.wait() if type(local) is not Tensor and hasattr(local, "wait") else local


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, ready to be read there.

    A copy to the host has to be waited for: torch makes one that does not block asynchronous.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def all_reduce_(accumulator: Tensor, key: NormKey) -> None:
    """Sums normalised accumulators over the ranks that share a split parameter, in place."""
    if key:
        mesh, split = key
        for dimension in split:
            torch.distributed.all_reduce(accumulator, group=mesh.get_group(dimension))
