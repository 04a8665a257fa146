"""Compares FSDPadaptOptimizer with the same algorithm in torch operators, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cases import gradients_of
from group import Case, Group
from shapes import Shapes
from torch import Tensor, nn

from torchopt_ext import _C, FSDPadaptOptimizer, FusedAdamW

FUSED = "FSDPadaptOptimizer, FusedAdamW"
ANY = "FSDPadaptOptimizer, torch AdamW fused"
PLAIN = "torch operators, torch AdamW fused"
IMPLEMENTATIONS = (FUSED, ANY, PLAIN)
STEP = "check+clip+step"

# Bytes per parameter. Ours with FusedAdamW: g 2, then g 2, master, m, v 24, p written 2. Ours with
# another base: g 2, then g 2 and fp32 gradient written 4, the base 28, master 4 and p written 2.
# Operators: cast to double 10, its norm 8, cast to float 6, product 8, the base 28, copy back 6.
BYTES = {FUSED: 30, ANY: 42, PLAIN: 66}


class PlainAdapter:
    """LightRFT's step without overflow, operator by operator."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float = 1.0) -> None:
        self.optimizer, self.clip = optimizer, clip
        self.scale = torch.ones(1)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in optimizer.param_groups:
            params = group["params"]
            group["params"] = [param.detach().float() for param in params]
            self.pairs += zip(params, group["params"], strict=True)

    @torch.no_grad()
    def step(self) -> bool:
        norms = [param.grad.double().norm(2) for param, _ in self.pairs]
        norm = torch.stack(norms).square().sum().sqrt()
        if not torch.isfinite(norm):
            return False
        scale = self.scale.item()
        combined = scale * torch.clamp((norm / scale + 1e-6) / self.clip, min=1.0)
        for param, master in self.pairs:
            master.grad = param.grad.to(torch.float32)
        for _, master in self.pairs:
            master.grad.mul_(1.0 / combined)
        self.optimizer.step()
        for param, master in self.pairs:
            param.grad = master.grad = None
            param.copy_(master)
        return True


def adapter(
    implementation: str, params: Sequence[nn.Parameter]
) -> FSDPadaptOptimizer | PlainAdapter:
    if implementation == FUSED:
        return FSDPadaptOptimizer(FusedAdamW(params))
    base = torch.optim.AdamW(params, fused=True)
    return FSDPadaptOptimizer(base) if implementation == ANY else PlainAdapter(base)


def step_of(implementation: str, gradients: list[Tensor]) -> Callable[[], object]:
    """Returns a call that sets the parameters' gradients, which a step clears, and steps."""
    holders = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for holder, gradient in zip(holders, gradients, strict=True):
        holder.grad = gradient
    params = [nn.Parameter(torch.full_like(gradient, 0.02)) for gradient in gradients]
    optimizer = adapter(implementation, params)

    def call() -> None:
        _C.share_gradients(list(params), holders)
        optimizer.step()

    return call


def build_adapters(name: str, shapes: Shapes) -> Group:
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    cases = [
        Case(implementation, STEP, step_of(implementation, gradients), BYTES[implementation])
        for implementation in IMPLEMENTATIONS
    ]
    return Group(name, shapes, cases, baseline=PLAIN)
