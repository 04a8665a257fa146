"""Which rank orthogonalizes each matrix of which ranks hold parts, and in which exchange."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.collective import compared
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.matrices import (
    SETTINGS,
    Matrix,
    blocks_of,
    coefficients_of,
    direction_dtype,
    flops_of,
)
from torchopt_ext.state.pieces import Piece, group_of_mesh, is_cut, pieces_of

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
        owner: the rank that orthogonalizes it.
        senders: the ranks whose pieces make up the matrix: those of the owner's replica.
    """

    numel: int
    pieces: Mapping[int, Piece]
    owner: int
    senders: frozenset[int]


@dataclass(frozen=True, eq=False)
class SharedParam:
    """A parameter whose matrices are cut.

    Attributes:
        position, part: of the parameter in the optimizer and in its plan.
        called: its name in messages.
        settings: coefficients, eps and what replaces the iterations, for _C.orthogonalize_.
        blocks: the blocks of each of its matrices that are orthogonalized.
        flops: the operations for one of its matrices.
        dtype: of its directions.
    """

    position: int
    part: int
    called: str
    settings: tuple[Any, ...]
    blocks: tuple[Matrix, ...]
    flops: int
    dtype: torch.dtype
    numel: int
    pieces: list[dict[int, Piece]]  # of each matrix, by rank of the default group
    replicas: dict[int, int]

    @classmethod
    def of(
        cls, position: int, part: int, group: Mapping[str, Any], param: Any, called: str
    ) -> "SharedParam":
        values = {**SETTINGS, **group}
        triples = tuple(coefficients_of(values))
        settings = triples, float(values["eps"]), group.get("orthogonalize")
        blocks = tuple(blocks_of(group, param, called))
        dtype = direction_dtype(group, local_tensor(param))
        pieces = pieces_of(group, param, called)
        work = flops_of(blocks, group)
        return cls(position, part, called, settings, blocks, work, dtype, param.numel(), *pieces)


Exchange = list[tuple[SharedParam, list[SharedMatrix]]]
"""Parameters whose directions travel together, in the order of the plan, with their matrices."""


def digest_of(by_part: Mapping[int, list[Exchange]]) -> int:
    """Returns a number that differs on ranks that would not exchange the same directions."""
    plan = [
        (part, param.position, str(param.dtype), param.settings[:2], param.blocks, param.numel,
         [(matrix.owner, sorted(matrix.pieces.items())) for matrix in matrices])
        for part, exchanges in by_part.items() for exchange in exchanges
        for param, matrices in exchange
    ]  # fmt: skip
    return compared(plan)


def groups_of_cut(optimizer: Any) -> dict[int, Any]:
    """Returns the process groups of parameters whose matrices are cut, by position."""
    pairs = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    return {
        position: group_of_mesh(param.device_mesh)
        for position, (group, param) in enumerate(pairs)
        if algorithm_of(group).steps_matrices and is_cut(group, param)
    }


def plan_exchanges(
    params: Sequence[SharedParam], ranks: Sequence[int]
) -> dict[int, list[Exchange]]:
    """Returns the exchanges of each part of a plan, for parameters that one group of ranks shares.

    Matrices go to ranks that hold a part, the most expensive first, each to the rank with the
    least to do and, among those, with the fewest elements. Nothing depends on the rank.

    Args:
        ranks: the group's, in the default group.
    """
    number = {rank: n for n, rank in enumerate(ranks)}
    loads = [(0, 0, rank) for rank in number.values()]
    ranked = sorted(params, key=lambda param: (str(param.dtype), -param.flops))
    chosen = []
    for param in ranked:
        matrices = []
        numel = param.numel // max(1, len(param.pieces))
        for by_rank in filter(None, param.pieces):  # matrices may have no elements
            pieces = {number[rank]: piece for rank, piece in by_rank.items()}
            replicas = {number[rank]: param.replicas[rank] for rank in by_rank}
            work, elements, owner = min(loads[rank] for rank in pieces)
            loads[owner] = work + param.flops, elements + numel, owner
            senders = frozenset(r for r in pieces if replicas[r] == replicas[owner])
            matrices.append(SharedMatrix(numel, pieces, owner, senders))
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
        exchange.sort(key=lambda pair: pair[0].position)
    return by_part
