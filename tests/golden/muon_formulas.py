"""Muon and NorMuon: sections 2 and 12 of docs/numerics.md on top of softfloat, and their file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from formulas import ONE, Step, average, compute_format
from softfloat import (
    BF16,
    FP32,
    FP64,
    ZERO,
    Format,
    Number,
    add,
    decode,
    div,
    encode,
    hexed,
    mul,
    number,
    round_to,
    sqrt,
    sub,
)

Rows = list[list[Number]]
Triple = tuple[float, float, float]
TINY = number(1e-8)


def fma(a: Number, b: Number, c: Number) -> Number:
    return add(FP32, (a[0] ^ b[0], a[1] * b[1]), c)


def transposed(x: Rows) -> Rows:
    return [*map(list, zip(*x, strict=True))]


def each(f: Callable[..., Number], *matrices: Rows) -> Rows:
    """Applies a function to the elements of matrices of one shape."""
    return [[f(*x) for x in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def product(a: Rows, b: Rows, symmetric: bool = False) -> Rows:
    """Returns a b, each element one chain; of a symmetric product the upper half counts."""
    result: Rows = []
    for i, row in enumerate(a):
        result.append([])
        for j, column in enumerate(transposed(b)):
            total = ZERO
            if symmetric and j < i:
                total = result[j][i]
            else:
                for x, y in zip(row, column, strict=True):
                    total = fma(x, y, total)
            result[-1].append(total)
    return result


def orthogonalized(x: Rows, triples: Sequence[Triple], eps: float) -> Rows:
    if len(x) > len(x[0]):
        return transposed(orthogonalized(transposed(x), triples, eps))
    squares = (0, sum(value * value for row in x for _, value in row))
    norm = sqrt(FP64, round_to(FP64, squares))
    least = number(eps)
    factor = div(FP64, ONE, norm if norm[1] > least[1] else least)
    x = each(lambda value: round_to(FP32, mul(FP64, value, factor)), x)
    segments: list[list[Triple]] = []
    growth = math.inf
    for triple in triples:
        growth *= max(1.0, triple[0] ** 2)
        if growth > 1024 or len(x) == len(x[0]):
            segments.append([])
            growth = max(1.0, triple[0] ** 2)
        segments[-1].append(triple)
    for segment in segments:
        r = product(x, transposed(x), symmetric=True)
        u: Rows = []
        for triple in segment:
            a, b, c = (round_to(FP32, number(value)) for value in triple)
            rr = product(r, r, symmetric=True)
            q = each(lambda y, z, b=b, c=c: fma(c, z, mul(FP32, b, y)), r, rr)
            for i in range(len(r)):
                q[i][i] = add(FP32, q[i][i], a)
            u = product(q, u, symmetric=True) if u else q
            r = product(product(q, r, symmetric=True), q, symmetric=True)
        x = product(u, x)
    return x


def total(values: Sequence[Number]) -> Number:
    result = ZERO
    for value in values:
        result = add(FP64, result, value)
    return result


def row_normalized(o: Rows, v: list[Number], beta2: Number) -> tuple[Rows, list[Number]]:
    """Returns NorMuon's matrix and averages."""
    squares, factors, averages = [], [], []
    for row, old in zip(o, v, strict=True):
        s = [total([mul(FP64, x, x) for x in row[lane::8]]) for lane in range(8)]
        half = [add(FP64, s[k], s[k + 4]) for k in range(4)]
        squares.append(add(FP64, add(FP64, half[0], half[1]), add(FP64, half[2], half[3])))
        mean = div(FP64, squares[-1], number(len(row)))
        new = mul(FP64, sub(FP64, ONE, beta2), mean)
        averages.append(round_to(FP32, add(FP64, mul(FP64, beta2, old), new)))
        factors.append(div(FP64, ONE, add(FP64, sqrt(FP64, averages[-1]), TINY)))
    pairs = zip(squares, factors, strict=True)
    after = sqrt(FP64, total([mul(FP64, mul(FP64, s, f), f) for s, f in pairs]))
    whole = div(FP64, sqrt(FP64, total(squares)), add(FP64, after, TINY))
    factors = [round_to(FP32, mul(FP64, f, whole)) for f in factors]
    rows = zip(o, factors, strict=True)
    return [[mul(FP32, x, f) for x in row] for row, f in rows], averages


@dataclass(frozen=True, kw_only=True)
class Muon(Step):
    momentum: Number
    triples: Sequence[Triple]
    nesterov: bool = True
    beta2: Number = ZERO
    adjust: str | None = None

    def factor(self, rows: int, cols: int) -> Number:
        if self.adjust == "match_rms_adamw":
            return mul(FP64, number(0.2), sqrt(FP64, number(max(rows, cols))))
        ratio = div(FP64, number(rows), number(cols))
        return sqrt(FP64, ratio if rows > cols or self.adjust == "spectral_unclamped" else ONE)

    def advance(
        self, fmt: Format, p: Rows, m: Rows, v: list[Number], grad: Rows
    ) -> tuple[Rows, Rows, list[Number]]:
        t, mu = compute_format(fmt), self.momentum
        g = each(lambda x, y: self.scaled(t, x, y), grad, p)
        u = m = each(lambda x, y: average(t, x, y, mu), m, g)
        if self.nesterov:
            u = each(lambda x, y: average(t, x, y, sub(FP64, ONE, mu), w=mu), g, m)
        o = orthogonalized(each(lambda x: round_to(FP32, x), u), self.triples, 1e-7)
        if v:
            o, v = row_normalized(o, v, self.beta2)
        size = mul(FP64, self.lr, self.factor(len(p), len(p[0])))
        p = each(lambda x, y: round_to(fmt, self.applied(t, x, y, size)), p, o)
        return p, each(lambda x: round_to(fmt, x), m), v


# --------------------------------------------------------------------------------------------
# The file: three steps from a momentum of 0.

JORDAN: Triple = (3.4445, -4.7750, 2.0315)
HALF = 0.49999999999999994  # 1 - (1 - HALF) is 0.5
MUON_CASES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((3, 5), {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.1}),
    ((5, 3), {"lr": 0.1, "momentum": 0.4, "weight_decay": 0.0, "nesterov": False}),
    ((5, 3), {"lr": 0.02, "momentum": HALF, "adjust_lr_fn": "match_rms_adamw", "maximize": True}),
    ((4, 4), {"lr": 0.1, "ns_coefficients": [[4.0, -6.0, 2.5], [2.0, -1.5, 0.5]]}),
    ((3, 10), {"lr": 0.1, "beta2": 0.9, "adjust_lr_fn": "spectral_unclamped"}),
    ((10, 3), {"lr": 0.1, "beta2": 0.95, "weight_decay": 0.3, "cautious_weight_decay": True}),
]
KEYS = {"adjust_lr_fn": "adjust", "cautious_weight_decay": "cautious", "ns_coefficients": "triples"}
DEFAULTS: dict[str, Any] = {"momentum": 0.95, "weight_decay": 0.1}


def bits_of(fmt: Format, rows: Rows) -> str:
    return hexed(fmt, [encode(fmt, x) for row in rows for x in row])


def muon_file(elements: Callable[..., list[int]]) -> Iterator[dict[str, Any]]:
    """Yields cases with arguments of FusedMuon; ``elements`` draws bits by a seed."""
    for index, (shape, chosen) in enumerate(MUON_CASES):
        arguments = DEFAULTS | chosen
        values = {
            KEYS.get(k, k): number(v) if type(v) is float else v for k, v in arguments.items()
        }
        step = Muon(**{"triples": [JORDAN] * 5} | values)
        for fmt in (FP32, FP64, BF16):
            drawn = [
                elements(fmt, math.prod(shape), 3000 + 10 * index + k, {"low": -8, "high": 0})
                for k in range(4)
            ]
            cut = range(0, math.prod(shape), shape[1])
            p, *grads = (
                [[decode(fmt, b) for b in x[i : i + shape[1]]] for i in cut] for x in drawn
            )
            m = each(lambda _: ZERO, p)
            v = [ZERO] * shape[0] if "beta2" in arguments else []
            for grad in grads:
                p, m, v = step.advance(fmt, p, m, v, grad)
            after = {"p": bits_of(fmt, p), "momentum_buffer": bits_of(fmt, m)}
            if v:
                after["second_momentum_buffer"] = bits_of(FP32, [v])
            yield {
                "dtype": fmt.name,
                "shape": shape,
                "arguments": arguments,
                "before": hexed(fmt, drawn[0]),
                "grads": [hexed(fmt, x) for x in drawn[1:]],
                "after": after,
            }
