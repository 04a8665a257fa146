"""The commands of docs/first_run.md, with fewer steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_trains_on_ones_own_text_and_draws_the_loss(tmp_path: Path) -> None:
    """The loss falls, validation runs with averaged weights, and there is a picture."""
    page = (ROOT / "docs/first_run.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    job = "--training.steps 40 --validation.freq 20 --metrics.log_freq 10"
    commands = commands.replace("own_text.toml", f"own_text.toml {job}")
    for name in ("docs", "examples", "README.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True,
        timeout=300,
    )  # fmt: skip
    lines = [
        json.loads(x)
        for x in (tmp_path / "out/own_text/metrics.jsonl").read_text().split("\n")
        if x
    ]
    key = "loss_metrics/global_avg_loss"
    losses = [line[key] for line in lines if key in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in lines if "validation_metrics/loss" in line] == [0, 20, 40]
    assert (tmp_path / "out/own_text/loss.png").read_bytes().startswith(b"\x89PNG")
