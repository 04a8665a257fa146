"""Forks the ranks of worker scripts from one process that has imported torch, which takes 4 s.

Reads one job per line, [number, script, arguments, ranks, seconds], and answers with [number,
problem, output].
Scripts on the command line run first, in the server's own process.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
import time
from contextlib import redirect_stdout
from multiprocessing import connection, get_context
from pathlib import Path
from typing import IO, Any

import torch._dynamo  # the first optimizer would import it
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import torchopt_ext.containers
import torchopt_ext.mixed_precision
import torchopt_ext.zero  # noqa: F401


def be_rank(output: IO[bytes], environment: dict[str, str], script: str, arguments: list[str]):
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))  # as Python does for a script
    runpy.run_path(script, run_name="__main__")


def run(script: str, arguments: list[str], ranks: int, seconds: float) -> tuple[str, str]:
    """Returns the problem, or "", and the output of all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryFile() as output:
        start = get_context("fork").Process
        processes: Any = [
            start(target=be_rank, args=(output, rendezvous | {"RANK": rank}, script, arguments))
            for rank in map(str, range(ranks))
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        running = list(processes)
        while running and not any(process.exitcode for process in processes):
            left = deadline - time.monotonic()
            if not connection.wait([process.sentinel for process in running], max(left, 0)):
                break
            running = [process for process in running if process.exitcode is None]
        codes = [process.exitcode for process in processes]  # None: still running
        for process in processes:
            process.kill()
            process.join()
        output.seek(0)
        problem = f"exit codes {codes}, limit {seconds} s" if any(c != 0 for c in codes) else ""
        return problem, output.read().decode(errors="replace")


if __name__ == "__main__":
    sys.path.append(
        str(Path(__file__).parents[2])
    )  # last: `import torchopt_ext` takes the built one
    for preloaded in sys.argv[1:]:
        with redirect_stdout(sys.stderr):  # stdout is for answers only
            runpy.run_path(preloaded)
    for line in sys.stdin:
        number, *job = json.loads(line)
        print(json.dumps([number, *run(*job)]), flush=True)
