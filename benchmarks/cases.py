"""The implementations that are timed, what they do in each operation, and the bytes that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from shapes import Shapes
from torch import nn

from torchopt_ext import FusedAdamW

MAX_NORM = 1.0
OPERATIONS = ("step", "clip+step")

# Bytes read and written per float32 parameter. A fused step reads p, g, m, v and writes p, m, v.
# The foreach step makes eight passes: decay 8, lerp of m 12, v*beta2 8, addcmul 12, sqrt 8, div 8,
# add eps 8, addcdiv 16. clip_grad_norm_ reads the gradients, then reads and writes them.
FUSED, FOREACH, TORCH_CLIP, NORM = 28, 80, 12, 4
BYTES = {
    ("torchopt_ext", "step"): FUSED,
    ("torchopt_ext", "clip+step"): NORM + FUSED,
    ("torch fused", "step"): FUSED,
    ("torch fused", "clip+step"): TORCH_CLIP + FUSED,
    ("torch foreach", "step"): FOREACH,
    ("torch foreach", "clip+step"): TORCH_CLIP + FOREACH,
}
IMPLEMENTATIONS = ("torchopt_ext", "torch fused", "torch foreach")


@dataclass(frozen=True)
class Case:
    """One thing to time: ``call`` does it once."""

    implementation: str
    operation: str
    call: Callable[[], None]


def build_cases(shapes: Shapes) -> list[Case]:
    """Every implementation and operation on the set, each implementation with its own parameters.

    Gradients are shared and stay where they are; clipping them again and again leaves them as
    they are after the first time.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    cases = []
    for implementation in IMPLEMENTATIONS:
        params = [nn.Parameter(torch.full(shape, 0.02)) for shape in shapes]
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        make = our_calls if implementation == "torchopt_ext" else torch_calls
        calls = make(params, implementation)
        cases += [Case(implementation, op, calls[op]) for op in OPERATIONS]
    return cases


def our_calls(params: list[nn.Parameter], _: str) -> dict[str, Callable[[], None]]:
    optimizer = FusedAdamW(params)

    def step() -> None:
        optimizer.max_grad_norm = None
        optimizer.step()

    def clip_and_step() -> None:
        optimizer.max_grad_norm = MAX_NORM
        optimizer.step()

    return dict(zip(OPERATIONS, (step, clip_and_step), strict=True))


def torch_calls(params: list[nn.Parameter], name: str) -> dict[str, Callable[[], None]]:
    optimizer = torch.optim.AdamW(params, **{name.removeprefix("torch "): True})

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return dict(zip(OPERATIONS, (optimizer.step, clip_and_step), strict=True))
