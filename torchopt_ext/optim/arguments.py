"""Checks of arguments' types: the message names the argument and shows its value."""

import operator
from numbers import Real
from typing import Any

from torch import Tensor

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
"""Of a param group of Adam's."""


def expect_numbers(**values: Any) -> None:
    """Rejects what is neither a number nor a tensor, such as YAML's ``1e-3``, a string there.

    Raises:
        TypeError: names the argument.
    """
    for name, value in values.items():
        if not isinstance(value, Real | Tensor):
            raise TypeError(f"{name} is {value!r:.200}, expected a number")


def expect_counts(**values: Any) -> None:
    """Rejects what is no integer.

    Raises:
        TypeError: names the argument.
    """
    for name, value in values.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r:.200}, expected an integer") from None


def expect_hyperparameters(*, betas: Any, **others: Any) -> None:
    """Rejects values of :data:`HYPERPARAMETERS` that are no numbers.

    Raises:
        TypeError: names the value.
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas is {betas!r:.200}, expected two numbers")
    expect_numbers(**{f"betas[{i}]": beta for i, beta in enumerate(betas)}, **others)
