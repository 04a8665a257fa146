"""Golden vectors of docs/numerics.md, from a program that shares no code with the library.

    python tests/golden/generate.py            write the JSON files next to this file
    python tests/golden/generate.py --check    compute them again and compare

Uses the standard library only. softfloat.py does all floating-point arithmetic with ``fractions``
and integers; Python's own floats only carry constants. Bit patterns are hexadecimal, most
significant digit first. The elements of a tensor follow each other in storage order.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from formulas import (
    Accumulator,
    Adam,
    Lion,
    Sgd,
    Step,
    add_squares,
    advance,
    control,
    lr_factor,
    partition_greedy,
    row_length,
)
from muon_formulas import muon_file
from softfloat import (
    BF16,
    FORMATS,
    FP32,
    FP64,
    Format,
    Number,
    decode,
    encode,
    hexed,
    number,
    special_bits,
)
from storage_formulas import digest, loss_scales, random_of, round_stochastically, split, split8

HERE = Path(__file__).resolve().parent

# --------------------------------------------------------------------------------------------
# Inputs. All random numbers come from SplitMix64 (Steele, Lea, Flood 2014), so that files that name
# a seed instead of listing elements can be reproduced anywhere.


class SplitMix64:
    def __init__(self, seed: int) -> None:
        self.state = seed

    def bits(self) -> int:
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    def below(self, n: int) -> int:
        return self.bits() % n


def random_bits(rng: SplitMix64, fmt: Format, low: int, high: int, *, signed: bool = True) -> int:
    """Returns a random significand at a binary exponent in [low, high], cut to the format."""
    exponent = low + rng.below(high - low + 1)
    exponent = max(fmt.emin - fmt.precision + 1, min(exponent, fmt.emax))
    fraction = rng.bits() & (fmt.hidden - 1)
    sign = (rng.bits() & 1) << (fmt.width - 1) if signed else 0
    if exponent >= fmt.emin:
        return sign | ((exponent + fmt.emax) << (fmt.precision - 1)) | fraction
    return sign | ((fmt.hidden | fraction) >> (fmt.emin - exponent))


def tensor_elements(fmt: Format, count: int, seed: int, values: dict[str, Any]) -> list[int]:
    """Returns elements in storage order: exponents in [low, high], or any finite bits with "any";
    with "special", every `every`-th element from `offset` on becomes the special of that index."""
    rng = SplitMix64(seed)
    if "any" in values:
        limit = fmt.exponent_mask << (fmt.precision - 1)
        result = []
        while len(result) < count:
            bits = rng.bits() >> (64 - fmt.width)
            if bits & (limit | (fmt.hidden - 1)) < limit:
                result.append(bits)
    else:
        result = [random_bits(rng, fmt, values["low"], values["high"]) for _ in range(count)]
    if "special" in values:
        for i in range(values.get("offset", 0), count, values["every"]):
            result[i] = special_bits(fmt)[values["special"]]
    return result


def double_hex(x: Number) -> str:
    return hexed(FP64, [encode(FP64, x)])


# --------------------------------------------------------------------------------------------
# The files.

ADAM_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled": True,
    "amsgrad": False,
    "maximize": False,
    "grad_factor": 1.0,
    "t": 0,
}
ADAM_CASES: list[dict[str, Any]] = [
    {"weight_decay": 0.01},
    {"weight_decay": 0.01, "t": 1},
    {},
    {"decoupled": False, "weight_decay": 0.1},
    {"decoupled": False, "weight_decay": 0.1, "maximize": True, "amsgrad": True, "t": 7},
    {"weight_decay": 0.1, "amsgrad": True, "t": 3},
    {"weight_decay": 0.1, "maximize": True, "t": 2},
    {"beta1": 0.0, "weight_decay": 0.01},
    {"beta2": 0.0, "t": 4},
    {"beta1": 0.0, "beta2": 0.0, "eps": 0.0},
    {"beta1": 0.5, "beta2": 0.5, "weight_decay": 0.01, "t": 1},
    {"beta1": 0.5000000000000001, "beta2": 0.5000000000000001, "t": 1},
    {"beta1": 0.3, "beta2": 0.2, "amsgrad": True, "t": 5},
    {"beta1": 0.99, "beta2": 0.9999999, "weight_decay": 0.3, "eps": 1e-15, "t": 12345},
    {"eps": 0.0, "weight_decay": 0.01, "t": 9},
    {"eps": 0.0, "t": 0, "amsgrad": True},
    {"lr": 0.0, "weight_decay": 0.1, "t": 2},
    {"grad_factor": 0.37, "weight_decay": 0.01, "t": 99},
    {"grad_factor": 0.0, "weight_decay": 0.01, "t": 3},
    {"grad_factor": 1.5e-42, "eps": 1e-30, "t": 3},
    {"grad_factor": 65536.0, "decoupled": False, "weight_decay": 1e-4, "t": 0},
    {"lr": 1e-30, "weight_decay": 1e-20, "t": 3},
    {"decoupled": False, "weight_decay": 1e-60, "t": 3},
    {"lr": 10.0, "weight_decay": 0.5, "eps": 1.0, "t": 16777212},
    {"lr": 1e30, "weight_decay": 1e-30, "eps": 1e-38, "t": 1000000},
]
ADAM_STEPS = 3
ADAM_ELEMENTS = 16


def adam_arguments(case: dict[str, Any]) -> Adam:
    numbers = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_factor")
    flags = ("decoupled", "amsgrad", "maximize")
    return Adam(**{k: number(case[k]) for k in numbers}, **{k: case[k] for k in flags})


def adam_inputs(rng: SplitMix64, fmt: Format, fresh: bool) -> dict[str, Any]:
    """Elements 0-4 resemble training, 5-9 have any magnitude up to 2**100, 10-15 hold specials."""
    specials = special_bits(fmt)
    lowest = fmt.emin - fmt.precision + 1
    usual = [(-8, 2), (-12, -4), (-24, -8), (-24, -8)] + [(-12, -4)] * ADAM_STEPS
    rows = []
    for i in range(ADAM_ELEMENTS):
        if i < 5:
            row = [random_bits(rng, fmt, *r, signed=k not in (2, 3)) for k, r in enumerate(usual)]
        elif i < 10:
            row = [random_bits(rng, fmt, lowest, 100, signed=k < 2) for k in range(4)]
            size = lowest + rng.below(100 - lowest)
            row += [random_bits(rng, fmt, size - 1, size + 1) for _ in range(ADAM_STEPS)]
        else:
            # Two specials among ordinary numbers, so that not all results are NaN.
            row = [random_bits(rng, fmt, -3, 3, signed=k != 2) for k in range(len(usual))]
            for _ in range(2):
                row[rng.below(len(row))] = specials[rng.below(len(specials))]
        rows.append(row)
    p, m, v, vmax, *grads = (list(column) for column in zip(*rows, strict=True))
    if fresh:
        m, v, vmax = ([0] * ADAM_ELEMENTS for _ in range(3))
    return {"p": p, "m": m, "v": v, "vmax": vmax, "grads": grads}


def adam_file() -> Iterator[dict[str, Any]]:
    for index, overrides in enumerate(ADAM_CASES):
        case = ADAM_DEFAULTS | overrides
        arguments = adam_arguments(case)
        for fmt in FORMATS.values():
            rng = SplitMix64(1000 * index + fmt.precision)
            x = adam_inputs(rng, fmt, fresh=case["t"] == 0)
            names = ("m", "v", "vmax") if arguments.amsgrad else ("m", "v")
            last = case["t"] + ADAM_STEPS
            scalars = {
                "step_size": arguments.step_size(last),
                "eps_hat": arguments.eps_hat(last),
            }
            yield {
                "dtype": fmt.name,
                **case,
                **stepped(arguments, fmt, case["t"], x, names),
                "last_scalars": {name: double_hex(value) for name, value in scalars.items()},
            }


def stepped(
    a: Step, fmt: Format, count: int, x: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Steps elements of `adam_inputs` with the states of these names."""
    p, states = advance(a, fmt, count, x["grads"], x["p"], [x[name] for name in names])
    after = dict(zip(("p", *names), (p, *states), strict=True))
    return {
        "before": {name: hexed(fmt, x[name]) for name in after},
        "grads": [hexed(fmt, g) for g in x["grads"]],
        "after": {name: hexed(fmt, bits) for name, bits in after.items()},
    }


# The operator, its arguments where they are not 0 or False, and the step count.
ALGORITHM_CASES: list[tuple[str, dict[str, Any], int]] = [
    ("lion", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99}, 0),
    ("lion", {"lr": 0.3, "beta1": 0.4, "beta2": 0.6, "weight_decay": 0.1, "maximize": True}, 3),
    ("lion", {"lr": 0.1, "beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1, "cautious": True}, 9),
    ("lion", {"lr": 0.1, "weight_decay": 0.3, "decoupled": False}, 2),
    ("sgd", {"lr": 0.1}, 0),
    ("sgd", {"lr": 0.1, "weight_decay": 0.1, "decoupled": False, "maximize": True}, 5),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, 0),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "cautious": True}, 4),
    ("sgd", {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1, "peak": 0.3}, 1),
    ("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "cautious": True}, 7),
    ("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "peak": 0.7}, 7),
]
ALGORITHMS: dict[str, tuple[type[Step], tuple[str, ...]]] = {
    "adam": (Adam, ("beta1", "beta2", "eps")),
    "lion": (Lion, ("beta1", "beta2")),
    "sgd": (Sgd, ("momentum", "dampening")),
}


def algorithms_file() -> Iterator[dict[str, Any]]:
    for index, (algorithm, chosen, t) in enumerate(ALGORITHM_CASES):
        cls, more = ALGORITHMS[algorithm]
        numbers = ("lr", "weight_decay", "peak", "grad_factor", *more)
        case = dict.fromkeys(numbers, 0.0) | {"grad_factor": 0.37} | chosen
        arguments = cls(**{k: number(v) if k in numbers else v for k, v in case.items()})
        names = {"adam": ("m", "v"), "lion": ("m",)}.get(algorithm, ("m",) * ("momentum" in chosen))
        for fmt in FORMATS.values():
            x = adam_inputs(SplitMix64(2000 + 10 * index + fmt.precision), fmt, fresh=t == 0)
            case["decoupled"] = arguments.decoupled
            fields = {"algorithm": algorithm, "dtype": fmt.name, "arguments": case, "t": t}
            yield fields | stepped(arguments, fmt, t, x, names)


ORDINARY = {"low": -20, "high": 0}
# (shape, order of dimensions from the outermost stride to the innermost)
SUMSQ_SHAPES: list[tuple[list[int], list[int] | None]] = [
    ([], None),
    ([0], None),
    ([3, 0, 5], None),
    ([1], None),
    ([63], None),
    ([200], None),
    ([1, 63], None),
    ([5, 63], None),
    ([1, 64], None),
    ([5, 64], None),
    ([3, 65], None),
    ([3, 127], None),
    ([2, 4096], None),
    ([2, 4097], None),
    ([1, 10000], None),
    ([2, 8191], None),
    ([7, 3, 5, 5], None),
    ([64, 100], [1, 0]),
    ([100, 63], [1, 0]),
    ([2, 3, 8, 9], [0, 2, 3, 1]),
    ([1, 3, 8, 9], [0, 2, 3, 1]),
    ([4, 1, 9, 1, 8], [4, 3, 2, 1, 0]),
    ([1, 5000], [1, 0]),
]
SUMSQ_VALUES: list[tuple[str, list[int], dict[str, Any]]] = [
    # dtype, shape, values: adversarial magnitudes, and specials in many places
    ("float32", [500], {"any": True}),
    ("float32", [2, 4200], {"any": True}),
    ("float32", [3, 4096], {"low": -149, "high": -140}),
    ("float32", [300], {"low": -149, "high": -126}),
    ("float32", [2, 4100], {"low": 127, "high": 127}),
    ("float32", [2, 5000], {"low": -3, "high": 127}),
    ("float64", [500], {"low": -560, "high": 511}),
    ("float64", [2, 4200], {"low": -530, "high": 500}),
    ("float64", [300], {"any": True}),
    ("float64", [2, 4200], {"low": 509, "high": 511}),
    ("float64", [2, 200], {"low": -1074, "high": -500}),
    ("bfloat16", [500], {"any": True}),
    ("bfloat16", [2, 4200], {"any": True}),
    ("float16", [500], {"any": True}),
    ("float16", [2, 4200], {"any": True}),
]


def strides_of(shape: list[int], order: list[int] | None) -> list[int]:
    strides = [0] * len(shape)
    stride = 1
    for d in reversed(order if order is not None else range(len(shape))):
        strides[d] = stride
        stride *= max(shape[d], 1)
    return strides


def sumsq_case(seed: int, dtype: str, shape: list[int], strides: list[int], values: dict[str, Any]):
    fmt = FORMATS[dtype]
    acc = Accumulator()
    elements = tensor_elements(fmt, math.prod(shape), seed, values)
    if elements:
        add_squares(acc, fmt, elements, row_length(shape, strides))
    return {
        "dtype": dtype,
        "shape": shape,
        "strides": strides,
        "seed": seed,
        "values": values,
        **accumulator_fields(acc),
    }


def accumulator_fields(acc: Accumulator) -> dict[str, Any]:
    """Returns the nonzero entries of the normalized accumulator, and its total."""
    return {
        "accumulator": {str(k): limb for k, limb in enumerate(acc.limbs()) if limb},
        "total": double_hex(acc.total()),
    }


def sumsq_file() -> Iterator[dict[str, Any]]:
    seed = 1
    for shape, order in SUMSQ_SHAPES:
        for dtype in FORMATS:
            yield sumsq_case(seed, dtype, shape, strides_of(shape, order), ORDINARY)
            seed += 1
    for dtype, shape, values in SUMSQ_VALUES:
        yield sumsq_case(seed, dtype, shape, strides_of(shape, None), values)
        seed += 1
    for dtype in FORMATS:
        for special in (6, 13, 14, 15):  # both infinities and two NaNs
            for shape, every, offset in (([130], 200, 129), ([3, 70], 75, 0), ([2, 4200], 4197, 3)):
                values = {**ORDINARY, "special": special, "every": every, "offset": offset}
                yield sumsq_case(seed, dtype, shape, strides_of(shape, None), values)
                seed += 1


def accumulator_file() -> Iterator[dict[str, Any]]:
    def case(doubles: list[int]) -> dict[str, Any]:
        acc = Accumulator()
        for bits in doubles:
            acc.add(decode(FP64, bits))
        return {"doubles": hexed(FP64, doubles), **accumulator_fields(acc)}

    def bits(*numbers: float | Fraction) -> list[int]:
        return [encode(FP64, number(x)) for x in numbers]

    largest = Fraction((1 << 53) - 1) * (1 << 971)
    yield case([])
    for x in special_bits(FP64):
        yield case([x])
    tie = Fraction(1, 1 << 53)
    tiny = Fraction(1, 1 << 1074)
    yield case(bits(1.0, tie))  # ties to even, down
    yield case(bits(1.0, 2 * tie, tie))  # ties to even, up
    yield case(bits(1.0, tie, tiny))  # just above a tie
    yield case(bits(1.0, tie, -tiny))  # just below a tie
    yield case(bits(1.0, -tie / 2))  # a tie below a power of two
    yield case(bits(largest, Fraction(1 << 970)))  # a tie that overflows
    yield case(bits(largest, Fraction(1 << 970), -tiny))  # just below that tie
    yield case(bits(largest, largest, -largest))
    yield case(bits(largest, largest))
    yield case(bits(-largest, -largest))
    yield case(bits(largest, 1.0, -largest))
    yield case(bits(tiny, tiny, -tiny))
    yield case(bits(-1.0, tiny))
    yield case(bits(1.0, -1.0))
    yield case(bits(-tiny))
    yield case([*special_bits(FP64)])
    rng = SplitMix64(7)
    for count in (2, 3, 5, 9, 17):
        for low, high in ((-1074, 1023), (-60, 60), (-1074, -1000), (1000, 1023)):
            yield case([random_bits(rng, FP64, low, high) for _ in range(count)])


def control_file() -> Iterator[dict[str, Any]]:
    inf = float("inf")
    nan = float("nan")
    sums: list[list[float]] = [[], [0.25], [4.0, 5e-324], [2.0, 1e-20], [1e300], [1e308, 1e308]]
    sums += [[5e-324], [1e-12], [0.998e-6], [inf], [nan], [1.0, inf, nan]]
    for doubles in sums:
        acc = Accumulator()
        for x in doubles:
            acc.add(number(x))
        for max_grad_norm in (0.0, 1.0, 0.3, 1e-300):
            for scale, found_inf in ((None, None), (65536.0, 0), (3.0, 1)):
                for skip_nonfinite in (False, True):
                    result = control(
                        acc,
                        number(max_grad_norm),
                        skip_nonfinite,
                        None if scale is None else number(scale),
                        bool(found_inf),
                    )
                    if skip_nonfinite and not any(x != x or x == inf for x in doubles):
                        continue  # same as without skip_nonfinite
                    yield {
                        "doubles": hexed(FP64, [encode(FP64, number(x)) for x in doubles]),
                        "max_grad_norm": double_hex(number(max_grad_norm)),
                        "skip_nonfinite": skip_nonfinite,
                        "grad_scale": scale,
                        "scaler_found_inf": found_inf,
                        **{k: double_hex(x) for k, x in result.items()},
                    }


LR_SCHEDULES = [(0, 0, 0), (0, 0, 10), (10, 0, 90), (7, 20, 33), (5, 0, 0), (0, 5, 1)]
LR_SCHEDULES += [(100, 800, 100)]


def lr_factor_file() -> Iterator[dict[str, Any]]:
    for warmup, stable, decay in LR_SCHEDULES:
        length = warmup + stable + decay
        corners = [0, 1, warmup - 1, warmup, warmup + stable - 1, warmup + stable, length - 1]
        corners += [warmup + stable + decay * k // 7 for k in range(1, 7)]
        corners += [length, length + 1, length + 1000, 2**40]
        steps = sorted({s for s in corners if s >= 0})
        for kind in ("linear", "sqrt", "cosine"):
            for generation in (1, 2):
                for min_factor in (0.0, 0.1):
                    factors = (
                        lr_factor(s, warmup, stable, decay, kind, number(min_factor), generation)
                        for s in steps
                    )
                    yield {
                        "warmup_steps": warmup,
                        "stable_steps": stable,
                        "decay_steps": decay,
                        "decay_type": kind,
                        "min_factor": min_factor,
                        "generation": generation,
                        "steps": steps,
                        "factors": hexed(FP64, (encode(FP64, f) for f in factors)),
                    }


def partition_file() -> Iterator[dict[str, Any]]:
    def case(numels: list[int], world_size: int, loads: list[int] | None) -> dict[str, Any]:
        return {
            "numels": numels,
            "world_size": world_size,
            "initial_loads": loads,
            "ranks": partition_greedy(numels, world_size, loads),
        }

    rng = SplitMix64(11)
    yield case([], 3, None)
    yield case([5], 1, None)
    yield case([0, 0, 0], 2, None)
    yield case([5, 5, 5, 5, 5], 3, None)
    yield case([1, 2, 3, 4, 5, 6, 7], 3, [10, 0, 4])
    yield case([9, 7, 6, 5, 4], 2, None)
    yield case([1 << 40, 1 << 40, 3, (1 << 62) + 1], 3, None)
    for world_size in (2, 3, 8):
        numels = [(1, 64, 768, 768 * 768)[rng.below(4)] * (1 + rng.below(3)) for _ in range(30)]
        yield case(numels, world_size, None)
        yield case(numels, world_size, [rng.below(1000000) for _ in range(world_size)])


def remainders(
    split: Callable[[int], tuple[int, int]], lowers: list[int], seed: int, ties: int
) -> Iterator[dict[str, Any]]:
    """Splits edges, random numbers, and as many ties between bf16 numbers."""
    uppers = [0, 1, 2, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F]
    bits = [sign | u << 16 | low for sign in (0, 1 << 31) for u in uppers for low in lowers]
    rng = SplitMix64(seed)
    bits += [random_bits(rng, FP32, -20, 20) for _ in range(200)]
    bits += [b & ~0xFFFF | 0x8000 for b in bits[len(bits) - ties :]] + [0x7F800000, 0xFF800000]
    parts = [split(b) for b in bits]
    yield {
        "weights": hexed(FP32, bits),
        "parameters": hexed(BF16, (weight for weight, _ in parts)),
        "remainders": [remainder for _, remainder in parts],
    }


LOW_16 = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
LOW_8 = [0, 0x7F, 0x80, 0x81, 0x180, 0x7F00, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x8080, 0xFF80]


def stochastic_file() -> Iterator[dict[str, Any]]:
    """exp_avg after one step with beta1 = 0.5 is exactly half the gradient."""
    rng = SplitMix64(13)
    for seed, parameter, steps in ((0, 0, 1), (1, 2, 3), (2**64 - 1, 1, 2)):
        halves = [random_bits(rng, FP32, -20, 20) for _ in range(61)]
        halves += [0, 1 << 31, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x00000001]
        draws = [random_of(seed, steps, parameter, e) for e in range(len(halves))]
        pairs = list(zip(halves, draws, strict=True))
        yield {
            "seed": seed,
            "parameter": parameter,
            "step": steps,
            "random": [f"{r:016x}" for r in draws],
            "before": hexed(FP32, halves),
            "after": [
                hexed(BF16, (round_stochastically(b, r, draw) for b, r in pairs))
                for draw in range(4)
            ],
        }


def digest_file() -> Iterator[dict[str, Any]]:
    """Digests of parameters without state."""
    rng = SplitMix64(14)
    for fmt in FORMATS.values():
        for parameter, count in ((0, 37), (3, 530)):  # 530: two segments
            bits = [random_bits(rng, fmt, -10, 10) for _ in range(count)]
            yield {
                "dtype": fmt.name,
                "parameter": parameter,
                "bits": hexed(fmt, bits),
                "digest": digest(parameter, 0, fmt.width, bits),
            }


def loss_scale_file() -> Iterator[dict[str, Any]]:
    rng = SplitMix64(15)
    usual = {"loss_scale": 65536, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    none = {"hysteresis": 1, "min_scale": 0, "max_scale": 0}
    variants: list[dict[str, Any]] = [
        {},
        {"hysteresis": 2},
        {"hysteresis": 0, "min_scale": 4096, "max_scale": 131072},
        {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
        {"loss_scale": 2**126, "growth_interval": 1},
    ]
    for variant in variants:
        for share in (1, 3):  # of four steps
            overflows = [rng.below(4) < share for _ in range(60)]
            settings = usual | none | variant
            yield {
                "settings": settings,
                "overflows": overflows,
                "scales": hexed(FP32, loss_scales(settings, overflows)),
            }


FILES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "adam.json": adam_file,
    "algorithms.json": algorithms_file,
    "muon.json": lambda: muon_file(tensor_elements),
    "sumsq.json": sumsq_file,
    "accumulator.json": accumulator_file,
    "control.json": control_file,
    "lr_factor.json": lr_factor_file,
    "partition.json": partition_file,
    "remainder.json": lambda: remainders(split, LOW_16, 12, ties=50),
    "remainder8.json": lambda: remainders(split8, LOW_8, 16, ties=0),
    "stochastic.json": stochastic_file,
    "digest.json": digest_file,
    "loss_scale.json": loss_scale_file,
}


def text_of(cases: Iterable[dict[str, Any]]) -> str:
    """Returns a JSON array with one case per line."""
    return "[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    differing = []
    for name, cases in FILES.items():
        path, text = HERE / name, text_of(cases())
        if not arguments.check:
            path.write_text(text)
        elif (stored := path.read_text() if path.exists() else "") != text:
            pairs = zip(stored.splitlines(), text.splitlines(), strict=False)
            line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), "at the end")
            differing.append(f"{name}: differs from line {line}")
    if arguments.check:
        print("\n".join(differing) or f"{len(FILES)} files agree")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
