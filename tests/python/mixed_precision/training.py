"""Problems for FSDPadaptOptimizer: bases, parameters, gradients from backward, and all bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ...support.compare import bits

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPES = ((3, 4), (7,), (), (0,), (2, 3, 5), (1, 517), (4, 0))
SHORT = ((3, 4), (7,), (2, 70))
DYNAMIC: dict[str, Any] = {"initial_scale": 2.0**8, "growth_interval": 4}
SPECIALS = (math.inf, math.nan, -math.inf)

Base = Callable[[Any], torch.optim.Optimizer]
_ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
_SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


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


class OfTheUser(torch.optim.Optimizer):
    """A user's own optimizer: state of its own kinds, and a common name with fewer columns."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("kept", [torch.zeros(2)])[0][0] += 1
                rows = p.grad.reshape(p.shape[0], -1).mean(1, keepdim=True)
                moment = state.setdefault("exp_avg", torch.zeros_like(rows)).lerp_(rows, 0.5)
                update = moment.reshape(-1, *[1] * (p.dim() - 1)) + p.grad
                p.sub_(update, alpha=group["lr"] / state["count"])


# Kind: optimizer under FSDPadaptOptimizer, and under the reference if it is another.
BASES: dict[str, tuple[Base, ...]] = {
    "SGD": (lambda groups: torch.optim.SGD(groups, **_SGD),),
    "AdamW-fused": (lambda groups: torch.optim.AdamW(groups, fused=True, **_ADAM),),
    "AdamW-foreach": (lambda groups: torch.optim.AdamW(groups, foreach=True, **_ADAM),),
    "FusedAdamW": (
        lambda groups: FusedAdamW(groups, **_ADAM),
        lambda groups: torch.optim.AdamW(groups, foreach=True, **_ADAM),
    ),
    "FusedLion": (lambda groups: FusedLion(groups, lr=0.01, weight_decay=0.1), PlainLion),
    "FusedSGD": (
        lambda groups: FusedSGD(groups, **_SGD),
        lambda groups: torch.optim.SGD(groups, **_SGD),
    ),
}
OTHERS: dict[str, Base] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=False),
    "ASGD": torch.optim.ASGD,
    "NAdam": lambda params: torch.optim.NAdam(params, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD maximize": lambda params: torch.optim.SGD(
        params, lr=0.1, maximize=True, nesterov=True, momentum=0.5
    ),
    "Muon": lambda params: torch.optim.Muon(params, lr=0.1),
    "a user's": OfTheUser,
}
ALL = BASES | {name: (make,) for name, make in OTHERS.items()}
KINDS = ("SGD", "FusedAdamW")  # one base of each path
every_kind = pytest.mark.parametrize("kind", KINDS)
every_base = pytest.mark.parametrize("kind", BASES)


def parameters(
    dtype: torch.dtype = BF16, shapes: Iterable[tuple[int, ...]] = SHORT, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def ours_of(kind: str, params: Any, **kwargs: Any) -> Any:
    return FSDPadaptOptimizer(ALL[kind][0](params), **kwargs)


# ---- gradients -----------------------------------------------------------------------------------


def coefficients(params: Sequence[Tensor], seed: int, size: float = 1.0) -> list[Any]:
    """Returns random gradients of an unscaled loss, and None for frozen parameters."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(p.shape, generator=generator) * size for p in params]
    return [c if p.requires_grad else None for p, c in zip(params, drawn, strict=True)]


def plant(gradients: Sequence[Any], step: int) -> None:
    """Plants an infinity or NaN, in another tensor and at the other end each step."""
    tensors = [c for c in gradients if c is not None and c.numel()]
    tensors[step % len(tensors)].view(-1)[-(step % 2)] = SPECIALS[step % 3]


def overflows(steps: int, share: float = 0.3, seed: int = 3) -> list[bool]:
    generator = random.Random(seed)
    return [generator.random() < share for _ in range(steps)]


def loss_of(params: Sequence[Tensor], gradients: Sequence[Any]) -> Tensor:
    """Returns a loss that has these gradients."""
    pairs = zip(params, gradients, strict=True)
    return torch.stack([(p.float() * c).sum() for p, c in pairs if c is not None]).sum()


def train(
    optimizer: Any, params: Sequence[Tensor], steps: Iterable[int], overflow: int | None = None
) -> list[bool]:
    """Makes a step for each seed; returns which were made."""
    made = []
    for step in steps:
        gradients = coefficients(params, step)
        if step == overflow:
            plant(gradients, step)
        optimizer.backward(loss_of(params, gradients))
        made.append(bool(optimizer.step()))
    return made


def trained(
    kind: str, steps: int = 3, dtype: torch.dtype = BF16, seed: int = 0, **kwargs: Any
) -> tuple[list[nn.Parameter], Any]:
    """Trains two groups of named parameters under a dynamic scale. The second step overflows."""
    params = parameters(dtype, ((6, 4), (2, 70), (3, 5)) if kind == "Muon" else SHORT, seed)
    named = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
    groups = [{"params": named[:1]}, {"params": named[1:], "lr": 0.003}]
    ours = ours_of(kind, groups, **{"grad_scal_cfg": DYNAMIC, **kwargs})
    train(ours, params, range(seed, seed + steps), overflow=seed + 1)
    return params, ours


# ---- contents ------------------------------------------------------------------------------------


def weights_of(optimizer: Any) -> list[Tensor]:
    """Returns the stepped weights, in the order of the groups."""
    groups = optimizer.state_dict()["flat_fp32_weights"]
    return [w for index in sorted(groups) for w in groups[index]]


def state_of(optimizer: Any) -> list[Any]:
    """Returns every byte of the base's per-parameter state, without masters."""
    return [
        (name, bits(value) if isinstance(value, Tensor) else repr(value))
        for group in optimizer.param_groups
        for param in group["params"]
        for name, value in sorted(optimizer.state.get(param, {}).items())
        if name != "master_weight"
    ]


def content(optimizer: Any, params: Sequence[Tensor]) -> dict[str, Any]:
    """Returns what must be equal in two optimizers with different parameter objects."""
    return {
        "parameters": [bits(p) for p in params],
        "weights": [bits(w) for w in weights_of(optimizer)],
        "state": state_of(optimizer),
        "groups": [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "scaler": optimizer.grad_scaler.state_dict(),
        "clip": optimizer.max_grad_norm,
    }


@contextmanager
def unchanged(optimizer: Any, params: Sequence[Tensor], *but: str) -> Iterator[None]:
    """Asserts that a block changes no byte of what there is, except in parts that are named."""

    def everything() -> dict[str, Any]:
        return content(optimizer, params) | {
            "gradients": [None if p.grad is None else (id(p.grad), bits(p.grad)) for p in params],
            "held": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
            "norm": repr(float(optimizer.grad_norm)),
            "skipped": float(optimizer.skipped_steps),
        }

    before = everything()
    yield
    after = everything()
    assert [part for part in before if after[part] != before[part] and part not in but] == []
