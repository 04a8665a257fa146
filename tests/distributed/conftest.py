"""Runs a worker script on a few gloo ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN_TIMEOUT = 120  # seconds; a run takes about 10 on an idle machine

Results = list[dict[str, dict[str, Any]]]  # by rank and case


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Results]:
    """All cases of a worker script of this folder, in one run of so many processes."""

    def run(worker: str, ranks: int) -> Results:
        folder = tmp_path_factory.mktemp(Path(worker).stem)
        command = [
            *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
            *["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"],
            *[str(Path(__file__).with_name(worker)), str(folder)],
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(
                f"{ranks} ranks still ran after {RUN_TIMEOUT} s:\n{process.communicate()[0]}"
            )
        assert process.returncode == 0, output
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="session")
def run_two_ranks(run_ranks: Callable[[str, int], Results]) -> Callable[[str], Results]:
    return lambda worker: run_ranks(worker, 2)
