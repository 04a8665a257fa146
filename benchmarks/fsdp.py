"""Times FSDP2's all-gathers and the step with and without low-precision shards. See README.md.

python benchmarks/fsdp.py --out out/bench-fsdp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import report
from fsdp_worker import CAST, IMPLEMENTATIONS, OPERATIONS
from group import Case, Group
from ranks import run_ranks
from rows import rows_of
from shapes import GPT2, QUICK_SETS, SETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-fsdp"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="tiny tensors; times mean nothing")
    options = parser.parse_args()
    about = report.environment()
    about["threads"] = "1 for each rank"
    sets = QUICK_SETS if options.quick else SETS
    result = run_ranks(
        "fsdp_worker.py", options.ranks, options.rounds, "quick" if options.quick else "full"
    )
    cases = [
        Case(kind, operation, lambda: None, None)
        for operation in OPERATIONS
        for kind in IMPLEMENTATIONS
    ]
    samples = [result["samples"][f"{case.operation}, {case.implementation}"] for case in cases]
    rows = rows_of(f"{GPT2}, {options.ranks} ranks", Group(GPT2, sets[GPT2], cases, CAST), samples)
    header = ("implementation", "all-gather", "step")
    lines = [(kind, *map("{:.2f}".format, result["bytes"][kind])) for kind in IMPLEMENTATIONS]
    sections = {
        "Bytes that are read and written for an element of a shard, what is sent and received left "
        "out": report.table(header, lines).splitlines()
    }
    print(report.write(sections, rows, about, {"bytes": result["bytes"]}, options.out))


if __name__ == "__main__":
    main()
