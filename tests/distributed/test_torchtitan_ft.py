"""torchtitan's fault-tolerant Trainers of 0.2 and 0.3 on CPU, as replica groups under torchft.

Every run is ten steps of the llama3 debug model in two groups of processes, from the same seed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.compare import difference
from .replica_groups import Groups, replica_groups
from .torchtitan_runs import HERE, STEPS, options_of, read_metrics, require_torchtitan

pytest.importorskip("torchft")
version = require_torchtitan("0.2.", "0.3.")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN_TIMEOUT = 240  # seconds; a run takes about 20 on an idle machine


@dataclass(frozen=True)
class Version:
    """How to run a Trainer of one version."""

    script: str
    options: tuple[str, ...]
    kinds: dict[str, tuple[str, ...]]
    semi_sync: tuple[str, ...]  # options of LocalSGD and DiLoCo
    ranks: int  # ranks of a group with a quorum in every step


INTEGRATION = "torchopt_ext.integrations.torchtitan_0_2"
SEMI_SYNC = ("--fault_tolerance.sync_steps=4",)
VERSIONS = {
    "0.2": Version(
        "train_ft.py",
        (),
        {
            "stock": (),
            "ours": (f"--experimental.custom_import={INTEGRATION}",),
            "deferred": (
                f"--job.custom_config_module={INTEGRATION}",
                "--optimizer.deferred_clipping",
            ),
        },
        ("--job.custom_config_module=torchtitan.components.ft.config.job_config", *SEMI_SYNC),
        ranks=2,
    ),
    # In a group of two ranks, one rank may send its state while the other loads a peer's state. The
    # model's state dict needs both ranks: its hook splits the fused weight of attention.
    "0.3": Version(
        "train_ft_030.py",
        # Without checkpoints the manager has no state to send (experiments/torchft/checkpoint.py).
        ("--checkpoint.enable", "--checkpoint.interval=100"),
        {
            "stock": ("--config=fault_tolerant",),
            "ours": ("--config=fault_tolerant_ours",),
            "deferred": ("--config=fault_tolerant_ours", "--optimizer.deferred_clipping"),
        },
        SEMI_SYNC,
        ranks=1,
    ),
}
TITAN = VERSIONS[version[:3]]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    subprocess.run([sys.executable, HERE / "assets.py", folder], check=True, timeout=60)
    return folder


def start(
    run: Groups, group: int, assets: Path, options: tuple[str, ...], ranks: int, hold: str = ""
) -> None:
    """Starts one group as torchtitan does."""
    command = [
        *[sys.executable, str(HERE / TITAN.script)],
        *options_of(version, assets, run.folder / str(group)),
        *[*TITAN.options, "--training.max_norm=0.1"],
        *["--checkpoint.no-enable_ft_dataloader_checkpoints", "--fault_tolerance.enable"],
        *[f"--fault_tolerance.replica_id={group}", "--fault_tolerance.group_size=2", *options],
    ]
    environment = {"METRICS_FILE": str(run.folder / f"metrics{group}"), "HOLD": hold}
    environment |= {"HF_HOME": str(assets / "hf"), "HF_DATASETS_OFFLINE": "1"}
    run.start(group, command, ranks, environment)


def state(run: Groups, group: int, rank: int) -> Any:
    return torch.load(run.folder / f"metrics{group}.rank{rank}.pt", weights_only=True)


def train(folder: Path, assets: Path, options: tuple[str, ...], ranks: int) -> list[dict[int, Any]]:
    """Trains two groups without a failure and returns each group's metrics by step."""
    folder.mkdir()
    with replica_groups(folder, groups=2) as run:
        for group in (0, 1):
            start(run, group, assets, (*options, "--fault_tolerance.min_replica_size=2"), ranks)
        run.wait(RUN_TIMEOUT)
    return [read_metrics(folder / f"metrics{group}.rank0") for group in (0, 1)]


@pytest.mark.parametrize("method", ["quorum in every step", "local_sgd", "diloco"])
def test_training_equals_stock(tmp_path: Path, assets: Path, method: str) -> None:
    options: tuple[str, ...] = ()
    if method in ("local_sgd", "diloco"):
        options = (*TITAN.semi_sync, f"--fault_tolerance.semi_sync_method={method}")
    ranks = 1 if options else TITAN.ranks
    runs = {
        kind: train(tmp_path / kind, assets, (*TITAN.kinds[kind], *options), ranks)
        for kind in ("stock", "ours")
    }
    for stock, ours in zip(runs["stock"], runs["ours"], strict=True):
        assert list(stock) == list(ours) == list(range(1, STEPS + 1))
        assert ours[1]["classes"][0].startswith("torchopt_ext.")
        assert ours[1]["classes"][0].endswith(".FTOptimizersContainer")
        assert stock[1]["classes"][0].startswith("torchtitan.")
        for step, line in ours.items():
            assert abs(line["loss"] - stock[step]["loss"]) <= 1e-5, step
            assert abs(line["grad_norm"] - stock[step]["grad_norm"]) <= 1e-5, step
    # The first logged loss may be one group's alone, while the other loads its weights.
    assert stock[STEPS]["loss"] < stock[2]["loss"] - 0.2


@pytest.mark.parametrize("kind", ["ours", "deferred"])
def test_a_killed_group_comes_back_with_its_peers_bits(
    tmp_path: Path, assets: Path, kind: str
) -> None:
    killed, returns = 4, 6  # after these steps

    def noted(group: int, step: int) -> Callable[[], bool]:
        file = run.folder / f"metrics{group}.rank0"
        return lambda: file.exists() and step in read_metrics(file)

    with replica_groups(tmp_path) as run:
        start(run, 0, assets, TITAN.kinds[kind], TITAN.ranks, hold=f"0,{killed},{returns}")
        start(run, 1, assets, TITAN.kinds[kind], TITAN.ranks, hold=f"0,{killed}")
        for group in (0, 1):
            run.wait_until(lambda g=group: "Trainer is init" in run.log(g).read_text(), RUN_TIMEOUT)
        # The lighthouse knows both groups by now, so no quorum has a single group.
        for group in (0, 1):
            (tmp_path / f"metrics{group}.go-0").touch()
        for group in (0, 1):
            run.wait_until(noted(group, killed), RUN_TIMEOUT)
        run.kill(1)
        (tmp_path / f"metrics0.go-{killed}").touch()
        run.wait_until(noted(0, returns), RUN_TIMEOUT)
        before = run.log(1).stat().st_size
        start(run, 1, assets, TITAN.kinds[kind], TITAN.ranks)
        run.wait_until(
            lambda: "Training starts at step" in run.log(1).read_text()[before:], RUN_TIMEOUT
        )
        time.sleep(1)  # until the group has asked for a quorum
        (tmp_path / f"metrics0.go-{returns}").touch()
        run.wait(RUN_TIMEOUT)
        survivor, returned = (read_metrics(tmp_path / f"metrics{g}.rank0") for g in (0, 1))
        assert list(survivor) == list(range(1, STEPS + 1))
        again = [step for step in returned if step > returns]  # it joins within a step or two
        assert again and again == list(range(again[0], STEPS + 1))
        for rank in range(TITAN.ranks):
            left, right = state(run, 0, rank), state(run, 1, rank)
            assert left["optimizer.state.norm.weight.step"] == STEPS
            assert difference(left, right) == ""
