"""Cases of test_workers.py: three ranks exchange text, errors and optimizer state."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from zero_common import PARTITIONS, Traffic, parameters, raises, whole_state, zero_over

from tests.support.compare import assert_same
from tests.support.problems import train
from tests.support.ranks import run_cases
from torchopt_ext.state import collective
from torchopt_ext.zero import exchange, ranks
from torchopt_ext.zero.part import Part, in_memory_order

State = dict[int, dict[Any, Any]]
Entry = tuple[int, Any, Part, Any]

KB = 1 << 10
PIECE = 4 * KB  # instead of 16 MB
LAST = 2
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
    torch.complex128,
]  # fmt: skip


def world() -> Any:
    return dist.group.WORLD


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns random bits of the dtype, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def whole(index: int, name: Any, value: Any) -> Entry:
    """Returns an entry that one rank has, of a parameter without elements."""
    param = torch.empty(0)
    return index, name, Part(param, 0, 0, param, param), value


def part(index: int, tensor: Tensor, begin: int, end: int) -> Entry:
    """Returns the entry of a part of a parameter's state."""
    own = in_memory_order(tensor, tensor)[begin:end]
    return index, "exp_avg", Part(tensor, begin, end, own, tensor), own


@contextmanager
def raises_alike(error: type[Exception], *parts: str) -> Iterator[None]:
    """Asserts that the block raises the same message on all ranks, which then still communicate."""
    message = ""
    with raises(error, *parts):
        try:
            yield
        except error as problem:
            message = str(problem)
            raise
    assert collective.all_gather_text(message, world()) == [message] * dist.get_world_size()


def check(entries: list[list[Entry]], expected: State, to: int) -> None:
    """Asserts that only the target gets the state, with equal bits, strides and order, in memory
    of its own."""
    mine = entries[dist.get_rank()]
    state = exchange.gather_entries(mine, to, world())
    if dist.get_rank() != to:
        assert state is None
        return
    assert_same(state, expected)
    addresses = {tensor.data_ptr() for tensor in tree_leaves([value for *_, value in mine])
                 if isinstance(tensor, Tensor)} - {0}  # fmt: skip
    pairs = zip(tree_leaves(state), tree_leaves(expected), strict=True)
    for copied, tensor in ((a, b) for a, b in pairs if isinstance(b, Tensor)):
        assert copied.stride() == torch.empty_like(tensor).stride()
        assert copied.untyped_storage().nbytes() == copied.nbytes
        assert copied.data_ptr() not in addresses and not copied.requires_grad


# ---- text and agreement --------------------------------------------------------------------------


def text_and_agreement() -> None:
    """Agreement costs one length. An error of one rank is named on all."""
    texts = ["", "any\u00efthing \U0001f600 \ud800", "x" * 5000]
    assert collective.all_gather_text(texts[dist.get_rank()], world()) == texts
    assert collective.all_gather_text("", world()) == [""] * 3
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
        collective.raise_together(None, world())
    assert [call.args[1].nbytes for call in calls.mock_calls] == [8]
    for error in ("no space", ""):
        with raises_alike(RuntimeError, f"rank 2: {error}"):
            collective.raise_together(error if dist.get_rank() == LAST else None, world())


NAMES = ["'a': float32 (2,)", "'b': float32 (3,)", "'c': float32 (4,)"]
OTHERS: list[tuple[list[str], list[str], str]] = [
    (
        NAMES, [NAMES[0], "'b': float32 (4,)", NAMES[2]],
        "1: 'b': float32 (3,) on rank 0, 1; 'b': float32 (4,) on rank 2",
    ),
    (NAMES, NAMES[::-1], "0: 'a': float32 (2,) on rank 0, 1; 'c': float32 (4,) on rank 2"),
    (NAMES, [*NAMES, "'d'"], "3: nothing on rank 0, 1; 'd' on rank 2"),
    (NAMES, NAMES[:-1], "2: 'c': float32 (4,) on rank 0, 1; nothing on rank 2"),
    (["a", "b"], ["a, b"], "0: a on rank 0, 1; a, b on rank 2"),
]  # fmt: skip


def check_same() -> None:
    """The same parameters cost a count and a digest. Others of the last rank are named."""
    for same in (NAMES * 100, []):
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
            exchange.check_same(same, "parameters", world())
        assert [call.args[1].nbytes for call in calls.mock_calls] == [16]
    for mine, last, message in OTHERS:
        with raises_alike(ValueError, "differ in their parameters", f"position {message}"):
            exchange.check_same(last if dist.get_rank() == LAST else mine, "parameters", world())


# ---- state ---------------------------------------------------------------------------------------


def values_of(rank: int) -> State:
    """Returns state of other parameters on every rank: all dtypes, layouts, sizes and kinds."""
    state: State = {}
    for number, dtype in enumerate(DTYPES):
        index = (len(DTYPES) - 1 - number) * 3 + rank
        state[index] = {
            "exp_avg": random((3, 5, 7), dtype, index),
            "0-dim": random((), dtype, index),
            "empty": random((0, 4), dtype, index),
            "transposed": random((6, 5), dtype, index).t(),
            "sliced": random((9, 8), dtype, index)[::2, 1::3],
            "expanded": random((1, 4), dtype, index).expand(3, 4),
        }
    large = random((3, 2 * KB), torch.float32, rank)
    state[100 + rank] = {
        "pieces": random((9 * KB + 3,), torch.int16, rank),
        "channels_last": random((2, 3, 110, 100), torch.float32, rank).to(
            memory_format=torch.channels_last
        ),
        "strided": large[:, ::2],
        "strided columns": large.t()[::2],
        "history": [(rank, torch.full((2,), rank)), {"at": torch.ones(3).bool(), 1: None}],
        "lr": float("inf"),
        ("a", 1): "text",
        "dtype": torch.bfloat16,
        "parameter": torch.nn.Parameter(torch.ones(rank + 1)),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    }
    return state


def whole_values(to: int) -> None:
    by_rank = [values_of(rank) for rank in range(3)]
    entries = [
        [whole(i, name, value) for i, values in state.items() for name, value in values.items()]
        for state in by_rank
    ]
    merged = {i: values for state in by_rank for i, values in state.items()}
    for values in (merged[100 + rank] for rank in range(3)):
        assert all(values[name].nbytes > PIECE for name in list(values)[:4])
        values["parameter"] = values["parameter"].detach()
        values["conj"], values["neg"] = values["conj"].resolve_conj(), values["neg"].resolve_neg()
    check(entries, {i: merged[i] for i in sorted(merged)}, to)


def parts(to: int) -> None:
    """Gathers uneven, empty and large parts that all ranks hold, and whole values."""
    shapes = {0: (5, 7), 4: (3 * KB + 1, 2), 2: (3,), 7: (6, 4, 3), 3: (1, 3)}
    dtypes = {0: torch.float32, 4: torch.float32, 2: torch.int16, 7: torch.bool, 3: torch.float64}
    full = {i: random(shape, dtypes[i], i) for i, shape in shapes.items()}
    full[7] = full[7].permute(1, 2, 0)
    entries: list[list[Entry]] = [[] for _ in range(3)]
    for index, tensor in full.items():
        cuts = [tensor.numel() * r * r // 9 for r in range(4)]
        if index == 0:
            cuts[1] = 0  # an empty part
        for rank in range(3):  # lower ranks hold later elements
            entries[2 - rank].append(part(index, tensor, cuts[rank], cuts[rank + 1]))
    for rank in range(3):  # each has a step, of which only rank 0's is taken, and a unique entry
        entries[rank].append(whole(0, "step", torch.tensor(float(rank))))
        entries[rank].append(whole(0, f"own {rank}", rank))
    expected: State = {index: {"exp_avg": full[index]} for index in sorted(full)}
    expected[0] |= {"step": torch.tensor(0.0), **{f"own {r}": r for r in range(3)}}
    check(entries, expected, to)


TEN = torch.ones(2, 5)
WRONG_PARTS: dict[str, tuple[Entry, Entry, str]] = {
    "overlap": (
        part(4, TEN, 0, 6), part(4, TEN, 5, 10), "bytes [(0, 24), (20, 40)], expected all 40 once"
    ),
    "no begin": (part(4, TEN, 1, 5), part(4, TEN, 5, 10), "bytes [(4, 20), (20, 40)]"),
    "shape": (part(4, TEN, 0, 5), part(4, TEN.view(5, 2), 5, 10), "shape (5, 2)"),
    "dtype": (part(4, TEN, 0, 5), part(4, TEN.double(), 5, 10), "torch.float64"),
    "whole and part": (
        whole(4, "exp_avg", TEN), part(4, TEN, 0, 9),
        "has a part of it, of torch.float32 and shape (2, 5), a lower rank all",
    ),
    "part and whole": (part(4, TEN, 0, 9), whole(4, "exp_avg", TEN), "has all of it"),
}  # fmt: skip


def wrong_parts(first: Entry, last: Entry, says: str) -> None:
    """Gathers wrong parts of the first and last rank. No rank sends the large values after them."""
    mine = {0: [first], LAST: [last]}.get(dist.get_rank(), [])
    with raises_alike(ValueError, "parameter 4 ['exp_avg']", says), Traffic() as traffic:
        entries = [*mine, whole(9 + dist.get_rank(), "large", torch.ones(KB**2))]
        exchange.gather_entries(entries, 0, world())
    assert traffic.bytes.total() < KB**2


UNSENDABLE: dict[str, Any] = {
    "cannot send a function; state may hold tensors, numbers": lambda: None,
    "layout torch.sparse_coo": [torch.ones(3).to_sparse()],
    "on meta": torch.ones(3, device="meta"),
    "cannot send a UninitializedParameter": [torch.nn.UninitializedParameter()],
}


def unsendable() -> None:
    """Gathers large state, and a value of the last rank that cannot be sent."""
    for says, value in UNSENDABLE.items():
        entries = [whole(dist.get_rank(), "exp_avg", torch.ones(8 * KB))]
        if dist.get_rank() == LAST:
            entries.append(whole(3, "hook", value))
        start = "rank 2: consolidating the optimizer state: state of parameter 3 ['hook']: "
        with raises_alike(RuntimeError, start, says):
            exchange.gather_entries(entries, 0, world())


def subgroup() -> None:
    """Gathers in a group of ranks 1 and 2 of three. Rank 0 does not wait."""
    group: Any = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    mine, six = dist.get_rank(group), torch.arange(6.0)
    entries = [whole(mine, "whole", torch.full((3,), mine)), part(5, six, 3 * mine, 3 * mine + 3)]
    state = exchange.gather_entries(entries, 1, group)
    expected = {r: {"whole": torch.full((3,), r)} for r in range(2)} | {5: {"exp_avg": six}}
    assert_same(state, expected if mine else None)
    texts = collective.all_gather_text(f"global {dist.get_rank()}", group)
    assert texts == ["global 1", "global 2"]
    with raises(RuntimeError, "rank 1: bad 1"):
        collective.raise_together(f"bad {mine}" if mine else None, group)
    with raises(ValueError, "position 0: 0 on rank 0; 1 on rank 1"):
        exchange.check_same([str(mine)], "parameters", group)


# ---- a rank that fails, and copies ---------------------------------------------------------------


def late(what: str, call: Callable[[Any], Any], agrees: bool = False) -> None:
    """Makes a call that the last rank does not join, or joins only in the agreement."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=1))
    collective.raise_together(None, group)  # connects the ranks before the call
    dist.barrier()
    if dist.get_rank() == 0:
        with raises(RuntimeError, f"{what}: a rank of the group died, is late"):
            call(group)
    elif dist.get_rank() != LAST:
        with contextlib.suppress(RuntimeError):
            call(group)
    elif agrees:
        collective.raise_together(None, group)
    dist.barrier()


def without_copies() -> None:
    """Dense tensors are sent from where they are to where they stay, in pieces."""
    values = [torch.ones(12 * KB), torch.ones(2, 4, 64, 64).to(memory_format=torch.channels_last)]
    rank = dist.get_rank()
    entries = [whole(0, number, value) for number, value in enumerate(values) if rank == LAST]
    with (
        mock.patch.object(dist, "isend", wraps=dist.isend) as sends,
        mock.patch.object(dist, "irecv", wraps=dist.irecv) as receives,
    ):
        state = exchange.gather_entries(entries, 0, world())
    at_ends = {LAST: (values, sends), 0: ([*state[0].values()] if state else [], receives)}
    held, calls = at_ends.get(rank, ([], sends))
    pieces = [call.args[0] for call in calls.mock_calls]
    assert {piece.untyped_storage().data_ptr() for piece in pieces} == {v.data_ptr() for v in held}
    assert all(piece.nbytes <= PIECE for piece in pieces)


def small_tensors_together() -> None:
    """A rank sends its small tensors in few messages."""
    values = [torch.full((8,), float(number)) for number in range(PIECE // 32 * 2)]
    entries = [[], [], [whole(0, number, value) for number, value in enumerate(values)]]
    with mock.patch.object(dist, "isend", wraps=dist.isend) as sends:
        check(entries, {0: dict(enumerate(values))}, to=0)
    sizes = [call.args[0].nbytes for call in sends.mock_calls]
    assert sizes == ([PIECE] * 2 if dist.get_rank() == LAST else [])


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": lambda weight: weight.new_empty(0),
    "dtype": lambda weight: weight.bfloat16(),
    "copied": lambda weight: weight.clone(),
    "layout": lambda weight: weight.transpose(0, -1).contiguous().transpose(0, -1),
    "tied": lambda weight: torch.ones(()).expand(weight.shape),
}


def read_state(replace: Callable[[Tensor], Tensor]) -> None:
    """State is read as it was after the step, and weights whose memory was replaced stay there."""
    params = parameters()
    zero = zero_over(params, **PARTITIONS["balanced"])
    train(zero, range(2))

    def of_rank() -> Any:
        state = zero.state_dict()["state"]
        flat = {(index, name): v for index, entry in state.items() for name, v in entry.items()}
        return {key: (v.shape, v.chunks, v.shards) for key, v in flat.items() if v.dim()}

    before, expected = of_rank(), whole_state(zero)
    zero._consolidated = None
    weights = [replace(param.detach()) for param in params]
    for param, weight in zip(params, weights, strict=True):
        param.data = weight
    assert_same(of_rank(), before)
    assert_same(whole_state(zero), expected)
    for param, weight in zip(params, weights, strict=True):
        assert param.data_ptr() == weight.data_ptr() and param.stride() == weight.stride()


def cases() -> dict[str, Callable[[], None]]:
    exchange.MAX_PACKED_BYTES = ranks.MAX_PACKED_BYTES = ranks.LARGE = PIECE
    table: dict[str, Callable[[], None]] = {
        "text and agreement": text_and_agreement,
        "check same": check_same,
        "nothing": lambda: check([[]] * 3, {}, to=0),
        "unsendable": unsendable,
        "without copies": without_copies,
        "small tensors together": small_tensors_together,
        "late state": lambda: late(
            "consolidating the optimizer state",
            lambda g: exchange.gather_entries([], 0, g),
            agrees=True,
        ),
        "late agreement": lambda: late(
            "agreeing on whether every rank can go on", lambda g: exchange.gather_entries([], 0, g)
        ),
        "late check": lambda: late(
            "comparing the parameters of the ranks",
            lambda g: exchange.check_same(NAMES, "parameters", g),
        ),
        "subgroup": subgroup,
    }
    for to in (0, LAST):
        table |= {f"whole to {to}": partial(whole_values, to), f"parts to {to}": partial(parts, to)}
    table |= {f"read, {name}": partial(read_state, replace) for name, replace in REPLACED.items()}
    for name, wrong in WRONG_PARTS.items():
        table[f"wrong: {name}"] = partial(wrong_parts, *wrong)
    return table


if __name__ == "__main__":
    run_cases(cases)
