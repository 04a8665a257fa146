"""Runs a measurement on gloo ranks of this machine: ranks.py OUT MODULE FUNCTION ARGUMENTS."""

from __future__ import annotations

import importlib
import inspect
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
    function: Callable[..., Any],
    ranks: int,
    *arguments: object,
    threads: int = 1,
    log: Path | None = None,
) -> Any:
    """Calls a function of a module of this folder on ranks, and returns rank 0's result.

    Args:
        function: returns a value of JSON's types.
        arguments: the function's, of JSON's types.
        threads: of each rank.
        log: the file for the ranks' output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
            *["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"],
            *[__file__, str(out), Path(inspect.getfile(function)).stem, function.__name__],
            json.dumps(arguments),
        ]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        with open(log or os.devnull, "w") as file:
            output = None if log is None else file
            subprocess.run(command, env=env, check=True, stdout=output, stderr=output)
        return json.loads(out.read_text())


def sample(call: Callable[[], object]) -> float:
    """Returns the milliseconds from a barrier until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    spent = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def on_ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def main() -> None:
    out, module, function, arguments = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    result = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
