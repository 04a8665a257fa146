"""Converts float moments to 8 bits and back, some rows at a time (docs/numerics.md section 11)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchopt_ext._torch import is_dtensor, local_shape_and_offset
from torchopt_ext.state.algorithms import STATES
from torchopt_ext.state.local import as_placed, local_tensor, placed
from torchopt_ext.state.quantized import (
    CODES,
    CODES_OF,
    CONVERT,
    GROUP,
    OTHER_FORM,
    SCALES,
    can_quantize,
    scale_shape,
    scales_like,
)
from torchopt_ext.state.quantized import quantized_problem as problem

_ELEMENTS = 1 << 18
"""Elements that are in memory as float32 at once, at least one row."""
_ANY_SCALE = tuple(f"{name}_scale" for name in CODES_OF)
"""How the names of scales begin, in every version of the format."""
_CODED = CODES.keys() | SCALES.keys()


def has_codes(entry: Mapping[str, Any]) -> bool:
    """Returns whether a parameter's saved state has 8-bit moments."""
    return not _CODED.isdisjoint(entry)


def code_problems(entry: Mapping[str, Any], param: Tensor) -> Iterator[tuple[str, str]]:
    """Yields names of codes and scales that do not fit, and why."""
    for name in entry:
        if name not in SCALES and name.startswith(_ANY_SCALE):
            yield name, f"is of another format of 8-bit moments, expected {', '.join(SCALES)}"
            return
    coded = [name for scale, name in SCALES.items() if scale in entry or CODES_OF[name] in entry]
    for name in (*(CODES_OF[of] for of in coded), *(STATES[of].scale for of in coded)):
        if name not in entry:
            yield name, "is missing beside 8-bit moments"
        elif param.is_complex() or param.dim() < 2:
            yield name, f"belongs to 8-bit moments, which the parameter cannot have here{CONVERT}"
        elif found := problem(name, entry[name], param):
            yield name, found
        elif name in SCALES and is_dtensor(entry[name]) and not can_quantize(param):
            yield (
                name,
                f"is {placed(entry[name])}, expected the whole tensor on every rank{CONVERT}",
            )


def fit_moments(entry: Mapping[str, Any], param: Tensor, quantizes: bool) -> Mapping[str, Any]:
    """Returns a checked entry with 8-bit moments if ``quantizes``, otherwise with float moments."""
    if not entry or has_codes(entry) == quantizes:
        return entry
    fitted = {k: value for k, value in entry.items() if k not in SCALES and k not in OTHER_FORM}
    for scale, name in SCALES.items():
        if (name if quantizes else CODES_OF[name]) not in entry:
            continue
        if quantizes:
            codes, scales = quantize(name, local_tensor(entry[name]))
            fitted[CODES_OF[name]] = as_placed(codes, param)
            fitted[scale] = scales_like(param)
            local_tensor(fitted[scale]).copy_(scales)
        else:
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
    for own in _blocks(moment):
        rows = moment[own].reshape(-1, by_row.shape[1]).float()
        grouped = pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), scales.shape[1], GROUP)
        # In double: torch's float32 root is not correctly rounded if it comes from MKL.
        value = grouped.double().sqrt().float() if is_root else grouped
        most = value.abs().amax(-1)
        scale = most / torch.full_like(most, 256.0 if is_root else 127.0)
        inverse = (1 / scale).clamp(max=2.0**126).unsqueeze(-1)
        code = (value * inverse).round()
        code = (code - 1).clamp(0.0, 255.0) if is_root else code.clamp(-128.0, 127.0)
        scales[own] = scale
        by_row[own] = code.nan_to_num(0.0).flatten(1)[:, : by_row.shape[1]].to(codes.dtype)
    return codes, scales


def dequantize(name: str, codes: Tensor, scales: Tensor, groups: Tensor | None = None) -> Tensor:
    """Returns the float32 moment that codes and scales stand for, exactly as a step reads it.

    ``groups`` are the columns of the scales for the elements of a row; by default it is whole.
    """
    moment = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    by_row = moment.flatten(1)
    groups = torch.arange(by_row.shape[1]) // GROUP if groups is None else groups
    for own in _blocks(codes):
        code = codes[own].reshape(-1, by_row.shape[1]).float()
        scale = scales[own][:, groups.to(scales.device)].to(codes.device)
        by_row[own] = ((code + 1) * scale).square() if STATES[name].as_root else code * scale
    return moment


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Yields slices of rows that are converted together."""
    step = max(1, _ELEMENTS // max(1, math.prod(tensor.shape[1:])))
    return (slice(start, start + step) for start in range(0, len(tensor), step))
