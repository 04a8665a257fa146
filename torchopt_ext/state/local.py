"""This rank's plain tensors of DTensors and wrapper subclasses, and how DTensors are placed."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import is_dtensor, local_shard

PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that are this rank's plain tensors themselves."""


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
