"""A few steps of the three ways on two ranks, in both dtypes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]

TIME_LIMIT = 170  # seconds; a run takes about 20 on two free cores


def run(examples: Path, dtype: str) -> str:
    command = [sys.executable, "-W", "ignore", str(examples / "fsdp_mixed_precision.py")]
    process = subprocess.Popen(
        [*command, "--steps=4", f"--dtype={dtype}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "RANK"},
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"two ranks still ran after {TIME_LIMIT} s:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_moving_and_resuming_change_nothing(examples: Path, dtype: str) -> None:
    output = run(examples, dtype)
    assert re.search(r"the same sha256, [0-9a-f]{16}$", output, re.MULTILINE), output
    rows = re.findall(r"^(\S.*?) {2,}((?:[\d.]+ *){5})$", output, re.MULTILINE)
    assert len(rows) == 3, output
    fused, moved, torchs = ([float(x) for x in numbers.split()] for _, numbers in rows)
    assert fused[:4] == moved[:4] or dtype == "float16"  # skipped steps are not saved
    assert fused[0] == moved[0]
    assert 4 < fused[0] < 8
    assert torchs[0] == pytest.approx(fused[0], rel=2e-2)
    assert fused[2] == 1 or (dtype == "float16" and 1 < fused[2] <= 2.0**16)
