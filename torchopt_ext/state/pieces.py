"""The parts of a DTensor's matrices that the ranks of its mesh hold."""

import itertools
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
    """Returns a process group of all ranks of a mesh, which call this together."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    world, group = _groups.get(ranks, (None, None))
    if group is None or world is not dist.group.WORLD:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
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
    for coordinate in itertools.product(*map(range, mesh.shape)):
        rank, replica = int(mesh.mesh[coordinate]), 0
        indices = [[*range(size)] for size in shape]
        for ranks, index, placement in zip(mesh.shape, coordinate, param.placements, strict=True):
            if _cuts(placement):
                indices[placement.dim] = _part(indices[placement.dim], placement, ranks, index)
            else:
                replica = replica * ranks + index
        replicas[rank] = replica
        held = [range(own[0], own[-1] + 1) if own else range(0) for own in indices]
        if [*map(len, held)] != [*map(len, indices)]:
            raise ValueError(f"{called} is {param.placements}: rows or columns are interleaved")
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


def _part(indices: list[int], placement: Any, ranks: int, rank: int) -> list[int]:
    """Returns those of a dimension's indices that a placement leaves to a rank."""
    along = torch.tensor(indices).view([1] * placement.dim + [-1])
    chunks, _ = placement._split_tensor(along, ranks, with_padding=False)
    part: list[int] = chunks[rank].flatten().tolist()
    return part
