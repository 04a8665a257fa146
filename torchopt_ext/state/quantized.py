"""Moments of 8 bits, with a scale for each group of elements (docs/numerics.md section 11)."""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchopt_ext._torch import is_dtensor, local_shape_and_offset
from torchopt_ext.state.algorithms import STATES
from torchopt_ext.state.local import as_placed, local_tensor, placed

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

_ANY_SCALE = tuple(f"{name}_scale" for name in CODES_OF)
"""How the names of scales begin, in every version of the format."""
_ELEMENTS = 1 << 18
"""Elements that are in memory as float32 at once, at least one row."""
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
    local = local_tensor(value)
    if not isinstance(value, Tensor) or local.dtype != dtype:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        return f"is {kind}, expected {dtype}: the optimizer keeps 8-bit moments of the parameter"
    if value.shape != shape or local.layout is not torch.strided or local.is_meta:
        return (
            f"has shape {tuple(value.shape)}, {local.layout}, on {local.device}; expected a dense "
            f"tensor of shape {tuple(shape)} with memory"
        )
    return None


# ---- conversion ----------------------------------------------------------------------------------


def has_codes(entry: Mapping[str, Any]) -> bool:
    """Returns whether a parameter's saved state has 8-bit moments."""
    return not (CODES.keys() | SCALES.keys()).isdisjoint(entry)


def code_problems(entry: Mapping[str, Any], param: Tensor) -> Iterator[tuple[str, str]]:
    """Yields names of codes and scales that do not fit, and why."""
    for name in entry:
        if name not in SCALES and name.startswith(_ANY_SCALE):
            yield name, f"is of another format of 8-bit moments, expected {', '.join(SCALES)}"
            return
    pairs = [(CODES_OF[of], scale) for scale, of in SCALES.items()]
    for name in chain(*zip(*(pair for pair in pairs if entry.keys() & set(pair)), strict=True)):
        if name not in entry:
            yield name, "is missing beside 8-bit moments"
        elif param.is_complex() or param.dim() < 2:
            yield name, f"belongs to 8-bit moments, which the parameter cannot have here{CONVERT}"
        elif problem := quantized_problem(name, entry[name], param):
            yield name, problem
        elif name in SCALES and is_dtensor(entry[name]) and not can_quantize(param):
            where = placed(entry[name])
            yield name, f"is {where}, expected the whole tensor on every rank{CONVERT}"


def fit_moments(entry: Mapping[str, Any], param: Tensor, quantizes: bool) -> Mapping[str, Any]:
    """Returns a checked entry with 8-bit moments if ``quantizes``, otherwise with float moments."""
    if not entry or has_codes(entry) == quantizes:
        return entry
    fitted = {k: value for k, value in entry.items() if k not in SCALES and k not in OTHER_FORM}
    for scale, name in SCALES.items():
        if quantizes and name in entry:
            codes, scales = quantize(name, local_tensor(entry[name]))
            fitted[CODES_OF[name]] = as_placed(codes, param)
            fitted[scale] = scales_like(param)
            local_tensor(fitted[scale]).copy_(scales)
        elif not quantizes and CODES_OF[name] in entry:
            codes, (scales, groups) = entry[CODES_OF[name]], _scales(entry[scale], param)
            moment = dequantize(name, local_tensor(codes), scales, groups)
            fitted[name] = as_placed(moment, param)
    return fitted


def _scales(scales: Any, param: Any) -> tuple[Tensor, Tensor]:
    """Returns the scales of this rank's rows, and the group of each element of its rows."""
    shard = param
    if is_dtensor(param) and is_dtensor(scales):  # cut between groups: as of a smaller parameter
        shard, scales = local_tensor(param), local_tensor(scales)
    groups = torch.arange(math.prod(shard.shape[1:])).view(shard.shape[1:]) // GROUP
    if is_dtensor(shard):  # the scales are whole, and the shard may begin and end inside a group
        sizes, offset = local_shape_and_offset(shard)
        rows, *box = (slice(first, first + n) for first, n in zip(offset, sizes, strict=True))
        scales, groups = scales[rows], groups[tuple(box)]
    return scales, groups.flatten()


def quantize(name: str, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of a moment, as a step stores them but rounded to nearest."""
    codes = torch.empty(moment.shape, dtype=CODES[CODES_OF[name]], device=moment.device)
    scales = torch.empty(scale_shape(moment), dtype=torch.float32, device=moment.device)
    by_row = codes.flatten(1)
    is_root = STATES[name].as_root  # a root's code c stands for c + 1 steps
    for block in _blocks(moment):
        rows = moment[block].reshape(-1, by_row.shape[1]).float()
        grouped = pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), scales.shape[1], GROUP)
        # In double: torch's float32 root is not correctly rounded if it comes from MKL.
        value = grouped.double().sqrt().float() if is_root else grouped
        most = value.abs().amax(-1)
        scale = most / torch.full_like(most, 256.0 if is_root else 127.0)
        inverse = (1 / scale).clamp(max=2.0**126).unsqueeze(-1)
        code = (value * inverse).round()
        code = (code - 1).clamp(0.0, 255.0) if is_root else code.clamp(-128.0, 127.0)
        scales[block] = scale
        by_row[block] = code.nan_to_num(0.0).flatten(1)[:, : by_row.shape[1]].to(codes.dtype)
    return codes, scales


def dequantize(name: str, codes: Tensor, scales: Tensor, groups: Tensor | None = None) -> Tensor:
    """Returns the float32 moment that codes and scales stand for, exactly as a step reads it.

    ``groups`` are the columns of the scales for the elements of a row; by default it is whole.
    """
    moment = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if not codes.numel():  # the part of a rank that has nothing of a weight has one dimension
        return moment
    by_row = moment.flatten(1)
    groups = torch.arange(by_row.shape[1]) // GROUP if groups is None else groups
    for block in _blocks(codes):
        code = codes[block].reshape(-1, by_row.shape[1]).float()
        scale = scales[block][:, groups.to(scales.device)].to(codes.device)
        by_row[block] = ((code + 1) * scale).square() if STATES[name].as_root else code * scale
    return moment


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Yields slices of rows that are converted together."""
    step = max(1, _ELEMENTS // max(1, math.prod(tensor.shape[1:])))
    return (slice(start, start + step) for start in range(0, len(tensor), step))
