"""Runs a measurement on gloo ranks of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    worker: str, ranks: int, *arguments: object, threads: int = 1, log: Path | None = None
) -> dict[str, Any]:
    """Runs `worker`, a program of this folder, on ranks, and returns the JSON that rank 0 writes.

    Args:
        arguments: of the worker, after the file to write.
        threads: of each rank.
        log: the file for the ranks' output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
            *["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"],
            *[str(Path(__file__).with_name(worker)), str(out), *map(str, arguments)],
        ]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        with open(log or os.devnull, "w") as file:
            output = None if log is None else file
            subprocess.run(command, env=env, check=True, stdout=output, stderr=output)
        return dict(json.loads(out.read_text()))


def sample(call: Callable[[], object]) -> float:
    """Returns the milliseconds from a barrier until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    spent = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)
