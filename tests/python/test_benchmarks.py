"""The benchmark runs and reports every field; its times are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def test_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--quick", "--out", str(tmp_path), "--threads", "1"]
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
    assert len(sets) == 6  # every quick set is small, so each is timed with flushed caches too
    keys = {(row["set"], row["operation"], row["implementation"]) for row in rows}
    assert len(keys) == len(rows) == len(sets) * 2 * 3
    for row in rows:
        times = row["milliseconds"]
        assert 0 < times["min"] <= times["q25"] <= times["median"] <= times["q75"] <= times["max"]
        assert len(times["samples"]) == result["settings"]["rounds"]
        moved = row["bytes_per_parameter"] * row["parameters"]
        assert row["gigabytes_per_second"] == pytest.approx(moved / times["median"] / 1e6)
        if row["implementation"] == "torch fused":
            assert row["speedup_over_torch_fused"] == 1.0
        assert row["speedup_over_torch_fused"] > 0
    expected = {("torchopt_ext", "clip+step"): 32, ("torch fused", "clip+step"): 40}
    for row in rows:
        key = row["implementation"], row["operation"]
        assert row["bytes_per_parameter"] == expected.get(key, row["bytes_per_parameter"])

    table = (tmp_path / "results.txt").read_text()
    assert table in done.stdout
    assert all(name in table for name in sets)
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
