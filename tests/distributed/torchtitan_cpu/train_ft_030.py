"""torchtitan 0.3's FaultTolerantTrainer on a CPU, as train_030.py: one rank of a replica group."""

from __future__ import annotations

import os
from typing import Any

import torchft
import train_030 as recorder  # replaces what does not run on a CPU
from ft_recording import record

from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer  # isort: skip
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer  # isort: skip


class Manager(torchft.Manager):
    """Waits for the quorum, and for recovery, when a step begins.

    Without it torchft's thread takes the model's state dict during forward (torchtitan keeps none,
    as 0.2 does), and FSDP2's hook of state_dict() reshards the parameters that are in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"use_async_quorum": False}))


if __name__ == "__main__":
    torchft.Manager = Manager
    record(FaultTolerantTrainer, TorchFTOptimizersContainer)
    recorder.run(os.environ["METRICS_FILE"])
