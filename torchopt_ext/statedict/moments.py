"""Converts float moments to 8 bits and back, some rows at a time (docs/numerics.md section 11)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.local import as_placed, local_tensor
from torchopt_ext.optim.quantized import (
    CODES,
    GROUP,
    SCALES,
    can_quantize,
    scale_shape,
    scales_like,
)
from torchopt_ext.optim.quantized import quantized_problem as problem

_ELEMENTS = 1 << 18
"""Elements that are in memory as float32 at once, at least one row."""
_DTYPES = frozenset(CODES.values())
_ANY_SCALE = tuple(f"{name}_scale" for name in CODES)
"""How the names of scales begin, in every version of the format."""
_CODES = {"exp_avg": 127.0, "exp_avg_sq": 256.0}
"""Steps of a scale up to the largest magnitude of its group."""


def has_codes(entry: Mapping[str, Any]) -> bool:
    """Returns whether a parameter's saved state has 8-bit moments."""
    found = (getattr(entry.get(name), "dtype", None) for name in CODES)
    return not (_DTYPES.isdisjoint(found) and SCALES.keys().isdisjoint(entry))


def code_problems(entry: Mapping[str, Any], param: Tensor) -> Iterator[tuple[str, str]]:
    """Yields names of codes and scales that do not fit, and why."""
    for name in entry:
        if name not in SCALES and name.startswith(_ANY_SCALE):
            yield name, f"is of another format of 8-bit moments, expected {', '.join(SCALES)}"
            return
    for name in (*CODES, *SCALES):
        if name not in entry:
            yield name, "is missing beside 8-bit moments"
        elif not _can_decode(param):
            yield name, "belongs to 8-bit moments, which the parameter cannot have here"
        elif found := problem(name, entry[name], param):
            yield name, found


def _can_decode(param: Tensor) -> bool:
    """Returns whether codes of a parameter can be read, if only to make float moments of them.

    Other DTensors are excluded: a shard may hold parts of rows, but scales belong to whole rows.
    """
    plain = not is_dtensor(param) and not param.is_complex()
    return can_quantize(param) or (plain and param.dim() >= 2)


def fit_moments(entry: Mapping[str, Any], param: Tensor, quantizes: bool) -> Mapping[str, Any]:
    """Returns a checked entry with 8-bit moments if ``quantizes``, otherwise with float moments."""
    if not entry or has_codes(entry) == quantizes:
        return entry
    fitted = {name: value for name, value in entry.items() if name not in SCALES}
    for scale, name in SCALES.items():
        if quantizes:
            codes, scales = quantize(name, local_tensor(entry[name]))
            fitted[name] = as_placed(codes, param)
            fitted[scale] = scales_like(param)
            local_tensor(fitted[scale]).copy_(scales)
        else:
            moment = dequantize(name, local_tensor(entry[name]), local_tensor(entry[scale]))
            fitted[name] = as_placed(moment, param)
    return fitted


def quantize(name: str, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of a moment, as a step stores them but rounded to nearest."""
    codes = torch.empty(moment.shape, dtype=CODES[name], device=moment.device)
    scales = torch.empty(scale_shape(moment), dtype=torch.float32, device=moment.device)
    by_row = codes.flatten(1)
    is_root = name == "exp_avg_sq"  # a root's code c stands for c + 1 steps
    for own in _blocks(moment):
        grouped = _grouped(moment[own].reshape(-1, by_row.shape[1]).float())
        value = _sqrt(grouped) if is_root else grouped
        most = value.abs().amax(-1)
        scale = most / torch.full_like(most, _CODES[name])
        inverse = (1 / scale).clamp(max=2.0**126).unsqueeze(-1)
        code = (value * inverse).round()
        code = (code - 1).clamp(0.0, 255.0) if is_root else code.clamp(-128.0, 127.0)
        scales[own] = scale
        by_row[own] = code.nan_to_num(0.0).flatten(1)[:, : by_row.shape[1]].to(codes.dtype)
    return codes, scales


def dequantize(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the float32 moment that codes and scales stand for, exactly as a step reads it."""
    moment = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    by_row = moment.flatten(1)
    for own in _blocks(codes):
        code = _grouped(codes[own].reshape(-1, by_row.shape[1]).float())
        scale = scales[own].unsqueeze(-1)
        value = code * scale if name == "exp_avg" else ((code + 1) * scale).square()
        by_row[own] = value.flatten(1)[:, : by_row.shape[1]]
    return moment


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Yields slices of rows that are converted together."""
    step = max(1, _ELEMENTS // math.prod(tensor.shape[1:]))
    return (slice(start, start + step) for start in range(0, len(tensor), step))


def _grouped(rows: Tensor) -> Tensor:
    """Returns (rows, elements) as (rows, groups, GROUP); zeros fill the last group."""
    padded = pad(rows, (0, -rows.shape[1] % GROUP))
    return padded.view(len(rows), padded.shape[1] // GROUP, GROUP)


def _sqrt(x: Tensor) -> Tensor:
    """Returns the correctly rounded root; torch's float32 root is not, if it comes from MKL."""
    return x.double().sqrt().float()
