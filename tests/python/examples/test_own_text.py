"""The job of docs/first_run.md: its commands, with fewer steps, and validation with averages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("docs", "examples", "README.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(folder: Path, options: str, lines: int = 5) -> list[dict[str, float]]:
    """Runs the first lines of the page's commands with other options; returns the metrics."""
    page = (ROOT / "docs/first_run.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = "\n".join(commands.splitlines()[:lines])
    commands = commands.replace("own_text.toml", f"own_text.toml {options}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(["bash", "-ec", commands], cwd=folder, env=environment, check=True, timeout=300)
    metrics = folder / "out/own_text/metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_the_page_trains_on_ones_own_text_and_draws_the_loss(folder: Path) -> None:
    lines = run(folder, "--training.steps 40 --validation.freq 20 --metrics.log_freq 10")
    key = "loss_metrics/global_avg_loss"
    losses = [line[key] for line in lines if key in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in lines if "validation_metrics/loss" in line] == [0, 20, 40]
    assert (folder / "out/own_text/loss.png").read_bytes().startswith(b"\x89PNG")


def test_validation_runs_with_the_averages(folder: Path) -> None:
    """An average that keeps the first weights validates as they did, although training goes on."""
    options = "--training.steps 8 --validation.freq 4 --metrics.log_freq 1 --optimizer.ema_decay 1"
    lines = run(folder, options, lines=4)
    key, trained = "validation_metrics/loss", "loss_metrics/global_avg_loss"
    first, *others = [line[key] for line in lines if key in line]
    assert len(others) == 2 and set(others) == {first}
    losses = [line[trained] for line in lines if trained in line]
    assert losses[-1] < losses[0]
