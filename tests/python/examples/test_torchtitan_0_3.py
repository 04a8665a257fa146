"""The example trains; needs torchtitan 0.3."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

SCRIPT = Path(__file__).parents[3] / "examples/torchtitan_0_3/run.py"


@pytest.mark.slow
def test_one_command_trains_on_a_cpu(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "--ranks=2", "--steps=4", f"--out={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    losses = [float(x) for x in re.findall(r"loss:\s+([0-9.]+)", result.stdout + result.stderr)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
