"""Implements the formulas of docs/numerics.md, section by section, on top of softfloat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from softfloat import (
    FP32,
    FP64,
    INF,
    NAN,
    ZERO,
    Format,
    Number,
    add,
    decode,
    div,
    encode,
    is_zero,
    less,
    mul,
    negate,
    number,
    round_to,
    sqrt,
    sub,
)

ONE = number(1)
HALF = number(Fraction(1, 2))


def compute_format(fmt: Format) -> Format:
    return FP64 if fmt is FP64 else FP32


# --------------------------------------------------------------------------------------------
# Section 2: the update.


@cache
def power(base: Number, exponent: int) -> Number:
    result = ONE
    while exponent > 0:
        if exponent % 2:
            result = mul(FP64, result, base)
        base = mul(FP64, base, base)
        exponent //= 2
    return result


@cache
def root_of_correction(beta2: Number, count: int) -> Number:
    return sqrt(FP64, sub(FP64, ONE, power(beta2, count)))


def average(t: Format, m: Number, g: Number, beta: Number, w: Number | None = None) -> Number:
    w = sub(FP64, ONE, beta) if w is None else w
    from_m = sub(t, g, m)
    if less(w, HALF):
        return add(t, m, mul(t, round_to(t, w), from_m))
    return sub(t, g, mul(t, round_to(t, beta), from_m))


def sign(x: Number) -> Number:
    return x if is_zero(x) or x[1] is NAN else (x[0], ONE[1])


@dataclass(frozen=True, kw_only=True)
class Step:
    """Arguments of one step of any algorithm. The numbers are doubles."""

    lr: Number
    weight_decay: Number
    decoupled: bool = True
    maximize: bool = False
    cautious: bool = False
    peak: Number = ZERO
    grad_factor: Number = ONE

    def decay(self) -> Number:
        decay = mul(FP64, self.lr, self.weight_decay) if self.decoupled else ZERO
        return decay if is_zero(self.peak) else mul(FP64, decay, div(FP64, self.lr, self.peak))

    def step_size(self, count: int) -> Number:
        return self.lr

    def scaled(self, t: Format, grad: Number, p: Number) -> Number:
        """Returns g."""
        g = mul(t, grad, round_to(t, self.grad_factor))
        if self.maximize:
            g = negate(g)
        if not self.decoupled and not is_zero(self.weight_decay):
            g = add(t, g, mul(t, round_to(t, self.weight_decay), p))
        return g

    def direction(self, t: Format, count: int, g: Number, states: list[Number]) -> Number:
        """Updates the states by the gradient, and returns u."""
        raise NotImplementedError

    def applied(self, t: Format, p: Number, u: Number, step_size: Number) -> Number:
        """Returns the new p, before it is rounded to the parameter's format."""
        change = mul(t, round_to(t, step_size), u)
        if not is_zero(self.decay()):
            decayed = mul(t, round_to(t, self.decay()), p)
            if self.cautious:
                decayed = mul(t, decayed, ZERO if less(mul(t, sign(u), p), ZERO) else ONE)
            change = add(t, decayed, change)
        return sub(t, p, change)


@dataclass(frozen=True, kw_only=True)
class Adam(Step):
    beta1: Number
    beta2: Number
    eps: Number
    amsgrad: bool = False

    def step_size(self, count: int) -> Number:
        bc1 = sub(FP64, ONE, power(self.beta1, count))
        return mul(FP64, div(FP64, self.lr, bc1), root_of_correction(self.beta2, count))

    def eps_hat(self, count: int) -> Number:
        return mul(FP64, self.eps, root_of_correction(self.beta2, count))

    def direction(self, t: Format, count: int, g: Number, states: list[Number]) -> Number:
        m = states[0] = average(t, states[0], g, self.beta1)
        w2 = sub(FP64, ONE, self.beta2)
        square = mul(t, mul(t, round_to(t, w2), g), g)
        if less(w2, HALF):
            forgotten = mul(t, round_to(t, w2), states[1])
            largest = decode(t, 0x7F7FFFFF if t is FP32 else 0x7FEFFFFFFFFFFFFF)
            forgotten = forgotten if less(forgotten, largest) else largest
            states[1] = add(t, states[1], sub(t, square, forgotten))
        else:
            states[1] = add(t, square, mul(t, round_to(t, self.beta2), states[1]))
        d = states[1]
        if self.amsgrad:
            if not (less(d, states[2]) or states[2][1] is NAN):
                states[2] = d
            d = states[2]
        return div(t, m, add(t, sqrt(t, d), round_to(t, self.eps_hat(count))))


@dataclass(frozen=True, kw_only=True)
class Lion(Step):
    beta1: Number
    beta2: Number

    def direction(self, t: Format, count: int, g: Number, states: list[Number]) -> Number:
        c = average(t, states[0], g, self.beta1)
        states[0] = average(t, states[0], g, self.beta2)
        return sign(c)


@dataclass(frozen=True, kw_only=True)
class Sgd(Step):
    momentum: Number
    dampening: Number
    nesterov: bool = False

    def direction(self, t: Format, count: int, g: Number, states: list[Number]) -> Number:
        if not states:
            return g
        keeps = ZERO if count == 1 else self.momentum
        w = ONE if count == 1 else sub(FP64, ONE, self.dampening)
        b = states[0] = add(t, mul(t, round_to(t, keeps), states[0]), mul(t, round_to(t, w), g))
        return add(t, g, mul(t, round_to(t, self.momentum), b)) if self.nesterov else b


def element(
    a: Step, fmt: Format, count: int, p_bits: int, g_bits: int, state_bits: list[int]
) -> tuple[int, list[int]]:
    """Steps one element, given and returned as bit patterns of `fmt`: parameter and states."""
    t = compute_format(fmt)
    p, g, *states = (decode(fmt, bits) for bits in (p_bits, g_bits, *state_bits))
    u = a.direction(t, count, a.scaled(t, g, p), states)
    p = a.applied(t, p, u, a.step_size(count))
    return encode(fmt, round_to(fmt, p)), [encode(fmt, round_to(fmt, x)) for x in states]


def advance(
    a: Step, fmt: Format, count: int, grads: list[list[int]], p: list[int], states: list[list[int]]
) -> tuple[list[int], list[list[int]]]:
    """Runs len(grads) steps from a step count. Returns the updated parameter and states."""
    rows = [list(row) for row in zip(*states, strict=True)] if states else [[] for _ in p]
    for g in grads:
        count += 1
        done = [element(a, fmt, count, *x) for x in zip(p, g, rows, strict=True)]
        p, rows = [one for one, _ in done], [row for _, row in done]
    return p, [list(column) for column in zip(*rows, strict=True)]


# --------------------------------------------------------------------------------------------
# Section 3: sum of squares.

LIMBS = 68
UNIT = 1088  # the accumulator counts units of 2**-1088
LANES, BLOCK = 64, 4096


@dataclass
class Accumulator:
    units: int = 0
    infinities: int = 0
    nans: int = 0

    def add(self, x: Number) -> None:
        if x[1] is NAN:
            self.nans += 1
        elif x[1] is INF:
            self.infinities += 1
        else:
            scaled = x[1] * (1 << UNIT)
            assert scaled.denominator == 1
            self.units += -scaled.numerator if x[0] else scaled.numerator

    def limbs(self) -> list[int]:
        """Returns the normalized limbs and the two counters, as the library's int64[70]."""
        rest = self.units
        limbs = []
        for _ in range(LIMBS - 1):
            limbs.append(rest & 0xFFFFFFFF)
            rest >>= 32
        return [*limbs, rest, self.infinities, self.nans]

    def total(self) -> Number:
        if self.nans:
            return (0, NAN)
        if self.infinities:
            return (0, INF)
        return round_to(FP64, (int(self.units < 0), Fraction(abs(self.units), 1 << UNIT)))


def row_length(shape: list[int], strides: list[int]) -> int:
    """Returns the row length. `strides` must describe a dense tensor without empty dimensions."""
    if not shape:
        return 1
    count = math.prod(shape)
    if shape[0] == 1:
        return count
    outer = max((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[d])
    return count // shape[outer]


def add_squares(acc: Accumulator, fmt: Format, elements: list[int], row: int) -> None:
    squares = [mul(FP64, x, x) for x in (decode(fmt, bits) for bits in elements)]
    if row < LANES:
        for x in squares:
            acc.add(x)
        return
    for start in range(0, len(squares), row):
        for first in range(start, start + row, BLOCK):
            block = squares[first : min(first + BLOCK, start + row)]
            lanes = [ZERO] * LANES
            for i, x in enumerate(block):
                lanes[i % LANES] = add(FP64, lanes[i % LANES], x)
            width = LANES
            while width > 1:
                width //= 2
                for j in range(width):
                    lanes[j] = add(FP64, lanes[j], lanes[j + width])
            acc.add(lanes[0])


# --------------------------------------------------------------------------------------------
# Section 4: control.


def control(
    acc: Accumulator,
    max_grad_norm: Number,
    skip_nonfinite: bool,
    scale: Number | None,
    scaler_found_inf: bool,
) -> dict[str, Number]:
    scale = ONE if scale is None else scale
    total = acc.total()
    grad_norm = div(FP64, sqrt(FP64, total), scale)
    clip_factor = ONE
    if less(ZERO, max_grad_norm):
        clip_factor = div(FP64, max_grad_norm, add(FP64, grad_norm, number(1e-6)))
        if less(ONE, clip_factor):
            clip_factor = ONE
    found_inf = total[1] in (INF, NAN) or scaler_found_inf
    skip = found_inf and (skip_nonfinite or scaler_found_inf)
    return {
        "grad_norm": grad_norm,
        "clip_factor": clip_factor,
        "grad_factor": mul(FP64, clip_factor, div(FP64, ONE, scale)),
        "found_inf": ONE if found_inf else ZERO,
        "skip": ONE if skip else ZERO,
    }


# --------------------------------------------------------------------------------------------
# Section 5: learning-rate factor.

# pi to 50 decimals (OEIS A000796), rounded once to double
PI = number(Fraction("3.14159265358979323846264338327950288419716939937510"))


def polynomial(z: Number, coefficients: list[Number]) -> Number:
    """Evaluates a polynomial by Horner's rule; coefficients start at the lowest power."""
    result = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = add(FP64, mul(FP64, result, z), c)
    return result


COSINE = [number(Fraction((-1) ** k, math.factorial(2 * k))) for k in range(10)]
SINE = [number(Fraction((-1) ** k, math.factorial(2 * k + 1))) for k in range(10)]


def cospi(x: Number) -> Number:
    if less(HALF, x):
        return negate(cospi(sub(FP64, ONE, x)))
    if less(number(Fraction(1, 4)), x):
        y = mul(FP64, PI, sub(FP64, HALF, x))
        return mul(FP64, y, polynomial(mul(FP64, y, y), SINE))
    y = mul(FP64, PI, x)
    return polynomial(mul(FP64, y, y), COSINE)


def lr_factor(
    step: int, warmup: int, stable: int, decay: int, kind: str, min_factor: Number, generation: int
) -> Number:
    extra = 1 if generation == 1 else 0
    if step < warmup:
        return div(FP64, number(step + 1), number(warmup + extra))
    if step < warmup + stable:
        return ONE
    if decay + extra == 0:
        return ONE
    done = number(step + 1 - (warmup + stable))
    progress = div(FP64, done, number(decay + extra))
    if less(ONE, progress):
        progress = ONE
    if kind == "linear":
        f = sub(FP64, ONE, progress)
    elif kind == "sqrt":
        f = sub(FP64, ONE, sqrt(FP64, progress))
    else:
        f = mul(FP64, HALF, add(FP64, ONE, cospi(progress)))
    return add(FP64, min_factor, mul(FP64, sub(FP64, ONE, min_factor), f))


# --------------------------------------------------------------------------------------------
# Greedy partition, as in torch/distributed/optim/zero_redundancy_optimizer.py.


def partition_greedy(
    numels: list[int], world_size: int, initial_loads: list[int] | None
) -> list[int]:
    loads = list(initial_loads) if initial_loads is not None else [0] * world_size
    ranks = [0] * len(numels)
    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):  # sorted() is stable
        ranks[i] = loads.index(min(loads))
        loads[ranks[i]] += numels[i]
    return ranks
