"""Runs of torchtitan's Trainer, 0.2 or 0.3, with their metrics and checkpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent / "torchtitan_cpu"
STEPS, SAVED = 10, 5
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


def options_of(version: str, assets: Path, folder: Path) -> list[str]:
    """Returns options of a run that writes to a folder: the model, tokenizer and data."""
    if version.startswith("0.2."):
        return [
            *[f"--job.dump_folder={folder}", "--model.name=llama3", "--model.flavor=debugmodel"],
            f"--model.hf_assets_path={assets / 'tokenizer'}",
            *["--training.dataset=c4_test", f"--training.dataset_path={assets / 'data'}"],
            *["--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1", *OPTIONS],
        ]
    return [
        *["--module=configs_030", f"--dump_folder={folder}"],
        f"--hf_assets_path={assets / 'tokenizer'}",
        f"--dataloader.dataset_path={assets / 'data'}",
        *["--validator.no-enable", "--debug.no-enable_structured_logging", *OPTIONS],
    ]


@dataclass(frozen=True)
class Version:
    """How to run the Trainer of one version.

    Attributes:
        script: in torchtitan_cpu; it records the metrics. ``preload`` imports torchtitan.
        options: of every run.
        layouts: the number of processes and options, by name.
        kinds: options by name: which containers, and how they are configured.
        entry: a moment's entry in checkpoints.
        learns: how far the loss falls, at least.
        max_norm: to which the Trainer clips, below every norm.
        norm_tolerance: of torch's norm, which it sums in float32. Ours is exact.
    """

    script: str
    preload: str
    options: tuple[str, ...]
    layouts: Mapping[str, tuple[int, tuple[str, ...]]]
    kinds: Mapping[str, tuple[str, ...]]
    entry: str
    learns: float
    max_norm: float
    norm_tolerance: float


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
    """Starts runs of a version under `folder`, each once."""

    titan: str  # torchtitan's version
    version: Version
    folder: Path
    start: Callable[..., str]
    done: dict[str, Run] = field(default_factory=dict)

    def get(
        self,
        layout: str,
        kind: str,
        resume: str = "",
        saved_in: str = "",
        without: str | None = None,
    ) -> Run:
        """Trains to step 10. `resume` is the kind of run whose step 5 is continued.

        `saved_in` is that run's layout if it differs. The data then starts from the beginning:
        torchtitan's loader continues only with the same ranks. `without` is not loaded; "" loads
        everything.
        """
        if without is None:
            without = "dataloader" if saved_in else ""
        name = f"{layout}-{kind}-from-{saved_in}-{resume}".removesuffix("-from--") + without
        name = name.replace(" ", "-").replace(",", "")
        if name in self.done:
            return self.done[name]
        before = self.get(saved_in or layout, resume) if resume else None
        folder = self.folder / name
        if folder.exists():
            pytest.fail(f"the run {name} failed in an earlier test")
        checkpoints = folder / "checkpoint"
        checkpoints.mkdir(parents=True)
        ranks, parallelism = self.version.layouts[layout]
        options = options_of(self.titan, self.folder, folder)
        options += ["--checkpoint.enable", f"--checkpoint.interval={SAVED}", *self.version.options]
        options += [*parallelism, *self.version.kinds[kind]]
        if before:
            saved = before.checkpoints / f"step-{SAVED}"
            (checkpoints / saved.name).symlink_to(saved)
        if without:
            options.append(f"--checkpoint.exclude_from_loading={without}")
        script = f"torchtitan_cpu/{self.version.script}"
        log = self.start(script, ranks, str(folder / "metrics"), *options, seconds=RUN_TIMEOUT)
        of_ranks = [read_metrics(folder / f"metrics.rank{rank}") for rank in range(ranks)]
        for line, *others in zip(*(metrics.values() for metrics in of_ranks), strict=True):
            # Only the last pipeline stage knows the loss, and the rates of its groups.
            names = ("step", "grad_norm") if layout.startswith("pp") else tuple(line)
            for other in others:
                assert [line[n] for n in names] == [other[n] for n in names], (
                    f"{name}: ranks differ"
                )
        self.done[name] = Run(of_ranks[-1], checkpoints, log)
        return self.done[name]


def assert_same_training(
    run: Run, expected: Run, first_step: int = 1, norm_tolerance: float = 1e-5
) -> None:
    assert list(run.metrics) == list(range(first_step, STEPS + 1))
    for step, line in run.metrics.items():
        reference = expected.metrics[step]
        assert line["lrs"] == pytest.approx(reference["lrs"], rel=1e-14), f"step {step}"
        norm_tolerance_here = norm_tolerance * max(1.0, reference["grad_norm"])
        for name, tolerance in (("loss", 1e-5), ("grad_norm", norm_tolerance_here)):
            assert abs(line[name] - reference[name]) <= tolerance, f"{name} of step {step}"


def assert_continues(resumed: Run, whole: Run, entry: str) -> None:
    """Asserts that a resumed run repeats every digit and ends with the same checkpoint."""
    assert resumed.metrics == {s: whole.metrics[s] for s in range(SAVED + 1, STEPS + 1)}
    expected, found = read_checkpoint(whole, STEPS), read_checkpoint(resumed, STEPS)
    assert entry in expected
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == found[name].numpy().tobytes(), name


@contextmanager
def torchtitan_runs(
    rank_server: Any, titan: str, version: Version, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Yields runs whose ranks are forked from a process that has imported torchtitan, and are on
    the CPU, without a network."""
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
        with rank_server(f"torchtitan_cpu/{version.preload}") as start:
            yield Runs(titan, version, folder, start)
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
