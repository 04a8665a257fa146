"""Runs torchtitan 0.3's FaultTolerantTrainer on a CPU: one rank of a replica group."""

from __future__ import annotations

import os
from typing import Any

import torchft
import train_030 as recorder  # patches what does not run on a CPU
from ft_recording import record

from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer  # isort: skip
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer  # isort: skip


class Manager(torchft.Manager):
    """Waits for the quorum, and for recovery, at the beginning of a step.

    Otherwise torchft's thread takes the model's state dict during forward, and FSDP2's hook of
    state_dict() reshards parameters that are in use. torchtitan 0.2 keeps a state dict instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"use_async_quorum": False}))


if __name__ == "__main__":
    torchft.Manager = Manager
    record(FaultTolerantTrainer, TorchFTOptimizersContainer)
    recorder.run(os.environ["METRICS_FILE"])
