"""Runs torchtitan 0.2's FTTrainer on a CPU like train.py: one rank of one replica group."""

from __future__ import annotations

from ft_recording import record
from train import Recording  # patches what does not run on a CPU

from torchtitan.components.optimizer import FTOptimizersContainer  # isort: skip
from torchtitan.experiments.ft.train import FTTrainer  # isort: skip
from torchtitan.train import main  # isort: skip


class RecordingFTTrainer(Recording, FTTrainer):
    pass


if __name__ == "__main__":
    record(RecordingFTTrainer, FTOptimizersContainer)
    main(RecordingFTTrainer)
