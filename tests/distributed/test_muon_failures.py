"""If a rank that shares matrices dies or stops, the others raise and say what they stepped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .muon_failures_worker import ONCE, TIMEOUT

pytestmark = pytest.mark.timeout(120)

WORKER = Path(__file__).with_name("muon_failures_worker.py")
KILL, STOP, SLOW = signal.SIGKILL, signal.SIGSTOP, pytest.mark.slow
PHASES = ["agreement", "norm", "average", "products", "return", "apply"]
FAST = [("agreement", KILL), ("products", STOP)]  # before anything is stepped, and within


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param(phase, number, marks=[SLOW] * ((phase, number) not in FAST))
        for phase in PHASES
        for number in (KILL, STOP)
    ],
)
def test_the_others_say_what_they_stepped(
    tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), phase, str(int(number))],
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        for survivor in (0, 2):
            processes[survivor].wait(timeout=90)
    finally:
        for process in processes:
            process.kill()
    for survivor in (0, 2):
        check(json.loads((tmp_path / f"rank{survivor}.json").read_text()), phase)


def check(found: dict[str, Any], phase: str) -> None:
    assert "a rank of the group died, is late" in found["error"], found
    assert found["seconds"] < TIMEOUT + 10  # on a busy machine
    if phase in ONCE:
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
