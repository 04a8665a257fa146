"""Times the optimizer step, torch's and other libraries'. See README.md.

python benchmarks/run.py --out out/bench
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import report
import torch
from allocations import measure_allocations
from bf16_cases import build_masters, build_plain
from cases import CLIP, FUSED, HOST, OURS, SCALER, STEP, build_fp32
from group import Group
from measure import measure
from peers import PEERS, PEERS_8BIT, build_peer, build_peer_8bit
from shapes import FEWER, GPT2, LARGE, ONES, QUICK_SETS, SETS, SMALL, Shapes
from targets import targets
from timing import Flush, wall_milliseconds
from tracked_cases import build_tracked


def cpu_builds(sets: dict[str, Shapes]) -> list[partial[Group]]:
    """Returns the groups to time on the CPU."""
    pair = partial(build_fp32, implementations=(OURS, FUSED))
    return [
        partial(build_fp32, LARGE, sets[LARGE]),
        partial(build_fp32, GPT2, sets[GPT2]),
        partial(
            build_fp32, SMALL, sets[SMALL], operations=(STEP, CLIP, SCALER, HOST), flushed=True
        ),
        *[partial(pair, name, sets[name], operations=(CLIP,)) for name in FEWER],
        partial(pair, ONES, sets[ONES], operations=(STEP,), loops=False),
        partial(build_masters, f"{GPT2}, bf16", sets[GPT2]),
        partial(build_plain, f"{GPT2}, bf16 throughout", sets[GPT2]),
        partial(build_tracked, f"{GPT2}, tracked", sets[GPT2]),
        *[partial(build_peer, peer, name, sets[name]) for name in (GPT2, SMALL) for peer in PEERS],
        *[
            partial(build_peer_8bit, peer, f"{GPT2}, {peer.name}", sets[GPT2])
            for peer in PEERS_8BIT
        ],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for results")
    parser.add_argument("--only", default="", help='sets whose name has it, such as "tracked"')
    parser.add_argument("--rounds", type=int, default=15, help="samples of each case, at most")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of ours")
    parser.add_argument("--flush-megabytes", type=int, default=256, help="more than the caches")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to try the program")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = report.environment()
    if options.quick:
        options.rounds, options.flush_megabytes = 2, 8
        about["quick"] = "tiny tensors stand in for the sets below; the times mean nothing"
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    sets = QUICK_SETS if options.quick else SETS
    flush = partial(Flush, options.flush_megabytes)
    builds = [b for b in cpu_builds(sets) if any(options.only in str(a) for a in b.args)]
    rows, missing = measure(builds, options.rounds, wall_milliseconds, flush)
    counts = (len(sets[ONES]) // 10, len(sets[ONES]))
    counted = [] if options.only else measure_allocations(counts, options.threads)
    # Targets of tiny tensors would mislead.
    reached = [] if options.quick else targets(rows, counted)
    sections = {
        "Other libraries": [*map(str, PEERS + PEERS_8BIT), *missing],
        "Memory that one step allocates": report.allocation_table(counted),
        "Targets": [str(target) for target in reached],
    }
    content = {"allocations": counted, "targets": [vars(target) for target in reached]}
    content["settings"] = settings
    print(report.write(sections, rows, about, content, options.out))
    print(f"written to {options.out}: results.txt, results.json, results.png")


if __name__ == "__main__":
    main()
