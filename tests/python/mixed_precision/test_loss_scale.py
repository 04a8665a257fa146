"""How the loss scale moves, and what copies, saves and loads keep of it."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext import DynamicGradScaler, FusedAdamW, GradScaler

from ...support.problems import make_params
from .reference import ReferenceScaler
from .scaling import PATTERN, drive, scaler_of
from .training import BF16, FP16, FP32

# ---- sequences -----------------------------------------------------------------------------------


def exactly(low: float, high: float, **kwargs: Any) -> st.SearchStrategy[float]:
    """Draws numbers that float32 can hold, so that one rounding decides a product."""
    return st.floats(*map(float, np.float32([low, high])), width=32, **kwargs)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    initial = draw(exactly(2.0**-10, 2.0**30))
    no_limit = st.sampled_from([None, 0, 0.0])
    dtype = draw(st.sampled_from([FP16, BF16, FP32]))
    moves = dtype == FP16
    return {
        "initial_scale": initial,
        "growth_factor": draw(exactly(1.0, 4.0, exclude_min=moves)),
        "backoff_factor": draw(exactly(0.125, 1.0, exclude_max=moves)),
        "growth_interval": draw(st.integers(1, 5)),
        "min_scale": draw(st.one_of(no_limit, exactly(2.0**-30, initial))),
        "max_scale": draw(st.one_of(no_limit, exactly(initial, 2.0**40))),
        "hysteresis": draw(st.integers(0, 4)),
        "dtype": dtype,
    }


# A bool, found_inf tensors, all-reduced bytes, and a count of ranks.
FLAGS: list[Callable[[bool], Any]] = [
    lambda flag: flag,
    torch.tensor,
    lambda flag: torch.tensor([flag]),
    lambda flag: torch.tensor(float(flag)),
    lambda flag: torch.tensor([float(flag)], dtype=torch.float64),
    lambda flag: torch.tensor(int(flag), dtype=torch.uint8),
    lambda flag: torch.tensor(3.0 * flag),
]


def loaded(scaler: DynamicGradScaler, config: dict[str, Any]) -> DynamicGradScaler:
    other = DynamicGradScaler(**config)
    other.load_state_dict(scaler.state_dict())
    return other


COPIES: list[Callable[[Any, dict[str, Any]], Any]] = [
    lambda scaler, _: pickle.loads(pickle.dumps(scaler)),
    lambda scaler, _: copy.deepcopy(scaler),
    loaded,
]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    configurations(),
    st.lists(st.booleans(), max_size=25),
    st.lists(st.booleans(), max_size=8),
    st.sampled_from(FLAGS),
    st.sampled_from(COPIES),
)
def test_random_sequences(
    config: dict[str, Any], sequence: list[bool], rest: list[bool], flag: Any, copied: Any
) -> None:
    """Scale and both counters match after every update, also of a copy or a loaded scaler."""
    scaler, plain = DynamicGradScaler(**config), ReferenceScaler(**config)
    scale = scaler.scale
    assert scale.shape == (1,) and scale.dtype == FP32
    for overflow in sequence:
        told = flag(overflow)
        kept = copy.deepcopy(told)
        scaler.update(told)
        plain.update(overflow)
        assert told == kept
        assert scaler.state_dict() == plain.state_dict()
        assert scale.item() == plain.scale  # one lasting tensor
        assert scaler.inv_scale.dtype == FP32
        assert scaler.inv_scale.item() == float(np.float32(1.0 / plain.scale))
        assert scaler.is_one() == (plain.scale == 1.0)
    before, other = scaler.state_dict(), copied(scaler, config)
    for overflow in rest:
        other.update(overflow)
        plain.update(overflow)
        assert other.state_dict() == plain.state_dict()
    assert scaler.state_dict() == before
    scaler.load_state_dict(plain.state_dict())
    assert scale.item() == plain.scale


def test_defaults() -> None:
    scaler, plain = DynamicGradScaler(), ReferenceScaler()
    assert [type(value) for value in scaler.state_dict().values()] == [float, int, int]
    for overflow in [False] * 999 + [True] + [False] * 1001 + [True] * 20:
        scaler.update(overflow)
        plain.update(overflow)
        assert scaler.state_dict() == plain.state_dict()
    assert scaler.scale == 1.0  # and not lower
    scaler.load_state_dict({"_scale": 2.0**24, "_growth_step": 999, "_hysteresis_step": 0})
    scaler.update(False)
    assert scaler.scale == 2.0**24  # and not higher


class Megatron:
    """megatron/core/optimizer/grad_scaler.py, DynamicGradScaler."""

    def __init__(self, scale: float, interval: int, hysteresis: int, min_scale: float) -> None:
        self.scale, self.interval, self.hysteresis = scale, interval, hysteresis
        self.min_scale, self.left, self.good = min_scale, hysteresis, 0

    def update(self, overflow: bool) -> float:
        if overflow:
            self.good = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        else:
            self.good += 1
            if self.good == self.interval:
                self.good, self.left, self.scale = 0, self.hysteresis, self.scale * 2
        return self.scale


class DeepSpeed(Megatron):
    """deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler, for runs within its window."""

    def update(self, overflow: bool) -> float:
        if overflow and self.left > 1:
            self.left -= 1
        elif overflow:
            self.scale = max(self.scale / 2, self.min_scale)
        return self.scale


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "interval", "min_scale"),
    [(Megatron, 3, 1.0), (Megatron, 1, 2.0**8), (DeepSpeed, 1000, 2.0**7)],
)
def test_hysteresis(model: Any, interval: int, min_scale: float, hysteresis: int) -> None:
    """Both scalers follow other projects' sequences over random overflows."""
    generator = random.Random(hysteresis)
    pattern = [generator.random() < 0.45 for _ in range(80)]
    oracle = model(2.0**10, interval, hysteresis, min_scale)
    params = make_params(((3,),))
    config = {"growth_interval": interval, "hysteresis": hysteresis, "min_scale": min_scale}
    trace = drive(scaler_of(GradScaler, **config), FusedAdamW(params), params, pattern)
    scales = [float.fromhex(scale) for scale, _ in trace]
    assert scales == [oracle.update(overflow) for overflow in pattern]
    assert len(set(scales)) > 2
    dynamic = DynamicGradScaler(2.0**10, max_scale=None, **config)  # type: ignore[arg-type]
    for overflow, scale in zip(pattern, scales, strict=True):
        dynamic.update(overflow)
        assert dynamic.scale == scale


def test_limits_of_the_scale() -> None:
    params = make_params(((3,),))
    scaler = scaler_of(GradScaler, growth_interval=1, min_scale=300.0, max_scale=1500.0)
    pattern = [False, False, True, True, True, False]
    trace = drive(scaler, FusedAdamW(params), params, pattern)
    assert [float.fromhex(s) for s, _ in trace] == [1500.0, 1500.0, 750.0, 375.0, 300.0, 600.0]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"growth_factor": value, "dtype": FP16} for value in (1.0, 0.5)),
        *({"backoff_factor": value, "dtype": FP16} for value in (1.0, 0.0, -0.5, 2.0)),
        *({"growth_factor": 0.5, "dtype": dtype} for dtype in (BF16, FP32)),
        *({"backoff_factor": value, "dtype": BF16} for value in (0.0, 1.5)),
        {"initial_scale": 1e-50, "dtype": BF16},
        *({name: math.nan, "dtype": BF16} for name in ("growth_interval", "hysteresis")),
        *({"hysteresis": -1}, {"min_scale": -1.0}, {"max_scale": -1.0}, {"min_scale": math.nan}),
        *({"min_scale": 4.0, "max_scale": 2.0}, {"growth_interval": 1.5}),
        *({"init_scale": value} for value in (0.0, -1.0, math.nan, math.inf, 1e-46, 1e39)),
    ],
    ids=str,
)
def test_rejected_arguments(wrong: dict[str, Any]) -> None:
    """Those with a dtype are DynamicGradScaler's, the others GradScaler's."""
    make = DynamicGradScaler if "dtype" in wrong else lambda **kwargs: GradScaler("cpu", **kwargs)
    error = AssertionError if wrong.get("dtype") == FP16 else ValueError
    with pytest.raises(error, match=next(iter(wrong))):
        make(**wrong)
    GradScaler("cpu", init_scale=0.0, enabled=False)
    with pytest.raises(ValueError, match=r"Invalid init_scale: 65536, expected .* to 1024"):
        GradScaler("cpu", max_scale=1024.0)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler),
     (GradScaler, GradScaler)],
)  # fmt: skip
@pytest.mark.parametrize("used", [False, True])
def test_state_moves_both_ways(source: Any, target: Any, used: bool) -> None:
    params, others = make_params(((3,),)), make_params(((3,),))
    config = {"growth_interval": 4, "growth_factor": 3.0, "backoff_factor": 0.25}
    first = scaler_of(source, **config)
    drive(first, FusedAdamW(params), params, [*PATTERN[:10], False])
    saved = first.state_dict()
    assert saved.keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    assert all(type(value) in (int, float) for value in saved.values())
    assert saved["_growth_tracker"] > 0
    second = target("cpu")
    if used:
        second.scale(torch.ones(1))
        drive(second, FusedAdamW(others), others, [False, True])
    second.load_state_dict(saved)
    second.scale(torch.ones(1))
    assert second.state_dict() == saved
    rest = [False, True, False, False, False, False, False]
    assert drive(first, FusedAdamW(params), params, rest) == drive(
        second, FusedAdamW(others), others, rest
    )


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "state dict", "state dict, in use"])
@pytest.mark.parametrize("started", [False, True])
def test_a_copy_continues_the_sequence(how: str, started: bool) -> None:
    """A copy also keeps the overflows that count for hysteresis."""
    params, others = make_params(((3,),)), make_params(((3,),))
    config = {"hysteresis": 3, "growth_interval": 5}
    scaler = GradScaler("cpu", init_scale=2.0**10, **config)  # type: ignore[arg-type]
    if started:
        scaler.scale(torch.ones(1))
        drive(scaler, FusedAdamW(params), params, [False, True, True])
    if how == "pickle":
        other = pickle.loads(pickle.dumps(scaler))
    elif how == "deepcopy":
        other = copy.deepcopy(scaler)
    else:
        other = GradScaler("cpu", **config)  # type: ignore[arg-type]
        if "in use" in how:
            other.scale(torch.ones(1))
            drive(other, FusedAdamW(others), others, [True])
        other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    for s in (scaler, other):
        s.scale(torch.ones(1))
    traces = [
        drive(s, FusedAdamW(p), p, [True, False, True, False])
        for s, p in ((scaler, params), (other, others))
    ]
    assert traces[0] == traces[1]
    assert (float.fromhex(traces[0][0][0]) < 2.0**10) == started


def test_changed_settings_take_effect() -> None:
    traces = []
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        params = make_params(((3,),))
        optimizer, scaler = FusedAdamW(params), scaler_of(scaler_class)
        trace = drive(scaler, optimizer, params, [False, False])
        scaler.set_growth_factor(5.0)
        scaler.set_growth_interval(1)
        scaler.set_backoff_factor(0.1)
        trace += drive(scaler, optimizer, params, [False, True])
        scaler.update(64.0)
        trace += drive(scaler, optimizer, params, [False])
        scaler.set_growth_interval(3)
        scaler._growth_tracker.fill_(2)  # as torch's load_state_dict
        trace += drive(scaler, optimizer, params, [False])
        traces.append(trace)
    assert traces[0] == traces[1]
    assert float.fromhex(traces[0][2][0]) == 5 * 2.0**11


NUMBERS = (math.inf, math.nan, -1.0)


@pytest.mark.parametrize(
    ("scaler", "key", "value"),
    [
        *(("dynamic", "_scale", value) for value in (*NUMBERS, None, 0.0)),
        *(("dynamic", "_growth_step", value) for value in (*NUMBERS, None)),
        *(("dynamic", "_hysteresis_step", value) for value in (*NUMBERS, None)),
        *(("torch's", "scale", value) for value in (*NUMBERS, 0.0, "2")),
        *(("torch's", "_hysteresis_tracker", math.nan), ("torch's", "growth_interval", None)),
    ],
)
def test_a_state_dict_that_lacks_an_entry_or_is_out_of_range(
    scaler: str, key: str, value: Any
) -> None:
    """A scale that is not a positive number would ruin all gradients."""
    target: Any = DynamicGradScaler(2.0**8) if scaler == "dynamic" else GradScaler("cpu")
    before = target.state_dict()
    wrong = {name: number * 2 for name, number in before.items()} | {key: value}
    with pytest.raises((KeyError, TypeError, ValueError), match=key):
        target.load_state_dict({k: v for k, v in wrong.items() if v is not None})
    assert target.state_dict() == before
