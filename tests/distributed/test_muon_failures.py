"""If a rank that shares matrices dies or stops, the other raises and says what it stepped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.newest_torch]

WORKER = Path(__file__).with_name("muon_failures_worker.py")


@pytest.mark.parametrize("phase", ["agreement", "average", "products", "return"])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_the_others_say_what_they_stepped(
    tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), phase, str(int(number))],
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        processes[0].wait(timeout=90)
    finally:
        for process in processes:
            process.kill()
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert "a rank of the group died, is late" in found["error"], found
    if phase == "agreement":
        assert found["weights"] == found["momentum"] == []
        return
    stepped, averaged = (
        [int(n) for n in re.findall(r"\d+", text)]
        for text in re.findall(r"(?:stepped|weights): \[(.*?)\]", found["error"])
    )
    assert sorted(stepped) == found["weights"]
    assert sorted(stepped + averaged) == found["momentum"]
    assert found["momentum"]
    assert "load a checkpoint" in found["error"].lower()
