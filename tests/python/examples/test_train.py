"""Two steps of the real training script on one process, and a resume from the first."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

TINY = {
    "dim = 192": "dim = 16",
    "n_layers = 5": "n_layers = 1",
    "steps = 400": "steps = 2",
    "interval = 100": "interval = 1",
    "batches = 16": "batches = 1",
    "seq_len = 128": "seq_len = 16",
}


@pytest.fixture
def job(examples: Path, tmp_path: Path) -> Path:
    text = (examples / "demo.toml").read_text()
    for old, new in TINY.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def run(examples: Path, job: Path, out: Path) -> list[dict[str, Any]]:
    one_process = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    subprocess.run(
        [sys.executable, examples / "train.py", "--job", job, "--out", out],
        env=os.environ | one_process | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=100,
    )
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_two_steps_and_a_resume_after_the_first_end_alike(
    examples: Path, job: Path, tmp_path: Path
) -> None:
    whole = run(examples, job, tmp_path / "whole")
    kinds = ["start", "validation", "train", "train", "validation", "end"]
    assert [event["event"] for event in whole] == kinds
    for event in whole[2:4]:
        assert 7 < event["bits_per_byte"] < 9
        assert math.isfinite(event["grad_norm"])
        assert event["grad_norm"] > 0
    assert whole[2]["lr"] != whole[3]["lr"]

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    checkpoints = tmp_path / "resumed" / "checkpoints"
    (checkpoints / "step-000002" / ".metadata").unlink()  # as if killed while writing it
    (tmp_path / "resumed" / "log.jsonl").unlink()
    resumed = run(examples, job, tmp_path / "resumed")
    assert [event["event"] for event in resumed] == ["start", "train", "validation", "end"]
    assert resumed[0]["step"] == 1
    assert resumed[1:3] == whole[3:5]
    assert resumed[-1]["sha256"] == whole[-1]["sha256"]
