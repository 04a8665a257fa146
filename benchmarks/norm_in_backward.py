"""Times backward and step with the norm measured in the step or in backward. See README.md.

python benchmarks/norm_in_backward.py --out out/bench-norm-in-backward
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from cases import OURS
from group import Case, Group
from in_backward import Products
from measure import measure
from shapes import Shapes
from timing import Flush
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples/

from examples.model import VOCABULARY, Transformer
from torchopt_ext import FusedAdamW
from torchopt_ext.optim import norm_in_backward

IN_STEP, IN_BACKWARD = OURS, f"{OURS}, norm_in_backward"
OPERATION = "backward+clip+step"
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "max_grad_norm": 1.0}
EQUAL: dict[str, Shapes] = {
    "1,000 of 1,000": [(1000,)] * 1000,
    "1,000 of 70,000": [(350, 200)] * 1000,
    "120 of 524,288": [(512, 1024)] * 120,
    "60 of 1 M": [(1024, 1024)] * 60,
}


class Demo(nn.Module):
    """The loss of the demo's model on a random batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(192, 5, 4, 128, seed=0)
        self.batch = torch.randint(VOCABULARY, (4, 129))

    def forward(self) -> Tensor:
        logits = self.model(self.batch[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, self.batch[:, 1:].flatten())


class Training:
    """Returns the milliseconds of backward and step."""

    def __init__(self, make: Callable[[], nn.Module], early: bool) -> None:
        self.model = make()
        self.optimizer = FusedAdamW(self.model.parameters(), **SETTINGS, norm_in_backward=early)

    def __call__(self) -> float:
        loss = self.model()
        start = time.perf_counter_ns()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter_ns() - start) / 1e6


def build(name: str, make: Callable[[], nn.Module]) -> Group:
    torch.manual_seed(0)
    shapes = [tuple(p.shape) for p in make().parameters()]
    cases = [
        Case(implementation, OPERATION, Training(make, early), None)
        for implementation, early in ((IN_STEP, False), (IN_BACKWARD, True))
    ]
    return Group(name, shapes, cases, IN_STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-norm-in-backward"))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hook-from", type=int, default=norm_in_backward.MEASURED_BYTES)
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to try the program")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    norm_in_backward.MEASURED_BYTES = options.hook_from
    about = report.environment()
    builds = [partial(build, "demo model", Demo)]
    for name, shapes in EQUAL.items():
        some = shapes[:4] if options.quick else shapes
        builds.append(partial(build, name, partial(Products, some)))
    rows, _ = measure(
        builds,
        2 if options.quick else options.rounds,
        lambda call: float(call()),
        partial(Flush, 256, "cpu"),
    )
    print(report.write({}, rows, about, {}, options.out))


if __name__ == "__main__":
    main()
