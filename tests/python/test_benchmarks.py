"""The benchmarks run and report every field. The tests do not judge the times."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

OURS = "torchopt_ext"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = BENCHMARKS / "run.py"
# torchao's step compiles itself for a minute, and this test only checks the benchmark.
EAGER = f"""import runpy, sys, torch
torch.compiler.set_stance("force_eager")
sys.path.insert(0, {str(BENCHMARKS)!r})
runpy.run_path({str(RUN)!r}, run_name="__main__")"""


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EAGER, "--quick", "--out", str(tmp_path), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results.json").read_text())

    about = result["environment"]
    text = ["torchopt_ext", "torch", "python", "compiler", "cpu", "date", "command", "system"]
    text += ["torch_cpu_capability", "torchopt_ext_kernels"]
    assert all(isinstance(about[key], str) and about[key] for key in text)
    assert about["threads"] == 1
    assert about["memory_gib"] > 0
    assert result["settings"]["quick"] is True

    rows = result["results"]
    sets = dict.fromkeys(row["set"] for row in rows)
    keys = {(row["set"], row["operation"], row["implementation"]) for row in rows}
    assert len(keys) == len(rows)
    ours = {(row["set"], row["operation"]) for row in rows if row["implementation"] == OURS}
    for operation in ("step", "clip+step", "scaler+clip+step"):
        assert sum(op == operation for _, op in ours) >= 3
    for row in rows:
        times = row["milliseconds"]
        order = [times[key] for key in ("min", "q25", "median", "q75", "max")]
        assert order[0] > 0
        # A quartile of equal samples may round to less than the samples.
        assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(order))
        assert 1 <= len(times["samples"]) <= result["settings"]["rounds"]
    expected = {
        (OURS, "step"): 28,
        (OURS, "clip+step"): 32,
        ("torch fused", "clip+step"): 40,
        ("torch fused", "scaler+clip+step"): 48,
        (f"{OURS}, fp32 masters", "scaler+clip+step"): 30,
        (f"{OURS}, remainder", "scaler+clip+step"): 28,
    }
    counted = {
        (row["implementation"], row["operation"]): row["bytes_per_parameter"] for row in rows
    }
    assert {key: counted[key] for key in expected} == expected
    assert any(row["implementation"] == "plain loop" for row in rows)

    table = (tmp_path / "results.txt").read_text()
    assert table in done.stdout
    assert all(name in table for name in sets)


def test_one_set_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--quick", "--only", "throughout", "--out", str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=100, check=True)
    result = json.loads((tmp_path / "results.json").read_text())
    assert {row["set"] for row in result["results"]} == {"GPT-2 124 M, bf16 throughout"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_convergence_compares_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "convergence.py"), "--out", str(tmp_path)]
    command += ["--steps", "1", "--seeds", "2", "--jobs", "2"]

    def rows() -> dict[tuple[str, str], dict[str, Any]]:
        subprocess.run(command, capture_output=True, timeout=100, check=True)
        result = json.loads((tmp_path / "convergence.json").read_text())
        return {(row["task"], row["setting"]): row for row in result["results"]}

    found = rows()
    base = "fp32, torch.optim.AdamW"
    for (task, setting), row in found.items():
        assert [len(curve) for curve in row["curves"]] == [1, 1]
        assert all(loss < 7 for loss in row["losses"])  # little above the loss of a uniform guess
        assert (row["within_spread"], row["difference"]) == (True, [0, 0]) or setting != base
        assert row["spread"] == abs(found[task, base]["losses"][0] - found[task, base]["losses"][1])
    assert len({row["task"] for row in found.values()}) == 2
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert (tmp_path / "convergence.md").read_text().count("\n| ") >= len(found)

    worse = found["perceptron", "fp32"]["losses"][0] + 10
    kept = next((tmp_path / "runs").glob("perceptron-fp32-1.json"))
    record = json.loads(kept.read_text())
    record["curve"][-1][1] = worse
    kept.write_text(json.dumps(record))
    again = rows()
    assert again["perceptron", "fp32"]["losses"][0] == worse
    assert not again["perceptron", "fp32"]["within_spread"]
    others = found.keys() - {("perceptron", "fp32")}
    assert {key: again[key] for key in others} == {key: found[key] for key in others}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "muon_ranks"])
def test_muon_runs(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / f"{name.replace('_', '-')}.txt").read_text()
    assert "FusedMuon" in text and "torch" in text


@pytest.mark.slow
def test_steps_on_the_host_run(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "host_step.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "host-step.json").read_text())
    by_set: dict[str, dict[str, Any]] = {}
    for row in result["results"]:
        by_set.setdefault(row["set"], {})[row["implementation"]] = row
    alone, beside = by_set.values()
    assert alone.keys() - beside.keys() == {
        "ZeRO-Offload",
        "ZeRO-Offload, gradients cast on the CPU",
    }
    assert all(beside[kind]["roofline"]["ratio"] > 0 for kind in beside if kind != "plain loop")
    (rate,) = result["copies"]
    assert 0 < rate < 7
    assert "Adam" in (tmp_path / "host-step.txt").read_text()
