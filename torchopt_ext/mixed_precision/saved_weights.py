"""The master weights of a state dict: ``flat_fp32_weights``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchopt_ext.mixed_precision.master_table import names_of
from torchopt_ext.optim.storage import is_steppable
from torchopt_ext.statedict.entries import tensor_problem


def read_weights(
    saved: Any, params: list[list[Tensor]], groups: list[dict[str, Any]]
) -> tuple[list[list[Tensor]], list[str]]:
    """The weights by group, and what of them does not fit its parameter.

    Args:
        saved: maps every group's index to a list of tensors.
        params: the model's, by group.
        groups: whose names messages use.

    Raises:
        AssertionError: other groups, or another number of tensors.
    """
    saved = {int(index): own for index, own in saved.items()}  # DCP makes text of them
    assert set(saved) == set(range(len(params))), (
        f"The groups of the saved weights are {sorted(saved)}, expected 0 to {len(params) - 1}"
    )
    for index, own in enumerate(params):
        assert len(saved[index]) == len(own), (
            f"The number of flat tensor is inconsistent, {len(own)} != {len(saved[index])}"
        )
    weights = [list(saved[index]) for index in range(len(params))]
    problems = [
        f"the saved weight of parameter {name} {found}"
        for index, own in enumerate(params)
        for name, param, weight in zip(
            names_of(index, groups[index]), own, weights[index], strict=True
        )
        if is_steppable(param) and (found := tensor_problem(weight, param))
    ]
    return weights, problems
