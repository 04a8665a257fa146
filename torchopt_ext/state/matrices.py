"""Which matrices of a parameter Muon orthogonalizes, and how: keys of a group."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._arguments import expect_bools, expect_counts, expect_numbers
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.newton_schulz import JORDAN, Triple, step_coefficients
from torchopt_ext.state.pieces import (
    is_cut,
    marked_cut,
    matrix_sizes,
    pieces_of,
    whole_shape,
)

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
    "orthogonalize": None,
}
"""The keys that groups may have, with defaults."""

FUNCTIONS = ("adjust_lr_fn", "orthogonalize")
"""The keys whose values may be functions. These stay out of state dicts, as LambdaLR's do, since
torch.load would not read them. A load keeps the optimizer's own."""

ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral_unclamped": lambda rows, cols: math.sqrt(rows / cols),
}
"""Factors of the learning rate by shape, as values of ``adjust_lr_fn``; None means "original"."""
_DTYPES = (torch.float32, torch.bfloat16)


def fix_settings(group: dict[str, Any]) -> None:
    """Makes tuples of lists and numbers of tensors: a plan sees only that a value is replaced."""
    for key in {*SETTINGS, *OPTIONAL} & group.keys():
        value = group[key]
        if isinstance(value, list | tuple):
            group[key] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        elif isinstance(value, Tensor) and value.numel() == 1:
            group[key] = value.item()


@dataclass(frozen=True)
class Replacement:
    """A group's function instead of the iterations, whose result is checked to be a tensor."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, batch: Tensor) -> Tensor:
        result = self.function(batch)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"the group's orthogonalize returns {result!r:.200}, expected a tensor of shape "
                f"{tuple(batch.shape)}"
            )
        return result


def replacement_of(group: Mapping[str, Any]) -> Replacement | None:
    """Returns what orthogonalizes a group's matrices instead of the iterations, or None."""
    function = group.get("orthogonalize")
    return None if function is None else Replacement(function)


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
    name = values["adjust_lr_fn"]
    if not callable(name) and not (name is None or (isinstance(name, str) and name in ADJUSTMENTS)):
        raise ValueError(
            f"Adjust learning rate function {name} is not supported, expected None, a function "
            f"of rows and columns, or one of {', '.join(map(repr, ADJUSTMENTS))}"
        )
    expect_bools(flatten=values["flatten"])
    if values["orthogonalize_dtype"] not in (None, *_DTYPES):
        raise ValueError(
            f"orthogonalize_dtype is {values['orthogonalize_dtype']!r}, expected None or one of "
            f"{_DTYPES}"
        )
    if not (values["orthogonalize"] is None or callable(values["orthogonalize"])):
        raise TypeError(
            f"orthogonalize is {values['orthogonalize']!r}, expected a function of [batch, m, n]"
        )
    if values["num_heads"] is not None:
        expect_counts(num_heads=values["num_heads"])
        if values["num_heads"] < 1:
            raise ValueError(f"num_heads is {values['num_heads']}, expected 1 or more")
    if values["head_dim"] not in (0, 1):
        raise ValueError(f"head_dim is {values['head_dim']!r}, expected 0 (rows) or 1 (columns)")
    if values.get("beta2") and values["num_heads"] is not None and values["head_dim"] == 1:
        raise ValueError("head_dim=1 excludes beta2: NorMuon normalizes whole rows")
    sizes = values["split_sizes"]
    if sizes is None:
        return
    if values["num_heads"] is not None or values["head_dim"] == 1:
        raise ValueError("split_sizes excludes num_heads and head_dim: give the rows of each block")
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"split_sizes is {sizes!r}, expected the rows of each block")
    for size in sizes:
        expect_counts(split_sizes=size)


def without_functions(group: Mapping[str, Any], keep_keys: bool = False) -> dict[str, Any]:
    """Returns what a state dict has of a group.

    Args:
        keep_keys: has None in place of functions.
    """
    functions = {key for key in FUNCTIONS if callable(group.get(key))}
    kept = {key: value for key, value in group.items() if key not in functions}
    return kept | dict.fromkeys(functions if keep_keys else ())


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
    if not isinstance(coefficients, Sequence):
        raise TypeError(
            f"ns_coefficients is {coefficients!r:.200}, expected the name of a preset or numbers"
        )
    by_step = isinstance(coefficients, str) and coefficients not in ("jordan", "polar_express")
    if not isinstance(coefficients, str) and len(coefficients):
        by_step = isinstance(coefficients[0], Sequence)
    return step_coefficients(coefficients, None if by_step else steps)


def matrices_of(group: Mapping[str, Any], param: Tensor, what: str | int) -> list[Matrix]:
    """Returns the matrices of a parameter, in storage order of its local tensor.

    If ranks hold parts of the matrices of a DTensor, these are the rows that this rank has.

    Two dimensions are one matrix, three a batch of matrices (experts). With ``flatten`` all
    dimensions after the first are columns (convolutions). ``num_heads`` cuts a matrix into blocks
    of equal rows, or of equal columns if ``head_dim`` is 1, and ``split_sizes`` into blocks of
    these rows. A matrix's shape decides its learning rate. A parameter that is not dense is stepped
    through a dense copy, whose storage order counts (csrc/plan/entry_checks.cpp).

    Raises:
        ValueError: the parameter has no such matrices.
    """
    called = repr(what) if isinstance(what, str) else f"parameter {what}"
    if param.is_complex():
        raise ValueError(f"{called} has dtype {param.dtype}; Muon does not support complex numbers")
    local = local_tensor(param)
    shape = whole_shape(param) if is_cut(group, param) else tuple(local.shape)
    if not (len(shape) in (2, 3) or (len(shape) > 3 and group.get("flatten"))):
        raise ValueError(
            f"{called} has shape {shape}; Muon steps matrices (2 dimensions), batches of matrices "
            "(3), and with flatten=True convolutions, as matrices of the first dimension by the "
            "others: put it into a group of another algorithm (torchopt_ext.muon_groups)"
        )
    batch, rows, cols = matrix_sizes(group, shape)
    blocks, factor = _blocks(group, rows, cols, called), _adjustment(group)
    if is_cut(group, param):
        return _rows_of_pieces(group, param, blocks, factor, called)
    if not torch.ops.aten.is_non_overlapping_and_dense(local):
        local = torch.empty_like(local, device="meta")
    if local.numel() == 0:
        return [(0, 0, cols, cols, 1.0)]
    factors = [_factor_of(factor, height, width, called) for _, _, height, width in blocks]
    if local.is_contiguous():
        return [
            (number * rows * cols + row * cols + column, height, width, cols, scale)
            for number in range(batch)
            for (row, column, height, width), scale in zip(blocks, factors, strict=True)
        ]
    # Permuted columns only permute the columns of the result, unless they are cut: channels_last.
    if batch == 1 and local.stride(0) == cols and all(width == cols for *_, width in blocks):
        return [
            (row * cols, height, width, cols, scale)
            for (row, _, height, width), scale in zip(blocks, factors, strict=True)
        ]
    is_by_row = bool(group.get("beta2"))
    is_transposed = shape[-2:] == (rows, cols) and local.mT.is_contiguous()
    if is_transposed and len(set(factors)) == 1 and not is_by_row:
        return [
            (number * rows * cols + column * rows + row, width, height, rows, scale)
            for number in range(batch)
            for (row, column, height, width), scale in zip(blocks, factors, strict=True)
        ]
    raise ValueError(
        f"{called} has strides {local.stride()} for shape {shape}: Muon needs the blocks of a "
        "matrix in row-major order"
    )


def direction_dtype(group: Mapping[str, Any], param: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's directions (csrc/plan/orthogonal_update.cpp)."""
    if param.dtype == torch.float64:
        return param.dtype
    usual = torch.bfloat16 if param.is_cuda else torch.float32
    return group.get("orthogonalize_dtype") or usual


OPERATIONS = 1000
"""Of matrix products, in the time of one element of pass B: about 200 on a CPU, 5,000 on an H100.

Counted from memory's bandwidth and the rate of products."""


def newton_schulz_flops(group: Mapping[str, Any], param: Tensor, what: str | int) -> int:
    """Returns the floating-point operations by which a step orthogonalizes a parameter's matrices.

    An iteration has the products R = X X^T, R R and (b R + c R R) X, a multiply-add counts two: of
    sides s <= l these are 2 s s (2 l + s). A group's own ``orthogonalize`` counts nothing.

    Raises:
        ValueError: as :func:`matrices_of`.
    """
    return flops_of(matrices_of(group, param, what), group)


def flops_of(matrices: Iterable[Matrix], group: Mapping[str, Any]) -> int:
    """Returns the operations of :func:`newton_schulz_flops` for matrices of a group."""
    if group.get("orthogonalize"):
        return 0
    sides = (sorted((rows, cols)) for _, rows, cols, _, _ in matrices)
    iterations = len(coefficients_of({**SETTINGS, **group}))
    return iterations * sum(2 * short * short * (2 * long + short) for short, long in sides)


def blocks_of(group: Mapping[str, Any], param: Tensor, called: str) -> list[Matrix]:
    """Returns the blocks of a whole matrix of a parameter that are orthogonalized each for itself.

    Learning rates are those of the ranks' rows, :func:`matrices_of`.
    """
    _, rows, cols = matrix_sizes(group, whole_shape(param))
    return [
        (row * cols + column, height, width, cols, 1.0)
        for row, column, height, width in _blocks(group, rows, cols, called)
    ]


def _rows_of_pieces(
    group: Mapping[str, Any],
    param: Any,
    blocks: Sequence[tuple[int, int, int, int]],
    factor: Callable[[int, int], float],
    called: str,
) -> list[Matrix]:
    """Returns this rank's rows of cut matrices, with the learning rates of their blocks."""
    local = local_tensor(param)
    if not local.is_contiguous():
        raise ValueError(f"{called} has a local part with strides {local.stride()}, not contiguous")
    rank, cut = torch.distributed.get_rank(), marked_cut(param)
    tensor = 0 if cut is None else cut.tensor
    by_rank = pieces_of(group, param, called)[0]
    by_matrix = [pieces.get(rank, ()) for pieces in by_rank]
    if cut is not None and group.get("beta2"):
        its = chain.from_iterable(chain(*pieces.values()) for pieces in by_rank)
        if any(piece.run < piece.stride for piece in its):
            raise ValueError(
                f"{called} was cut between ranks inside rows, which NorMuon (beta2) needs whole: "
                "build the optimizer with beta2 in the group"
            )
    found = []
    for start, first, rows, run, stride, its_tensor in chain(*by_matrix):
        if its_tensor != tensor:
            continue
        top = first // stride
        for row, column, height, width in blocks:
            low, high = max(row, top), min(row + height, top + rows)
            if low < high and column == 0:  # blocks of columns have one factor
                scale = _factor_of(factor, height, width, called)
                found.append((start + (low - top) * run, high - low, run, run, scale))
    return found or [(0, 0, 1, 1, 1.0)]


def _adjustment(group: Mapping[str, Any]) -> Callable[[int, int], float]:
    name = group.get("adjust_lr_fn")
    return name if callable(name) else ADJUSTMENTS[name or "original"]


def _factor_of(factor: Callable[[int, int], float], rows: int, cols: int, called: str) -> float:
    value = factor(rows, cols)
    if not isinstance(value, Real) or not 0.0 < value < math.inf:
        raise ValueError(
            f"adjust_lr_fn returns {value!r} for the {rows} x {cols} matrix of {called}, expected "
            "a positive number"
        )
    return float(value)


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
