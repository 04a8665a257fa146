"""Norms over a group and a mesh, ZeRO, FSDPadaptOptimizer and rejected steps on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .support import marks

pytestmark = marks


@pytest.mark.timeout(180)
def test_two_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    worker = [sys.executable, str(Path(__file__).with_name("two_ranks_worker.py"))]
    processes, logs = [], [tmp_path / f"rank{rank}.log" for rank in range(2)]
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            command = [*worker, str(rank), str(tmp_path / "store"), "cuda"]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
