"""Training steps with planted overflows under a gradient scaler."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...support.problems import set_gradients

SPECIALS = (math.inf, -math.inf, math.nan)
_RANDOM = random.Random(3)
PATTERN = [_RANDOM.random() < 0.3 for _ in range(40)]  # True for steps with an overflow


def scaler_of(cls: type[torch.amp.GradScaler], **kwargs: Any) -> Any:
    scaler = cls("cpu", **{"init_scale": 2.0**10, "growth_interval": 2, **kwargs})
    scaler.scale(torch.ones(1))  # creates the scale
    return scaler


def plant(params: Sequence[nn.Parameter], step: int) -> None:
    """Plants an infinity or NaN, in another place each step, the very last element included."""
    p = params[-1 - step % len(params)]
    p.grad.view(-1)[-1 if step % 2 else 0] = SPECIALS[step % 3]


def drive(
    scaler: Any, optimizers: Any, params: Sequence[nn.Parameter], pattern: Sequence[bool]
) -> list[tuple[str, int]]:
    """Runs scaled steps with planted overflows. Returns scale and growth tracker after each."""
    trace = []
    for step, overflow in enumerate(pattern):
        set_gradients(params, seed=step, scale=scaler.get_scale())
        if overflow:
            plant(params, step)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale().hex(), scaler._get_growth_tracker()))
    return trace
