"""A killed replica group under torchft comes back and takes its state from its peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ..support.compare import difference
from .replica_groups import replica_groups

pytest.importorskip("torchft")

WORKER = Path(__file__).with_name("fault_tolerance_worker.py")
WAIT = 60  # seconds for each event; a whole run takes about 10 on an idle machine

pytestmark = pytest.mark.timeout(150)


def steps(folder: Path, replica: int) -> list[dict[str, int]]:
    file = folder / f"{replica}.steps"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize(
    "kind", ["deferred clipping", pytest.param("bf16 with remainders", marks=pytest.mark.slow)]
)
def test_a_killed_group_comes_back_with_its_peers_bits(tmp_path: Path, kind: str) -> None:
    def start(replica: int) -> None:
        run.start(replica, [sys.executable, str(WORKER), str(tmp_path), str(replica), kind])

    def last(replica: int) -> dict[str, int]:
        return steps(tmp_path, replica)[-1]

    with replica_groups(tmp_path) as run:
        start(0)
        start(1)
        run.wait_until(lambda: len(steps(tmp_path, 0)) and len(steps(tmp_path, 1)) > 4, WAIT)
        run.kill(1)
        before, killed_at = len(steps(tmp_path, 1)), last(1)["step"]
        run.wait_until(lambda: last(0)["step"] > killed_at + 5 and last(0)["groups"] == 1, WAIT)
        start(1)
        run.wait_until(
            lambda: len(steps(tmp_path, 1)) > before + 5 and last(1)["groups"] == 2, WAIT
        )
        (tmp_path / "stop").touch()
        run.wait(WAIT)

    survivor, returned = steps(tmp_path, 0), steps(tmp_path, 1)[before:]
    # The group continued at its peer's step, not at the step where it was killed.
    assert returned[0]["step"] > killed_at + 5
    assert returned[-1]["step"] == survivor[-1]["step"]
    for line in survivor + returned:
        assert line["hooks"] == line["committed"]
    left, right = (torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1))
    assert difference(left, right) == ""
    # Every committed step counts once, the first as 1.
    assert left["optimizer"]["state.0.weight.step"] == survivor[-1]["step"]
    assert left["schedule"]["last_epoch"] == survivor[-1]["step"]
