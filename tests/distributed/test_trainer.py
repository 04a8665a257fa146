"""The Trainer's jobs train like a loop written by hand, and resumed jobs like whole jobs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .rank_results import assert_passed

REPOSITORY = Path(__file__).parents[2]
TEXT = REPOSITORY / "tests" / "golden" / "adam.json"  # a file that seldom changes
STEPS = 6
JOB = [
    *("--experimental.custom_import", "examples.byte_llama"),
    *("--model.name", "byte_llama", "--model.flavor", "debug"),
    *("--training.device", "cpu", "--training.steps", str(STEPS), "--training.seed", "7"),
    *("--training.dataset", "text", "--training.dataset_path", str(TEXT)),
    *("--training.seq_len", "32", "--training.mixed_precision_param", "float32"),
    *("--activation_checkpoint.mode", "none", "--metrics.log_freq", "1"),
    *("--metrics.progress_bar", "off", "--lr_scheduler.warmup_steps", "2"),
    *("--checkpoint.interval", "3", "--lr_scheduler.total_steps", str(STEPS)),
]
BATCH = 8  # sequences per step, over all ranks
SAVING = ("--checkpoint.enable_checkpoint", "--checkpoint.interval", "3")
Run = list[dict[str, Any]]
Train = Callable[..., Run]


def layout(**degrees: int) -> tuple[str, ...]:
    names = {
        "ddp": "data_parallel_replicate_degree",
        "fsdp": "data_parallel_shard_degree",
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
    }
    words = [(f"--parallelism.{names[kind]}", str(degree)) for kind, degree in degrees.items()]
    return tuple(word for pair in words for word in pair)


ZERO = ("--parallelism.zero", "balanced")
INTERLEAVED = ("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
# Ranks, the number of ranks that read different data, and settings.
LAYOUTS = {
    "one process": (1, 1, ()),
    "FSDP": (2, 2, layout(fsdp=2)),
    "DDP, balanced ZeRO": (2, 2, (*layout(ddp=2), *ZERO)),
    "accumulation": (1, 1, ("--training.global_batch_size", str(BATCH))),
    "DDP": (2, 2, layout(ddp=2)),
    "DDP, greedy ZeRO": (2, 2, (*layout(ddp=2), "--parallelism.zero", "greedy")),
    "TP": (2, 1, layout(tp=2)),
    "PP": (2, 1, layout(pp=2)),
    "PP, interleaved": (2, 1, (*layout(pp=2), *INTERLEAVED)),
    "HSDP": (4, 4, layout(ddp=2, fsdp=2)),
    "FSDP and TP": (4, 2, layout(fsdp=2, tp=2)),
    "FSDP and PP": (4, 2, layout(fsdp=2, pp=2)),
    "FSDP, offloaded": (2, 2, (*layout(fsdp=2), "--training.enable_cpu_offload")),
    "FSDP, accumulation": (
        2,
        2,
        (*layout(fsdp=2), "--training.global_batch_size", str(BATCH)),
    ),
    "in backward": (1, 1, ("--optimizer.early_step_in_backward",)),
    "recomputed": (2, 2, (*layout(fsdp=2), "--activation_checkpoint.mode", "full")),
    "DDP, deterministic": (4, 4, (*layout(ddp=4), "--training.deterministic")),
}
FAST = ("one process", "FSDP", "DDP, balanced ZeRO", "accumulation")


def batch(name: str) -> tuple[str, str]:
    _, readers, _ = LAYOUTS[name]
    microbatches = 2 if "accumulation" in name else 1
    return "--training.batch_size", str(BATCH // readers // microbatches)


def layouts(*fast: str) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in LAYOUTS
    ]


@pytest.fixture(scope="module")
def train(rank_server) -> Iterator[Train]:
    """A function that runs a job on a number of ranks and returns its metrics by step."""
    with rank_server("trainer_worker.py") as start:

        def run(folder: Path, ranks: int, *settings: str, worker: str = "trainer_worker.py") -> Run:
            start(worker, ranks, *JOB, "--job.dump_folder", str(folder), *settings)
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]

        yield run


@pytest.fixture(scope="module")
def by_hand(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("by_hand")
    return train(folder, 1, "--training.batch_size", str(BATCH), worker="trainer_by_hand.py")


def ended(folder: Path) -> list[dict[str, Any]]:
    """Returns the results that the ranks wrote at the end."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def trajectory(run: Run) -> list[tuple[float, float]]:
    return [(line["loss_metrics/global_avg_loss"], line["grad_norm"]) for line in run]


def test_one_process_repeats_the_loop_by_hand_bit_for_bit(train, by_hand, tmp_path):
    run = train(tmp_path, 1, *batch("one process"))
    assert trajectory(run) == trajectory(by_hand)
    assert [line["step"] for line in run] == list(range(1, STEPS + 1))
    assert run[-1]["loss_metrics/global_avg_loss"] < run[0]["loss_metrics/global_avg_loss"]


@pytest.mark.parametrize("name", layouts(*FAST))
def test_layouts_train_as_the_loop_by_hand(train, by_hand, tmp_path, name):
    ranks, _, settings = LAYOUTS[name]
    run = train(tmp_path, ranks, *batch(name), *settings)
    for found, expected in zip(trajectory(run), trajectory(by_hand), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


# DDP on more than two ranks sums the first step after a start in another order, unless told not to.
@pytest.mark.parametrize("name", layouts("FSDP", "DDP, balanced ZeRO"))
def test_resumed_jobs_end_with_the_same_bits(train, tmp_path, name):
    ranks, _, settings = LAYOUTS[name]
    common = (*batch(name), *settings, *SAVING)
    whole = train(tmp_path / "whole", ranks, *common)
    cut = tmp_path / "cut"
    train(cut, ranks, *common, "--training.steps", "3")
    resumed = train(cut, ranks, *common)
    assert trajectory(resumed) == trajectory(whole)
    assert [line["lr"] for line in resumed] == [line["lr"] for line in whole]
    assert ended(cut) == ended(tmp_path / "whole")


CHANGES = [("FSDP", "DDP, balanced ZeRO"), ("DDP, balanced ZeRO", "FSDP"), ("TP", "PP")]
CHANGES += [("one process", "HSDP"), ("FSDP and PP", "one process"), ("PP", "FSDP")]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_jobs_resume_in_another_layout(train, by_hand, tmp_path, before, after):
    for name, steps in ((before, "3"), (after, str(STEPS))):
        ranks, _, settings = LAYOUTS[name]
        run = train(tmp_path, ranks, *batch(name), *settings, *SAVING, "--training.steps", steps)
    assert len(run) == STEPS
    for found, expected in zip(trajectory(run), trajectory(by_hand), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_trainer_does_step_by_step(rank_server, tmp_path, ranks):
    with rank_server("trainer_behaviour.py") as start:
        start("trainer_behaviour.py", ranks, str(tmp_path), *JOB)
    assert_passed(ended(tmp_path))
