"""What FSDPadaptOptimizer and DynamicGradScaler compute, in the plainest torch code.

One process, any torch optimizer as base, one tensor after the other. It shares nothing with
torchopt_ext.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...support.oracle import LossScale

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class ReferenceScaler(LossScale):
    """The oracle's loss scale with DynamicGradScaler's arguments, defaults and state dict."""

    def __init__(self, initial_scale: float = 2.0**16, **settings: Any) -> None:
        defaults = {
            "growth_interval": 1000,
            "hysteresis": 2,
            "min_scale": 1.0,
            "max_scale": 2.0**24,
        }
        settings = {name: value or 0 for name, value in (defaults | settings).items()}
        settings.pop("dtype", None)
        super().__init__(float(initial_scale), **settings)

    def state_dict(self) -> dict[str, Any]:
        counts = {"_growth_step": self.growth_tracker, "_hysteresis_step": self.hysteresis_tracker}
        return {"_scale": self.scale} | counts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["_scale"]
        self.growth_tracker = state_dict["_growth_step"]
        self.hysteresis_tracker = state_dict["_hysteresis_step"]


STATIC = {"initial_scale": 1.0, "growth_factor": 1.0, "backoff_factor": 1.0, "max_scale": 1.0}


class Reference:
    """Loss scaling, one global norm, clipping, overflow check and float32 weights around a base.

    The base's ``param_groups`` hold the weights that it steps: float32 for 16-bit parameters.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        scaler: dict[str, Any] | None = None,
        clip_grad_norm: float = 1.0,
    ) -> None:
        self.optim = optim
        self.grad_scaler = ReferenceScaler(**(STATIC if scaler is None else scaler))
        self.clip_grad_norm = clip_grad_norm
        self.grad_norm = 0.0
        self.skipped_steps = 0
        self.pairs: list[tuple[Tensor, Tensor]] = []  # parameter, weight that is stepped for it
        for group in optim.param_groups:
            self._adopt(group)

    def _adopt(self, group: dict[str, Any]) -> None:
        for i, p in enumerate(group["params"]):
            w = p.detach().float() if p.dtype in SIXTEEN_BITS else p.detach().clone()
            state = self.optim.state.pop(p, {})
            if state:
                self.optim.state[w] = {
                    name: v.float() if getattr(v, "dtype", None) in SIXTEEN_BITS else v
                    for name, v in state.items()
                }
            group["params"][i] = w
            self.pairs.append((p, w))

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(group)
        self._adopt(self.optim.param_groups[-1])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def backward(self, loss: Tensor) -> None:
        (self.grad_scaler.scale * loss.float()).backward()

    @torch.no_grad()
    def step(self) -> bool:
        scale = self.grad_scaler.scale  # the scale that multiplied the gradients
        gradients = [p.grad for p, _ in self.pairs if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64)
        for grad in gradients:
            square += grad.double().square().sum()
        norm = float(square.sqrt())
        overflow = not all(bool(torch.isfinite(grad).all()) for grad in gradients)
        self.grad_norm = norm / scale
        self.grad_scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
        else:
            combined = scale
            if self.clip_grad_norm > 0.0:
                combined *= max(1.0, (norm / scale + 1e-6) / self.clip_grad_norm)
            for p, w in self.pairs:
                w.grad = None if p.grad is None else p.grad.to(w.dtype).mul(1.0 / combined)
            self.optim.step()
        for p, w in self.pairs:
            p.grad = w.grad = None
            p.copy_(w)
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        weights = iter([w for _, w in self.pairs])
        groups = enumerate(self.optim.param_groups)
        return {
            "grad_scaler": self.grad_scaler.state_dict(),
            "base_optim_states": self.optim.state_dict(),
            "flat_fp32_weights": {i: [next(weights) for _ in g["params"]] for i, g in groups},
        }

    @torch.no_grad()
    def load_state_dict(self, states: dict[str, Any]) -> None:
        self.grad_scaler.load_state_dict(states["grad_scaler"])
        self.optim.load_state_dict(states["base_optim_states"])
        saved = [w for group in states["flat_fp32_weights"].values() for w in group]
        for (p, w), value in zip(self.pairs, saved, strict=True):
            w.copy_(value)
            p.copy_(w)
