"""Sections 4 (loss scale) and 7 to 9 of docs/numerics.md, in integers and fractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softfloat import BF16, FP32, FP64, ZERO, Number, decode, encode, less, mul, number, round_to

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def split(bits: int) -> tuple[int, int]:
    """Splits an fp32 value that is not a NaN into its bf16 weight and remainder."""
    if bits % (1 << 17) == 1 << 15:
        bits -= 1
    weight = encode(BF16, round_to(BF16, decode(FP32, bits)))
    return weight, bits - (weight << 16)


def split8(bits: int) -> tuple[int, int]:
    """Splits an fp32 value into its nearest bf16 weight and an 8-bit remainder.

    The nearest remainder whose pair rounds to the weight; ties go down if bit 16 is 0, else up.
    """
    weight = encode(BF16, round_to(BF16, decode(FP32, bits)))
    rest = bits - (weight << 16)

    def distance(remainder: int) -> tuple[int, int]:
        return abs(256 * remainder - rest), -remainder if bits >> 16 & 1 else remainder

    lowest = -127 if weight % 2 else -128
    return weight, min(range(lowest, 128), key=distance)


def mix64(x: int) -> int:
    """The finalizer of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def random_of(seed: int, step: int, parameter: int, element: int) -> int:
    """Returns the 64 random bits of an element: two words, the lower first."""
    golden = 0x9E3779B97F4A7C15
    x = mix64(seed + golden & M64)
    x = mix64(x ^ (step << 32 | parameter))
    x = mix64(x + (element >> 20) * golden & M64)
    keys = x & M32, x >> 32

    y = (element & M32) * 0x9E3779B1 + keys[0] & M32
    y = (y ^ y >> 16) * 0x21F0AAAD & M32
    y = (y ^ y >> 15 ^ keys[1]) * 0xD35A2D97 & M32
    first = y ^ y >> 15
    second = first * 0xAC4C1B51 & M32
    return first | (second ^ second >> 16) << 32


def round_stochastically(bits: int, random: int, draw: int) -> int:
    """Rounds an fp32 value that is neither infinite nor a NaN to bf16 bits."""
    return (bits + (random >> 16 * draw & 0xFFFF)) >> 16


def half_factor(half: int) -> int:
    x = half // 2 * 317 % 512
    x = (x ^ x >> 4) * 229 % 512
    return 2 * x + 1 if half % 2 else 2047 - 2 * x


def signed(bits: int, width: int) -> int:
    return bits - (bits >> width - 1 << width)


def digest(parameter: int, role: int, width: int, elements: Sequence[int]) -> int:
    """Returns the digest of one array, whose elements are given as bits of ``width``."""
    total = 0
    for element, bits in enumerate(elements):
        number = element % 512
        lane_of = element if width == 64 else element - number + number * width // 32 % 8
        x = (lane_of & M32) * 0x9E3779B1 + mix64(mix64(parameter) + (element >> 20)) & M32
        x = (x ^ x >> 16) * 0x21F0AAAD & M32
        lane = signed(x ^ x >> 15 | 1, 32)
        array, upper_array = (mix64(role + shift + 1) | 1 for shift in (0, 5))
        if width == 64:
            words = (bits & M32) * array + (bits >> 32) * upper_array
            total += words * lane
        elif width == 32:
            lower = signed(bits & 0xFFFF, 16) * half_factor(2 * number)
            upper = signed(bits >> 16, 16) * half_factor(2 * number + 1)
            total += (lower + upper) * lane * array
        elif width == 16:
            total += signed(bits, 16) * half_factor(number) * lane * array
        else:
            byte = bits if number % 2 == 0 else signed(bits, 8) << 8
            total += byte * half_factor(number // 2) * lane * array
    return total & M64


def loss_scales(settings: dict[str, Any], overflows: Sequence[bool]) -> list[int]:
    """Returns the bits of the fp32 scale after each step."""
    scale = number(settings["loss_scale"])
    growth = hysteresis = 0
    scales = []
    for overflow in overflows:
        if overflow:
            growth, hysteresis = 0, hysteresis + 1
            if hysteresis >= settings["hysteresis"]:
                scale = _rounded(mul(FP64, scale, number(settings["backoff_factor"])))
                low = number(settings["min_scale"])
                scale = low if less(scale, low) else scale
        else:
            growth += 1
            if growth >= settings["growth_interval"]:
                growth = hysteresis = 0
                grown = _rounded(mul(FP64, scale, number(settings["growth_factor"])))
                high = number(settings["max_scale"])
                if less(ZERO, high) and less(high, grown):
                    grown = high
                if encode(FP32, grown) < 0x7F800000:  # not infinite
                    scale = grown
        scales.append(encode(FP32, scale))
    return scales


def _rounded(x: Number) -> Number:
    return round_to(FP32, x)
