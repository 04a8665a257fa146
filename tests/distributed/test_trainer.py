"""The Trainer's jobs train like a loop written by hand, and resumed jobs like whole jobs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


# ---- what a Trainer does, step by step -----------------------------------------------------------


@pytest.fixture(scope="module")
def behaviour(rank_server, tmp_path_factory) -> Callable[[int], list[dict[str, Any]]]:
    """A function that returns the results of trainer_behaviour.py by rank."""
    found: dict[int, list[dict[str, Any]]] = {}

    def run(ranks: int) -> list[dict[str, Any]]:
        if ranks not in found:
            folder = tmp_path_factory.mktemp("behaviour")
            with rank_server("trainer_behaviour.py") as start:
                start("trainer_behaviour.py", ranks, str(folder), *JOB)
            files = sorted(folder.glob("rank*.json"))
            found[ranks] = [json.loads(file.read_text()) for file in files]
        return found[ranks]

    return run


@pytest.mark.newest_torch
def test_calls_of_a_step_come_in_the_order_of_torchtitan(behaviour):
    found = behaviour(1)[0]["order_of_calls"]
    clips = ["clip_grad_norm_"]
    for name, clip in (("fused", []), ("foreach", clips), ("a TrainSpec's", clips)):
        step = [
            *("GarbageCollection.run", "Trainer.next_batch", "OptimizersContainer.zero_grad"),
            *("ByteLlama.forward", *clip, "CheckpointManager.maybe_wait_for_staging"),
            *("OptimizersContainer.step", "LRSchedulersContainer.step", "MetricsProcessor.log"),
            "CheckpointManager.save",
        ]
        assert found[name] == step * 2
    early = found["in backward"]  # changes the state in backward
    wait = "CheckpointManager.maybe_wait_for_staging"
    assert early.index(wait) < early.index("ByteLlama.forward")
    assert set(found["seconds"]["in backward"]) == {None}
    # Clipping counts as the optimizer's time.
    assert min(found["seconds"]["a TrainSpec's"]) > 0.05


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_steps_that_are_not_finite_change_nothing_and_are_counted(behaviour, implementation):
    found = behaviour(1)[0]["skipped_steps"][implementation]
    assert found["unchanged"] == [False, True, False, True, False]
    assert found["skipped"] == [0, 1, 1, 2, 2]
    assert [norm is None for norm in found["norms"]] == [False, True, False, True, False]


def test_too_many_skips_in_a_row_end_the_job(behaviour):
    step, message = behaviour(1)[0]["too_many_skips"]
    assert step == 7
    assert "3 steps in a row" in message
    assert "the last checkpoint before them is step 4" in message


def test_refused_commits_are_neither_steps_nor_skips(behaviour):
    """Two groups make a step of 16 sequences from two batches of 4 each."""
    pytest.importorskip("torchft")
    found = behaviour(1)[0]["refused_commits"]
    assert found["accumulated"] == 2
    assert found["steps"] == 3  # 1, 3 and 5
    assert found["norms"] == [True, False, False, False, True]
    assert found["saved"] == ["step-5"]  # step 4 was due between a skipped step and a good one


def test_training_ends_with_its_data(behaviour):
    """When its data ends, a job validates and exports as after its last step."""
    saved = ["step-4", "step-5", "step-5.safetensors"]
    assert behaviour(1)[0]["data_that_ends"] == ["data", 5, saved, "model", [0, 3, 5]]


def test_validation_reads_the_same_data_every_time(behaviour):
    training, losses = behaviour(1)[0]["validation"]
    assert training
    assert [step for step, _ in losses] == [0, 2, 4, 5]
    assert len({loss for _, loss in losses}) == 1


def test_close_leaves_the_process_as_it_was_and_the_settings_in_a_file(behaviour):
    assert behaviour(1)[0]["closing"] == [True, False, False, True, True, 1]


@pytest.mark.newest_torch
def test_low_precision_shards_change_no_bit(behaviour):
    for found in behaviour(2):
        cast, kept = found["low_precision_shards"]
        assert not any(cast[0])
        assert all(kept[0])
        assert kept[1] == cast[1]


def test_all_stages_end_if_one_has_no_optimizer(behaviour):
    own, other = (found["a_stage_that_fails"] for found in reversed(behaviour(2)))
    assert own == "no optimizer for the last stage"
    assert other == f"rank 1: ConfigError: {own}"


def test_sigterm_at_one_rank_ends_all_after_one_step(behaviour):
    for found in behaviour(2):
        assert found["sigterm_at_one_rank"] == ["SIGTERM", 4, 4]
