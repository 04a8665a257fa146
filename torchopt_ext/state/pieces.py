"""The parts of a DTensor's matrices that the ranks of its mesh hold."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext._torch import is_dtensor

_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Groups by their ranks, with the default group that there was."""


class Piece(NamedTuple):
    """What a rank holds of a matrix, one row after another from ``start`` in its local tensor.

    Element (i, j) is number ``first + i * stride + j`` of the whole matrix.
    """

    start: int
    first: int
    rows: int
    run: int
    stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.run

    def of_whole(self, flat: Tensor, offset: int) -> Tensor:
        """Returns the view of this piece in a flat tensor that has the matrix at ``offset``."""
        return flat.as_strided((self.rows, self.run), (self.stride, 1), offset + self.first)

    def of_local(self, flat: Tensor) -> Tensor:
        """Returns the view of this piece in the flat local tensor."""
        return flat[self.start : self.start + self.numel].view(self.rows, self.run)


def is_stack(group: Mapping[str, Any], param: Tensor) -> bool:
    """Returns whether a parameter of Muon is a batch of matrices, such as experts."""
    return param.dim() == 3 and not group.get("flatten")


def is_cut(group: Mapping[str, Any], param: Any) -> bool:
    """Returns whether ranks hold parts of a parameter's matrices."""
    return is_dtensor(param) and any(
        size > 1 and _cuts(placement) and not (is_stack(group, param) and placement.dim == 0)
        for size, placement in zip(param.device_mesh.shape, param.placements, strict=True)
    )


def group_of_mesh(mesh: Any) -> Any:
    """Returns the process group of all ranks of a mesh, one for equal ranks.

    The ranks call this together.
    """
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    world, group = _groups.get(ranks, (None, None))
    if group is None or world is not dist.group.WORLD:
        new = functools.partial(dist.new_group, list(ranks), use_local_synchronization=True)
        group = mesh.get_group() if mesh.ndim == 1 else new()
        _groups[ranks] = dist.group.WORLD, group
    return group


def pieces_of(
    group: Mapping[str, Any], param: Any, called: str
) -> tuple[list[dict[int, Piece]], dict[int, int]]:
    """Returns who holds what of a cut parameter.

    Returns:
        For each matrix the pieces by rank of the default group, without ranks that hold none of it;
        and by rank the number of the replica to which it belongs.

    Raises:
        ValueError: a rank holds something else than consecutive rows and columns.
    """
    mesh, shape = param.device_mesh, tuple(param.shape)
    stack = is_stack(group, param)
    inner = 1 if stack else math.prod(shape[2:])
    cols = shape[2] if stack else shape[1] * inner
    pieces: list[dict[int, Piece]] = [{} for _ in range(shape[0] if stack else 1)]
    replicas = {}
    placements = tuple(param.placements)
    for coordinate, held in _held(shape, tuple(mesh.shape), placements).items():
        rank, replica = int(mesh.mesh[coordinate]), 0
        for ranks, index, placement in zip(mesh.shape, coordinate, placements, strict=True):
            replica = replica if _cuts(placement) else replica * ranks + index
        replicas[rank] = replica
        if held is None:
            raise ValueError(f"{called} is {placements}: rows or columns are interleaved")
        which, its_rows, its_cols = held[:3] if stack else (range(1), *held[:2])
        if not stack and [*map(len, held[2:])] != [*shape[2:]]:
            raise ValueError(f"{called} of shape {shape} is {param.placements}: kernels are cut")
        rows, run = len(its_rows), len(its_cols) * inner
        for number in which if rows * run else ():
            start = (number - which.start) * rows * run
            first = its_rows.start * cols + its_cols.start * inner
            pieces[number][rank] = Piece(start, first, rows, run, cols)
    return pieces, replicas


def _cuts(placement: Any) -> bool:
    """Returns whether a placement is Shard or _StridedShard, whose is_shard() is False."""
    return hasattr(placement, "dim")


@functools.lru_cache(maxsize=1024)
def _held(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> dict[tuple[int, ...], list[range] | None]:
    """Returns the indices of dimensions by coordinate of a mesh; None if they are interleaved."""
    held: dict[tuple[int, ...], list[list[int]]] = {(): [[*range(size)] for size in shape]}
    for ranks, placement in zip(mesh_shape, placements, strict=True):
        parts: dict[tuple[int, ...], list[list[int]]] = {}
        for coordinate, indices in held.items():
            own = [indices] * ranks
            if _cuts(placement):
                dim = placement.dim
                along = torch.tensor(indices[dim]).view([1] * dim + [-1])
                chunks, _ = placement._split_tensor(along, ranks, with_padding=False)
                own = [
                    [*indices[:dim], chunk.flatten().tolist(), *indices[dim + 1 :]]
                    for chunk in chunks
                ]
            parts |= {(*coordinate, rank): own[rank] for rank in range(ranks)}
        held = parts
    return {coordinate: _ranges(indices) for coordinate, indices in held.items()}


def _ranges(indices: list[list[int]]) -> list[range] | None:
    """Returns indices as ranges, or None if some are not consecutive."""
    ranges = [range(own[0], own[-1] + 1) if own else range(0) for own in indices]
    return ranges if [*map(len, ranges)] == [*map(len, indices)] else None
