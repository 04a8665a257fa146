"""Runs of torchtitan's Trainer, 0.2 or 0.3, with their metrics and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent / "torchtitan_cpu"
CROSSINGS = [
    *[("fsdp", layout) for layout in ("single", "ddp", "tp", "pp")],
    *[(layout, "fsdp") for layout in ("single", "tp", "pp")],
]
"""The layout of a checkpoint, and the layout of the run that resumes from it."""
WEIGHTS_ALONE = "lr_scheduler,dataloader,optimizer"
"""The parts that are not loaded, as in torchtitan's test of optional checkpoints."""


@dataclass(frozen=True)
class Run:
    metrics: dict[int, dict[str, Any]]  # by step, from a rank that knows the loss
    checkpoints: Path
    log: str  # the output of the ranks


@contextmanager
def torchtitan_server(
    rank_server: Any, preload: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Callable[..., str]]]:
    """Yields a folder with tokenizer and data, and a function that starts ranks. The ranks are on
    the CPU, without a network, and ``preload`` has imported torchtitan in them."""
    folder = tmp_path_factory.mktemp("torchtitan")
    subprocess.run([sys.executable, HERE / "assets.py", folder], check=True, timeout=60)
    settings = {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setitem(os.environ, name, value)
        with rank_server(f"torchtitan_cpu/{preload}") as start:
            yield folder, start
    shutil.rmtree(folder)  # the checkpoints are some 70 MB each


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


def read_checkpoint(run: Run, step: int) -> dict[str, Any]:
    """Returns every tensor of a distributed checkpoint, unsharded, by its flat name."""
    file = run.checkpoints / f"step-{step}.pt"
    dcp_to_torch_save(run.checkpoints / f"step-{step}", file)
    flat: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, item)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    flatten("", torch.load(file, weights_only=True))
    file.unlink()
    return flat
