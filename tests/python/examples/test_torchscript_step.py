"""The scripted step runs from Python, and in a C++ program without Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchopt_ext.ops import lr_factor

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def norms(text: str) -> list[float]:
    values = [float(x) for x in re.findall(r"gradient norm ([\d.e+-]+)", text)]
    assert len(values) == 10, text
    return values


def expected() -> list[float]:
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    result = []
    for step in range(10):
        for p in params:
            p.grad = 2 * p.detach()
        result.append(float(nn.utils.clip_grad_norm_(params, 1.0)))
        factor = lr_factor(step, warmup_steps=2, stable_steps=4, decay_steps=4)
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        optimizer.step()
    return result


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("script") / "step.pt"
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "torchscript_step.py")]
    done = subprocess.run(
        [*command, "--out", str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_from_python(script: tuple[Path, str]) -> None:
    assert norms(script[1]) == pytest.approx(expected(), rel=1e-4)


@pytest.mark.timeout(300)
def test_from_cpp(script: tuple[Path, str], cpp_programs: Path) -> None:
    run = subprocess.run(
        [str(cpp_programs / "examples" / "torchscript_step"), str(script[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert norms(run.stdout) == pytest.approx(norms(script[1]), rel=1e-3)
