"""Undoes what a partition got with a param group."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle


@contextmanager
def regrown_if_raised(*objects: Any) -> Iterator[None]:
    """Restores the objects' attributes, and what containers among these hold, if an error follows.

    Hooks whose handles came to a list are removed. Parameters may stay in other memory.
    """
    attributes = [(vars(each), vars(each).copy()) for each in objects]
    values = [value for _, before in attributes for value in before.values()]
    contents: list[Any] = [(v, copy.copy(v)) for v in values if isinstance(v, list | dict | set)]
    try:
        yield
    except BaseException:
        for held, before in contents + attributes:
            if isinstance(held, list):
                for added in held[len(before) :]:
                    if isinstance(added, RemovableHandle):
                        added.remove()
                held[:] = before
            else:
                held.clear()
                held.update(before)
        raise
