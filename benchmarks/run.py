"""Times the step, and clipping and the step, beside torch's AdamW. See README.md.

python benchmarks/run.py --out out/bench
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from pathlib import Path

import report
import torch
from cases import BYTES, OPERATIONS, Case, build_cases
from shapes import QUICK_SETS, SETS, Shapes
from timing import Flush, Times, time_in_turn
from tqdm import tqdm

SMALL = 10_000_000  # parameters; a set below fits into the caches of some machines


def rows_of(name: str, shapes: Shapes, cases: list[Case], times: list[Times]) -> list[report.Row]:
    """One row for each case, with its speed against torch fused in the same rounds."""
    parameters = sum(math.prod(shape) for shape in shapes)
    fused = {
        case.operation: t.samples
        for case, t in zip(cases, times, strict=True)
        if case.implementation == "torch fused"
    }
    rows = []
    for case, t in zip(cases, times, strict=True):
        bytes_per_parameter = BYTES[case.implementation, case.operation]
        pairs = zip(fused[case.operation], t.samples, strict=True)
        low, high = t.quartiles
        rows.append(
            {
                "set": name,
                "operation": case.operation,
                "implementation": case.implementation,
                "tensors": len(shapes),
                "parameters": parameters,
                "bytes_per_parameter": bytes_per_parameter,
                "milliseconds": {
                    "median": t.median,
                    "min": min(t.samples),
                    "max": max(t.samples),
                    "q25": low,
                    "q75": high,
                    "samples": t.samples,
                },
                "gigabytes_per_second": bytes_per_parameter * parameters / t.median / 1e6,
                "speedup_over_torch_fused": statistics.median(f / mine for f, mine in pairs),
            }
        )
    return sorted(rows, key=lambda row: OPERATIONS.index(row["operation"]))


def measure(sets: dict[str, Shapes], rounds: int, flush_megabytes: int) -> list[report.Row]:
    rows = []
    for name, shapes in tqdm(sets.items(), desc="tensor sets"):
        cases = build_cases(shapes)
        small = sum(math.prod(shape) for shape in shapes) < SMALL
        rows += rows_of(name, shapes, cases, time_in_turn(cases, rounds, calls=5 if small else 1))
        if small:
            times = time_in_turn(cases, rounds, calls=3, flush=Flush(flush_megabytes))
            rows += rows_of(f"{name}, caches flushed", shapes, cases, times)
        del cases
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for results")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each case")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of ours")
    parser.add_argument("--flush-megabytes", type=int, default=256, help="more than the caches")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to try the program")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = report.environment()
    if options.quick:
        options.rounds, options.flush_megabytes = 2, 8
    sets = QUICK_SETS if options.quick else SETS
    rows = measure(sets, options.rounds, options.flush_megabytes)
    settings = {
        "rounds": options.rounds,
        "threads": options.threads,
        "flush_megabytes": options.flush_megabytes,
        "quick": options.quick,
        "dtype": "float32",
    }
    print(report.write(rows, about, settings, options.out))
    print(f"written to {options.out}: results.txt, results.json, results.png")


if __name__ == "__main__":
    main()
