"""Cases of test_workers.py: three ranks exchange text, errors and optimizer state."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import difference, run_cases
from torch import Tensor
from torch.utils._pytree import tree_flatten

from torchopt_ext.state import collective
from torchopt_ext.zero import exchange
from torchopt_ext.zero.exchange import Entry

State = dict[int, dict[Any, Any]]

MB = 1 << 20
QUICK = 20  # seconds; the group's timeout is 60, and a call takes well below 1
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
    torch.complex128,
]  # fmt: skip


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns random bits of the dtype, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def copy_difference(found: Any, expected: Any) -> str:
    """Returns the first difference in structure, bits, layout or owner of the memory, or ""."""
    (mine, structure), (theirs, other) = tree_flatten(found), tree_flatten(expected)
    if structure != other:
        return f"{structure} instead of {other}"
    for copied, tensor in zip(mine, theirs, strict=True):
        if not isinstance(tensor, Tensor) or not isinstance(copied, Tensor):
            continue
        if copied.stride() != torch.empty_like(tensor).stride():
            return f"stride {copied.stride()} of {tensor.stride()}"
        if copied.untyped_storage().nbytes() != copied.numel() * copied.element_size():
            return f"{copied.untyped_storage().nbytes()} bytes of memory"
        if copied.numel() and copied.data_ptr() == tensor.data_ptr():
            return "not in memory of its own"
        if copied.requires_grad:
            return "requires grad"
    return difference(found, expected)


@contextmanager
def raises(error: type[Exception], start: str, *parts: str, end: str = "") -> Iterator[None]:
    """Asserts that the block soon raises the same message on all ranks."""
    begin = time.monotonic()
    with pytest.raises(error) as raised:
        yield
    assert time.monotonic() - begin < QUICK
    message = str(raised.value)
    assert collective.all_gather_text(message, world()) == [message] * dist.get_world_size()
    assert message.startswith(start) and message.endswith(end), message
    assert all(part in message for part in parts), message


def gathered(by_rank: list[list[Entry]], expected: State, to: int) -> None:
    """Asserts that only the target gets the state, with equal bits, strides and order."""
    state = exchange.gather_entries(by_rank[dist.get_rank()], to, world())
    if dist.get_rank() == to:
        assert copy_difference(state, expected) == ""
    else:
        assert state is None


# ---- text and agreement --------------------------------------------------------------------------


TEXTS = ["", "any\u00efthing \U0001f600 \ud800", "x" * 5000]


def all_gather_text() -> None:
    assert collective.all_gather_text(TEXTS[dist.get_rank()], world()) == TEXTS
    assert collective.all_gather_text("", world()) == [""] * len(TEXTS)


@contextmanager
def traffic() -> Iterator[list[int]]:
    """Yields a list of the bytes that this rank gives to each all-gather."""
    sizes: list[int] = []
    original = dist.all_gather

    def counted(out: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(out, tensor, *args, **kwargs)

    dist.all_gather = counted
    try:
        yield sizes
    finally:
        dist.all_gather = original


def agree() -> None:
    """Agreement costs one length. An error of one rank is named on all."""
    with traffic() as sizes:
        collective.raise_together(None, world())
    assert sizes == [8]
    for error, message in (("no space", "rank 2: no space"), ("", "rank 2: ")):
        with raises(RuntimeError, message):
            collective.raise_together(error if is_last() else None, world())


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


NAMES = ["'a': float32 (2,)", "'b': float32 (3,)", "'c': float32 (4,)"]
OTHERS: dict[str, tuple[list[str], list[str], str]] = {
    "other shape": (
        NAMES, [NAMES[0], "'b': float32 (4,)", NAMES[2]],
        "1: 'b': float32 (3,) on rank 0, 1; 'b': float32 (4,) on rank 2",
    ),
    "other order": (
        NAMES, NAMES[::-1], "0: 'a': float32 (2,) on rank 0, 1; 'c': float32 (4,) on rank 2",
    ),
    "one more": (
        NAMES, [*NAMES, "'d': float32 (1,)"],
        "3: nothing on rank 0, 1; 'd': float32 (1,) on rank 2",
    ),
    "one less": (NAMES, NAMES[:-1], "2: 'c': float32 (4,) on rank 0, 1; nothing on rank 2"),
    "split otherwise": (["a", "b"], ["a, b"], "0: a on rank 0, 1; a, b on rank 2"),
}  # fmt: skip


def check_same() -> None:
    """The same parameters cost a count and a digest. Others of the last rank are named."""
    for same in (NAMES * 100, []):
        with traffic() as sizes:
            exchange.check_same(same, "parameters", world())
        assert sizes == [16]
    for mine, last, found in OTHERS.values():
        with raises(ValueError, "", "differ in their parameters", end=f"position {found}"):
            exchange.check_same(last if is_last() else mine, "parameters", world())


# ---- state ---------------------------------------------------------------------------------------


def whole_tensors(to: int) -> None:
    """Gathers tensors of all dtypes, layouts and sizes, of other parameters on every rank."""
    size = dist.get_world_size()
    by_rank: list[list[Entry]] = []
    everything: State = {}
    for rank in range(size):
        entries = []
        for number, dtype in enumerate(DTYPES):
            index = (len(DTYPES) - 1 - number) * size + rank
            values = {
                "exp_avg": random((3, 5, 7), dtype, index),
                "0-dim": random((), dtype, index),
                "empty": random((0, 4), dtype, index),
                "transposed": random((6, 5), dtype, index).t(),
                "sliced": random((9, 8), dtype, index)[::2, 1::3],
                "expanded": random((1, 4), dtype, index).expand(3, 4),
            }
            everything[index] = values
            entries += [Entry(index, name, value) for name, value in values.items()]
        by_rank.append(entries)
    expected = {index: everything[index] for index in sorted(everything)}
    gathered(by_rank, expected, to)


def large_tensors(to: int) -> None:
    """Gathers tensors around the transports' size limits, and strided tensors in pieces."""
    by_rank: list[list[Entry]] = []
    expected: State = {}
    for rank in range(dist.get_world_size()):
        base = random((3, 7 * MB // 2), torch.float32, rank)
        values = {
            "step": torch.tensor(float(rank)),
            "just alone": random((4 * MB,), torch.uint8, rank),
            "just shared": random((4 * MB - 1,), torch.uint8, rank),
            "pieces": random((9 * MB + 3,), torch.int16, rank),
            "channels_last": random((2, 3, 1100, 1000), torch.float32, rank).to(
                memory_format=torch.channels_last
            ),
            "strided": base[:, ::2],
            "strided columns": base.t()[::2],
            "small": random((5,), torch.bfloat16, rank),
        }
        for name in ("pieces", "channels_last", "strided", "strided columns"):
            assert values[name].nbytes > exchange.MAX_PACKED_BYTES
        expected[rank] = values
        by_rank.append([Entry(rank, name, value) for name, value in values.items()])
    gathered(by_rank, expected, to)


def other_values() -> None:
    """Gathers values that are not tensors, some with tensors inside."""
    size = dist.get_world_size()
    by_rank, expected = [], {}
    for rank in range(size):
        grad = torch.nn.Parameter(torch.ones(rank + 1))
        values = {
            "history": [(rank, torch.full((2,), rank)), {"at": torch.ones(3).bool(), 1: None}],
            "lr": float("inf"),
            ("a", 1): "text",
            "dtype": torch.bfloat16,
            "parameter": grad,
            "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        }
        by_rank.append([Entry(rank, name, value) for name, value in values.items()])
        expected[rank] = {
            **values, "parameter": grad.detach().clone(), "conj": torch.tensor([1 - 2j, 3 + 1j]),
            "neg": torch.tensor([-2.0, 1.0]),
        }  # fmt: skip
    gathered(by_rank, expected, to=0)


def parts(to: int) -> None:
    """Gathers uneven, empty and large parts that all ranks hold, and whole values."""
    size = dist.get_world_size()
    shapes = {0: (5, 7), 4: (3 * MB + 1, 2), 2: (size,), 1: (), 3: (0, 3)}
    dtypes = {0: torch.float32, 4: torch.float32, 2: torch.int16, 1: torch.bool, 3: torch.float64}
    full = {i: random(shape, dtypes[i], i) for i, shape in shapes.items()}
    by_rank: list[list[Entry]] = [[] for _ in range(size)]
    for index, tensor in full.items():
        cuts = [tensor.numel() * r * r // size**2 for r in range(size + 1)]
        if index == 0:
            cuts[1] = 0  # an empty part
        for rank in range(size):
            begin, end = cuts[rank], cuts[rank + 1]
            # lower ranks hold later elements
            part = tensor.view(-1)[begin:end].clone()
            entry = Entry(index, "exp_avg", part, tensor, begin)
            by_rank[size - 1 - rank].append(entry)
    for rank in range(size):  # each has a step, of which only rank 0's is taken, and a unique entry
        by_rank[rank].append(Entry(0, "step", torch.tensor(float(rank))))
        by_rank[rank].append(Entry(0, f"own {rank}", rank))
    expected: State = {index: {"exp_avg": full[index]} for index in sorted(full)}
    expected[0] |= {"step": torch.tensor(0.0), **{f"own {r}": r for r in range(size)}}
    gathered(by_rank, expected, to)


def parts_not_contiguous() -> None:
    """Gathers parts of a tensor with permuted dimensions."""
    size = dist.get_world_size()
    flat = random((size, 24), torch.float32, 0)
    full = flat.view(size, 6, 4).permute(1, 2, 0)
    spread = flat[:, :, None].expand(size, 24, 2).contiguous()[:, :, 0]
    by_rank = [[Entry(7, "m", spread[r], full, 24 * r)] for r in range(size)]
    gathered(by_rank, {7: {"m": full}}, to=0)


def nothing() -> None:
    gathered([[] for _ in range(dist.get_world_size())], {}, to=0)


def wrong_parts(first: Entry, last: Entry, says: str) -> None:
    """Gathers wrong parts of the first and last rank. No rank sends the large values after them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    entries = {0: [first], size - 1: [last]}.get(rank, [])
    entries = [*entries, Entry(9 + rank, "large", torch.ones(2 * MB))]
    with raises(ValueError, "", "parameter 4 ['exp_avg']", says):
        exchange.gather_entries(entries, 0, world())
    collective.raise_together(None, world())  # works, so no message is left over


def part(begin: int, end: int, shape: tuple[int, ...] = (2, 5), **kwargs: Any) -> Entry:
    return Entry(4, "exp_avg", torch.ones(end - begin, **kwargs), torch.empty(shape), begin)


WRONG_PARTS: dict[str, tuple[Entry, Entry, str]] = {
    "overlap": (part(0, 6), part(5, 10), "bytes [(0, 24), (20, 40)], expected all 40 once"),
    "hole": (part(0, 4), part(5, 10), "bytes [(0, 16), (20, 40)]"),
    "no begin": (part(1, 5), part(5, 10), "bytes [(4, 20), (20, 40)]"),
    "too far": (part(0, 5), part(5, 11), "bytes [(0, 20), (20, 44)]"),
    "shape": (part(0, 5), part(5, 10, (5, 2)), "shape (5, 2)"),
    "dtype": (part(0, 5), part(5, 10, dtype=torch.float64), "torch.float64"),
    "whole and part": (
        Entry(4, "exp_avg", torch.ones(2, 5)), part(0, 10),
        "has a part of it, of torch.float32 and shape (2, 5), a lower rank all",
    ),
    "part and whole": (part(0, 10), Entry(4, "exp_avg", torch.ones(2, 5)), "has all of it"),
}  # fmt: skip


def unsendable(says: str, value: Any, **kwargs: Any) -> None:
    """Gathers large state, and a value of the last rank that cannot be sent."""
    entries = [Entry(dist.get_rank(), "exp_avg", torch.ones(8 * MB))]
    if is_last():
        entries.append(Entry(3, "hook", value, **kwargs))
    start = "rank 2: consolidating the optimizer state: state of parameter 3 ['hook']: "
    with raises(RuntimeError, start, says):
        exchange.gather_entries(entries, 0, world())


def subgroup() -> None:
    """Gathers in a group of ranks 1 and 2 of three. Rank 0 does not wait."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    mine = dist.get_rank(group)
    entries = [
        Entry(mine, "whole", random((2 * MB,), torch.float32, mine)),
        Entry(5, "part", torch.full((3,), float(mine)), torch.empty(6), 3 * mine),
    ]
    state = exchange.gather_entries(entries, 1, group)
    expected: State = {
        **{r: {"whole": random((2 * MB,), torch.float32, r)} for r in range(2)},
        5: {"part": torch.tensor([0.0, 0, 0, 1, 1, 1])},
    }
    assert copy_difference(state, expected) == "" if mine == 1 else state is None
    assert str(collective.comm_device(group)) == "cpu"
    texts = collective.all_gather_text(f"global {dist.get_rank()}", group)
    assert texts == ["global 1", "global 2"]
    with pytest.raises(RuntimeError, match=r"^rank 1: bad 1$"):
        collective.raise_together(f"bad {mine}" if mine else None, group)
    with pytest.raises(ValueError, match=r"position 0: 0 on rank 0; 1 on rank 1$"):
        exchange.check_same([str(mine)], "parameters", group)


# ---- a rank that fails, and memory ---------------------------------------------------------------


def late(what: str, call: Callable[[dist.ProcessGroup], Any], agreed: bool = False) -> None:
    """Makes a call that the last rank does not join, or joins only in the agreement."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    collective.raise_together(None, group)  # connects the ranks before the call
    dist.barrier()
    if is_last():
        if agreed:
            collective.raise_together(None, group)
    elif dist.get_rank() == 0:
        begin = time.monotonic()
        message = f"^{what}: a rank of the group died, is late"
        with pytest.raises(RuntimeError, match=message) as error:
            call(group)
        assert error.value.__cause__ is not None
        assert time.monotonic() - begin < QUICK
    else:
        with contextlib.suppress(RuntimeError):
            call(group)
    dist.barrier()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@contextmanager
def growth() -> Iterator[dict[str, int]]:
    """Yields a dict for the largest growth of this process's memory meanwhile."""
    # Memory that malloc keeps after earlier frees would hide the growth.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    start = resident()
    found = {"bytes": 0}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            found["bytes"] = max(found["bytes"], resident() - start)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def memory() -> None:
    """Sends 128 MB from the last rank, by every transport.

    They take far less than a copy on the sender, and little more than a copy on the target.
    """
    with growth() as seen:  # proves that the test sees growth
        tensor = torch.ones(16 * MB)
        time.sleep(0.05)
    assert seen["bytes"] > 60 * MB
    del tensor
    entries: list[Entry] = []
    if is_last():
        values = {
            "pieces": torch.ones(12 * MB),
            "channels_last": torch.ones(2, 4, 1024, 1024).to(memory_format=torch.channels_last),
            "strided": torch.ones(4 * MB, 2)[:, 0],
            **{f"alone {i}": torch.ones(MB + i) for i in range(2)},
            **{f"shared {i}": torch.ones(MB // 4) for i in range(24)},
        }
        assert sum(v.numel() * 4 for v in values.values()) >= 128 * MB
        entries = [Entry(0, name, value) for name, value in values.items()]
    state: State | None = None
    dist.barrier()
    with growth() as grown:
        state = exchange.gather_entries(entries, 0, world())
    if dist.get_rank() == 0:
        assert state is not None
        assert 120 * MB < grown["bytes"] < (128 + 40) * MB
    else:
        assert state is None
        assert grown["bytes"] < 40 * MB


def cases() -> dict[str, Callable[[], None]]:
    gather = exchange.gather_entries
    found: dict[str, Callable[[], None]] = {
        "text": all_gather_text,
        "agree": agree,
        "check same": check_same,
        "other values": other_values,
        "parts, not contiguous": parts_not_contiguous,
        "nothing": nothing,
        "function": lambda: unsendable(
            "cannot send a function; state may hold tensors, numbers", lambda: None
        ),
        "sparse": lambda: unsendable("layout torch.sparse_coo", [torch.ones(3).to_sparse()]),
        "meta": lambda: unsendable("on meta", torch.ones(3, device="meta")),
        "subclass": lambda: unsendable(
            "cannot send a UninitializedParameter", torch.nn.UninitializedParameter()
        ),
        "part of a float": lambda: unsendable(
            "is of type float, expected a tensor", 1.0, whole=torch.empty(3)
        ),
        "memory": memory,
        "late state": lambda: late(
            "consolidating the optimizer state", lambda g: gather([], 0, g), agreed=True
        ),
        "late agreement": lambda: late(
            "agreeing on whether every rank can go on", lambda g: gather([], 0, g)
        ),
        "late check": lambda: late(
            "comparing the parameters of the ranks",
            lambda g: exchange.check_same(NAMES, "parameters", g),
        ),
        "subgroup": subgroup,
    }
    for call in (whole_tensors, large_tensors, parts):
        for to in (0, dist.get_world_size() - 1):
            found[f"{call.__name__} to {to}"] = partial(call, to)
    for name, wrong in WRONG_PARTS.items():
        found[f"wrong: {name}"] = partial(wrong_parts, *wrong)
    return found


if __name__ == "__main__":
    run_cases(cases)
