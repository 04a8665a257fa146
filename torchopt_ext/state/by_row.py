"""States with one float32 for each row of a parameter's matrices: NorMuon's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import local_shape_and_offset
from torchopt_ext.state.algorithms import STATES
from torchopt_ext.state.local import as_placed, local_tensor, placed, same_placement
from torchopt_ext.state.pieces import is_cut, marked_cut

BY_ROW = frozenset(state.name for state in STATES.values() if state.by_row)
"""Entries of a parameter's state that have one value for each row."""


def row_shape(shape: Sequence[int], group: Mapping[str, Any]) -> torch.Size:
    """Returns the shape of a state by row: 1 in each dimension that is columns."""
    rows = 1 if len(shape) > 2 and group.get("flatten") else len(shape) - 1
    return torch.Size((*shape[:rows], *(1 for _ in shape[rows:])))


def rows_shape(param: Tensor, group: Mapping[str, Any]) -> torch.Size:
    """Returns the shape of a parameter's state by row, which is flat for a part of one."""
    cut = marked_cut(param)
    if cut is None or param.shape == cut.shape:
        return row_shape(param.shape, group)
    rows = row_shape(cut.shape, {"flatten": cut.flatten}).numel()
    return torch.Size([param.numel() * rows // max(1, math.prod(cut.shape))])


def has_rows_of(value: Any, param: Tensor) -> bool:
    """Returns whether a tensor may be a state by row of the parameter."""
    return value.shape in (rows_shape(param, {}), rows_shape(param, {"flatten": True}))


def rows_like(group: Mapping[str, Any], param: Tensor) -> Tensor:
    """Returns zeros for each row of a parameter, placed like it.

    Of a row that ranks share, the rank with the first column has the value.
    """
    local, whole = local_tensor(param), row_shape(param.shape, group)
    shape: tuple[int, ...] = rows_shape(local, group)
    if is_cut(group, param) and marked_cut(param) is None:
        shape, _ = local_shape_and_offset(param, whole)
    zeros = torch.zeros(shape, dtype=torch.float32, device=local.device)
    return as_placed(zeros, param, whole)


def row_problem(value: Any, param: Tensor, group: Mapping[str, Any] | None = None) -> str | None:
    """Returns what is wrong with a state by row, to follow its name, or None.

    Without ``group``, which has "flatten", the shape may be that of either.
    """
    expected = rows_shape(param, group or {})
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        return f"is {kind}, expected a floating-point tensor of shape {tuple(expected)}"
    if value.shape != expected and not (group is None and has_rows_of(value, param)):
        return f"has shape {tuple(value.shape)}, expected {tuple(expected)}, a value for each row"
    if not same_placement(value, param):
        return f"is {placed(value)}, its parameter {placed(param)}"
    local = local_tensor(value)
    if local.layout is not torch.strided or local.is_meta:
        return f"is {local.layout} on {local.device}, expected a dense tensor with memory"
    return None


def fit_rows(value: Tensor, group: Mapping[str, Any], param: Tensor) -> Tensor:
    """Returns a checked state as float32 on the parameter's device; may copy it."""
    local, like = local_tensor(value), local_tensor(param)
    if (local.dtype, local.device) == (torch.float32, like.device) and local.is_contiguous():
        return value
    fitted = rows_like(group, param)
    local_tensor(fitted).copy_(local)
    return fitted
