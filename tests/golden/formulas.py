"""Implements the formulas of docs/numerics.md, section by section, on top of softfloat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

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
# Section 2: Adam and AdamW.


def power(base: Number, exponent: int) -> Number:
    result = ONE
    while exponent > 0:
        if exponent % 2:
            result = mul(FP64, result, base)
        base = mul(FP64, base, base)
        exponent //= 2
    return result


@dataclass(frozen=True)
class Adam:
    """Arguments of one Adam step. The numbers are doubles."""

    lr: Number
    beta1: Number
    beta2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False
    grad_factor: Number = ONE


def adam_scalars(a: Adam, t: int) -> dict[str, Number]:
    bc1 = sub(FP64, ONE, power(a.beta1, t))
    bc2 = sub(FP64, ONE, power(a.beta2, t))
    root = sqrt(FP64, bc2)
    return {
        "beta1": a.beta1,
        "beta2": a.beta2,
        "step_size": mul(FP64, div(FP64, a.lr, bc1), root),
        "eps_hat": mul(FP64, a.eps, root),
        "decay": mul(FP64, a.lr, a.weight_decay) if a.decoupled else ZERO,
        "l2": ZERO if a.decoupled else a.weight_decay,
        "w1": sub(FP64, ONE, a.beta1),
        "w2": sub(FP64, ONE, a.beta2),
        "grad_factor": a.grad_factor,
    }


def adam_element(
    a: Adam, fmt: Format, scalars: dict[str, Number], p: int, g: int, m: int, v: int, vmax: int
) -> tuple[int, int, int, int]:
    """Steps one element, given and returned as bit patterns of `fmt`: p, m, v, vmax."""
    t = compute_format(fmt)
    s = {name: round_to(t, value) for name, value in scalars.items()}
    pt, gt, mt, vt, vmaxt = (decode(fmt, bits) for bits in (p, g, m, v, vmax))

    gt = mul(t, gt, s["grad_factor"])
    if a.maximize:
        gt = negate(gt)
    if not is_zero(scalars["l2"]):
        gt = add(t, gt, mul(t, s["l2"], pt))
    if less(scalars["w1"], HALF):
        mt = add(t, mt, mul(t, s["w1"], sub(t, gt, mt)))
    else:
        mt = sub(t, gt, mul(t, s["beta1"], sub(t, gt, mt)))
    square = mul(t, mul(t, s["w2"], gt), gt)
    if less(scalars["w2"], HALF):
        forgotten = mul(t, s["w2"], vt)
        largest = decode(t, 0x7F7FFFFF if t is FP32 else 0x7FEFFFFFFFFFFFFF)
        vt = add(t, vt, sub(t, square, forgotten if less(forgotten, largest) else largest))
    else:
        vt = add(t, square, mul(t, s["beta2"], vt))
    d = vt
    if a.amsgrad:
        if not (less(vt, vmaxt) or vmaxt[1] is NAN):
            vmaxt = vt
        d = vmaxt
    u = div(t, mt, add(t, sqrt(t, d), s["eps_hat"]))
    change = mul(t, s["step_size"], u)
    if not is_zero(scalars["decay"]):
        change = add(t, mul(t, s["decay"], pt), change)
    pt = sub(t, pt, change)

    stored = (encode(fmt, round_to(fmt, x)) for x in (pt, mt, vt))
    return (*stored, encode(fmt, round_to(fmt, vmaxt)) if a.amsgrad else vmax)


def adam_steps(
    a: Adam,
    fmt: Format,
    t: int,
    grads: list[list[int]],
    p: list[int],
    m: list[int],
    v: list[int],
    vmax: list[int],
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Runs len(grads) steps from step count t. Returns the updated p, m, v, vmax."""
    for g in grads:
        t += 1
        scalars = adam_scalars(a, t)
        rows = [adam_element(a, fmt, scalars, *x) for x in zip(p, g, m, v, vmax, strict=True)]
        p, m, v, vmax = ([row[k] for row in rows] for k in range(4))
    return p, m, v, vmax


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
