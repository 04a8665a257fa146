"""Which rank orthogonalizes each matrix that ranks share, and in which exchange."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.by_row import row_shape
from torchopt_ext.state.collective import compared
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.matrices import (
    SETTINGS,
    Matrix,
    blocks_of,
    coefficients_of,
    direction_dtype,
    flops_of,
    replacement_of,
)
from torchopt_ext.state.params import named_group_params
from torchopt_ext.state.pieces import (
    Piece,
    group_of_mesh,
    is_cut,
    marked_cut,
    pieces_of,
    replicated,
    whole_shape,
)

BYTES = 16 << 20
"""Directions of an exchange on one rank: more than a network needs, few beside the weights."""
LEAST = 4
"""The fewest exchanges, if there are as many parameters: the products of one hide the next."""


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix of which ranks hold parts. Ranks are numbered in the exchange's group.

    Attributes:
        numel: the elements of the whole matrix.
        pieces: what each rank holds, without ranks that hold nothing.
        averages: the same of NorMuon's averages of rows, as a matrix of one column.
        owner: the rank that orthogonalizes it.
        senders: the ranks whose pieces make up the matrix: those of the owner's replica.
    """

    numel: int
    pieces: Mapping[int, Sequence[Piece]]
    averages: Mapping[int, Sequence[Piece]]
    owner: int
    senders: frozenset[int]

    @property
    def averaged(self) -> int:
        """How many rows have an average."""
        pieces = (piece for rank in self.senders for piece in self.averages.get(rank, ()))
        return sum(piece.numel for piece in pieces)


@dataclass(frozen=True, eq=False)
class SharedParam:
    """A parameter whose matrices ranks share.

    Attributes:
        number: of the parameter, equal on all ranks.
        positions: of this rank's tensors of the parameter in the optimizer.
        part: of the parameter in the optimizer's plan.
        called: its name in messages.
        settings: coefficients, eps and what replaces the iterations, for _C.orthogonalize_.
        blocks: the blocks of each of its matrices that are orthogonalized.
        flops: the operations for one of its matrices.
        dtype: of its directions.
    """

    number: int
    positions: list[int]
    part: int
    called: str
    settings: tuple[Any, ...]
    blocks: tuple[Matrix, ...]
    flops: int
    dtype: torch.dtype
    numel: int
    pieces: list[dict[int, Sequence[Piece]]]  # of each matrix, by rank of the default group
    averages: list[dict[int, Sequence[Piece]]]  # the same of the averages of rows, if it has some
    replicas: Mapping[int, int]

    @classmethod
    def of(
        cls, position: int, part: int, group: Mapping[str, Any], param: Any, called: str, ranks: Any
    ) -> "SharedParam":
        values = {**SETTINGS, **group}
        triples = tuple(coefficients_of(values))
        settings = triples, float(values["eps"]), replacement_of(group)
        blocks = tuple(blocks_of(group, param, called))
        dtype = direction_dtype(group, local_tensor(param))
        shape = whole_shape(param)
        work, numel = flops_of(blocks, group), math.prod(shape)
        found = partial(replicated, group, ranks)
        if is_cut(group, param):
            found = partial(pieces_of, group, param, called)
        pieces, replicas = found(shape)
        averages: list[dict[int, Sequence[Piece]]] = [{} for _ in pieces]
        if any(state.by_row for state in algorithm_of(group).states_of(group)):
            averages, _ = found(row_shape(shape, group))
        number = number_of(param, position)
        own = number, [position], part, called
        return cls(*own, settings, blocks, work, dtype, numel, pieces, averages, replicas)


Exchange = list[tuple[SharedParam, list[SharedMatrix]]]
"""Parameters whose directions travel together, in the order of the plan, with their matrices."""


def digest_of(by_part: Mapping[int, list[Exchange]]) -> int:
    """Returns a number that differs on ranks that would not exchange the same directions."""
    plan = [
        (part, param.number, str(param.dtype), param.settings[:2], param.blocks, param.numel,
         [(matrix.owner, sorted(matrix.pieces.items()), sorted(matrix.averages.items()))
          for matrix in matrices])
        for part, exchanges in by_part.items() for exchange in exchanges
        for param, matrices in exchange
    ]  # fmt: skip
    return compared(plan)


def number_of(param: Any, position: int) -> int:
    """Returns the number that a parameter has on all ranks."""
    cut = marked_cut(param)
    return position if cut is None else cut.number


def groups_of_shared(optimizer: Any) -> dict[int, Any]:
    """Returns the process groups of parameters whose matrices ranks share, by position."""
    pairs = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    found = {
        position: _group_of(group, param, optimizer.orthogonalize_over)
        for position, (group, param) in enumerate(pairs)
        if algorithm_of(group).steps_matrices
    }
    return {position: group for position, group in found.items() if group is not None}


def _group_of(group: Mapping[str, Any], param: Any, over: Any) -> Any:
    if is_cut(group, param):
        cut = marked_cut(param)
        return group_of_mesh(param.device_mesh) if cut is None else cut.group
    # Each rank orthogonalizes the other matrices that it has whole.
    return over if param.is_contiguous() and not is_dtensor(param) else None


def shared_params(
    optimizer: Any, groups: Mapping[int, Any], part_of: Callable[[Any], int | None]
) -> list[SharedParam]:
    """Returns the parameters whose matrices ranks share, in the order of their numbers.

    Args:
        groups: as :func:`groups_of_shared` returns them.
        part_of: returns the part of the plan in which a parameter is, None for none.
    """
    found: dict[int, SharedParam] = {}
    for position, (_, group, name, param) in enumerate(named_group_params(optimizer)):
        part = part_of(param) if position in groups else None
        if part is None:
            continue
        if (number := number_of(param, position)) in found:
            found[number].positions.append(position)
        else:
            called = repr(name) if name else f"parameter {number}"
            ranks = groups[position]
            found[number] = SharedParam.of(position, part, group, param, called, ranks)
    return [found[number] for number in sorted(found)]


def number_matrices(optimizers: Sequence[Any]) -> None:
    """Numbers the matrices of optimizers that step alone, so that ranks take turns to own them.

    The largest come first, so that the turns are about equal work. The result is the same on all
    ranks, and before and after a framework cuts the parameters.
    """
    of: list[tuple[list[int], Any]] = []
    for optimizer in optimizers:
        stepped = [g for g in optimizer.param_groups if algorithm_of(g).steps_matrices]
        of.append(([p.numel() for group in stepped for p in group["params"]], optimizer))
    first = 0
    for sizes, optimizer in sorted(of, key=lambda pair: -max(pair[0], default=0)):
        optimizer._first_matrix_number = first
        first += len(sizes)


def plan_exchanges(
    params: Sequence[SharedParam], ranks: Sequence[int], first: int = 0
) -> dict[int, list[Exchange]]:
    """Returns the exchanges of each part of a plan, for parameters that one group of ranks shares.

    Matrices go to ranks that hold a part, the most expensive first, each to the rank with the
    least to do and, among those, with the fewest elements. Nothing depends on the rank.

    Args:
        ranks: the group's, in the default group.
        first: matrices of the container's other optimizers that come before: ranks with equal work
            take turns from there.
    """
    number = {rank: n for n, rank in enumerate(ranks)}
    loads = [(0, 0, (rank - first) % len(ranks)) for rank in number.values()]
    ranked = sorted(params, key=lambda param: (str(param.dtype), -param.flops))
    chosen = []
    for param in ranked:
        matrices = []
        numel = param.numel // max(1, len(param.pieces))
        for by_rank, rows in zip(param.pieces, param.averages, strict=True):
            if not by_rank:  # matrices may have no elements
                continue
            pieces = {number[rank]: its for rank, its in by_rank.items()}
            averages = {number[rank]: its for rank, its in rows.items()}
            replicas = {number[rank]: param.replicas[rank] for rank in by_rank}
            owner = min(pieces, key=loads.__getitem__)
            work, elements, turn = loads[owner]
            loads[owner] = work + param.flops, elements + numel, turn
            senders = frozenset(r for r in pieces if replicas[r] == replicas[owner])
            matrices.append(SharedMatrix(numel, pieces, averages, owner, senders))
        chosen.append((param, matrices))
    by_part: dict[int, list[Exchange]] = {}
    totals: Counter[int] = Counter()
    for param in params:
        totals[param.part] += param.numel
    held = 0  # by the last exchange
    for param, matrices in sorted(chosen, key=lambda pair: pair[0].part):
        exchanges = by_part.setdefault(param.part, [])
        least = math.ceil(totals[param.part] / LEAST)
        most = min(BYTES // param.dtype.itemsize * len(ranks), least)
        has_room = exchanges and held + param.numel <= most
        if not (has_room and exchanges[-1][0][0].dtype == param.dtype):
            exchanges.append([])
            held = 0
        exchanges[-1].append((param, matrices))
        held += param.numel
    for exchange in itertools.chain(*by_part.values()):
        exchange.sort(key=lambda pair: pair[0].number)
    return by_part
