"""The parts of a parameter's matrices that ranks hold."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext._torch import is_dtensor

_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Groups by their ranks, with the default group that there was."""


_CUT = "_torchopt_cut"


class Piece(NamedTuple):
    """What a rank holds of a matrix, one row after another from ``start`` in a local tensor.

    Element (i, j) is number ``first + i * stride + j`` of the whole matrix. ``tensor`` is the
    tensor's number among those that the rank has of the parameter.
    """

    start: int
    first: int
    rows: int
    run: int
    stride: int
    tensor: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.run

    def by_row(self) -> "Piece":
        """Returns this piece, which has whole rows, of a state with one value for each row."""
        start, first = self.start // self.stride, self.first // self.stride
        return Piece(start, first, self.rows, 1, 1, self.tensor)

    def of_whole(self, flat: Tensor) -> Tensor:
        """Returns the view of this piece in the flat matrix."""
        start = flat.storage_offset() + self.first
        return flat.as_strided((self.rows, self.run), (self.stride, 1), start)

    def of_local(self, flat: Tensor) -> Tensor:
        """Returns the view of this piece in the flat local tensor."""
        return flat[self.start : self.start + self.numel].view(self.rows, self.run)


@dataclass(frozen=True, eq=False)
class Cut:
    """A parameter of whose matrices ranks hold parts that are no DTensors.

    Attributes:
        number: of the parameter, equal on all ranks.
        tensor: which of this rank's tensors of the parameter it is.
        shape: of the whole parameter.
        flatten: of the param group when the parameter was cut.
        group: the ranks' process group.
        pieces: of each matrix, by rank of the default group, without ranks that hold none of it.
        replicas: by rank, the number of the replica to which it belongs.
    """

    number: int
    tensor: int
    shape: tuple[int, ...]
    flatten: bool
    group: Any
    pieces: list[dict[int, Sequence[Piece]]]
    replicas: Mapping[int, int]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cut":
        return self

    def mark(self, tensor: Tensor) -> None:
        """Makes a tensor, which is not a DTensor, one of this rank's parts of the parameter."""
        setattr(tensor, _CUT, self)


def marked_cut(param: Tensor) -> Cut | None:
    """Returns what :meth:`Cut.mark` has noted."""
    return getattr(param, _CUT, None)


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the shape of the parameter of which ranks have parts."""
    cut = marked_cut(param)
    return tuple(param.shape) if cut is None else cut.shape


def is_stack(group: Mapping[str, Any], param: Tensor) -> bool:
    """Returns whether a parameter of Muon is a batch of matrices, such as experts."""
    return _is_stack(group, whole_shape(param))


def _is_stack(group: Mapping[str, Any], shape: Sequence[int]) -> bool:
    return len(shape) == 3 and not group.get("flatten")


def is_cut(group: Mapping[str, Any], param: Any) -> bool:
    """Returns whether ranks hold parts of a parameter's matrices."""
    if marked_cut(param) is not None:
        return True
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


def matrix_sizes(group: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns the number, the rows and the columns of a parameter's matrices."""
    if _is_stack(group, shape):
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def pieces_of_run(
    begin: int, end: int, size: int, cols: int, tensor: int
) -> Iterator[tuple[int, Piece]]:
    """Yields elements [begin, end) of a stack, which make up a tensor, by matrix as pieces.

    Args:
        size, cols: the elements and the columns of a matrix.
    """
    at = begin
    while at < end:
        number, first = divmod(at, size)
        most = min(end - at, size - first)
        in_row = min(most, cols - first % cols)
        rows = 1 if in_row < cols else most // cols
        yield number, Piece(at - begin, first, rows, in_row, cols, tensor)
        at += rows * in_row


def replicated(
    group: Mapping[str, Any], ranks: Any, shape: Sequence[int]
) -> tuple[list[dict[int, Sequence[Piece]]], Mapping[int, int]]:
    """Returns :func:`pieces_of` for a tensor that each rank of a process group has whole."""
    count, rows, cols = matrix_sizes(group, shape)
    replicas = {rank: rank for rank in dist.get_process_group_ranks(ranks)}
    pieces = (Piece(k * rows * cols, 0, rows, cols, cols) for k in range(count))
    return [{rank: [piece] for rank in replicas} for piece in pieces], replicas


def pieces_of(
    group: Mapping[str, Any], param: Any, called: str, shape: Sequence[int] | None = None
) -> tuple[list[dict[int, Sequence[Piece]]], Mapping[int, int]]:
    """Returns who holds what of a cut parameter.

    Args:
        shape: of a state that is placed like the parameter, whose pieces to return instead; of
            parts by :meth:`Cut.mark` it has one value for each row.

    Returns:
        For each matrix the pieces by rank of the default group, without ranks that hold none of it;
        and by rank the number of the replica to which it belongs.

    Raises:
        ValueError: a rank holds something else than consecutive rows and columns, or the group's
            ``flatten`` has changed since the parameter was cut.
    """
    if (cut := marked_cut(param)) is not None:
        if bool(group.get("flatten")) != cut.flatten:
            raise ValueError(
                f"{called} was cut between ranks with flatten={cut.flatten} in its group: build "
                f"the optimizer anew to change it"
            )
        if shape is None or tuple(shape) == cut.shape:
            return cut.pieces, cut.replicas
        by_row: list[dict[int, Sequence[Piece]]] = [
            {rank: [piece.by_row() for piece in its] for rank, its in held.items()}
            for held in cut.pieces
        ]
        return by_row, cut.replicas
    mesh, shape = param.device_mesh, tuple(param.shape if shape is None else shape)
    stack = is_stack(group, param)
    inner = 1 if stack else math.prod(shape[2:])
    count, _, cols = matrix_sizes(group, shape)
    pieces: list[dict[int, Sequence[Piece]]] = [{} for _ in range(count)]
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
            pieces[number][rank] = [Piece(start, first, rows, run, cols)]
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
