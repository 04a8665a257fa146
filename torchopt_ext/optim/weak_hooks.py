"""Hooks on parameters and modules that do not keep their owner alive and are removed with it."""

import contextlib
import weakref
from typing import Any

from torchopt_ext._torch import run_eagerly


class WeakHook:
    """Calls a method of an owner but does not keep the owner alive.

    A copied or unpickled hook does nothing: it is ``nullcontext().__exit__`` of the standard
    library, so that a saved module does not need this package.
    """

    def __init__(self, owner: Any, method: str) -> None:
        self._owner = weakref.ref(owner)
        self._method = method

    @run_eagerly  # code that calls backward may be compiled, and with it what backward calls
    def __call__(self, *args: Any) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def handles_of(owner: Any) -> list[Any]:
    """Returns a list for handles of hooks, which are removed when ``owner`` is gone."""
    handles: list[Any] = []
    weakref.finalize(owner, remove_all, handles)
    return handles


def remove_all(handles: list[Any]) -> None:
    """Removes hooks, and empties the list of their handles."""
    while handles:
        handles.pop().remove()
