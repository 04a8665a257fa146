"""Starts and kills replica groups of torchft, each of a few processes, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Groups:
    """Numbered replica groups. Each writes into FOLDER/<number>.log."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self.folder, self.lighthouse = folder, lighthouse
        self.running: dict[int, list[subprocess.Popen[bytes]]] = {}

    def start(
        self, group: int, command: list[str], ranks: int = 1, env: Mapping[str, str] | None = None
    ) -> None:
        """Runs the command on a number of ranks, with the variables that torchrun would set."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        common |= {"TORCHFT_LIGHTHOUSE": self.lighthouse, "OMP_NUM_THREADS": "1"}
        common |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        with open(self.log(group), "a") as log:
            self.running[group] = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                )
                for rank in range(ranks)
            ]

    def kill(self, group: int) -> None:
        """Sends SIGKILL to all processes of a group."""
        for process in self.running.get(group, ()):
            process.kill()
        for process in self.running.pop(group, ()):
            process.wait()

    def log(self, group: int) -> Path:
        return self.folder / f"{group}.log"

    def wait_until(self, done: Callable[[], Any], seconds: float) -> None:
        """Waits for `done`. Fails with the logs after `seconds`, or when a process has failed."""
        end = time.monotonic() + seconds
        while not done():
            codes = {g: [process.poll() for process in own] for g, own in self.running.items()}
            if any(any(own) for own in codes.values()) or time.monotonic() > end:
                logs = "\n---\n".join(self.log(g).read_text()[-4000:] for g in codes)
                pytest.fail(f"exit codes {codes} while waiting {seconds} s:\n{logs}")
            time.sleep(0.02)

    def wait(self, seconds: float) -> None:
        """Waits until all groups have ended."""
        every = [process for own in self.running.values() for process in own]
        self.wait_until(lambda: all(process.poll() == 0 for process in every), seconds)


@contextmanager
def lighthouse(min_replicas: int = 1) -> Iterator[str]:
    """Runs torchft's quorum server on loopback and yields its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=200,
        heartbeat_timeout_ms=2500,
    )
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


@contextmanager
def replica_groups(folder: Path, groups: int = 1) -> Iterator[Groups]:
    """Yields groups with a lighthouse that waits for `groups` of them. Kills all at the end."""
    with lighthouse(groups) as address:
        started = Groups(folder, address)
        try:
            yield started
        finally:
            for group in list(started.running):
                started.kill(group)
