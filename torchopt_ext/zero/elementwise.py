"""Optimizers that treat every element by itself: they may step any part of a parameter."""

from typing import Any

from torchopt_ext.optim import FusedAdam
from torchopt_ext.statedict.entries import REQUIRED


def is_elementwise(optimizer_class: Any) -> bool:
    """Whether the class is known to be; a subclass may do anything and is not."""
    if not isinstance(optimizer_class, type):
        return False
    return optimizer_class in REQUIRED or issubclass(optimizer_class, FusedAdam)


def check_elementwise(optimizer_class: Any, promised: bool) -> None:
    """Raises ValueError for an optimizer that is not known to be elementwise, nor said to be."""
    if not promised and not is_elementwise(optimizer_class):
        known = ", ".join(cls.__name__ for cls in REQUIRED)
        raise ValueError(
            f"partition='balanced' divides parameters among ranks, which suits FusedAdam, "
            f"FusedAdamW, {known}; {optimizer_class} may look at whole parameters. If it does not, "
            f"say so with elementwise=True"
        )
