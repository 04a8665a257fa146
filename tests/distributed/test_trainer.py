"""The Trainer's jobs beside a loop written by hand, and beside themselves resumed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import FusedAdamW
from torchopt_ext.ops import lr_factor

REPOSITORY = Path(__file__).parents[2]
STEPS = 6
JOB = [
    *("--experimental.custom_import", "examples.byte_llama"),
    *("--model.name", "byte_llama", "--model.flavor", "debug"),
    *("--training.device", "cpu", "--training.steps", str(STEPS), "--training.seed", "7"),
    *("--training.dataset", "text", "--training.dataset_path", str(REPOSITORY / "docs")),
    *("--training.seq_len", "32", "--training.mixed_precision_param", "float32"),
    *("--activation_checkpoint.mode", "none", "--metrics.log_freq", "1"),
    *("--metrics.progress_bar", "off", "--lr_scheduler.warmup_steps", "2"),
    *("--checkpoint.interval", "3", "--lr_scheduler.total_steps", str(STEPS)),
]
BATCH = 8  # sequences of a step on all ranks
Run = list[dict[str, Any]]
Train = Callable[..., Run]


@pytest.fixture(scope="module")
def train(rank_server) -> Iterator[Train]:
    """Runs a job on so many ranks and returns its metrics by step; `ended` holds the rest."""
    with rank_server("trainer_worker.py") as start:

        def run(folder: Path, ranks: int, *settings: str) -> Run:
            start("trainer_worker.py", ranks, *JOB, "--job.dump_folder", str(folder), *settings)
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]

        yield run


def ended(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def losses(run: Run) -> list[float]:
    return [line["loss_metrics/global_avg_loss"] for line in run]


def norms(run: Run) -> list[float]:
    return [line["grad_norm"] for line in run]
