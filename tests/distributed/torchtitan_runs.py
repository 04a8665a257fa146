"""Runs of torchtitan's Trainer, 0.2 or 0.3, with their metrics and checkpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent / "torchtitan_cpu"
CROSSINGS = [
    *[("fsdp", layout) for layout in ("single", "ddp", "tp", "pp")],
    *[(layout, "fsdp") for layout in ("single", "tp", "pp")],
]
"""The layout of a checkpoint, and the layout of the run that resumes from it."""
WEIGHTS_ALONE = "lr_scheduler,dataloader,optimizer"
"""The parts that are not loaded, as in torchtitan's test of optional checkpoints."""
STEPS, SAVED = 10, 5
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {  # processes, and options
    "single": (1, ()),
    "fsdp": (2, ()),
    "tp": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "ddp": (
        2,
        (
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=1",
        ),
    ),
}
OPTIONS = [
    *["--training.seq_len=64", "--training.local_batch_size=2"],
    *[f"--training.steps={STEPS}", "--training.mixed_precision_param=float32"],
    *["--metrics.disable_color_printing", "--debug.seed=0", "--debug.deterministic"],
    *["--comm.init_timeout_seconds=120", "--comm.train_timeout_seconds=60"],
    "--comm.trace_buf_size=0",
]
"""Options of every run. The seed gives every run of one layout the same initial weights. No mixed
precision: in bf16 a single other rounding moves the loss by more than 1e-5."""
RUN_TIMEOUT = 180  # seconds; a run takes about 5 on an idle machine


def require_torchtitan(*generations: str) -> str:
    """Returns the version of torchtitan. Skips the module if there is none that fits."""
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchtitan is not installed", allow_module_level=True)
    if not version.startswith(generations):
        pytest.skip(f"torchtitan {version} has another interface", allow_module_level=True)
    return version


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclass(frozen=True)
class Run:
    metrics: dict[int, dict[str, Any]]  # by step, from a rank that knows the loss
    checkpoints: Path
    log: str  # the output of the ranks

    def entries(self, step: int = SAVED) -> dict[str, Any]:
        """Returns names, dtypes and sizes in a checkpoint, and the shards of each rank."""
        reader = FileSystemReader(self.checkpoints / f"step-{step}")
        return reader.read_metadata().state_dict_metadata


@dataclass
class Runs:
    """Starts runs under `folder`, each once."""

    folder: Path
    start: Callable[..., str]
    done: dict[str, Run] = field(default_factory=dict)

    def train(
        self,
        name: str,
        script: str,
        ranks: int,
        options: list[str],
        resume: Run | None,
        without: str,
    ) -> tuple[list[dict[int, dict[str, Any]]], Path, str]:
        """Trains to step 10 and returns every rank's metrics, the checkpoints and the output.

        Args:
            resume: the run to continue from step 5.
            without: the parts of its checkpoint that are not loaded.
        """
        folder = self.folder / name
        if folder.exists():
            pytest.fail(f"the run {name} failed in an earlier test")
        checkpoints = folder / "checkpoint"
        checkpoints.mkdir(parents=True)
        if resume:
            saved = resume.checkpoints / f"step-{SAVED}"
            (checkpoints / saved.name).symlink_to(saved)
        if without:
            options = [*options, f"--checkpoint.exclude_from_loading={without}"]
        metrics = folder / "metrics"
        log = self.start(script, ranks, str(metrics), *options, seconds=RUN_TIMEOUT)
        lines = [read_metrics(folder / f"metrics.rank{rank}") for rank in range(ranks)]
        return lines, checkpoints, log


def assert_continues(resumed: Run, whole: Run, entry: str) -> None:
    """Asserts that a resumed run repeats every digit and ends with the same checkpoint."""
    assert resumed.metrics == {s: whole.metrics[s] for s in range(SAVED + 1, STEPS + 1)}
    expected, found = read_checkpoint(whole, STEPS), read_checkpoint(resumed, STEPS)
    assert entry in expected
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == found[name].numpy().tobytes(), name


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
