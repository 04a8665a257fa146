"""How the loss scale moves, and what copies, saves and loads keep of it."""

from __future__ import annotations

import copy
import math
import pickle
import random
from typing import Any

import pytest
import torch

from torchopt_ext import DynamicGradScaler, FusedAdamW, GradScaler

from ..optim.subject import make_params
from .scaling import PATTERN, drive, scaler_of

# ---- hysteresis and limits -----------------------------------------------------------------------


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
    [
        (Megatron, 3, 1.0),
        (Megatron, 1, 2.0**8),
        (DeepSpeed, 1000, 2.0**7),
    ],
)
def test_hysteresis(model: Any, interval: int, min_scale: float, hysteresis: int) -> None:
    """The scale follows other projects' sequences over random overflows."""
    generator = random.Random(hysteresis)
    pattern = [generator.random() < 0.45 for _ in range(80)]
    oracle = model(2.0**10, interval, hysteresis, min_scale)
    params = make_params(((3,),))
    optimizer = FusedAdamW(params)
    settings: dict[str, Any] = {
        "growth_interval": interval,
        "hysteresis": hysteresis,
        "min_scale": min_scale,
    }
    scaler = scaler_of(GradScaler, **settings)
    trace = [float.fromhex(scale) for scale, _ in drive(scaler, optimizer, params, pattern)]
    assert trace == [oracle.update(overflow) for overflow in pattern]
    assert len(set(trace)) > 2
    dynamic = DynamicGradScaler(2.0**10, max_scale=None, **settings)
    for overflow, scale in zip(pattern, trace, strict=True):
        dynamic.update(overflow)
        assert float(dynamic.scale) == scale


def test_limits_of_the_scale() -> None:
    params = make_params(((3,),))
    scaler = scaler_of(GradScaler, growth_interval=1, min_scale=300.0, max_scale=1500.0)
    pattern = [False, False, True, True, True, False]
    trace = [float.fromhex(s) for s, _ in drive(scaler, FusedAdamW(params), params, pattern)]
    assert trace == [1500.0, 1500.0, 750.0, 375.0, 300.0, 600.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"hysteresis": -1},
        {"min_scale": -1.0},
        {"max_scale": -1.0},
        {"min_scale": math.nan},
        {"min_scale": 4.0, "max_scale": 2.0},
    ],
    ids=str,
)
def test_refused_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GradScaler("cpu", **wrong)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler),
     (GradScaler, GradScaler)],
)  # fmt: skip
@pytest.mark.parametrize("used", [False, True])
def test_state_moves_both_ways(source: Any, target: Any, used: bool) -> None:
    params, others = make_params(((3,),)), make_params(((3,),))
    settings = {"growth_interval": 4, "growth_factor": 3.0, "backoff_factor": 0.25}
    first = scaler_of(source, **settings)
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


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "state dict"])
@pytest.mark.parametrize("started", [False, True])
def test_a_copy_continues_the_sequence(how: str, started: bool) -> None:
    """A copy also keeps the overflows that count for hysteresis."""
    params, others = make_params(((3,),)), make_params(((3,),))
    settings = {"hysteresis": 3, "growth_interval": 5}
    scaler = GradScaler("cpu", init_scale=2.0**10, **settings)
    if started:
        scaler.scale(torch.ones(1))
        drive(scaler, FusedAdamW(params), params, [False, True, True])
    if how == "pickle":
        other = pickle.loads(pickle.dumps(scaler))
    elif how == "deepcopy":
        other = copy.deepcopy(scaler)
    else:
        other = GradScaler("cpu", **settings)
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
    results = []
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
        results.append(trace)
    assert results[0] == results[1]
    assert float.fromhex(results[0][2][0]) == 5 * 2.0**11
