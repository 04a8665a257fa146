"""The examples are scripts that import one another by name from their own folder."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
TIME_LIMIT = 170  # seconds; a run takes about 25 on two free cores


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES


@pytest.fixture(scope="session")
def run_example(examples: Path) -> Callable[..., str]:
    """Runs an example that starts its ranks itself; returns what it printed."""

    def run(name: str, *arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", str(examples / name), *arguments]
        process = subprocess.Popen(
            command,
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
            pytest.fail(f"the ranks still ran after {TIME_LIMIT} s:\n{process.communicate()[0]}")
        assert process.returncode == 0, output
        return output

    return run
