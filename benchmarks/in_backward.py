"""Cases of a backward that updates each parameter when its gradient is ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cases import FUSED, MAX_NORM, OURS
from harness import Call, Case, Group
from shapes import Shapes
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersInBackwardContainer, batches

STEP, CLIP = "backward+step", "backward+clip+step"
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


class Products(nn.Module):
    """A model and loss whose backward has little to do for each parameter."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        x = torch.ones(())
        return torch.stack([(x * tensor).sum() for tensor in self.tensors]).sum()


def in_hooks(model: nn.Module, hook_of: Callable[[nn.Parameter], Call]) -> Call:
    """Calls a function of each parameter when its gradient is ready, and frees the gradient."""
    for param in model.parameters():
        call = hook_of(param)

        def hook(param: nn.Parameter, call: Call = call) -> None:
            call()
            param.grad = None

        param.register_post_accumulate_grad_hook(hook)
    return lambda: None


def drop(model: nn.Module) -> Call:
    """Returns backward alone, which no optimizer can undercut."""
    return in_hooks(model, lambda param: lambda: None)


def stock_in_hooks(model: nn.Module) -> Call:
    """Steps one optimizer per parameter in its hook, as torchtitan 0.2's container does."""
    return in_hooks(model, lambda param: torch.optim.AdamW([param], fused=True, **SETTINGS).step)


def stock_after_backward(model: nn.Module) -> Call:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **SETTINGS)
    clip = partial(nn.utils.clip_grad_norm_, params, MAX_NORM)
    return lambda: (clip(), optimizer.step(), optimizer.zero_grad())


def ours(model: nn.Module, batched: bool = True, **settings: Any) -> Call:
    small = batches.SMALL_BYTES
    batches.SMALL_BYTES = small if batched else -1
    try:
        container = OptimizersInBackwardContainer([model], FusedAdamW, SETTINGS | settings)
    finally:
        batches.SMALL_BYTES = small
    return container.step


CASES: list[tuple[str, str, Callable[[nn.Module], Call]]] = [
    (FUSED, STEP, stock_in_hooks),
    (f"{OURS}, one by one", STEP, partial(ours, batched=False)),
    (OURS, STEP, ours),
    ("gradients dropped", STEP, drop),
    (FUSED, CLIP, stock_after_backward),
    (OURS, CLIP, partial(ours, max_grad_norm=MAX_NORM)),
]


def build_backward(name: str, shapes: Shapes) -> Group:
    """Builds cases whose time is that of backward and of the call after it, without forward."""
    cases = []
    for implementation, operation, prepare in CASES:
        model = Products(shapes)
        then = prepare(model)

        def call(model: nn.Module = model, then: Call = then) -> float:
            loss = model()
            start = time.perf_counter_ns()
            loss.backward()
            then()
            return (time.perf_counter_ns() - start) / 1e6

        cases.append(Case(implementation, operation, call))
    return Group(name, shapes, cases, baseline=FUSED, clock=lambda call: call())
