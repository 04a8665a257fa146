"""Moments of 8 bits, with a scale for each group of elements (docs/numerics.md section 11)."""

import math
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.algorithms import STATES
from torchopt_ext.state.local import as_placed, local_tensor

GROUP = 64
"""Elements that share a scale (csrc/kernels/quantize.h)."""

_MOMENTS = [state for state in STATES.values() if state.is_moment]
CODES = {state.codes: torch.uint8 if state.as_root else torch.int8 for state in _MOMENTS}
"""Entries of a parameter's state that hold codes, with dtypes."""
CODES_OF = {state.name: state.codes for state in _MOMENTS}
"""The entry with codes by moment."""
OTHER_FORM = CODES_OF | {codes: name for name, codes in CODES_OF.items()}
"""The entry that holds the same moment in the other form, as codes or floats."""
SCALES = {state.scale: state.name for state in _MOMENTS}
"""Entries of a parameter's state that hold float32 scales, and the moments they belong to."""
CONVERT = "; `python -m torchopt_ext convert` makes float moments of them"
"""The end of messages about 8-bit moments in a checkpoint that cannot be loaded."""

_HELD = (torch.bfloat16, torch.float16, torch.float32)
_KEEPS_FLOATS = "torchopt_ext_keeps_float_moments"


def can_quantize(param: Any) -> bool:
    """Returns whether a parameter can have 8-bit moments; others keep float32 moments.

    A row is an index of the first dimension. One-dimensional or non-contiguous parameters, rows
    shorter than a group, and shards that cut rows inside a group do not allow 8-bit moments.
    """
    local = local_tensor(param)
    if param.dtype not in _HELD or param.dim() < 2 or not local.is_contiguous():
        return False
    if hasattr(local, _KEEPS_FLOATS):
        return False
    if is_dtensor(param):
        ranks = 1  # ranks that divide a row
        for placement, size in zip(param.placements, param.device_mesh.shape, strict=True):
            if placement.is_partial():
                return False
            ranks *= size if not placement.is_replicate() and placement.dim > 0 else 1
        if ranks > 1 and (param.dim() > 2 or param.shape[1] % (GROUP * ranks) != 0):
            return False
    return math.prod(local.shape[1:]) >= GROUP


def keep_float_moments(piece: Tensor) -> None:
    """Marks a piece of memory of a parameter that cannot be quantized as a whole."""
    setattr(piece, _KEEPS_FLOATS, True)


def scales_like(param: Any) -> Tensor:
    """Returns zero scales of a quantizable parameter, placed like it: float32 (rows, groups)."""
    local = local_tensor(param)
    scales = torch.zeros(scale_shape(local), dtype=torch.float32, device=local.device)
    return as_placed(scales, param, scale_shape(param))


def scale_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of the scales of a tensor's codes: (rows, groups in a row)."""
    return torch.Size((tensor.shape[0], -(-math.prod(tensor.shape[1:]) // GROUP)))


def groups_before(param: Tensor, element: int) -> int:
    """Returns how many groups of a parameter come before the group that begins at ``element``."""
    row, groups = math.prod(param.shape[1:]), scale_shape(param)[1]
    return element // row * groups + element % row // GROUP


def quantized_problem(name: str, value: Any, param: Any) -> str | None:
    """Returns what is wrong with codes or scales, to follow the entry's name, or None."""
    dtype = CODES.get(name, torch.float32)
    shape = param.shape if name in CODES else scale_shape(param)
    if not isinstance(value, Tensor) or local_tensor(value).dtype != dtype:
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        return f"is {found}, expected {dtype}: the optimizer keeps 8-bit moments of the parameter"
    local = local_tensor(value)
    if value.shape != shape or local.layout is not torch.strided or local.is_meta:
        found = f"has shape {tuple(value.shape)}, {local.layout}, on {local.device}"
        return f"{found}; expected a dense tensor of shape {tuple(shape)} with memory"
    return None
