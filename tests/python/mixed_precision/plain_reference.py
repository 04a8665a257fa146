"""Computes what FSDPadaptOptimizer and DynamicGradScaler compute, in the plainest torch code.

It runs in one process, with any torch optimizer as base, one tensor after the other. Nothing here
is shared with torchopt_ext.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def float32(value: float) -> float:
    """Returns the nearest float32, ties to even."""
    return struct.unpack("f", struct.pack("f", value))[0]


class ReferenceScaler:
    """A loss scale that grows after steps without overflow and backs off after overflows."""

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**24,
        hysteresis: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.scale = float(initial_scale)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self.growth_step = self.hysteresis_step = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.growth_step = 0
            self.hysteresis_step += 1
            if self.hysteresis_step >= self.hysteresis:
                smaller = float32(self.scale * self.backoff_factor)
                self.scale = max(smaller, self.min_scale) if self.min_scale else smaller
            return
        self.growth_step += 1
        if self.growth_step == self.growth_interval:
            self.growth_step = self.hysteresis_step = 0
            larger = float32(self.scale * self.growth_factor)
            self.scale = min(larger, self.max_scale) if self.max_scale else larger

    def state_dict(self) -> dict[str, Any]:
        return {
            "_scale": self.scale,
            "_growth_step": self.growth_step,
            "_hysteresis_step": self.hysteresis_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["_scale"]
        self.growth_step = state_dict["_growth_step"]
        self.hysteresis_step = state_dict["_hysteresis_step"]


def widened(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state with 16-bit tensors cast to float32, as the weight is."""
    return {
        name: value.float() if isinstance(value, Tensor) and value.dtype in SIXTEEN_BITS else value
        for name, value in state.items()
    }


def static_scaler() -> ReferenceScaler:
    return ReferenceScaler(1.0, growth_factor=1.0, backoff_factor=1.0, max_scale=1.0)


class PlainFSDPOptimizer:
    """Loss scaling, one global norm, clipping, overflow check and float32 weights around a base.

    ``model_groups`` are the model's parameters. The base's ``param_groups`` hold the weights that
    the base steps, ``weight_groups``: float32 for 16-bit parameters, else of the parameter's dtype.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        scaler: ReferenceScaler | None = None,
        clip_grad_norm: float = 1.0,
    ) -> None:
        self.optim = optim
        self.grad_scaler = static_scaler() if scaler is None else scaler
        self.clip_grad_norm = clip_grad_norm
        self.grad_norm = 0.0
        self.skipped_steps = 0
        self.model_groups: list[list[Tensor]] = []
        self.weight_groups: list[list[Tensor]] = []
        for group in optim.param_groups:
            self._adopt(group)

    def _adopt(self, group: dict[str, Any]) -> None:
        model, weights = list(group["params"]), []
        for p in model:
            w = p.detach().float() if p.dtype in SIXTEEN_BITS else p.detach().clone()
            weights.append(w)
            if p in self.optim.state:
                self.optim.state[w] = widened(self.optim.state.pop(p))
        group["params"] = weights
        self.model_groups.append(model)
        self.weight_groups.append(weights)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(group)
        self._adopt(self.optim.param_groups[-1])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each parameter of the model with the weight that is stepped for it."""
        return [
            (p, w)
            for model, weights in zip(self.model_groups, self.weight_groups, strict=True)
            for p, w in zip(model, weights, strict=True)
        ]

    def backward(self, loss: Tensor) -> None:
        (self.grad_scaler.scale * loss.float()).backward()

    def zero_grad(self) -> None:
        for p, _ in self.pairs():
            p.grad = None

    def _scaled_norm(self) -> float:
        square = torch.zeros((), dtype=torch.float64)
        for p, _ in self.pairs():
            if p.grad is not None:
                square += p.grad.double().square().sum()
        return float(square.sqrt())

    def _overflow(self) -> bool:
        return any(
            not bool(torch.isfinite(p.grad).all()) for p, _ in self.pairs() if p.grad is not None
        )

    @torch.no_grad()
    def step(self) -> bool:
        scale = self.grad_scaler.scale  # the scale that multiplied the gradients
        norm, overflow = self._scaled_norm(), self._overflow()
        self.grad_norm = norm / scale
        self.grad_scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
            self.zero_grad()
            return False
        combined = scale
        if self.clip_grad_norm > 0.0:
            combined *= max(1.0, (norm / scale + 1e-6) / self.clip_grad_norm)
        for p, w in self.pairs():
            if p.grad is not None:
                w.grad = p.grad.to(w.dtype).mul(1.0 / combined)
        self.optim.step()
        self.zero_grad()
        for p, w in self.pairs():
            w.grad = None
            p.copy_(w)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "grad_scaler": self.grad_scaler.state_dict(),
            "base_optim_states": self.optim.state_dict(),
            "flat_fp32_weights": dict(enumerate(self.weight_groups)),
        }

    @torch.no_grad()
    def load_state_dict(self, states: dict[str, Any]) -> None:
        self.grad_scaler.load_state_dict(states["grad_scaler"])
        self.optim.load_state_dict(states["base_optim_states"])
        for index, weights in enumerate(self.weight_groups):
            for w, saved in zip(weights, states["flat_fp32_weights"][index], strict=True):
                w.copy_(saved)
        for p, w in self.pairs():
            p.copy_(w)
