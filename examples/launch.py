"""Starts an example on several ranks of this machine."""

import os
import subprocess
import sys


def start_ranks(count: int) -> int:
    """Runs this very command once more, under torchrun; returns its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={count}", *sys.argv]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=env, check=False).returncode
