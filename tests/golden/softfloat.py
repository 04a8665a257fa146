"""IEEE 754 binary arithmetic, rounded to nearest even, in ``fractions`` and integers only.

A number is a pair (sign 0 or 1, magnitude). The magnitude is a nonnegative Fraction, INF or NAN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

INF = "inf"
NAN = "nan"
Number = tuple[int, Any]
ZERO: Number = (0, Fraction(0))


@dataclass(frozen=True)
class Format:
    name: str
    width: int  # bits
    precision: int  # significand bits with the hidden one
    emax: int

    @property
    def emin(self) -> int:
        return 1 - self.emax

    @property
    def digits(self) -> int:
        return self.width // 4

    @property
    def hidden(self) -> int:
        return 1 << (self.precision - 1)

    @property
    def exponent_mask(self) -> int:
        return (1 << (self.width - self.precision)) - 1


FP16 = Format("float16", 16, 11, 15)
BF16 = Format("bfloat16", 16, 8, 127)
FP32 = Format("float32", 32, 24, 127)
FP64 = Format("float64", 64, 53, 1023)
FORMATS = {f.name: f for f in (FP32, FP64, BF16, FP16)}


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def round_to(fmt: Format, x: Number) -> Number:
    """Rounds to nearest even; keeps subnormals and the sign of zero, and overflows to infinity."""
    sign, value = x
    if value is NAN or value is INF or value == 0:
        return x
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < power_of_two(exponent):
        exponent -= 1
    quantum = power_of_two(max(exponent, fmt.emin) - (fmt.precision - 1))
    rounded = round(value / quantum) * quantum  # Python rounds a Fraction's ties to even
    return (sign, INF if rounded >= power_of_two(fmt.emax + 1) else rounded)


def decode(fmt: Format, bits: int) -> Number:
    sign = bits >> (fmt.width - 1)
    field = bits >> (fmt.precision - 1) & fmt.exponent_mask
    fraction = bits & (fmt.hidden - 1)
    if field == fmt.exponent_mask:
        return (sign, NAN if fraction else INF)
    significand = fraction | (fmt.hidden if field else 0)
    return (sign, significand * power_of_two(max(field, 1) - fmt.emax - fmt.precision + 1))


def encode(fmt: Format, x: Number) -> int:
    """Returns the bits of a number that `fmt` can represent; every NaN gets one canonical form."""
    sign, value = x
    if value is NAN:
        return (fmt.exponent_mask << (fmt.precision - 1)) | (fmt.hidden >> 1)
    sign <<= fmt.width - 1
    if value is INF:
        return sign | (fmt.exponent_mask << (fmt.precision - 1))
    units = value / power_of_two(fmt.emin - fmt.precision + 1)
    assert units.denominator == 1, "not a number of this format"
    significand = units.numerator
    field = 0
    if significand >= fmt.hidden:
        field = significand.bit_length() - fmt.precision + 1
        significand >>= field - 1
        assert significand << (field - 1) == units.numerator, "not a number of this format"
        significand -= fmt.hidden
    return sign | (field << (fmt.precision - 1)) | significand


def number(x: float | int | str | Fraction) -> Number:
    """Returns the double nearest to a decimal constant."""
    if isinstance(x, float) and not math.isfinite(x):
        return (0, NAN) if x != x else (int(x < 0), INF)
    # repr gives the decimal digits as written, so this does not rely on Python's parser.
    value = x if isinstance(x, Fraction) else Fraction(repr(x) if isinstance(x, float) else x)
    negative = value < 0 or (isinstance(x, float) and math.copysign(1.0, x) < 0)
    return round_to(FP64, (int(negative), abs(value)))


def negate(a: Number) -> Number:
    return (1 - a[0], a[1])


def add(fmt: Format, a: Number, b: Number) -> Number:
    if a[1] is NAN or b[1] is NAN:
        return (0, NAN)
    if a[1] is INF or b[1] is INF:
        if a[1] is INF and b[1] is INF and a[0] != b[0]:
            return (0, NAN)
        return a if a[1] is INF else b
    exact = (-a[1] if a[0] else a[1]) + (-b[1] if b[0] else b[1])
    if exact == 0:  # -0 only from -0 + -0
        return (a[0] & b[0], exact)
    return round_to(fmt, (int(exact < 0), abs(exact)))


def sub(fmt: Format, a: Number, b: Number) -> Number:
    return add(fmt, a, negate(b))


def mul(fmt: Format, a: Number, b: Number) -> Number:
    if a[1] is NAN or b[1] is NAN:
        return (0, NAN)
    sign = a[0] ^ b[0]
    if a[1] is INF or b[1] is INF:
        return (0, NAN) if a[1] == 0 or b[1] == 0 else (sign, INF)
    return round_to(fmt, (sign, a[1] * b[1]))


def div(fmt: Format, a: Number, b: Number) -> Number:
    if a[1] is NAN or b[1] is NAN:
        return (0, NAN)
    sign = a[0] ^ b[0]
    if a[1] is INF:
        return (0, NAN) if b[1] is INF else (sign, INF)
    if b[1] is INF:
        return (sign, Fraction(0))
    if b[1] == 0:
        return (0, NAN) if a[1] == 0 else (sign, INF)
    return round_to(fmt, (sign, a[1] / b[1]))


def sqrt(fmt: Format, a: Number) -> Number:
    sign, value = a
    if value is NAN or value == 0:
        return a
    if sign:
        return (0, NAN)
    if value is INF:
        return a
    # Compute extra digits, then add half a unit of the last digit if the root is not exact.
    size = value.numerator.bit_length() - value.denominator.bit_length()
    shift = max(0, fmt.precision + 4 - size // 2)
    # 4**shift * value >= 2**(2 * precision + 6), so the root has at least precision + 3 bits.
    root = math.isqrt((value.numerator << 2 * shift) // value.denominator)
    exact = root * root * value.denominator == value.numerator << 2 * shift
    return round_to(fmt, (0, Fraction(2 * root + (0 if exact else 1), 2 << shift)))


def less(a: Number, b: Number) -> bool:
    """Compares as IEEE does: false with a NaN, and -0 equals 0."""
    if a[1] is NAN or b[1] is NAN:
        return False

    def key(x: Number) -> tuple[int, Fraction]:
        if x[1] is INF:
            return (-1 if x[0] else 1, Fraction(0))
        return (0, -x[1] if x[0] else x[1])

    return key(a) < key(b)


def is_zero(a: Number) -> bool:
    return a[1] is not NAN and a[1] is not INF and a[1] == 0


def hexed(fmt: Format, bits: Iterable[int]) -> str:
    return "".join(f"{b:0{fmt.digits}x}" for b in bits)


def unhexed(fmt: Format, text: str) -> list[int]:
    n = fmt.digits
    return [int(text[i : i + n], 16) for i in range(0, len(text), n)]


def special_bits(fmt: Format) -> list[int]:
    """±0, ±smallest, ±largest subnormal, ±smallest normal, ±1, ±largest, ±infinity, NaNs."""
    top = fmt.exponent_mask << (fmt.precision - 1)
    one = fmt.emax << (fmt.precision - 1)
    plain = [0, 1, fmt.hidden - 1, fmt.hidden, one, top - 1, top]
    sign = 1 << (fmt.width - 1)
    return plain + [sign | x for x in plain] + [top | 1, sign | top | (fmt.hidden >> 1) | 1]
