"""Hooks on parameters and modules that neither keep their owner alive nor stay after it."""

import contextlib
import weakref
from typing import Any


class WeakHook:
    """Calls a method of an owner that it does not keep alive.

    A copy of it, or what is unpickled, does nothing: the standard library's
    ``nullcontext().__exit__``, so that a saved module needs no package of ours.
    """

    def __init__(self, owner: Any, method: str) -> None:
        self._owner = weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def handles_of(owner: Any) -> list[Any]:
    """A list for handles of hooks, which are removed when ``owner`` has gone."""
    handles: list[Any] = []
    weakref.finalize(owner, _remove_all, handles)
    return handles


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
