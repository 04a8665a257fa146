"""Times FSDPadaptOptimizer and the same algorithm in torch operators. See README.md.

python benchmarks/mixed_precision.py --out out/bench-mixed-precision
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import harness
import torch
from cases import gradients_of
from harness import Call, Case, Group, find, target_line
from shapes import GPT2, QUICK_SETS, SETS, SMALL, Shapes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchopt_ext import _C, FSDPadaptOptimizer, FusedAdamW

FUSED = "FSDPadaptOptimizer, FusedAdamW"
ANY = "FSDPadaptOptimizer, torch AdamW fused"
PLAIN = "torch operators, torch AdamW fused"
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


def step_of(implementation: str, gradients: list[Tensor]) -> Call:
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


def build_adapters(name: str, shapes: Shapes, device: str = "cpu") -> Group:
    gradients = gradients_of(shapes, torch.bfloat16, device)
    cases = [Case(kind, STEP, step_of(kind, gradients), BYTES[kind]) for kind in BYTES]
    return Group(name, shapes, cases, baseline=PLAIN)


class Operators(TorchDispatchMode):
    """Counts operators, except the profiler's marks and operators inside DTensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith("profiler"):
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(call: Call) -> Counter[str]:
    """Counts the operators that a step dispatches, after a first step that creates state."""
    call()
    with Operators() as seen:
        call()
    return seen.count


def main() -> None:
    parser = harness.parser(__doc__, "bench-mixed-precision", rounds=11)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    about = harness.start(options, options.threads)
    sets = QUICK_SETS if options.quick else SETS
    names = (GPT2, SMALL)
    rows, _ = harness.measure(
        [partial(build_adapters, name, sets[name]) for name in names], options.rounds
    )
    targets = []
    for name, bound in zip(names, (2.2, 4.0), strict=True):
        row = find(rows, name, STEP, FUSED)
        times = row and row["times_as_fast_as"][PLAIN]
        targets.append(target_line(f"{name}, bf16: times as fast", times, bound))
    lines = []
    for name in names:
        for kind in BYTES:
            seen = operators(step_of(kind, gradients_of(sets[name], torch.bfloat16, "cpu")))
            base = sum(n for op, n in seen.items() if "fused_adamw" in op or "foreach" in op)
            lines.append((name, kind, f"{seen.total():,}", f"{base:,}"))
            if kind != PLAIN:
                what = f"{name}, {kind}: operators of ours"
                targets.append(target_line(what, seen.total() - base, 6, False))
    sections = {
        "Operators that one step dispatches": harness.table(
            ("tensors", "implementation", "operators", "of them the base's"), lines, 2
        ),
        "Targets": [] if options.quick else targets,
    }
    harness.write(options.out / "mixed_precision", about, rows, sections, operators=lines)


if __name__ == "__main__":
    main()
