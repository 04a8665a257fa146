"""Collectives: time limits, errors that name a purpose, exchange of text, and agreement of ranks.

Ranks are numbered within the group. All of them must call a function that communicates. Such a
function raises RuntimeError if a rank died or is late.
"""

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
_timeout: ContextVar[timedelta | None] = ContextVar("timeout", default=None)
_devices: "WeakKeyDictionary[Any, torch.device]" = WeakKeyDictionary()


@contextmanager
def waits_at_most(timeout: timedelta | None) -> Iterator[None]:
    """Limits how long :func:`run` and :func:`wait` wait inside; None keeps the caller's limit."""
    token = _timeout.set(timeout or _timeout.get())
    try:
        yield
    finally:
        _timeout.reset(token)


@contextmanager
def collective(what: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Adds a collective's purpose to its error. ``timeout`` is as for :func:`waits_at_most`."""
    try:
        with waits_at_most(timeout):
            yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: a rank of the group died, is late or does something else: {error}"
        ) from error


def run(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a collective operation and waits for it."""
    if _timeout.get() is None:
        operation(*args, **kwargs)
    else:
        wait(operation(*args, async_op=True, **kwargs))


def wait(work: Any) -> None:
    """Waits for a collective under way, up to the limit, or without a limit as the group does."""
    timeout = _timeout.get()
    if timeout is None:
        work.wait()  # NCCL makes the stream wait, not the host
    else:
        work.wait(timeout)


def use_device(group: Any, device: torch.device) -> None:
    """Sets the CUDA device of this rank's tensors of ``group``, if it is not the current device."""
    if device.type == "cuda":
        _devices[group] = device


DESTROYED = (
    "the process group was destroyed: build another optimizer with a group that exists, and load "
    "the saved state"
)


def comm_device(group: dist.ProcessGroup, at: torch.device = CPU) -> torch.device:
    """Returns the device for tensors that ``group`` sends: ``at`` if possible, else CPU or GPU."""
    try:
        backends = dist.get_backend_config(group)
    except (TypeError, ValueError) as error:  # torch does not know the group
        raise RuntimeError(DESTROYED) from error
    for device in (at, CPU):
        if f"{device.type}:" in backends:
            return device
    return _devices.get(group) or torch.device("cuda", torch.cuda.current_device())


def compared(value: object) -> int:
    """Returns a number of 56 bits by which ranks compare plain values: a hash of the text."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def all_gather_text(
    text: str, group: dist.ProcessGroup | None, what: str = "exchanging text"
) -> list[str]:
    """Returns the text of every rank, by rank (None: of this process). Errors name ``what``."""
    if group is None:
        return [text]
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    lengths = [int(n) for n in all_gather(torch.tensor([len(data)]), group, what)]
    if not any(lengths):
        return [""] * len(lengths)
    padded = torch.frombuffer(data.ljust(max(lengths), b"\0"), dtype=torch.uint8)
    gathered = zip(all_gather(padded, group, what), lengths, strict=True)
    texts = [ctypes.string_at(part.data_ptr(), n) for part, n in gathered]
    return [text.decode("utf-8", "surrogatepass") for text in texts]


def all_gather_json(
    value: Any, group: dist.ProcessGroup | None, what: str = "exchanging values"
) -> list[Any]:
    """Returns the values of every rank, of JSON's types, as :func:`all_gather_text` does."""
    return [json.loads(text) for text in all_gather_text(json.dumps(value), group, what)]


def raise_together(
    error: str | None, group: dist.ProcessGroup | None, kind: type[Exception] = RuntimeError
) -> None:
    """Raises ``kind`` with all ranks' errors, if any, on every rank (None: in this process)."""
    mine = "" if error is None else error or "an error without a message"
    if group is None:
        if mine:
            raise kind(mine)
        return
    errors = all_gather_text(mine, group, "agreeing on whether every rank can go on")
    if any(errors):
        raise kind("; ".join(f"rank {r}: {e}" for r, e in enumerate(errors) if e))


@contextmanager
def fail_together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Runs local work that fails on all ranks if it fails on one: the others raise, too.

    Raises:
        ValueError: the work failed on another rank; the message has the rank and its error.
    """
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError, ValueError):
            raise_together(f"{type(error).__name__}: {error}", group, ValueError)
        raise
    raise_together(None, group, ValueError)


@contextmanager
def fail_together_in(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """As :func:`fail_together` over all ranks of overlapping groups, such as a mesh's."""
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(fail_together(group))
        yield


def all_gather(tensor: Tensor, group: dist.ProcessGroup, what: str) -> list[Tensor]:
    mine = tensor.to(comm_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with collective(what):
        run(dist.all_gather, gathered, mine, group=group)
        return [part.cpu() for part in gathered]
