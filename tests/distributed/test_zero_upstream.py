"""torch's tests of ZeroRedundancyOptimizer, in the file TORCH_ZERO_TEST, pass with our class."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        "TORCH_ZERO_TEST" not in os.environ,
        reason="TORCH_ZERO_TEST does not name torch's test_zero_redundancy_optimizer.py",
    ),
]


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_our_class(ranks: int, start: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("zero_upstream.py"))],
        env=os.environ | {"RANKS": str(ranks), "START": start, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    ran = re.search(r"Ran (\d+) tests.*\n\nOK(.*)", done.stderr)
    assert ran and int(ran[1]) >= 40 and "skipped" not in ran[2], done.stderr[-2000:]
