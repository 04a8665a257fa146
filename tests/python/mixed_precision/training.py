"""Problems for FSDPadaptOptimizer: parameters, gradients from backward, and all bytes of both."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ..optim.subject import bits
from .plain_reference import PlainFSDPOptimizer, ReferenceScaler, static_scaler

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPES = ((3, 4), (7,), (), (0,), (2, 3, 5), (1, 517), (4, 0))
SHORT = ((3, 4), (7,), (2, 70))
DYNAMIC: dict[str, Any] = {"initial_scale": 2.0**8, "growth_interval": 4}
SPECIALS = (math.inf, math.nan, -math.inf)

Coefficients = Sequence[Any]  # tensors, or None for no gradient
Base = Callable[[Any], torch.optim.Optimizer]

_ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)


def _adamw_fused(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True, **_ADAM)


def _adamw_foreach(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, foreach=True, **_ADAM)


def _fused_adamw(groups: Any) -> torch.optim.Optimizer:
    return FusedAdamW(groups, **_ADAM)


class PlainLion(torch.optim.Optimizer):
    """Lion as in arXiv:2302.06675, in float64 and rounded once."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", torch.zeros(())) + 1
                    moment = state.setdefault("exp_avg", torch.zeros_like(p))
                    held, grad = moment.double(), p.grad.double()
                    update = held.lerp(grad, 1 - beta1).sign()
                    p.copy_(p.double() * (1 - lr * group["weight_decay"]) - lr * update)
                    moment.copy_(held.lerp(grad, 1 - beta2))


# Kind: (optimizer under FSDPadaptOptimizer, optimizer under the plain reference).
BASES: dict[str, tuple[Base, Base]] = {
    "SGD": (_sgd, _sgd),
    "AdamW-fused": (_adamw_fused, _adamw_fused),
    "AdamW-foreach": (_adamw_foreach, _adamw_foreach),
    "FusedAdamW": (_fused_adamw, _adamw_fused),
    "FusedLion": (lambda groups: FusedLion(groups, lr=0.01, weight_decay=0.1), PlainLion),
    "FusedSGD": (lambda groups: FusedSGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01), _sgd),
}
KINDS = ("SGD", "FusedAdamW")  # one base of each path


def parameters(
    dtype: torch.dtype = BF16, shapes: Iterable[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def ours_of(kind: str, params: Any, **kwargs: Any) -> Any:
    return FSDPadaptOptimizer(BASES[kind][0](params), **kwargs)


def reference_of(
    kind: str, params: Any, scaler: dict[str, Any] | None = None, clip: float = 1.0
) -> PlainFSDPOptimizer:
    made = static_scaler() if scaler is None else ReferenceScaler(**scaler)
    return PlainFSDPOptimizer(BASES[kind][1](params), made, clip)


# ---- gradients -----------------------------------------------------------------------------------


def coefficients(params: Sequence[Tensor], seed: int, size: float = 1.0) -> list[Any]:
    """Returns random gradients of an unscaled loss, and None for frozen parameters."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(p.shape, generator=generator) * size for p in params]
    return [c if p.requires_grad else None for p, c in zip(params, drawn, strict=True)]


def plant(given: Coefficients, step: int) -> None:
    """Plants an infinity or NaN, in another tensor and at the other end each step."""
    tensors = [c for c in given if c is not None and c.numel()]
    tensors[step % len(tensors)].view(-1)[-(step % 2)] = SPECIALS[step % 3]


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros(0) if p.grad is None else p.grad for p in params]


def overflows(steps: int, share: float = 0.3, seed: int = 3) -> list[bool]:
    generator = random.Random(seed)
    return [generator.random() < share for _ in range(steps)]


def loss_of(params: Sequence[Tensor], given: Coefficients) -> Tensor:
    """Returns a loss whose gradients are the coefficients."""
    terms = [(p.float() * c).sum() for p, c in zip(params, given, strict=True) if c is not None]
    return torch.stack(terms).sum()


def backward(optimizer: Any, params: Sequence[Tensor], given: Coefficients) -> None:
    optimizer.backward(loss_of(params, given))


def train(optimizer: Any, params: Sequence[Tensor], steps: Iterable[int], **kwargs: Any) -> None:
    for step in steps:
        backward(optimizer, params, coefficients(params, step, **kwargs))
        optimizer.step()


def trained(
    kind: str, steps: int = 3, dtype: torch.dtype = BF16, seed: int = 0, **kwargs: Any
) -> tuple[list[nn.Parameter], Any]:
    """Trains two groups under a dynamic scale. The second step overflows."""
    params = parameters(dtype, SHORT, seed)
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.003}]
    ours = ours_of(kind, groups, **{"grad_scal_cfg": DYNAMIC, **kwargs})
    for step in range(steps):
        given = coefficients(params, seed + step)
        if step == 1:
            plant(given, step)
        backward(ours, params, given)
        ours.step()
    return params, ours


# ---- contents ------------------------------------------------------------------------------------


def weights_of(optimizer: Any) -> list[Tensor]:
    """Returns the stepped weights, in the order of the groups."""
    groups = optimizer.state_dict()["flat_fp32_weights"]
    return [w for index in sorted(groups) for w in groups[index]]


def state_of(optimizer: Any) -> list[Any]:
    """Returns every byte of the base's per-parameter state."""
    return [
        (name, bits(value) if isinstance(value, Tensor) else value)
        for entry in optimizer.state.values()
        for name, value in sorted(entry.items())
    ]


def everything(optimizer: FSDPadaptOptimizer, params: Sequence[Tensor]) -> dict[str, Any]:
    """Returns every byte of parameters, gradients, weights, state, scaler and counters."""
    return {
        "parameters": [bits(p) for p in params],
        "gradients": [None if p.grad is None else (id(p.grad), bits(p.grad)) for p in params],
        "weights": [bits(w) for w in weights_of(optimizer)],
        "state": state_of(optimizer),
        "groups": [
            {key: repr(value) for key, value in group.items() if key != "params"}
            | {"params": [id(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "scaler": optimizer.grad_scaler.state_dict(),
        "clip": optimizer._clip_grad_norm,
        "norm": repr(float(optimizer.grad_norm)),
        "skipped": float(optimizer.skipped_steps),
    }


def content(optimizer: FSDPadaptOptimizer, params: Sequence[Tensor]) -> dict[str, Any]:
    """Returns what must be equal in two optimizers with different parameter objects."""
    found = everything(optimizer, params)
    for group in found["groups"]:
        del group["params"]
    return found
