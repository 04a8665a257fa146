"""Owners of shared matrices: the same on every rank, balanced over the whole model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext.optim.owners import BYTES, SharedParam, digest_of, plan_exchanges
from torchopt_ext.state.matrices import flops_of
from torchopt_ext.state.newton_schulz import JORDAN
from torchopt_ext.state.pieces import Piece, pieces_of_run

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),
         (14336, 4096), (14336, 4096), (4096, 14336)] * 32  # fmt: skip
GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12


def by_rows(position: int, rows: int, cols: int, ranks: int, part: int = 0) -> SharedParam:
    """Returns a matrix as FSDP2 cuts it: the last ranks may have no rows."""
    most = -(-rows // ranks)
    held = {rank: range(rows)[rank * most : (rank + 1) * most] for rank in range(ranks)}
    pieces = {
        rank: Piece(0, its.start * cols, len(its), cols, cols) for rank, its in held.items() if its
    }
    return shared(position, part, rows, cols, pieces, dict.fromkeys(range(ranks), 0))


def shared(
    position: int,
    part: int,
    rows: int,
    cols: int,
    pieces: dict[int, Piece],
    replicas: dict[int, int],
) -> SharedParam:
    values, block = ((JORDAN,) * 5, 1e-7, None), (0, rows, cols, cols, 1.0)
    work = flops_of([block], {})
    called = f"parameter {position}"
    return SharedParam(
        position, [position], part, called, values, (block,), work, torch.float32, rows * cols,
        [{rank: [piece] for rank, piece in pieces.items()}], [{}], replicas,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "ranks", "most"),
    [(LLAMA, 8, 1.01), (LLAMA, 32, 1.01), (LLAMA, 64, 1.07), (LLAMA, 128, 1.07), (GPT2, 4, 1.05)],
)
def test_no_rank_has_much_more_work_than_another(
    shapes: list[tuple[int, int]], ranks: int, most: float
) -> None:
    params = [by_rows(n, *shape, ranks) for n, shape in enumerate(shapes)]
    (exchanges,) = plan_exchanges(params, range(ranks)).values()
    assert sorted(param.number for exchange in exchanges for param, _ in exchange) == [
        *range(len(shapes))
    ]
    loads = [0] * ranks
    for exchange in exchanges:
        for (_, (matrix,)), (rows, cols) in ((pair, shapes[pair[0].number]) for pair in exchange):
            short, long = sorted((rows, cols))
            loads[matrix.owner] += 5 * short * short * (4 * long + 2 * short)
            assert matrix.owner in matrix.pieces
    assert max(loads) <= most * sum(loads) / ranks
    assert len(exchanges) >= 4
    for exchange in exchanges:
        held = 4 * sum(param.numel for param, _ in exchange) / ranks
        assert held <= BYTES or len(exchange) == 1


def test_ranks_without_a_part_own_nothing() -> None:
    params = [by_rows(n, 72, 16, 16) for n in range(40)]  # chunks of 5 rows: 15 ranks
    (exchanges,) = plan_exchanges(params, range(16)).values()
    owners = {matrix.owner for exchange in exchanges for _, (matrix,) in exchange}
    assert owners == set(range(15))


def test_one_balance_for_all_parts_of_a_plan() -> None:
    params = [by_rows(n, 64, 64, 4, part=n % 2) for n in range(8)]
    by_part = plan_exchanges(params, range(4))
    owners = [
        matrix.owner
        for exchanges in by_part.values() for exchange in exchanges for _, (matrix,) in exchange
    ]  # fmt: skip
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("count", [1, 3])
def test_optimizers_of_a_container_take_turns(count: int) -> None:
    owners: list[int] = []
    for first in range(0, 12, count):
        params = [by_rows(n, 64, 64, 4) for n in range(count)]
        by_part = plan_exchanges(params, range(4), first)
        owners += [m.owner for each in by_part.values() for e in each for _, ms in e for m in ms]
    assert owners == [0, 1, 2, 3] * 3


def test_replicas_share_the_work() -> None:
    """The owner's replica sends; every holder gets its piece back."""
    halves = [Piece(0, 0, 4, 8, 8), Piece(0, 32, 4, 8, 8)]
    pieces = {rank: halves[rank % 2] for rank in (3, 5, 6, 8)}  # of the default group
    params = [shared(n, 0, 8, 8, pieces, {3: 0, 5: 0, 6: 1, 8: 1}) for n in range(4)]
    (exchanges,) = plan_exchanges(params, (3, 5, 6, 8)).values()
    matrices = [matrix for exchange in exchanges for _, (matrix,) in exchange]
    assert [matrix.owner for matrix in matrices] == [0, 1, 2, 3]
    assert [set(matrix.senders) for matrix in matrices] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    assert all(set(matrix.pieces) == {0, 1, 2, 3} for matrix in matrices)


def test_other_plans_have_other_digests() -> None:
    def number(*shapes: tuple[int, int]) -> int:
        params = [by_rows(n, *shape, 2) for n, shape in enumerate(shapes)]
        return digest_of(plan_exchanges(params, range(2)))

    assert number((8, 4), (6, 4)) == number((8, 4), (6, 4))
    assert len({number((8, 4), (6, 4)), number((6, 4), (8, 4)), number((8, 4))}) == 3


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    rows=st.integers(1, 5), cols=st.integers(1, 9),
)  # fmt: skip
def test_pieces_of_runs_make_up_the_matrices(sizes: list[int], rows: int, cols: int) -> None:
    """Runs of a stack's elements, on any rank, hold each element once, where the matrix has it."""
    count = -(-sum(sizes) // (rows * cols))
    stack = torch.arange(count * rows * cols, dtype=torch.float32)
    found = torch.full_like(stack, -1)
    ends = [*itertools.accumulate([*sizes, stack.numel() - sum(sizes)], initial=0)]
    for tensor, (begin, end) in enumerate(itertools.pairwise(ends)):
        run = stack[begin:end].clone()
        for number, piece in pieces_of_run(begin, end, rows * cols, cols, tensor):
            assert piece.tensor == tensor and piece.first + piece.numel <= rows * cols
            piece.of_whole(found[number * rows * cols :]).copy_(piece.of_local(run))
    assert torch.equal(found, stack)
