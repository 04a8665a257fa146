"""Makes torchtitan's fault-tolerant Trainers, 0.2 and 0.3, wait and save for tests."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

socket.gethostname = lambda: "localhost"  # torchft's addresses stay on this host


def record(trainer_class: Any, stock_container: type) -> None:
    """Makes a Trainer wait at chosen steps and save its state at the end.

    With HOLD="0,5" it waits for the file METRICS_FILE.go-0 before training, and for
    METRICS_FILE.go-5 at the end of step 5. Each rank saves METRICS_FILE.rank<r>.pt.
    """
    stock_init, stock_step = trainer_class.__init__, trainer_class.train_step
    stock_train = trainer_class.train
    metrics = os.environ["METRICS_FILE"]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        if isinstance(self.optimizers, stock_container):
            # torchtitan's container creates its state by a step with lr 0 and counts that step.
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    state["step"].zero_()

    def hold(step: int) -> None:
        if str(step) in os.environ.get("HOLD", "").split(","):
            while not Path(f"{metrics}.go-{step}").exists():
                time.sleep(0.05)

    def train_step(self: Any, *args: Any) -> None:
        stock_step(self, *args)
        hold(self.step)

    def train(self: Any) -> None:
        hold(0)
        stock_train(self)
        parts = {f"model.{i}": part.state_dict() for i, part in enumerate(self.model_parts)}
        flat = {
            f"{owner}.{name}": value.to_local() if isinstance(value, DTensor) else value
            for owner, values in {"optimizer": self.optimizers.state_dict(), **parts}.items()
            for name, value in values.items()
        }
        flat |= {f"schedule.{k}": v for k, v in self.lr_schedulers.state_dict().items()}
        torch.save(flat, f"{metrics}.rank{os.environ['RANK']}.pt")

    trainer_class.__init__, trainer_class.train_step = init, train_step
    trainer_class.train = train
