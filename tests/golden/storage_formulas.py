"""Sections 4 (loss scale) and 7 to 9 of docs/numerics.md, on integers and fractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softfloat import BF16, FP32, FP64, ZERO, Number, decode, encode, less, mul, number, round_to

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def split(bits: int) -> tuple[int, int]:
    """bf16 weight and remainder of an fp32 value that is not a NaN."""
    if bits % (1 << 17) == 1 << 15:
        bits -= 1
    weight = encode(BF16, round_to(BF16, decode(FP32, bits)))
    return weight, bits - (weight << 16)


def philox_words(seed: int, step: int, parameter: int, block: int) -> list[int]:
    """Philox4x32-10: Salmon et al., SC11, section 3.3 and its reference code's constants."""
    counter = [block & M32, block >> 32, step, parameter]
    key = [seed & M32, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 1 << 32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & M32, (key[1] + 0xBB67AE85) & M32]
    return counter


def random_of(seed: int, step: int, parameter: int, element: int) -> int:
    words = philox_words(seed, step, parameter, element // 2)
    first = 2 * (element % 2)
    return words[first] + (words[first + 1] << 32)


def round_stochastically(bits: int, random: int, draw: int) -> int:
    """bf16 of an fp32 value that is neither infinite nor a NaN."""
    rounded = (bits + (random >> 16 * draw & 0xFFFF)) >> 16
    return rounded - 1 if rounded & 0x7FFF == 0x7F80 else rounded


def mix(x: int) -> int:
    x = ((x ^ x >> 16) * 0x21F0AAAD) & M32
    x = ((x ^ x >> 15) * 0xD35A2D97) & M32
    return x ^ x >> 15


def digest(parameter: int, role: int, width: int, elements: Sequence[int]) -> int:
    """Of one array's elements, given as bits of ``width``."""
    salt = mix((5 * parameter + role + 1) & M32)
    total = 0
    for element, bits in enumerate(elements):
        words = [bits] if width < 64 else [bits & M32, bits >> 32]
        for word, word_salt in zip(words, (salt, mix(salt)), strict=False):
            place = mix(element & M32 ^ mix(word_salt + (element >> 32) & M32))
            total += word * (place | 1)
    return total & M64


def loss_scales(settings: dict[str, Any], overflows: Sequence[bool]) -> list[int]:
    """Bits of the fp32 scale after each step."""
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
            hysteresis = 0 if settings["consecutive_hysteresis"] else hysteresis
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
