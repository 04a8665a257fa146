"""The torchtitan examples train; each needs its version of torchtitan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "module"),  # a module that only this version has
    [("0.2", "torchtitan.protocols.train_spec"), ("0.3", "torchtitan.components.optimizer.utils")],
)
def test_one_command_trains_on_a_cpu(tmp_path: Path, version: str, module: str) -> None:
    pytest.importorskip(module, reason=f"torchtitan {version} is not there")
    script = EXAMPLES / f"torchtitan_{version.replace('.', '_')}" / "run.py"
    result = subprocess.run(
        [sys.executable, script, "--ranks=2", "--steps=4", f"--out={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    losses = [float(x) for x in re.findall(r"loss:\s+([0-9.]+)", result.stdout + result.stderr)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
