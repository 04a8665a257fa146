"""torchtitan 0.2's command line on a CPU: train.py METRICS <torchtitan's options>

Each rank appends one JSON line per step to METRICS.rank<r>: loss, gradient norm and learning rate
in full precision, as the Trainer gives them to its metrics logger, the classes of the containers,
and the step's clip factor. A rank server with preload_022.py forks the ranks.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

if "torchtitan" not in sys.modules:
    runpy.run_path(str(Path(__file__).with_name("preload_022.py")))

from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.train import Trainer, main

clip_grad_norm_ = dist_utils.clip_grad_norm_


def clip_whole_gradients(parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
    """Reduces Partial gradients before torchtitan clips. torch 2.11 leaves them as they are. Norms
    under sequence parallelism have such gradients: the loss is off by 7e-5 after ten steps."""
    for param in parameters:
        if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)
    return clip_grad_norm_(parameters, *args, **kwargs)


dist_utils.clip_grad_norm_ = clip_whole_gradients


class Recording:
    """A mixin that records metrics. It must precede a Trainer in the list of bases."""

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        path = f"{os.environ['METRICS_FILE']}.rank{os.environ['RANK']}"
        workers = (self.optimizers, self.optimizers.optimizers[0], self.lr_schedulers)
        classes = [f"{type(worker).__module__}.{type(worker).__qualname__}" for worker in workers]
        log = self.metrics_processor.log

        def log_and_write(
            step: int,
            avg_loss: float,
            max_loss: float,
            grad_norm: float,
            extra_metrics: dict[str, Any],
        ) -> None:
            control = getattr(self.optimizers, "control", None)
            line = {
                "step": step,
                "loss": avg_loss,
                "max_loss": max_loss,
                "grad_norm": grad_norm,
                "lrs": {"lr": extra_metrics["lr"]},
                "classes": classes,
                "clip_factor": float(getattr(control, "clip_factor", 1.0)),
                "orthogonalized": float(getattr(control, "orthogonalized", 0.0)),
            }
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
            log(step, avg_loss, max_loss, grad_norm, extra_metrics)

        self.metrics_processor.log = log_and_write


class RecordingTrainer(Recording, Trainer):
    pass


if __name__ == "__main__":
    os.environ["METRICS_FILE"] = sys.argv.pop(1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    ConfigManager.parse_args.__defaults__ = (sys.argv[1:],)  # bound at import, in the server
    main(RecordingTrainer)
