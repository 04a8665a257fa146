"""The Trainer on one GPU: NCCL, checkpoints from another stream, and GPU-only features."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.trainer import Trainer, load_config

from .support import bits, marks

pytestmark = marks
pytest.importorskip("tyro", reason="the Trainer reads its settings with tyro")

REPOSITORY = Path(__file__).parents[2]
STEPS = 6
JOB = [
    *("--experimental.custom_import", "examples.byte_llama"),
    *("--model.name", "byte_llama", "--model.flavor", "debug"),
    *("--training.device", "cuda", "--training.steps", str(STEPS), "--training.seed", "7"),
    *("--training.dataset", "text"),
    *("--training.dataset_path", str(REPOSITORY / "tests" / "golden" / "adam.json")),
    *("--training.seq_len", "32", "--training.batch_size", "8"),
    *("--training.mixed_precision_param", "float32", "--activation_checkpoint.mode", "none"),
    *("--metrics.log_freq", "1", "--metrics.progress_bar", "off"),
    *("--lr_scheduler.warmup_steps", "2", "--lr_scheduler.total_steps", str(STEPS)),
    *("--checkpoint.interval", "3"),
]
SAVING = ("--checkpoint.enable_checkpoint", "--checkpoint.async_mode")
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "bf16": ("--training.mixed_precision_param", "bfloat16"),
    "in backward": ("--optimizer.early_step_in_backward",),
    "recomputed": ("--activation_checkpoint.mode", "full"),
    "8-bit moments": ("--optimizer.state_dtype", "int8"),
    "foreach": ("--optimizer.implementation", "foreach"),
    "accumulation": ("--training.global_batch_size", "16"),
}


@pytest.fixture(autouse=True)
def a_process_like_a_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes examples/ importable and limits threads: many threads slow small CPU jobs down."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(folder: Path, *settings: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Returns the metrics of each step, and all bits of weights and optimizer state."""
    trainer = Trainer(load_config([*JOB, "--job.dump_folder", str(folder), *settings]))
    try:
        trainer.train()
        kept = [part.state_dict() for part in trainer.model_parts]
        kept.append(trainer.optimizers.state_dict())
        ended = [
            bits(value)
            for values in kept
            for _, value in sorted(values.items())
            if isinstance(value, Tensor)
        ]
    finally:
        trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], ended


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss_metrics/global_avg_loss"] for line in lines]


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_on_the_cpu(way: str, tmp_path: Path) -> None:
    on_gpu, _ = train(tmp_path / "gpu", *WAYS[way])
    on_cpu, _ = train(tmp_path / "cpu", *WAYS[way], "--training.device", "cpu")
    tolerance = 2e-2 if way == "bf16" else 2e-3
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=tolerance)
    norms = [[line["grad_norm"] for line in lines] for lines in (on_gpu, on_cpu)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * tolerance)
    assert losses(on_gpu)[-1] < losses(on_gpu)[0]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_resumed_job_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *SAVING, mode)
    train(tmp_path / "cut", *SAVING, mode, "--training.steps", "3")
    resumed = train(tmp_path / "cut", *SAVING, mode)
    assert losses(resumed[0]) == losses(whole[0])
    assert resumed[1] == whole[1]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_step_that_is_not_finite_is_counted_and_changes_nothing(
    implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_batch = Trainer.next_batch
    weights: list[list[bytes]] = []

    def spoil(self: Trainer, *args: Any) -> Any:
        model = self.model_parts[0]
        weights.append([bits(p) for p in model.parameters()])
        first = next(model.parameters())
        if self.step == 3:
            handle = first.register_hook(lambda grad: grad * float("nan"))
            self.undo = handle.remove  # type: ignore[attr-defined]
        elif hasattr(self, "undo"):
            self.undo()
        return next_batch(self, *args)

    monkeypatch.setattr(Trainer, "next_batch", spoil)
    lines, _ = train(tmp_path, "--optimizer.implementation", implementation)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 1]
    unchanged = [before == after for before, after in itertools.pairwise(weights)]
    assert unchanged == [False, False, True, False, False]


def test_profiles_and_memory_snapshots(tmp_path: Path) -> None:
    settings = ["--profiling.enable_profiling", "--profiling.profile_freq", "5"]
    train(tmp_path, *settings, "--profiling.enable_memory_snapshot")
    written = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert {".json", ".pickle"} <= written


def test_no_step_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizers' steps after the first do not wait. The rest of a job is not watched."""
    step = OptimizersContainer.step

    def watched(self: OptimizersContainer, *args: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.steps else "default")
        try:
            step(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.steps += 1

    monkeypatch.setattr(OptimizersContainer, "steps", 0, raising=False)
    monkeypatch.setattr(OptimizersContainer, "step", watched)
    train(tmp_path)


def test_another_process_runs_the_examples_job(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.append({str(REPOSITORY)!r}); from torchopt_ext.__main__ import main"
    )
    command = [sys.executable, "-P", "-c", f"{code}; sys.exit(main())", "train", "--config"]
    command += [str(REPOSITORY / "examples" / "debug.toml"), "--training.steps", "20"]
    command += ["--job.dump_folder", str(tmp_path), "--training.device", "cuda"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
