"""The GPU report on a machine without a GPU: its sections' time limits, results and exit status."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("gpu_report")
        patch.setattr(module, "LEAST_SECONDS", 1.5)
        yield module


def python(report: ModuleType, name: str, code: str, seconds: float = 60) -> Any:
    return report.Section(name, [sys.executable, "-c", code], seconds)


def row(operation: str, implementation: str, ms: float, moved: float | None = None) -> Any:
    return {
        "set": "30 of 32 M",
        "operation": operation,
        "implementation": implementation,
        "milliseconds": ms,
        "wall_milliseconds": ms,
        "host_microseconds": 50.0,
        "gigabytes_per_second": moved and moved / ms / 1e6,
    }


ROWS = [
    row("copy", "torch", 2.0, 6e9),  # 3,000 GB/s
    row("clip+step", "torchopt_ext", 10.0, 27e9),
    row("clip+step", "torch fused", 15.0, 33e9),
]


def test_what_fails_or_hangs_is_recorded_and_the_next_section_runs(
    report: ModuleType, tmp_path: Path
) -> None:
    written = f"Path({str(tmp_path / 'slow.json')!r}).write_text({json.dumps(ROWS[:1])!r})"
    partial = f"import signal; from pathlib import Path; {written}; signal.pause()"
    todo = [
        python(report, "wrong", "print('first'); raise SystemExit('the reason')"),
        python(report, "slow", partial, seconds=2),
        report.Section("absent", ["no-such-program"], 60),
        report.Section("unmet", [sys.executable, "-c", ""], 60, "no_such_module"),
        python(report, "fine", "pass"),
    ]
    outcomes = report.run_all(todo, tmp_path, time.time() + 600)
    found = [(o.section, o.status) for o in outcomes]
    assert found == [
        ("wrong", report.FAILED),
        ("slow", report.TIMED_OUT),
        ("absent", report.SKIPPED),
        ("unmet", report.SKIPPED),
        ("fine", report.PASSED),
    ]
    assert outcomes[0].notes[-1] == "wrong.log: the reason"
    assert outcomes[1].rows[0]["operation"] == "copy"  # written before it was stopped
    assert "no-such-program is not installed" in outcomes[2].detail
    assert "no_such_module is not installed" in outcomes[3].detail
    text = (tmp_path / "report.txt").read_text()
    assert all(name in text for name, _ in found)
    assert len(json.loads((tmp_path / "report.json").read_text())["sections"]) == 5


def test_nothing_is_started_when_the_time_is_up(report: ModuleType, tmp_path: Path) -> None:
    (outcome,) = report.run_all([python(report, "late", "1 / 0")], tmp_path, time.time() + 1)
    assert (outcome.status, outcome.seconds) == (report.TIMED_OUT, 0.0)


def test_a_stopped_section_leaves_no_process(report: ModuleType, tmp_path: Path) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    section = python(report, "parent", code + "; p.wait()", seconds=2)
    assert report.run(section, tmp_path, 60).status == report.TIMED_OUT
    child = int((tmp_path / "parent.log").read_text())
    for _ in range(50):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the section's child still runs")


def test_failed_tests_are_named(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">'
        '<testcase name="test_a"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase name="test_b"/></testsuite></testsuites>'
    )
    outcome = report.run(python(report, "tests", "raise SystemExit(1)"), tmp_path, 60)
    assert outcome.status == report.FAILED
    assert outcome.detail == "2 passed, 1 failed, 1 skipped"
    assert "test_a: assert 1 == 2" in outcome.notes


def test_tests_that_are_all_skipped_have_not_passed(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="3" skipped="3"/></testsuites>'
    )
    outcome = report.run(python(report, "tests", "pass"), tmp_path, 60)
    assert (outcome.status, outcome.detail) == (report.FAILED, "0 passed, 0 failed, 3 skipped")


def test_table_and_targets(report: ModuleType, tmp_path: Path) -> None:
    rows = [dict(r) for r in ROWS]
    about = {"device": "a GPU", "torch": "2"}
    text = report.write(about, [report.Outcome("fp32", report.PASSED, 1.0, rows=rows)], tmp_path)
    ours = rows[1]
    assert ours["of_copy"] == pytest.approx(0.9)
    assert ours["times_as_fast"] == pytest.approx(1.5)
    lines = report.target_lines(rows)
    assert lines[0].startswith("met") and "of copy >= 0.9: 0.9" in lines[0]
    assert lines[1].startswith("not measured")
    assert lines[3].startswith("met") and "times as fast >= 1.25: 1.5" in lines[3]
    slower = [r | {"of_copy": 0.89} for r in rows]
    assert report.target_lines(slower)[0].startswith("NOT MET")
    assert " 90.0" in text and " 1.50" in text


@torch.compiler.set_stance("force_eager")  # torchao's steps compile for half a minute
@pytest.mark.slow
def test_measurements_run_on_the_cpu(report: ModuleType) -> None:
    """The measurements' Python code runs at tiny sizes. The times mean nothing."""
    torch.set_num_threads(1)
    measured = importlib.import_module("gpu_sections")
    bench = measured.Bench("cpu", quick=True)
    found = {name: list(section(bench)) for name, section in measured.SECTIONS.items()}
    rows = [row for section in found.values() for row in section if "note" not in row]
    keys = [(row["set"], row["operation"], row["implementation"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {key for key, *_ in report.TARGETS} - set(keys) == {report.GRAPH}
    assert all(row["milliseconds"] > 0 for row in rows)
    report.add_ratios(rows)
    assert all("of_copy" in row for row in rows if row["bytes"])
    started = {s.name for s in report.sections(Path(), quick=True)}
    assert started - {"tests", "trainer", "memcheck", "racecheck"} == set(found) - {"short"}


def test_a_section_is_a_program(report: ModuleType, tmp_path: Path) -> None:
    (section,) = [s for s in report.sections(tmp_path, "cpu", quick=True) if s.name == "copy"]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    section = dataclasses.replace(section, environment=environment)
    (outcome,) = report.run_all([section], tmp_path, time.time() + 60)
    assert outcome.status == report.PASSED
    assert [r["operation"] for r in outcome.rows] == ["copy"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCHMARKS / "gpu_report.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("No GPU")
    assert not (tmp_path / "out").exists()
