"""Times a backward that updates each parameter when its gradient is ready. See README.md.

python benchmarks/in_backward.py --out out/bench-in-backward
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from cases import FUSED, OURS
from group import Case, Group
from measure import measure
from shapes import QUICK_SETS, SETS, Shapes
from timing import Flush
from torch import nn
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersInBackwardContainer, batches

NAME = "1,000 of 1,000"
STEP, CLIP = "backward+step", "backward+clip+step"
DROPPED = "gradients dropped"
ONE_BY_ONE = f"{OURS}, one by one"
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


class Products(nn.Module):
    """A model and loss whose backward has little to do for each parameter."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        x = torch.ones(())
        return torch.stack([(x * tensor).sum() for tensor in self.tensors]).sum()


def hook_each(model: nn.Module, hook: Callable[[nn.Parameter], None]) -> None:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def drop(model: nn.Module) -> Callable[[], object]:
    """Times backward alone: a hook for each parameter frees the gradient."""

    def clear(param: nn.Parameter) -> None:
        param.grad = None

    hook_each(model, clear)
    return lambda: None


def stock_in_hooks(model: nn.Module) -> Callable[[], object]:
    """Steps one optimizer per parameter in its hook, as torchtitan 0.2's container does."""
    optimizer_of = {p: torch.optim.AdamW([p], fused=True, **SETTINGS) for p in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizer_of[param].step()
        optimizer_of[param].zero_grad()

    hook_each(model, step)
    return lambda: None


def stock_after_backward(model: nn.Module) -> Callable[[], object]:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **SETTINGS)
    return lambda: (clip_grad_norm_(params, 1.0), optimizer.step(), optimizer.zero_grad())


def ours(model: nn.Module, batched: bool = True, **settings: Any) -> Callable[[], object]:
    small = batches.SMALL_BYTES
    batches.SMALL_BYTES = small if batched else -1
    try:
        container = OptimizersInBackwardContainer([model], FusedAdamW, SETTINGS | settings)
    finally:
        batches.SMALL_BYTES = small
    return container.step


class Backward:
    """Returns the milliseconds of a backward and the call after it."""

    def __init__(
        self, shapes: Shapes, prepare: Callable[[nn.Module], Callable[[], object]]
    ) -> None:
        self.model = Products(shapes)
        self.then = prepare(self.model)

    def __call__(self) -> float:
        loss = self.model()
        start = time.perf_counter_ns()
        loss.backward()
        self.then()
        return (time.perf_counter_ns() - start) / 1e6


CASES = [
    (FUSED, STEP, stock_in_hooks),
    (ONE_BY_ONE, STEP, partial(ours, batched=False)),
    (OURS, STEP, ours),
    (DROPPED, STEP, drop),
    (FUSED, CLIP, stock_after_backward),
    (OURS, CLIP, partial(ours, max_grad_norm=1.0)),
]


def build(shapes: Shapes) -> Group:
    torch.manual_seed(0)
    cases = [
        Case(implementation, operation, Backward(shapes, prepare), None)
        for implementation, operation, prepare in CASES
    ]
    return Group(NAME, shapes, cases, FUSED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-in-backward"))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to try the program")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = report.environment()
    shapes = (QUICK_SETS if options.quick else SETS)[NAME]
    rows, _ = measure(
        [partial(build, shapes)],
        2 if options.quick else options.rounds,
        lambda call: float(call()),
        partial(Flush, 256, "cpu"),
    )
    print(report.write({}, rows, about, {}, options.out))


if __name__ == "__main__":
    main()
