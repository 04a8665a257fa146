"""The Trainer's jobs train like a loop written by hand, and resumed jobs like whole jobs."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.ranks import assert_passed

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


DDP, FSDP, TP, PP = layout(ddp=2), layout(fsdp=2), layout(tp=2), layout(pp=2)
SCHEDULE, MICROBATCH = (
    f"--parallelism.pipeline_parallel_{s}" for s in ("schedule", "microbatch_size")
)
INTERLEAVED = (SCHEDULE, "Interleaved1F1B")
ACCUMULATED = ("--training.global_batch_size", str(BATCH))
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
TORCHS = ("--optimizer.implementation", "foreach")  # and torch's clipping
MODE = "--activation_checkpoint.mode"
ALL, COSTLY = (
    (MODE, "full"),
    (MODE, "selective", "--activation_checkpoint.selective_ac_option", "op"),
)
COMPILED = ("--training.compile",)
# Ranks, the number of ranks that read different data, and settings.
LAYOUTS = {
    "one process": (1, 1, ()),
    "FSDP": (2, 2, FSDP),
    "FSDP, torch's": (2, 2, (*FSDP, *TORCHS)),
    "DDP, balanced ZeRO": (2, 2, (*DDP, "--parallelism.zero", "balanced")),
    "accumulation": (1, 1, ACCUMULATED),
    "in backward": (1, 1, ("--optimizer.early_step_in_backward",)),
    "DDP": (2, 2, DDP),
    "DDP, greedy ZeRO": (2, 2, (*DDP, "--parallelism.zero", "greedy")),
    "DDP, accumulation": (2, 2, (*DDP, *ACCUMULATED)),
    "DDP, bfloat16": (2, 2, (*DDP, *BFLOAT16)),
    "DDP, compiled": (2, 2, (*DDP, *COMPILED)),
    "DDP, deterministic": (4, 4, (*layout(ddp=4), "--training.deterministic")),
    "FSDP, offloaded": (2, 2, (*FSDP, "--training.enable_cpu_offload")),
    "FSDP, accumulation": (2, 2, (*FSDP, *ACCUMULATED)),
    "FSDP, bfloat16": (2, 2, (*FSDP, *BFLOAT16)),
    "FSDP, resharded": (2, 2, (*FSDP, "--parallelism.fsdp_reshard_after_forward", "always")),
    "FSDP, recomputed": (2, 2, (*FSDP, *ALL)),
    "FSDP, every second layer recomputed": (2, 2, (*FSDP, MODE, "selective")),
    "FSDP, costly operations saved": (2, 2, (*FSDP, *COSTLY)),
    "FSDP, compiled": (2, 2, (*FSDP, *COMPILED)),
    "FSDP, compiled and recomputed": (2, 2, (*FSDP, *COMPILED, *ALL)),
    "FSDP, compiled, costly operations saved": (2, 2, (*FSDP, *COMPILED, *COSTLY)),
    "HSDP": (4, 4, (*DDP, *FSDP)),
    "HSDP, accumulation": (4, 4, (*DDP, *FSDP, *ACCUMULATED)),
    "TP": (2, 1, TP),
    "TP, torch's": (2, 1, (*TP, *TORCHS)),
    "TP, whole logits": (2, 1, (*TP, "--parallelism.disable_loss_parallel")),
    "TP, costly operations saved": (2, 1, (*TP, *COSTLY)),
    "TP, four ranks": (4, 1, layout(tp=4)),
    "FSDP and TP": (4, 2, (*FSDP, *TP)),
    "PP": (2, 1, PP),
    "PP, torch's": (2, 1, (*PP, *TORCHS)),
    "PP, accumulation": (2, 1, (*PP, *ACCUMULATED)),
    "PP, split": (2, 1, (*PP, "--parallelism.pipeline_parallel_split_points", "layers.1")),
    "PP, GPipe": (2, 1, (*PP, SCHEDULE, "GPipe")),
    "PP, interleaved": (2, 1, (*PP, *INTERLEAVED)),
    "PP, interleaved, larger microbatches": (2, 1, (*PP, *INTERLEAVED, MICROBATCH, "2")),
    "PP, V-shaped": (2, 1, (*PP, SCHEDULE, "ZBVZeroBubble")),
    "PP, four ranks": (4, 1, layout(pp=4)),
    "PP and TP": (4, 1, (*PP, *TP)),
    "FSDP and PP": (4, 2, (*FSDP, *PP)),
    "FSDP and interleaved PP": (4, 2, (*FSDP, *PP, *INTERLEAVED)),
}
FAST = ("one process", "FSDP", "FSDP, torch's", "DDP, balanced ZeRO", "accumulation")
FAST += ("DDP, accumulation", "DDP, bfloat16", "FSDP, offloaded", "FSDP, accumulation")
FAST += ("FSDP, bfloat16", "FSDP, resharded", "FSDP, recomputed", "FSDP, costly operations saved")
RESUMED = [name for name in LAYOUTS if "," not in name or "ZeRO" in name]
RESUMED += ["DDP, deterministic", "PP, interleaved", "FSDP, offloaded", "FSDP, recomputed"]
OLD = pytest.mark.skipif(torch.__version__ < "2.12", reason="sends to itself, which gloo cannot")


def batch(name: str) -> tuple[str, str]:
    _, readers, settings = LAYOUTS[name]
    microbatches = 2 if ACCUMULATED[0] in settings else 1
    return "--training.batch_size", str(BATCH // readers // microbatches)


def layouts(names: Iterable[str], fast: Iterable[str]) -> list[Any]:
    marks = {name: [OLD] if "V-shaped" in name else [] for name in names}
    return [
        pytest.param(name, marks=more if name in fast else [pytest.mark.slow, *more])
        for name, more in marks.items()
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


@pytest.mark.parametrize("name", layouts(LAYOUTS, FAST))
def test_layouts_train_as_the_loop_by_hand(train, by_hand, tmp_path, name):
    ranks, _, settings = LAYOUTS[name]
    run = train(tmp_path, ranks, *batch(name), *settings)
    rounded = BFLOAT16[0] in settings  # at other places than in float32
    for step, expected in zip(trajectory(run), trajectory(by_hand), strict=True):
        assert step == pytest.approx(expected, rel=2e-2 if rounded else 1e-5)
    losses = [[loss for loss, _ in trajectory(each)] for each in (run, by_hand)]
    assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) != rounded


# DDP on more than two ranks sums the first step after a start in another order, unless told not to.
@pytest.mark.parametrize("name", layouts(RESUMED, ("FSDP", "DDP, balanced ZeRO")))
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
    for step, expected in zip(trajectory(run), trajectory(by_hand), strict=True):
        assert step == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_trainer_does_step_by_step(rank_server, tmp_path, ranks):
    with rank_server("trainer_behaviour.py") as start:
        start("trainer_behaviour.py", ranks, str(tmp_path), *JOB)
    assert_passed(ended(tmp_path))
