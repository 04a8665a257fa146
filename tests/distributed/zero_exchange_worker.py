"""One rank of tests/distributed/test_zero_exchange.py; writes its results as JSON.

Usage: torchrun ... zero_exchange_worker.py FOLDER
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import difference, run_cases
from torch import Tensor
from torch.utils._pytree import tree_flatten

from torchopt_ext.optim import collective
from torchopt_ext.zero import exchange
from torchopt_ext.zero.exchange import Entry

Result = dict[str, Any]
State = dict[int, dict[Any, Any]]

MB = 1 << 20
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


def outcome(call: Callable[[], Any]) -> Result:
    """Returns the call's error, or whether it returned a value, and its seconds."""
    start = time.monotonic()
    try:
        result = {"returned": None if call() is None else "something"}
    except Exception as error:
        cause = type(error.__cause__).__name__
        result = {"raised": type(error).__name__, "message": str(error), "cause": cause}
    return {**result, "seconds": time.monotonic() - start}


def gathered(by_rank: list[list[Entry]], expected: State, to: int) -> Result:
    state = exchange.gather_entries(by_rank[dist.get_rank()], to, world())
    if dist.get_rank() != to:
        return {"target": False, "difference": "" if state is None else "not None"}
    return {"target": True, "difference": copy_difference(state, expected)}


# ---- text and agreement --------------------------------------------------------------------------


TEXTS = ["", "any\u00efthing \U0001f600 \ud800", "x" * 5000]


def all_gather_text() -> Result:
    size = dist.get_world_size()
    found = collective.all_gather_text(TEXTS[dist.get_rank()], world())
    empty = collective.all_gather_text("", world())
    return {"found": found == TEXTS[:size], "empty": empty == [""] * size}


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


def agree(error: str | None) -> Result:
    """Agrees on an error that only the last rank has."""
    mine = error if dist.get_rank() == dist.get_world_size() - 1 else None
    with traffic() as sizes:
        result = outcome(lambda: collective.agree(mine, world()))
    return {**result, "traffic": sizes}


def check_same(mine: list[str], last: list[str] | None = None) -> Result:
    """Compares descriptions. The last rank may have others (`last`)."""
    if last is not None and dist.get_rank() == dist.get_world_size() - 1:
        mine = last
    with traffic() as sizes:
        result = outcome(lambda: exchange.check_same(mine, "parameters", world()))
    return {**result, "traffic": sizes}


# ---- state ---------------------------------------------------------------------------------------


def whole_tensors(to: int) -> Result:
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
    return gathered(by_rank, expected, to)


def large_tensors(to: int) -> Result:
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
    return gathered(by_rank, expected, to)


def other_values() -> Result:
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
    return gathered(by_rank, expected, to=0)


def parts(to: int) -> Result:
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
    return gathered(by_rank, expected, to)


def parts_not_contiguous() -> Result:
    """Gathers parts of a tensor with permuted dimensions."""
    size = dist.get_world_size()
    flat = random((size, 24), torch.float32, 0)
    full = flat.view(size, 6, 4).permute(1, 2, 0)
    spread = flat[:, :, None].expand(size, 24, 2).contiguous()[:, :, 0]
    by_rank = [[Entry(7, "m", spread[r], full, 24 * r)] for r in range(size)]
    return gathered(by_rank, {7: {"m": full}}, to=0)


def nothing() -> Result:
    return gathered([[] for _ in range(dist.get_world_size())], {}, to=0)


def wrong_parts(first: Entry, last: Entry) -> Result:
    """Gathers wrong parts of the first and last rank. No rank sends the large values after them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    entries = {0: [first], size - 1: [last]}.get(rank, [])
    entries = [*entries, Entry(9 + rank, "large", torch.ones(2 * MB))]
    result = outcome(lambda: exchange.gather_entries(entries, 0, world()))
    collective.agree(None, world())  # works, so no message is left over
    return result


def part(begin: int, end: int, shape: tuple[int, ...] = (2, 5), **kwargs: Any) -> Entry:
    return Entry(4, "exp_avg", torch.ones(end - begin, **kwargs), torch.empty(shape), begin)


WRONG_PARTS: dict[str, tuple[Entry, Entry]] = {
    "overlap": (part(0, 6), part(5, 10)),
    "hole": (part(0, 4), part(5, 10)),
    "no begin": (part(1, 5), part(5, 10)),
    "no end": (part(0, 5), part(5, 9)),
    "same twice": (part(0, 10), part(0, 10)),
    "too far": (part(0, 5), part(5, 11)),
    "negative": (part(0, 5), part(-1, 10)),
    "shape": (part(0, 5), part(5, 10, (5, 2))),
    "dtype": (part(0, 5), part(5, 10, dtype=torch.float64)),
    "large dtype": (
        part(0, 5, (3 * MB,)), part(5, 3 * MB, (3 * MB,), dtype=torch.float64),
    ),
    "whole and part": (Entry(4, "exp_avg", torch.ones(2, 5)), part(0, 10)),
    "part and whole": (part(0, 10), Entry(4, "exp_avg", torch.ones(2, 5))),
}  # fmt: skip


def unsendable(value: Any, **kwargs: Any) -> Result:
    """Gathers large state, and a value of the last rank that cannot be sent."""
    entries = [Entry(dist.get_rank(), "exp_avg", torch.ones(8 * MB))]
    if dist.get_rank() == dist.get_world_size() - 1:
        entries.append(Entry(3, "hook", value, **kwargs))
    return outcome(lambda: exchange.gather_entries(entries, 0, world()))


def subgroup() -> Result:
    """Gathers in a group of ranks 1 and 2 of three. Rank 0 does not wait."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return {}
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
    return {
        "device": str(collective.comm_device(group)),
        "texts": collective.all_gather_text(f"global {dist.get_rank()}", group),
        "agree": outcome(lambda: collective.agree(f"bad {mine}" if mine else None, group)),
        "check_same": outcome(lambda: exchange.check_same([str(mine)], "parameters", group)),
        "target": state is not None,
        "difference": copy_difference(state, expected) if mine == 1 else "",
    }


# ---- a rank that fails, and memory ---------------------------------------------------------------


def late(call: Callable[[dist.ProcessGroup], Any], agreed: bool = False) -> Result:
    """Makes a call that the last rank does not join, or joins only in the agreement."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    collective.agree(None, group)  # connects the ranks before the call
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        if agreed:
            collective.agree(None, group)
        dist.barrier()
        return {}
    result = outcome(lambda: call(group))
    dist.barrier()
    return result


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


def memory() -> Result:
    """Gathers 128 MB from the last rank, by every transport."""
    entries: list[Entry] = []
    if dist.get_rank() == dist.get_world_size() - 1:
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
    return {"grown": grown["bytes"] / MB, "target": state is not None}


def growth_is_seen() -> Result:
    """Measures the growth by a tensor, to prove that the test of memory sees it."""
    with growth() as grown:
        tensor = torch.ones(16 * MB)
        time.sleep(0.05)
    return {"grown": grown["bytes"] / MB, "held": tensor.numel()}


NAMES = ["'a': float32 (2,)", "'b': float32 (3,)", "'c': float32 (4,)"]


def cases() -> dict[str, Callable[[], Result]]:
    last = dist.get_world_size() - 1
    found: dict[str, Callable[[], Result]] = {
        "text": all_gather_text,
        "agree": lambda: agree(None),
        "disagree": lambda: agree("no space"),
        "disagree silently": lambda: agree(""),
        "same": lambda: check_same(NAMES * 100),
        "same, none": lambda: check_same([]),
        "other shape": lambda: check_same(NAMES, [NAMES[0], "'b': float32 (4,)", NAMES[2]]),
        "other order": lambda: check_same(NAMES, NAMES[::-1]),
        "one more": lambda: check_same(NAMES, [*NAMES, "'d': float32 (1,)"]),
        "one less": lambda: check_same(NAMES, NAMES[:-1]),
        "split otherwise": lambda: check_same(["a", "b"], ["a, b"]),
        "whole to first": lambda: whole_tensors(0),
        "whole to last": lambda: whole_tensors(last),
        "large to first": lambda: large_tensors(0),
        "large to last": lambda: large_tensors(last),
        "other values": other_values,
        "parts to first": lambda: parts(0),
        "parts to last": lambda: parts(last),
        "parts, not contiguous": parts_not_contiguous,
        "nothing": nothing,
        "function": lambda: unsendable(lambda: None),
        "sparse": lambda: unsendable([torch.ones(3).to_sparse()]),
        "meta": lambda: unsendable(torch.ones(3, device="meta")),
        "subclass": lambda: unsendable(torch.nn.UninitializedParameter()),
        "part of a float": lambda: unsendable(1.0, whole=torch.empty(3)),
        "growth": growth_is_seen,
        "memory": memory,
        "late state": lambda: late(lambda g: exchange.gather_entries([], 0, g), agreed=True),
        "late agreement": lambda: late(lambda g: exchange.gather_entries([], 0, g)),
        "late check": lambda: late(lambda g: exchange.check_same(NAMES, "parameters", g)),
        "subgroup": subgroup,
    }
    for name, (first, other) in WRONG_PARTS.items():
        found[f"wrong: {name}"] = lambda f=first, o=other: wrong_parts(f, o)
    return found


if __name__ == "__main__":
    run_cases(cases)
