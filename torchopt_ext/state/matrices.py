"""Which matrices of a parameter Muon orthogonalizes, and how: keys of a group."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._arguments import expect_bools, expect_counts, expect_numbers
from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.newton_schulz import JORDAN, Triple, step_coefficients

Matrix = tuple[int, int, int, int, float]
"""First element, rows, columns and stride in storage order, and the factor of the learning rate."""

SETTINGS: dict[str, Any] = {
    "ns_coefficients": JORDAN,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
"""The keys that groups have, with torch's defaults (torch/optim/_muon.py)."""
OPTIONAL: dict[str, Any] = {
    "flatten": False,
    "num_heads": None,
    "head_dim": 0,
    "split_sizes": None,
    "orthogonalize_dtype": None,
}
"""The keys that groups may have, with defaults."""

ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral_unclamped": lambda rows, cols: math.sqrt(rows / cols),
}
"""Factors of the learning rate by shape, as values of ``adjust_lr_fn``; None means "original"."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_settings(group: Mapping[str, Any]) -> None:
    """Rejects values of a group that say how its matrices are orthogonalized.

    Raises:
        TypeError, ValueError: a value has a wrong type, or is out of range.
    """
    values = {**SETTINGS, **OPTIONAL, **group}
    coefficients_of(values)
    expect_numbers(eps=values["eps"])
    if not values["eps"] >= 0.0:
        raise ValueError(f"Invalid eps value: {values['eps']}")
    if (name := values["adjust_lr_fn"]) not in (None, *ADJUSTMENTS) and not callable(name):
        raise ValueError(
            f"Adjust learning rate function {name!r} is not supported, expected None, a function "
            f"of rows and columns, or one of {', '.join(map(repr, ADJUSTMENTS))}"
        )
    expect_bools(flatten=values["flatten"])
    if values["orthogonalize_dtype"] not in (None, *_DTYPES):
        raise ValueError(
            f"orthogonalize_dtype is {values['orthogonalize_dtype']!r}, expected None or one of "
            f"{_DTYPES}"
        )
    if values["num_heads"] is not None:
        expect_counts(num_heads=values["num_heads"])
        if values["num_heads"] < 1:
            raise ValueError(f"num_heads is {values['num_heads']}, expected 1 or more")
    if values["head_dim"] not in (0, 1):
        raise ValueError(f"head_dim is {values['head_dim']!r}, expected 0 (rows) or 1 (columns)")
    if values["split_sizes"] is not None and values["num_heads"] is not None:
        raise ValueError("split_sizes and num_heads exclude each other: give the rows of each head")


def coefficients_of(group: Mapping[str, Any]) -> list[Triple]:
    """Returns the coefficients of every Newton-Schulz step of a group.

    ``ns_steps`` counts for one triple and for "polar_express", of which any number can be taken.
    Other presets and lists have a triple for each step.

    Raises:
        TypeError, ValueError: ``ns_coefficients`` or ``ns_steps`` is of a wrong type or length.
    """
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    expect_counts(ns_steps=steps)
    if not 0 <= steps < 100:
        raise ValueError(f"ns_steps is {steps}, expected less than 100")
    by_step = isinstance(coefficients, str) and coefficients not in ("jordan", "polar_express")
    if not isinstance(coefficients, str) and len(coefficients):
        by_step = isinstance(coefficients[0], Sequence)
    return step_coefficients(coefficients, None if by_step else steps)


def matrices_of(group: Mapping[str, Any], param: Tensor, what: str | int) -> list[Matrix]:
    """Returns the matrices of a parameter, in storage order of its local tensor.

    Two dimensions are one matrix, three a batch of matrices (experts). With ``flatten`` all
    dimensions after the first are columns (convolutions). ``num_heads`` cuts a matrix into blocks
    of equal rows, or of equal columns if ``head_dim`` is 1, and ``split_sizes`` into blocks of
    these rows. A matrix's shape decides its learning rate.

    Raises:
        ValueError: the parameter has no such matrices, or they are not whole in this process.
    """
    local, shape = local_tensor(param), tuple(param.shape)
    called = repr(what) if isinstance(what, str) else f"parameter {what}"
    if is_dtensor(param) and local.shape != param.shape:
        whole = len(shape) == 3 and not group.get("flatten") and local.shape[1:] == shape[1:]
        if not whole:
            raise ValueError(
                f"{called} of shape {shape} is sharded: this process has {tuple(local.shape)}, and "
                "Muon needs whole matrices"
            )
    if param.is_complex():
        raise ValueError(f"{called} has dtype {param.dtype}; Muon does not support complex numbers")
    shape = tuple(local.shape)
    if len(shape) > 1 and group.get("flatten"):
        batch, rows, cols = 1, shape[0], math.prod(shape[1:])
    elif len(shape) in (2, 3):
        batch, rows, cols = math.prod(shape[:-2]), *shape[-2:]
    else:
        raise ValueError(
            f"{called} has shape {shape}; Muon steps matrices (2 dimensions), batches of matrices "
            "(3), and with flatten=True convolutions, as matrices of the first dimension by the "
            "others: put it into a group of another algorithm (torchopt_ext.muon_groups)"
        )
    transposed = not local.is_contiguous() and len(shape) == 2 and local.t().is_contiguous()
    # Permuted columns only permute the columns of the result: channels_last.
    rows_follow = local.is_contiguous() or (batch == 1 and local.stride(0) == cols)
    if not (transposed or rows_follow) and local.numel() > 0:
        dense = torch.ops.aten.is_non_overlapping_and_dense(local)
        if dense or len(shape) == 3:
            raise ValueError(
                f"{called} has strides {local.stride()} for shape {shape}: Muon needs the rows of "
                "a matrix to follow one another"
            )
    factor = _adjustment(group)
    found = []
    for number in range(batch):
        for row, column, height, width in _blocks(group, rows, cols, called):
            if transposed:
                place = (column * rows + row, width, height, rows)
            else:
                place = (number * rows * cols + row * cols + column, height, width, cols)
            found.append((*place, factor(height, width) if height * width else 1.0))
    return found


def _adjustment(group: Mapping[str, Any]) -> Callable[[int, int], float]:
    name = group.get("adjust_lr_fn")
    return name if callable(name) else ADJUSTMENTS[name or "original"]


def _blocks(
    group: Mapping[str, Any], rows: int, cols: int, called: str
) -> list[tuple[int, int, int, int]]:
    """Returns first row, first column, rows and columns of every block of a matrix."""
    sizes, heads = group.get("split_sizes"), group.get("num_heads")
    if sizes is not None:
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"{called} has {rows} rows, split_sizes {sizes} of {sum(sizes)}")
        starts = accumulate(sizes, initial=0)
        return [(start, 0, size, cols) for start, size in zip(starts, sizes, strict=False)]
    if not heads:
        return [(0, 0, rows, cols)]
    across = group.get("head_dim", 0) == 1
    length = cols if across else rows
    if length % heads:
        raise ValueError(
            f"{called} has {length} {'columns' if across else 'rows'}, num_heads {heads} do not "
            "divide them"
        )
    size = length // heads
    if across:
        return [(0, k * size, rows, size) for k in range(heads)]
    return [(k * size, 0, size, cols) for k in range(heads)]
