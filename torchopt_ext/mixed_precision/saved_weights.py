"""The master weights of a state dict: ``flat_fp32_weights``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchopt_ext.mixed_precision.master_table import names_of
from torchopt_ext.optim.local import local_tensor
from torchopt_ext.optim.state import check_shape


def check_weights(
    saved: Any, params: list[list[Tensor]], groups: list[dict[str, Any]]
) -> list[list[Tensor]]:
    """The weights by group, if each fits its parameter.

    Args:
        saved: maps every group's index to a list of tensors.
        params: the model's, by group.
        groups: whose names messages use.

    Raises:
        AssertionError: other groups, or another number of tensors.
        ValueError: a tensor does not fit; names the parameter.
    """
    assert set(saved) == set(range(len(params))), (
        f"The groups of the saved weights are {sorted(saved)}, expected 0 to {len(params) - 1}"
    )
    for index, own in enumerate(params):
        assert len(saved[index]) == len(own), (
            f"The number of flat tensor is inconsistent, {len(own)} != {len(saved[index])}"
        )
    for index, own in enumerate(params):
        for name, param, weight in zip(
            names_of(index, groups[index]), own, saved[index], strict=True
        ):
            what = f"the saved weight of parameter {name}"
            check_shape(weight, param, what)
            local = local_tensor(weight)
            if local.layout is not torch.strided or not local.is_floating_point() or local.is_meta:
                raise ValueError(
                    f"{what} is {local.dtype}, {local.layout}, on {local.device}; expected a dense "
                    f"float32 tensor with memory"
                )
            if local.shape != local_tensor(param).shape:
                raise ValueError(
                    f"{what} has {tuple(local.shape)} of it on this rank, expected "
                    f"{tuple(local_tensor(param).shape)}"
                )
    return [list(saved[index]) for index in range(len(params))]
