"""If a rank dies or is late, the other raises in time, and a restart ends with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchopt_ext import FusedAdamW

pytestmark = pytest.mark.timeout(150)

STEPS = 5
WORKER = Path(__file__).with_name("zero_failures_worker.py")


def run(folder: Path, event: str, partition: str) -> list[tuple[int, str]]:
    """Returns the exit status and output of both ranks."""
    folder.mkdir(exist_ok=True)
    store = folder / f"store-{event}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), event, partition, str(STEPS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | {"RANK": str(rank), "STORE": str(store), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes[:1]]
        outputs.append("")
        if event != "none":
            processes[1].kill()
        outputs[1] = processes[1].communicate(timeout=60)[0]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def uninterrupted() -> list[torch.Tensor]:
    """The weights after one process trained on the data that both ranks have."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Linear(90, 30))
    optimizer = FusedAdamW(model.parameters(), max_grad_norm=1.0, lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 70)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("event", "partition"),
    [
        ("killed", "sharded"),
        pytest.param("late", "greedy", marks=pytest.mark.slow),
        pytest.param("killed", "greedy", marks=pytest.mark.slow),
        pytest.param("killed", "balanced", marks=pytest.mark.slow),
        pytest.param("late", "sharded", marks=pytest.mark.slow),
    ],
)
def test_others_raise_and_a_restart_has_the_same_bits(
    event: str, partition: str, tmp_path: Path, uninterrupted: list[torch.Tensor]
) -> None:
    (status, output), _ = run(tmp_path, event, partition)
    assert status == 7, output
    assert "rank of the group died, is late" in output
    for status, output in run(tmp_path, "none", partition):
        assert status == 0, output
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, uninterrupted, strict=True))


def test_a_timeout_of_the_optimizer_bounds_every_wait(tmp_path: Path) -> None:
    """Every call raises, although the group's timeout is 600 s and the other rank is alive."""
    (status, output), _ = run(tmp_path, "alone", "all")
    assert status == 7, output
    for name, error in json.loads((tmp_path / "errors.json").read_text()).items():
        assert "rank of the group died, is late" in error, name
