"""Times the host's work of clipping and stepping many small DTensors. See README.md.

python benchmarks/dtensor_host.py --out out/bench-dtensor-host
"""

from __future__ import annotations

import argparse
from pathlib import Path

import report
from cases import CLIP, FUSED, OURS
from dtensor_worker import DEFERRED, IMPLEMENTATIONS
from group import Case, Group
from ranks import run_ranks
from rows import Row, find, rows_of
from targets import Target, at_least

TIMES_AS_FAST = 5.0


def targets(rows: list[Row], counted: list[Row]) -> list[Target]:
    found: list[Target] = []
    for name in dict.fromkeys(row["set"] for row in rows):
        for ours in (OURS, DEFERRED):
            what = f"{name}, {ours.removeprefix(OURS + ', ')}"
            found += at_least(what, find(rows, name, CLIP, ours), FUSED, TIMES_AS_FAST)
    for row in counted:
        if row["implementation"] in (OURS, DEFERRED):
            few, many = row["operators"]
            what = f"{row['set']}, {row['implementation']}: no operator for each tensor"
            found.append(Target(what, f"{few} and {many}", few == many))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-dtensor-host"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=64, help="of each tensor")
    options = parser.parse_args()
    about = report.environment()
    about["threads"] = "1 for each rank"
    rows: list[Row] = []
    counted: list[Row] = []
    for ranks in options.ranks:
        result = run_ranks(
            "dtensor_worker.py", ranks, options.rounds, options.tensors, options.elements
        )
        name = f"{options.tensors:,} of {options.elements}, {ranks} rank{'s' * (ranks > 1)}"
        cases = [Case(each, CLIP, lambda: None, None) for each in IMPLEMENTATIONS]
        group = Group(name, [(options.elements,)] * options.tensors, cases, FUSED)
        rows += rows_of(name, group, [result["samples"][each] for each in IMPLEMENTATIONS])
        counted += [
            {"set": name, "implementation": each, "operators": result["operators"][each]}
            for each in IMPLEMENTATIONS
        ]
    header = ("tensors", "implementation", f"{options.tensors // 10:,}", f"{options.tensors:,}")
    lines = [
        (row["set"], row["implementation"], *(f"{n:,}" for n in row["operators"]))
        for row in counted
    ]
    reached = targets(rows, counted)
    sections = {
        "Operators that a step dispatches, by the number of tensors": report.table(
            header, lines, 2
        ).splitlines(),
        "Targets": [str(target) for target in reached],
    }
    content = {"counted": counted, "targets": [vars(target) for target in reached]}
    print(report.write(sections, rows, about, content, options.out))


if __name__ == "__main__":
    main()
