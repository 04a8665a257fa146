"""Checks of arguments: the message names the argument and shows its value."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
"""Of a param group of Adam's."""


def expect_numbers(**values: Any) -> None:
    """Rejects what is not one number, such as YAML's ``1e-3``, a string there.

    Raises:
        TypeError, ValueError: names the argument.
    """
    for name, value in values.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name} is {value!r:.200}, expected a number")
        if isinstance(value, Tensor) and value.numel() != 1:  # with torch.optim.Adam's message
            raise ValueError(f"Tensor {name} must be 1-element, but has shape {[*value.shape]}")


def expect_counts(**values: Any) -> None:
    """Rejects what is no integer of 64 bits.

    Raises:
        TypeError, ValueError: names the argument.
    """
    for name, value in values.items():
        try:
            count = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r:.200}, expected an integer") from None
        if not -(2**63) <= count < 2**64:
            raise ValueError(f"{name} is {count}, expected an integer of 64 bits")


def expect_bools(**values: Any) -> None:
    """Rejects what is neither True nor False, such as "no", which would be true.

    Raises:
        TypeError: names the argument.
    """
    for name, value in values.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r:.200}, expected a bool")


def expect_hyperparameters(*, betas: Any, **others: Any) -> None:
    """Rejects values of :data:`HYPERPARAMETERS` that are no numbers.

    Raises:
        TypeError: names the value.
    """
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise TypeError(f"betas is {betas!r:.200}, expected two numbers") from None
    expect_numbers(**{"betas[0]": first, "betas[1]": second}, **others)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside the wrappers that Accelerate and Lightning put around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def expect_group(process_group: Any) -> None:
    """Rejects what is neither None nor a process group, such as a mesh dimension's name.

    Raises:
        TypeError: shows the value.
    """
    if process_group is None or isinstance(process_group, torch.distributed.ProcessGroup):
        return
    raise TypeError(
        f"process_group is {process_group!r:.200}, expected a torch.distributed.ProcessGroup"
    )
