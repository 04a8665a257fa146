"""How long to wait for a collective, and what to say when it fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

_timeout: ContextVar[timedelta | None] = ContextVar("timeout", default=None)


@contextmanager
def waits_at_most(timeout: timedelta | None) -> Iterator[None]:
    """Bounds :func:`run` and :func:`wait` inside; None keeps the bound of the caller."""
    token = _timeout.set(timeout or _timeout.get())
    try:
        yield
    finally:
        _timeout.reset(token)


@contextmanager
def collective(what: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Says which collective failed when a rank of the group died or is late.

    Args:
        what: what the collective is for.
        timeout: as :func:`waits_at_most`.

    Raises:
        RuntimeError: torch.distributed raised one; that one is its cause.
    """
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
    """Waits for a collective under way: as long as the bound allows, without one the group."""
    timeout = _timeout.get()
    if timeout is None:
        work.wait()  # NCCL makes the stream wait, not the host
    else:
        work.wait(timeout)
