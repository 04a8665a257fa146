"""torchtitan 0.3's command line on a CPU: train_030.py METRICS <torchtitan's options>

Each rank appends one JSON line per step to METRICS.rank<r>: loss, gradient norm and learning rates
in full precision, as the Trainer gives them to its metrics logger, and the containers' classes.
Either torchrun starts the ranks, or a rank server with preload_030.py forks them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

if "torchtitan" not in sys.modules:
    runpy.run_path(str(Path(__file__).with_name("preload_030.py")))

from torchtitan import trainer
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.train import main

_log = MetricsProcessor.log


def log_and_write(
    self: MetricsProcessor,
    step: int,
    avg_loss: float,
    max_loss: float,
    grad_norm: float,
    extra_metrics: dict[str, Any],
) -> None:
    workers = (self.optimizers, *self.optimizers.optimizers)
    controls = [getattr(worker, "control", None) for worker in self.optimizers.optimizers]
    line = {
        "step": step,
        "loss": avg_loss,
        "max_loss": max_loss,
        "grad_norm": grad_norm,
        "lrs": {name: value for name, value in extra_metrics.items() if name.startswith("lr/")},
        "orthogonalized": sum(float(getattr(c, "orthogonalized", 0.0)) for c in controls),
        "classes": [f"{type(worker).__module__}.{type(worker).__qualname__}" for worker in workers],
    }
    with open(f"{metrics}.rank{os.environ['RANK']}", "a") as file:
        file.write(json.dumps(line) + "\n")
    _log(self, step, avg_loss, max_loss, grad_norm, extra_metrics=extra_metrics)


def run(path: str) -> None:
    global metrics
    metrics = path
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    MetricsProcessor.log = log_and_write
    trainer.time.sleep = lambda seconds: None  # skips 2 s at the end for ranks on other hosts
    main()


if __name__ == "__main__":
    run(sys.argv.pop(1))
