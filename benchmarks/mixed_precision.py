"""Times FSDPadaptOptimizer and the same algorithm in torch operators. See README.md.

python benchmarks/mixed_precision.py --out out/bench-mixed-precision
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import report
import torch
from adapt_cases import FUSED, IMPLEMENTATIONS, PLAIN, STEP, build_adapters, step_of
from cases import gradients_of
from measure import measure
from native import shared_library
from operators import Operators
from rows import Row, find
from shapes import GPT2, QUICK_SETS, SETS, SMALL, Shapes, parameters
from targets import Target, at_least
from timing import Flush, wall_milliseconds

MOST_OPERATORS = 6  # of ours in a step, for any number of tensors


def operators(implementation: str, shapes: Shapes) -> dict[str, int]:
    """Counts the operators of one step, and those of them that torch's AdamW calls."""
    call = step_of(implementation, gradients_of(shapes, torch.bfloat16, "cpu"))
    call()
    with Operators() as seen:
        call()
    base = sum(n for name, n in seen.count.items() if "fused_adamw" in name or "foreach" in name)
    return {"all": seen.count.total(), "base": base}


def peak_bytes(names: list[str]) -> dict[str, dict[str, int]]:
    """Returns the peak memory of a step above what was held before it."""
    with shared_library("allocations.cpp") as library:
        environment = os.environ | {"LD_PRELOAD": str(library)}
        command = [sys.executable, __file__, "--count-allocations", *names]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def count_in_this_process(names: list[str]) -> dict[str, dict[str, int]]:
    preloaded = ctypes.CDLL(None)
    count, peak = ctypes.c_int64(), ctypes.c_int64()
    found: dict[str, dict[str, int]] = {}
    for name in names:
        for implementation in IMPLEMENTATIONS:
            call = step_of(implementation, gradients_of(SETS[name], torch.bfloat16, "cpu"))
            for _ in range(2):  # the first call creates state
                call()
            preloaded.allocations_start()
            call()
            preloaded.allocations_stop(ctypes.byref(count), ctypes.byref(peak))
            found.setdefault(name, {})[implementation] = peak.value
    return found


def targets(rows: list[Row], counted: list[Row]) -> list[Target]:
    found = [
        *at_least(f"{GPT2}, bf16", find(rows, GPT2, STEP, FUSED), PLAIN, 2.2),
        *at_least(f"{SMALL}, bf16", find(rows, SMALL, STEP, FUSED), PLAIN, 4.0),
    ]
    for row in counted:
        if row["implementation"] == PLAIN:
            continue
        ours = row["operators"]["all"] - row["operators"]["base"]
        what = f"{row['set']}, {row['implementation']}: at most {MOST_OPERATORS} operators of ours"
        found.append(Target(what, str(ours), ours <= MOST_OPERATORS))
        if row["implementation"] == FUSED and "peak_bytes" in row:
            what = f"{row['set']}: the step makes no fp32 gradients"
            found.append(
                Target(what, f"{row['peak_bytes']:,} bytes", row["peak_bytes"] < row["parameters"])
            )
    return found


def counted_table(counted: list[Row]) -> list[str]:
    header = ("tensors", "implementation", "operators", "of them the base's", "peak bytes/param")
    lines = [
        (
            row["set"],
            row["implementation"],
            f"{row['operators']['all']:,}",
            f"{row['operators']['base']:,}",
            f"{row['peak_bytes'] / row['parameters']:.3f}" if "peak_bytes" in row else "-",
        )
        for row in counted
    ]
    return report.table(header, lines, 2).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-mixed-precision"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to try the program")
    parser.add_argument("--count-allocations", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.count_allocations:
        print(json.dumps(count_in_this_process(options.count_allocations)))
        return
    sets = QUICK_SETS if options.quick else SETS
    names = [GPT2, SMALL]
    about = report.environment()
    builds = [partial(build_adapters, name, sets[name]) for name in names]
    rounds = 2 if options.quick else options.rounds
    rows, _ = measure(builds, rounds, wall_milliseconds, partial(Flush, 256, "cpu"))
    peaks = {} if options.quick else peak_bytes(names)
    counted: list[Row] = []
    for name in names:
        for implementation in IMPLEMENTATIONS:
            row: Row = {"set": name, "implementation": implementation}
            row["parameters"] = parameters(sets[name])
            row["operators"] = operators(implementation, sets[name])
            if peaks:
                row["peak_bytes"] = peaks[name][implementation]
            counted.append(row)
    reached = [] if options.quick else targets(rows, counted)
    sections = {
        "One step: operators dispatched, and the most memory it holds": counted_table(counted),
        "Targets": [str(target) for target in reached],
    }
    content = {"counted": counted, "targets": [vars(target) for target in reached]}
    print(report.write(sections, rows, about, content, options.out))


if __name__ == "__main__":
    main()
