"""Tests and times the library on a GPU by one command, with one report. See make gpu-report.

python benchmarks/gpu_report.py --out build/gpu-report

Sections run one after another, the most important first, each in a separate process with its own
time limit. report.json and report.txt are written after each section. A section that
fails or runs out of time is recorded, and the next section runs. Exit status: 0 if all passed, 1 if
some did not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Row, find, number, target_line

from torchopt_ext.cli.terminal import table
from torchopt_ext.cli.timing import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

PASSED, FAILED, TIMED_OUT, SKIPPED = "passed", "failed", "ran out of time", "skipped"
LEAST_SECONDS = 5.0  # a section is not started with less time left
OURS = "torchopt_ext"


@dataclass(frozen=True)
class Section:
    """``seconds`` is the limit. A section whose program or ``module`` is missing is skipped."""

    name: str
    command: list[str]
    seconds: float
    module: str = "torch"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    section: str
    status: str
    seconds: float
    detail: str = ""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sections(out: Path, device: str = "cuda", quick: bool = False) -> list[Section]:
    """Returns all sections, the most important first. Their limits exceed the total limit."""
    python = sys.executable
    options = ["--device", device, *["--quick"] * quick]

    def measured(name: str, seconds: float) -> Section:
        command = [python, str(HERE / "gpu_sections.py"), name, "--out", str(out / f"{name}.json")]
        return Section(name, [*command, *options], seconds)

    tests = ROOT / "tests" / "gpu"
    trainer = str(tests / "test_trainer.py")

    def tested(name: str, seconds: float, module: str, *what: str) -> Section:
        pytest = ["-P", "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-m", "gpu", "-ra"]
        command = [python, *pytest, f"--junitxml={out / name}.xml", *what]
        return Section(name, command, seconds, module)

    short = measured("short", 0).command
    # Gives each tensor its own allocation. Otherwise accesses past its end would not be seen.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def watched(tool: str, environment: dict[str, str]) -> Section:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *short]
        return Section(tool, command, 90, environment=environment)

    return [
        tested("tests", 150, "pytest", str(tests), f"--ignore={trainer}"),
        watched("memcheck", apart),
        watched("racecheck", {}),
        measured("copy", 30),
        measured("fp32", 75),
        measured("bf16", 75),
        measured("small", 45),
        measured("passes", 60),
        measured("adapters", 40),
        measured("offload", 120),
        tested("trainer", 120, "tyro", trainer),
        measured("peers", 60),
    ]


def search_path() -> str:
    """Returns PATH and the CUDA toolkit's folder, which has compute-sanitizer."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(home, "bin"))])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all processes that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(section: Section, out: Path, left: float) -> Outcome:
    """Runs a section within its limit and ``left`` seconds. Its output goes to NAME.log."""
    program = shutil.which(section.command[0], path=search_path())
    if program is None:
        return Outcome(section.name, SKIPPED, 0.0, f"{section.command[0]} is not installed")
    if importlib.util.find_spec(section.module) is None:
        return Outcome(section.name, SKIPPED, 0.0, f"{section.module} is not installed")
    limit = min(section.seconds, left)
    if limit < LEAST_SECONDS:
        return Outcome(section.name, TIMED_OUT, 0.0, "not started: the time for all was used up")
    log = out / f"{section.name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *section.command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | section.environment,
            start_new_session=True,
        )
        try:
            process.wait(limit)
            status = PASSED if process.returncode == 0 else FAILED
            detail = "" if status == PASSED else f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            status, detail = TIMED_OUT, f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:
                stop(process)
    outcome = Outcome(section.name, status, round(time.monotonic() - started, 1), detail)
    if status == FAILED:
        last = log.read_text(errors="replace").strip().splitlines()[-5:]
        outcome.notes += [f"{log.name}: {line}" for line in last]
    collect(outcome, out)
    return outcome


def collect(outcome: Outcome, out: Path) -> None:
    """Adds the rows that a section has written, or the results of tests."""
    rows = out / f"{outcome.section}.json"
    if rows.exists():
        found: list[Row] = json.loads(rows.read_text())
        outcome.rows = [row for row in found if "note" not in row]
        outcome.notes += [row["note"] for row in found if "note" in row]
    results = out / f"{outcome.section}.xml"
    if results.exists():
        suites = list(ElementTree.parse(results).getroot().iter("testsuite"))
        total, failed, errors, skipped = (
            sum(int(suite.get(name, "0")) for suite in suites)
            for name in ("tests", "failures", "errors", "skipped")
        )
        passed = total - failed - errors - skipped
        if passed == 0:
            outcome.status = FAILED
        outcome.detail = f"{passed} passed, {failed + errors} failed, {skipped} skipped"
        for case in ElementTree.parse(results).getroot().iter("testcase"):
            for problem in (*case.iter("failure"), *case.iter("error")):
                message = (problem.get("message") or "").partition("\n")[0]
                outcome.notes.append(f"{case.get('name')}: {message}")


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups the rows by set and operation."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["operation"]), []).append(row)
    return list(groups.values())


def add_ratios(rows: list[Row]) -> None:
    """Adds the share of a copy's bandwidth, and the speedup over torch from idle to idle."""
    copies = [row["gigabytes_per_second"] for row in rows if row["operation"] == "copy"]
    for row in rows:
        if copies and row["gigabytes_per_second"]:
            row["of_copy"] = row["gigabytes_per_second"] / copies[0]
    for group in grouped(rows):
        for row, other in itertools.permutations(group, 2):
            if other["implementation"].startswith("torch "):
                row["times_as_fast"] = other["wall_milliseconds"] / row["wall_milliseconds"]


BILLION, SMALL, CLIP, SCALER = "30 of 32 M", "2,000 of 1,000", "clip+step", "scaler+clip+step"
EAGER, GRAPH = (SMALL, CLIP, OURS), (SMALL, f"{CLIP}, as a CUDA graph", OURS)
# Targets: a row, its field, the bound, and whether the bound is a minimum (True) or a maximum.
TARGETS: list[tuple[tuple[str, str, str], str, float, bool]] = [
    ((BILLION, CLIP, OURS), "of_copy", 0.90, True),
    ((f"{BILLION}, bf16", SCALER, f"{OURS}, fp32 masters"), "of_copy", 0.90, True),
    ((f"{BILLION}, bf16 throughout", CLIP, OURS), "of_copy", 0.85, True),
    ((BILLION, CLIP, OURS), "times_as_fast", 1.25, True),
    ((BILLION, SCALER, OURS), "times_as_fast", 1.4, True),
    (GRAPH, "milliseconds", 0.060, False),
    (EAGER, "host_microseconds", 100.0, False),
    (EAGER, "times_as_fast", 5.0, True),
]


def target_lines(rows: Sequence[Row]) -> list[str]:
    lines = []
    for key, figure, bound, at_least in TARGETS:
        row = find(rows, *key) or {}
        what = f"{', '.join(key)}: {figure.replace('_', ' ')}"
        lines.append(target_line(what, row.get(figure), bound, at_least))
    return lines


HEADER = ("tensors", "operation", "implementation", "ms", "wall ms", "host us", "GB/s", "% copy")
HEADER += ("x torch",)


FIGURES = {
    "milliseconds": ".4g",
    "wall_milliseconds": ".4g",
    "host_microseconds": ",.0f",
    "gigabytes_per_second": ",.0f",
    "percent of a copy": ".1f",
    "times_as_fast": ".2f",
}


def cells(row: Row) -> tuple[str, ...]:
    named = (row["set"], row["operation"], row["implementation"])
    if "of_copy" in row:
        row = row | {"percent of a copy": 100 * row["of_copy"]}
    return (*named, *(number(row.get(figure), form) for figure, form in FIGURES.items()))


def text_of(about: dict[str, Any], outcomes: list[Outcome]) -> str:
    rows = [row for outcome in outcomes for row in outcome.rows]
    lines = [f"{key}: {value}" for key, value in about.items()]
    lines += ["", "Sections"]
    for o in outcomes:
        lines.append(f"  {o.section:<10} {o.status:<15} {o.seconds:6.1f} s  {o.detail}".rstrip())
        lines += [f"    {note}" for note in o.notes]
    lines += ["", "Targets", *[f"  {line}" for line in target_lines(rows)], ""]
    lines.append(table(HEADER, [cells(row) for row in rows], 3))
    return "\n".join(lines) + "\n"


def write(about: dict[str, Any], outcomes: list[Outcome], out: Path) -> str:
    rows = [row for outcome in outcomes for row in outcome.rows]
    add_ratios(rows)
    text = text_of(about, outcomes)
    content = {"environment": about, "sections": [asdict(outcome) for outcome in outcomes]}
    (out / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "report.txt").write_text(text)
    return text


def run_all(todo: Sequence[Section], out: Path, end: float) -> list[Outcome]:
    """Runs sections until ``end`` (as from ``time.time``), and writes the report after each."""
    about = environment("cuda" if torch.cuda.is_available() else "cpu")
    outcomes: list[Outcome] = []
    for section in todo:
        outcome = run(section, out, end - time.time())
        outcomes.append(outcome)
        print(f"{section.name}: {outcome.status}, {outcome.seconds} s {outcome.detail}", flush=True)
        write(about, outcomes, out)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-report")
    parser.add_argument("--seconds", type=float, default=530, help="for all sections")
    parser.add_argument(
        "--since", type=float, default=time.time(), help="when it began, in Unix time"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="these sections, in this order"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    todo = sections(out)
    if options.only:
        named = {section.name: section for section in todo}
        if unknown := [name for name in options.only if name not in named]:
            parser.error(f"no section {', '.join(unknown)}; there are {', '.join(named)}")
        todo = [named[name] for name in options.only]
    if not torch.cuda.is_available():
        print("No GPU: torch.cuda.is_available() is False. The library is built; nothing was run.")
        return 2
    shutil.rmtree(out, ignore_errors=True)  # earlier results would be taken for this run's
    out.mkdir(parents=True)
    outcomes = run_all(todo, out, options.since + options.seconds)
    print((out / "report.txt").read_text())
    print(f"written to {out}: report.txt, report.json")
    return int(any(outcome.status in (FAILED, TIMED_OUT) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
