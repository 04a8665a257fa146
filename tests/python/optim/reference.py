"""Adam and AdamW in float64 on float32 inputs, and the RMS error of a training run against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """100 steps from random float32 parameters with random float32 gradients.

    ``p`` and ``g`` are the magnitudes of parameters and gradients. With ``drift``, part of each
    gradient is the same in every step, so that parameters move steadily.
    """

    name: str = "AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    p: float = 1.0
    g: float = 1.0
    drift: bool = False
    steps: int = 100

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Run, k)}
        return ",".join(f"{k}={v}" for k, v in changed.items()) or "defaults"

    @property
    def kwargs(self) -> dict[str, Any]:
        keys = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
        return {key: getattr(self, key) for key in keys}

    def initial(self, numel: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return (torch.randn(numel, generator=generator, dtype=torch.float64) * self.p).float()

    def gradients(self, numel: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(2)
        steady = torch.randn(numel, generator=generator)
        for _ in range(self.steps):
            noise = torch.randn(numel, generator=generator)
            if self.drift:
                noise = steady + 0.3 * noise
            # Cast through float64, so that neither tiny nor huge magnitudes are rounded twice.
            yield (noise.double() * self.g).float()


class Reference:
    """The update of Kingma & Ba and of Loshchilov & Hutter as torch documents it, in float64.

    With ``storage=torch.float32``, parameters and moments are rounded to float32 after each step. A
    kernel that stores float32 can beat this error only by luck.
    """

    def __init__(self, run: Run, param: Tensor, storage: torch.dtype = torch.float64) -> None:
        self.run, self.storage, self.steps = run, storage, 0
        self.param = param.to(storage, copy=True)
        self.exp_avg = torch.zeros_like(self.param)
        self.exp_avg_sq = torch.zeros_like(self.param)
        self.max_exp_avg_sq = torch.zeros_like(self.param)

    def step(self, gradient: Tensor) -> None:
        run = self.run
        self.steps += 1
        beta1, beta2 = run.betas
        g = gradient.double()
        p, m, v = self.param.double(), self.exp_avg.double(), self.exp_avg_sq.double()
        if run.maximize:
            g = -g
        if run.weight_decay and run.name == "Adam":
            g = g + run.weight_decay * p
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        largest = v
        if run.amsgrad:
            largest = torch.maximum(self.max_exp_avg_sq.double(), v)
            self.max_exp_avg_sq = largest.to(self.storage)
        denominator = largest.sqrt().div_(math.sqrt(1 - beta2**self.steps)).add_(run.eps)
        if run.weight_decay and run.name == "AdamW":
            p.mul_(1 - run.lr * run.weight_decay)
        p.addcdiv_(m, denominator, value=-run.lr / (1 - beta1**self.steps))
        self.param, self.exp_avg, self.exp_avg_sq = (x.to(self.storage) for x in (p, m, v))


@dataclass(frozen=True)
class Errors:
    """RMS errors of the parameters against float64."""

    ours: float
    torch: float
    floor: float | None  # error of float64 arithmetic on float32 storage
    torch_overflowed: bool  # some of torch's state is not finite


def measure(
    run: Run,
    numel: int,
    ours: Callable[..., torch.optim.Optimizer],
    theirs: Callable[..., torch.optim.Optimizer],
    with_floor: bool = False,
) -> Errors:
    """Trains the float64 reference, our optimizer and torch's fused class on the same gradients."""
    start = run.initial(numel)
    exact = Reference(run, start)
    floor = Reference(run, start, torch.float32) if with_floor else None
    params = [start.clone().requires_grad_(True) for _ in range(2)]
    optimizers = [
        ours([params[0]], **run.kwargs),
        theirs([params[1]], fused=True, **run.kwargs),
    ]
    for gradient in run.gradients(numel):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient
            optimizer.step()
        exact.step(gradient)
        if floor is not None:
            floor.step(gradient)
    state = optimizers[1].state[params[1]]
    assert exact.param.isfinite().all()
    assert params[1].isfinite().all(), f"torch's parameters are not finite: {run}"

    def rms(result: Tensor) -> float:
        return (result.detach().double() - exact.param).square().mean().sqrt().item()

    return Errors(
        ours=rms(params[0]),
        torch=rms(params[1]),
        floor=None if floor is None else rms(floor.param),
        torch_overflowed=not all(bool(s.isfinite().all()) for s in state.values()),
    )
