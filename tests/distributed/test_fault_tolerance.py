"""Replica groups under torchft: one is killed, comes back, and takes its state from its peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")

WORKER = Path(__file__).with_name("fault_tolerance_worker.py")
WAIT = 60  # seconds for anything to happen; a whole run takes about 10 on an idle machine

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


@contextmanager
def lighthouse(min_replicas: int = 1) -> Iterator[str]:
    """torchft's server of quorums, on loopback: its address."""
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=200,
        heartbeat_timeout_ms=1500,
    )
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


class Groups:
    """Starts replica groups, each one process of the worker script."""

    def __init__(self, folder: Path, kind: str, address: str) -> None:
        self.folder, self.kind, self.address = folder, kind, address
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, replica: int) -> None:
        command = [sys.executable, str(WORKER), str(self.folder), str(replica), self.kind]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(self.folder / f"{replica}.log", "a") as log:
            self.running[replica] = subprocess.Popen(
                [*command, self.address], env=environment, stdout=log, stderr=log
            )

    def steps(self, replica: int) -> list[dict[str, int]]:
        file = self.folder / f"{replica}.steps"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, done: Callable[[], Any]) -> None:
        end = time.monotonic() + WAIT
        while not done():
            ended = [process.poll() for process in self.running.values()]
            if any(ended) or time.monotonic() > end:
                logs = [(self.folder / f"{r}.log").read_text()[-3000:] for r in self.running]
                pytest.fail(f"waited {WAIT} s, exit codes {ended}:\n" + "\n---\n".join(logs))
            time.sleep(0.02)


@contextmanager
def groups(folder: Path, kind: str) -> Iterator[Groups]:
    with lighthouse() as address:
        started = Groups(folder, kind, address)
        try:
            yield started
        finally:
            for process in started.running.values():
                process.kill()
                process.wait()


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key in value for k, v in flattened(value[key], f"{name}.{key}").items()}


@pytest.mark.parametrize(
    "kind", ["deferred clipping", pytest.param("bf16 with remainders", marks=pytest.mark.slow)]
)
def test_a_killed_group_comes_back_with_its_peers_bits(tmp_path: Path, kind: str) -> None:
    with groups(tmp_path, kind) as run:
        run.start(0)
        run.start(1)
        run.wait_until(lambda: run.steps(1)[-1:] and run.steps(1)[-1]["committed"] >= 5)
        run.running[1].kill()
        run.running.pop(1).wait()
        before = len(run.steps(1))
        killed_at = run.steps(1)[-1]["step"]
        run.wait_until(
            lambda: run.steps(0)[-1]["step"] > killed_at + 5 and run.steps(0)[-1]["groups"] == 1
        )
        run.start(1)
        run.wait_until(lambda: len(run.steps(1)) > before + 5 and run.steps(1)[-1]["groups"] == 2)
        (tmp_path / "stop").touch()
        run.wait_until(lambda: all(process.poll() == 0 for process in run.running.values()))
        survivor, returned = run.steps(0), run.steps(1)[before:]

    # It went on where its peer was, not where it had been killed.
    assert returned[0]["step"] > killed_at + 5
    assert returned[-1]["step"] == survivor[-1]["step"]
    for line in survivor + returned:
        assert line["hooks"] == line["committed"]
    left, right = (flattened(torch.load(tmp_path / f"{r}.pt", weights_only=True)) for r in (0, 1))
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[key].dtype, key
            assert value.equal(right[key]), key
        else:
            assert value == right[key], key
    # Every committed step counts once, the first as 1.
    assert left[".optimizer.state.0.weight.step"] == survivor[-1]["step"]
    assert left[".schedule.last_epoch"] == survivor[-1]["step"]
