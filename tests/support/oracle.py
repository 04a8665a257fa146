"""docs/numerics.md in numpy: steps, storage, random draws, digest, loss scale and schedule.

Nothing here calls the library, except Muon's, so that a test against it can fail. numpy's
operations round correctly and never fuse, so that one operation at a time gives the specified bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
Floats = NDArray[np.float32]
Array = NDArray[Any]

MASK32 = np.uint64(0xFFFFFFFF)

# ---- steps (section 2) -------------------------------------------------------------------------


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        result = result * base if exponent % 2 else result
        base, exponent = base * base, exponent // 2
    return result


def average(m: Array, g: Array, beta: float) -> Array:
    w = 1 - beta
    return m + m.dtype.type(w) * (g - m) if w < 0.5 else g - m.dtype.type(beta) * (g - m)


def adam(
    group: Mapping[str, Any], count: int, g: Array, states: list[Array]
) -> tuple[float, Array]:
    t, (beta1, beta2), w2 = g.dtype.type, group["betas"], 1 - group["betas"][1]
    corrected = group.get("bias_correction", True)
    root = math.sqrt(1 - power(beta2, count)) if corrected else 1.0
    states[0] = average(states[0], g, beta1)
    square = (t(w2) * g) * g
    forgotten, largest = t(w2) * states[1], np.finfo(g.dtype).max
    forgotten = np.where(forgotten < largest, forgotten, largest)
    v = states[1] + (square - forgotten) if w2 < 0.5 else square + t(beta2) * states[1]
    states[1] = d = v
    if group.get("amsgrad"):
        states[2] = d = np.where((states[2] > v) | np.isnan(states[2]), states[2], v)
    step_size = group["lr"] / (1 - power(beta1, count) if corrected else 1.0) * root
    return step_size, states[0] / (np.sqrt(d) + t(group["eps"] * root))


def lion(
    group: Mapping[str, Any], count: int, g: Array, states: list[Array]
) -> tuple[float, Array]:
    beta1, beta2 = group["betas"]
    direction = np.sign(average(states[0], g, beta1))
    states[0] = average(states[0], g, beta2)
    return group["lr"], direction


def sgd(group: Mapping[str, Any], count: int, g: Array, states: list[Array]) -> tuple[float, Array]:
    t, momentum = g.dtype.type, group.get("momentum", 0.0)
    if not momentum:
        return group["lr"], g
    keeps, w = (0.0, 1.0) if count == 1 else (momentum, 1 - group.get("dampening", 0.0))
    states[0] = t(keeps) * states[0] + t(w) * g
    return group["lr"], g + t(momentum) * states[0] if group.get("nesterov") else states[0]


def muon(
    group: Mapping[str, Any], count: int, g: Array, states: list[Array]
) -> tuple[float, Array]:
    """The direction is orthogonalized by the library, in float32, which tests of its own check."""
    mu, t = group["momentum"], g.dtype.type
    m = states[0] = average(states[0], g, mu)
    if group["nesterov"]:
        from_g = m - g
        m = g + t(mu) * from_g if mu < 0.5 else m - t(1 - mu) * from_g
    if not g.size:
        return group["lr"], g
    rows, cols = g.shape[-2:]
    flat = [value for _ in range(group["ns_steps"]) for value in group["ns_coefficients"]]
    o = torch.ops.torchopt_ext.orthogonalize(torch.from_numpy(m).float(), flat, group["eps"])
    scale = {
        None: math.sqrt(max(1, rows / cols)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
    }[group["adjust_lr_fn"]]
    o = o.numpy()
    if group.get("beta2"):
        o, states[1] = by_rows(o, states[1], group["beta2"])
    return group["lr"] * scale, o.astype(m.dtype)


def by_rows(o: Array, average: Array, beta2: float) -> tuple[Array, Array]:
    """Returns a matrix with its rows normalized, and their average squares (section 12)."""
    lanes = np.pad(o.astype(np.float64) ** 2, ((0, 0), (0, -o.shape[1] % 8)))
    lanes = np.cumsum(lanes.reshape(len(o), -1, 8), axis=1)[:, -1]  # one after another
    half = lanes[:, :4] + lanes[:, 4:]
    squares = (half[:, 0] + half[:, 1]) + (half[:, 2] + half[:, 3])
    average = average.astype(np.float64).reshape(-1)
    average = (beta2 * average + (1 - beta2) * (squares / o.shape[1])).astype(np.float32)
    factors = 1 / (np.sqrt(average.astype(np.float64)) + 1e-8)
    before, after = np.cumsum(squares)[-1], np.cumsum(squares * factors * factors)[-1]
    factors = (factors * (np.sqrt(before) / (np.sqrt(after) + 1e-8))).astype(np.float32)
    return o * factors[:, None], average[:, None]


DIRECTIONS = {"adam": adam, "adamw": adam, "lion": lion, "sgd": sgd, "muon": muon}


def step(
    algorithm: str,
    group: Mapping[str, Any],
    count: int,
    param: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    grad_factor: float = 1.0,
) -> tuple[Tensor, list[Tensor]]:
    """Returns parameter and states after the step with this count, each in its dtype.

    Float64 parameters are computed in double, all others in float. The formula is also that of the
    papers, so that in double it tells the error of a step in another dtype.
    """
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    with np.errstate(all="ignore"):
        p, g, *held = (x.detach().to(wide).numpy() for x in (param, grad, *states))
        t = p.dtype.type
        decoupled = group.get("decoupled_weight_decay", algorithm in ("adamw", "lion", "muon"))
        decay = group["lr"] * group.get("weight_decay", 0.0) if decoupled else 0.0
        if peak := group.get("decay_follows_lr"):
            decay = decay * (group["lr"] / peak)
        l2 = 0.0 if decoupled else group.get("weight_decay", 0.0)
        g = g * t(grad_factor)
        g = -g if group.get("maximize") else g
        g = g + t(l2) * p if l2 else g
        size, u = DIRECTIONS[algorithm](group, count, g, held)
        change = t(size) * u
        if decay:
            decayed = t(decay) * p
            if group.get("cautious_weight_decay"):
                decayed = decayed * t(1 + np.minimum(np.sign(np.sign(u) * p), 0))
            change = decayed + change
        p = p - change
    stored = [(p, param), *zip(held, states, strict=True)]
    after = [canonical_nan(torch.from_numpy(np.asarray(x)).to(of.dtype)) for x, of in stored]
    return after[0], after[1:]


def canonical_nan(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)


# ---- loss scale and schedule (sections 4 and 5) ------------------------------------------------


@dataclass
class LossScale:
    """A loss scale that grows after good steps and backs off after overflows."""

    scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    max_scale: float = 0.0
    growth_tracker: int = 0
    hysteresis_tracker: int = 0

    def update(self, overflow: bool) -> float:
        if overflow:
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis_tracker + 1
            if self.hysteresis_tracker >= self.hysteresis:
                smaller = float(np.float32(self.scale * self.backoff_factor))
                self.scale = max(smaller, self.min_scale, 2.0**-126)
            return self.scale
        self.growth_tracker += 1
        if 0 < self.growth_interval <= self.growth_tracker:
            self.growth_tracker = self.hysteresis_tracker = 0
            with np.errstate(over="ignore"):
                larger = float(np.float32(self.scale * self.growth_factor))
            larger = min(larger, self.max_scale) if self.max_scale else larger
            self.scale = larger if math.isfinite(larger) else self.scale
        return self.scale


def horner(z: float, coefficients: list[float]) -> float:
    result = 0.0
    for c in reversed(coefficients):
        result = result * z + c
    return result


def cospi(x: float) -> float:
    if x > 0.5:
        return -cospi(1.0 - x)
    y = math.pi * (x if x <= 0.25 else 0.5 - x)
    first = 0 if x <= 0.25 else 1
    signed = [(-1) ** k / math.factorial(2 * k + first) for k in range(10)]
    value = horner(y * y, signed)
    return value if x <= 0.25 else y * value


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    decay_type: str = "linear",
    min_factor: float = 0.0,
    generation: int = 1,
) -> float:
    """Returns the learning rate's factor in the step with this number, from 0 on."""
    extra = 1 if generation == 1 else 0
    before_decay = warmup_steps + stable_steps
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + extra)
    if step < before_decay or decay_steps + extra == 0:
        return 1.0
    progress = min(1.0, (step + 1 - before_decay) / (decay_steps + extra))
    shape = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + cospi(progress)),
    }
    return min_factor + (1.0 - min_factor) * shape[decay_type]


# ---- masters and remainders (section 7) --------------------------------------------------------


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
    **dict.fromkeys(("exp_avg", "exp_avg_codes"), EXP_AVG),
    **dict.fromkeys(("momentum_buffer", "momentum_buffer_codes"), EXP_AVG),
    **dict.fromkeys(("exp_avg_sq", "exp_avg_sq_codes"), EXP_AVG_SQ),
    "max_exp_avg_sq": MAX_EXP_AVG_SQ,
    "second_momentum_buffer": EXP_AVG_SQ,
    **dict.fromkeys(("master_weight", "remainder", "remainder8"), MASTER),
}
SCALE_ROLES = {"exp_avg_scale_v2": 5, "momentum_buffer_scale_v2": 5, "exp_avg_sq_scale_v2": 6}


def digest(parameter: int, weight: Tensor, state: dict[str, Tensor]) -> int:
    """Returns the digest, modulo 2**64, of a parameter's state without its step count, and of the
    parameter unless it has a master weight."""
    total = 0 if "master_weight" in state else digest_array(weight, parameter, PARAM)
    total += sum(digest_array(state[k], parameter, r) for k, r in ROLES.items() if k in state)
    for name, role in SCALE_ROLES.items():
        if name in state:
            row = weight[0].numel()
            groups = [i for i in range(weight.numel()) if i % row % 64 == 0]
            total += digest_array(state[name], parameter, role, groups)
    return total % 2**64


# ---- a parameter as it is held -----------------------------------------------------------------


class Held:
    """A parameter under steps: its exact weight and its states, as the options have them rounded.

    Args:
        count: the number of the algorithm's states.
        number: the parameter's number, from which random bits are drawn.
        options: ``master_weights``, ``state_dtype``, ``stochastic_rounding``, ``rounding_seed``.
    """

    def __init__(
        self, algorithm: str, param: Tensor, count: int, number: int, **options: Any
    ) -> None:
        self.algorithm, self.dtype, self.number = algorithm, param.dtype, number
        self.wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        self.master = options.get("master_weights")
        usual = self.wide if self.master else self.dtype
        self.state_dtype = options.get("state_dtype") or usual
        self.seed = options.get("rounding_seed", 0) if options.get("stochastic_rounding") else None
        self.weight, self.steps = param.detach().to(self.wide, copy=True), 0
        self.states = [torch.zeros_like(self.weight) for _ in range(count)]
        if algorithm == "muon" and count == 2:
            self.states[1] = torch.zeros((*param.shape[:-1], 1))

    def step(self, group: Mapping[str, Any], grad: Tensor, grad_factor: float = 1.0) -> None:
        self.steps += 1
        wide, states = step(
            self.algorithm, group, self.steps, self.weight, grad, self.states, grad_factor
        )
        for i, x in enumerate(states):
            by_row = self.algorithm == "muon" and i == 1
            self.states[i] = x if by_row else self._rounded(x, self.state_dtype, 1 + i)
        if self.master == "fp32" or self.dtype == self.wide:
            self.weight = wide
        elif self.master == "remainder":
            weight, low = split(words(wide))
            self.weight = _exact(weight, low, wide)
        elif self.master == "remainder8":
            exact = words(wide)
            if self.seed is not None:
                exact = round_to_24_bits_stochastically(exact, self._draws(PARAM))
            weight, low = split8(exact)
            self.weight = _exact(weight, low * 256, wide)
        else:
            self.weight = self._rounded(wide, self.dtype, PARAM)

    @property
    def param(self) -> Tensor:
        return self.weight.to(self.dtype)

    def _draws(self, what: int) -> Words:
        numbers = np.arange(self.weight.numel(), dtype=np.uint64)
        return draws(self.seed or 0, self.steps, self.number, numbers, what)

    def _rounded(self, wide: Tensor, dtype: torch.dtype, what: int) -> Tensor:
        if self.seed is None or dtype != torch.bfloat16:
            return wide.to(dtype).to(self.wide)
        bits = round_stochastically(words(wide), self._draws(what))
        return floats(bits << np.uint64(16)).view_as(wide)


def _exact(weight: Words, low: NDArray[np.int64], like: Tensor) -> Tensor:
    return floats(((weight.astype(np.int64) << 16) + low).astype(np.uint64)).view_as(like)
