"""Bit patterns of tensors, and the sum of squares of docs/numerics.md for large inputs.

softfloat and formulas in tests/golden check both this module and the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from formulas import Accumulator
from softfloat import FORMATS, Format
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def format_of(dtype: torch.dtype) -> Format:
    return FORMATS[name_of(dtype)]


def raw(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's bits in storage order, as signed integers."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(INTEGER[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def to_bits(tensor: Tensor) -> list[int]:
    width = 8 * tensor.element_size()
    return [x % (1 << width) for x in raw(tensor).tolist()]


def from_bits(dtype: torch.dtype, bits: Sequence[int]) -> Tensor:
    """Returns a 1-D tensor."""
    width = format_of(dtype).width
    signed = [b - (1 << width) if b >> (width - 1) else b for b in bits]
    return torch.tensor(signed, dtype=INTEGER[width // 8]).view(dtype)


def accumulate(acc: Accumulator, doubles: Tensor) -> None:
    """Adds many doubles exactly, grouped by exponent."""
    acc.nans += int(doubles.isnan().sum())
    acc.infinities += int(doubles.isinf().sum())
    fraction, exponent = torch.frexp(doubles[doubles.isfinite()])
    significand = (fraction * 2**53).to(torch.int64)
    for e in exponent.unique().tolist():
        chosen = significand[exponent == e]
        # Split into two halves, so that the sums fit into 64 bits.
        units = (int((chosen >> 27).sum()) << 27) + int((chosen & (2**27 - 1)).sum())
        shift = e - 53 + 1088
        acc.units += units << shift if shift >= 0 else units >> -shift


def sumsq_reference(acc: Accumulator, elements: Tensor, row: int) -> None:
    """Adds the squares of a 1-D tensor of elements in storage order."""
    wide = elements.double()
    squares = wide * wide
    if row < 64:
        accumulate(acc, squares)
        return
    rows = squares.view(-1, row)
    for first in range(0, row, 4096):
        block = rows[:, first : first + 4096]
        lanes = torch.zeros(block.shape[0], 64, dtype=torch.float64)
        for i in range(0, block.shape[1], 64):
            part = block[:, i : i + 64]
            lanes[:, : part.shape[1]] += part
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        accumulate(acc, lanes[:, 0])


def random_elements(
    dtype: torch.dtype,
    count: int,
    seed: int,
    low: int = -20,
    high: int = 0,
    *,
    signed: bool = True,
    specials: bool = False,
) -> Tensor:
    """Returns random significands at binary exponents in [low, high]. With `specials`, one element
    in eight has any bit pattern (NaN payloads, infinities, subnormals)."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high + 1, (count,), generator=generator, dtype=torch.float64)
    significands = 1 + torch.rand(count, generator=generator, dtype=torch.float64)
    if signed:
        significands *= 1 - 2 * torch.randint(0, 2, (count,), generator=generator).double()
    elements = torch.ldexp(significands, exponents).to(dtype)
    if specials:
        width = elements.element_size()
        limit = 1 << (8 * width - 1)
        bits = torch.randint(-limit, limit - 1, (count,), generator=generator, dtype=torch.int64)
        chosen = torch.rand(count, generator=generator) < 0.125
        any_bits = bits.to(INTEGER[width]).view(dtype)
        elements = torch.where(chosen, any_bits, elements)
    return elements
