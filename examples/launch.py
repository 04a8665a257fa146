"""Starts an example on several ranks of this machine, and joins them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def start_ranks(count: int) -> int:
    """Runs this very command once more, under torchrun; returns its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={count}", *sys.argv]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=env, check=False).returncode


@contextmanager
def gloo_ranks() -> Iterator[None]:
    """The default process group, on gloo. Ranks that succeed leave it together.

    A thread of gloo that still holds the tensors of the last collective when the interpreter ends
    aborts the process (pytorch/pytorch#179291). While this thread waits it lets go.
    """
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
        time.sleep(0.2)  # without the interpreter's lock, which such a thread may be waiting for
    finally:
        dist.destroy_process_group()
