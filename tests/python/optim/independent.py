"""Computes what csrc/kernels/{remainder,stochastic,digest}.h compute, in numpy integers.

Nothing here calls the library, so that a test against it can fail.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]

MASK32 = np.uint64(0xFFFFFFFF)


def words(tensor: Tensor) -> Words:
    """Returns the elements' bits, in storage order of a contiguous tensor."""
    flat = tensor.detach().contiguous().flatten()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.element_size()]
    return flat.view(signed).numpy().view(unsigned).astype(np.uint64)


def floats(bits: Words) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def round_to_bf16(bits: Words) -> Words:
    """Rounds float32 bits to bfloat16 bits, to nearest even, by inspecting the dropped bits."""
    high, low = bits >> np.uint64(16), bits & np.uint64(0xFFFF)
    odd = high & np.uint64(1)
    up = (low > 0x8000) | ((low == 0x8000) & (odd == 1))
    return high + up.astype(np.uint64)


def is_upper_tie(bits: Words) -> NDArray[np.bool_]:
    """Finds ties whose even neighbor is the lower one: the only values that a remainder moves."""
    return (bits & np.uint64(0x1FFFF)) == 0x8000


def split(bits: Words) -> tuple[Words, NDArray[np.int64]]:
    """Returns weight bits and int16 remainders of float32 bits, with upper ties decremented."""
    exact = bits - is_upper_tie(bits).astype(np.uint64)
    weight = round_to_bf16(exact)
    return weight, exact.astype(np.int64) - (weight << np.uint64(16)).astype(np.int64)


def split8(bits: Words) -> tuple[Words, NDArray[np.int64]]:
    """Returns weight bits and int8 remainder: the nearest whose pair still rounds to the weight.

    Ties go down where bit 16 is 0, otherwise up.
    """
    weight = round_to_bf16(bits)
    rest = bits.astype(np.int64) - (weight << np.uint64(16)).astype(np.int64)
    lowest = np.where(weight % 2 == 1, -127, -128)
    odd = (bits >> np.uint64(16)).astype(np.int64) & 1
    nearest = np.where(odd == 1, np.floor(rest / 256 + 0.5), np.ceil(rest / 256 - 0.5))
    return weight, np.clip(nearest.astype(np.int64), lowest, 127)


def join(weight: Tensor, remainder: Tensor) -> Words:
    high = words(weight).astype(np.int64) << 16
    low = remainder.detach().flatten().numpy().astype(np.int64)
    low *= 256 if remainder.dtype == torch.int8 else 1
    return ((high + low) & 0xFFFFFFFF).astype(np.uint64)


Floats = NDArray[np.float32]


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """Computes a * b + c, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd in float64, so that rounding it again
    does no harm (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    product = np.float64(a) * np.float64(b)
    total = np.asarray(product + np.float64(c))
    of_product = total - np.float64(c)
    error = (product - of_product) + (np.float64(c) - (total - of_product))
    wrong = (error != 0) & (total.view(np.uint64) % np.uint64(2) == 0)
    odd = np.where(wrong, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


# ---- stochastic rounding (docs/numerics.md, section 8) ---------------------------------------

GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
    return x ^ x >> 31


def times(x: Words, factor: int) -> Words:
    return (x * np.uint64(factor)) & MASK32


def shifted(x: Words, bits: int) -> Words:
    return x >> np.uint64(bits)


PARAM, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, MASTER = range(5)


def draws(seed: int, step: int, parameter: int, elements: Words, what: int) -> Words:
    """Returns the 16 random bits that round one stored value of each element below 2**20."""
    x = mix64(mix64((seed + GOLDEN) % 2**64) ^ (step << 32 | parameter))
    x = mix64(x)
    keys = [np.uint64(key) for key in (x % 2**32, x >> 32)]
    y = (times(np.asarray(elements, np.uint64), 0x9E3779B1) + keys[0]) & MASK32
    y = times(y ^ shifted(y, 16), 0x21F0AAAD)
    y = times(y ^ shifted(y, 15) ^ keys[1], 0xD35A2D97)
    first = y ^ shifted(y, 15)
    second = times(first, 0xAC4C1B51)
    word = (first, second ^ shifted(second, 16))[what // 2]
    return shifted(word, 16 * (what % 2)) & np.uint64(0xFFFF)


def round_stochastically(bits: Words, random: Words) -> Words:
    """Rounds float32 bits to bfloat16 bits: up if the dropped bits plus the draw carry."""
    return (bits + random) >> np.uint64(16)


def round_to_24_bits_stochastically(bits: Words, random: Words) -> Words:
    """Rounds to what a weight and its int8 remainder can hold; a random bit decides upper ties."""
    rounded = (bits + (random & np.uint64(0xFF))) & ~np.uint64(0xFF)
    aside = np.where(random & np.uint64(0x100), np.uint64(0x100), MASK32 - np.uint64(0xFF))
    return np.where(is_upper_tie(rounded), (rounded + aside) & MASK32, rounded)


# ---- digest ------------------------------------------------------------------------------------


def half_factor(half: Words) -> NDArray[np.int64]:
    x = half // np.uint64(2) * np.uint64(317) % np.uint64(512)
    x = (x ^ x >> np.uint64(4)) * np.uint64(229) % np.uint64(512)
    factor = (2 * x + 1).astype(np.int64)
    return np.where(half % 2 == 0, 2048 - factor, factor)


def element_factor(parameter: int, elements: Words) -> NDArray[np.int64]:
    base = np.uint64(mix64(mix64(parameter)) % 2**32)
    x = (times(elements, 0x9E3779B1) + base) & MASK32
    x = times(x ^ shifted(x, 16), 0x21F0AAAD)
    return (x ^ shifted(x, 15) | np.uint64(1)).astype(np.uint32).view(np.int32).astype(np.int64)


def digest_array(tensor: Tensor, parameter: int, role: int, places: list[int] | None = None) -> int:
    """Returns the digest of one contiguous tensor of less than 2**20 elements: signed 16-bit halves
    times the odd factors of place, lane and array, summed. Words of fp64, or of elements at given
    places, are not split; their elements' factors apply."""
    values = words(tensor)
    size = tensor.element_size()
    numbers = np.asarray(range(values.size) if places is None else places, np.uint64)
    if size == 8 or places is not None:
        factor = element_factor(parameter, numbers).astype(np.uint64)
        products = [(values & MASK32) * factor]
        products += [shifted(values, 32) * factor] if size == 8 else []
    else:
        memory = values.astype(f"u{size}").tobytes()
        halves = np.frombuffer(memory + bytes(len(memory) % 2), "<i2").astype(np.int64)
        places_of_halves = np.arange(halves.size, dtype=np.uint64) * 2 // size  # elements
        in_segment = np.arange(halves.size, dtype=np.uint64) % (256 * size)
        first = places_of_halves // np.uint64(512) * np.uint64(512)
        lane = element_factor(parameter, first + in_segment // np.uint64(2) % np.uint64(8))
        factor = lane * half_factor(in_segment)
        products = [(halves * factor).astype(np.uint64)]
    total = 0
    for upper, product in enumerate(products):
        total += int(product.sum(dtype=np.uint64)) * (mix64(role + 5 * upper + 1) | 1)
    return total % 2**64


ROLES = {
    "exp_avg": EXP_AVG,
    "exp_avg_sq": EXP_AVG_SQ,
    "exp_avg_codes": EXP_AVG,
    "exp_avg_sq_codes": EXP_AVG_SQ,
    "max_exp_avg_sq": MAX_EXP_AVG_SQ,
    "master_weight": MASTER,
    "remainder": MASTER,
    "remainder8": MASTER,
}


def digest(parameter: int, weight: Tensor, state: dict[str, Tensor]) -> int:
    """Returns the digest, modulo 2**64, of a parameter's state without its step count, and of the
    parameter unless it has a master weight."""
    total = 0 if "master_weight" in state else digest_array(weight, parameter, PARAM)
    total += sum(digest_array(state[k], parameter, r) for k, r in ROLES.items() if k in state)
    for role, name in enumerate(("exp_avg_scale_v2", "exp_avg_sq_scale_v2"), 5):
        if name in state:
            row = weight[0].numel()
            groups = [i for i in range(weight.numel()) if i % row % 64 == 0]
            total += digest_array(state[name], parameter, role, groups)
    return total % 2**64
