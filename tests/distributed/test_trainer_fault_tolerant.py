"""Replica groups of the Trainer under torchft."""

import json
import sys
from pathlib import Path

import pytest

from .replica_groups import replica_groups
from .test_trainer import JOB, STEPS

pytest.importorskip("torchft")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def train(folder: Path, *more: str) -> list[dict]:
    """Trains two groups of one rank, each with its own folder. Returns what their ranks ended with.

    Only one of the groups saves checkpoints.
    """
    command = [sys.executable, str(Path(__file__).with_name("trainer_worker.py")), *JOB]
    command += ["--training.batch_size", "4", "--fault_tolerance.enable"]
    command += ["--fault_tolerance.group_size", "2", "--fault_tolerance.min_replica_size", "2"]
    command += ["--checkpoint.enable_checkpoint", *more]
    with replica_groups(folder, groups=2) as groups:
        for replica in range(2):
            options = ["--fault_tolerance.replica_id", str(replica)]
            options += ["--job.dump_folder", str(folder / str(replica))]
            groups.start(replica, [*command, *options])
        groups.wait(seconds=100)
    return [json.loads((folder / f"{r}/rank0.json").read_text()) for r in range(2)]


def logged(folder: Path, replica: int) -> list[dict]:
    lines = (folder / f"{replica}/replica_{replica}/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_replica_groups_read_other_data_and_end_with_the_same_bits(tmp_path):
    ended = train(tmp_path)
    assert ended[0] == ended[1]
    assert ended[0]["step"] == STEPS
    first = [logged(tmp_path, replica)[0] for replica in range(2)]
    assert first[0]["loss_metrics/global_avg_loss"] != first[1]["loss_metrics/global_avg_loss"]


def test_after_a_restart_groups_take_the_state_of_the_group_with_the_checkpoint(tmp_path):
    train(tmp_path, "--training.steps", "2")
    saved = [replica for replica in range(2) if (tmp_path / f"{replica}/checkpoint").exists()]
    assert len(saved) == 1
    for replica in range(2):  # the group with the checkpoint becomes the second
        (tmp_path / str(replica)).rename(tmp_path / f"{replica}.before")
    (tmp_path / f"{saved[0]}.before").rename(tmp_path / "1")
    (tmp_path / f"{1 - saved[0]}.before").rename(tmp_path / "0")
    ended = train(tmp_path)
    assert ended[0] == ended[1]
    assert ended[0]["step"] == STEPS
    for replica in range(2):
        assert [line["step"] for line in logged(tmp_path, replica)] == [*range(3, STEPS + 1)]
