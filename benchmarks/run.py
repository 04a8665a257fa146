"""Times the optimizer step, torch's and other libraries'. See README.md.

python benchmarks/run.py --out out/bench
"""

from __future__ import annotations

from functools import partial

import harness
import peers
from bf16_cases import build_masters, build_plain
from cases import (
    CLIP,
    FUSED,
    OURS,
    SCALER,
    STEP,
    build_algorithms,
    build_averaged,
    build_fp32,
    build_tracked,
)
from in_backward import build_backward
from shapes import FEWER, GPT2, LARGE, ONES, QUICK_SETS, SETS, SMALL, Shapes
from targets import target_lines

Build = partial[harness.Group]


def cpu_builds(sets: dict[str, Shapes]) -> list[Build]:
    """Returns the groups to time on the CPU. A group's name is its last string."""
    pair = partial(build_fp32, implementations=(OURS, FUSED))
    small = partial(build_fp32, operations=(STEP, CLIP, SCALER), flushed=True)
    return [
        partial(build_fp32, LARGE, sets[LARGE]),
        partial(build_fp32, GPT2, sets[GPT2]),
        partial(small, SMALL, sets[SMALL]),
        *[partial(pair, name, sets[name], operations=(CLIP,)) for name in FEWER],
        partial(pair, ONES, sets[ONES], operations=(STEP,), loops=False),
        partial(build_algorithms, f"{GPT2}, other algorithms", sets[GPT2]),
        partial(build_masters, f"{GPT2}, bf16", sets[GPT2]),
        partial(build_plain, f"{GPT2}, bf16 throughout", sets[GPT2]),
        partial(build_tracked, f"{GPT2}, tracked", sets[GPT2]),
        partial(build_averaged, f"{GPT2}, averages", sets[GPT2]),
        partial(build_backward, f"{FEWER[1]}, in backward", sets[FEWER[1]]),
        *[
            partial(peers.build_peer, peer, name, sets[name])
            for name in (GPT2, SMALL)
            for peer in peers.CPU
        ],
        *[
            partial(peers.build_peer_8bit, peer, f"{GPT2}, {peer.name}", sets[GPT2])
            for peer in peers.EIGHT_BITS
        ],
    ]


def main() -> None:
    parser = harness.parser(__doc__, "bench", rounds=15)
    parser.add_argument("--only", default="", help='sets whose name has it, such as "tracked"')
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of ours")
    options = parser.parse_args()
    about = harness.start(options, options.threads)
    sets = QUICK_SETS if options.quick else SETS
    builds = [b for b in cpu_builds(sets) if any(options.only in str(a) for a in b.args)]
    megabytes = 8 if options.quick else 256
    rows, missing = harness.measure(builds, options.rounds, flush_megabytes=megabytes)
    sections = {
        "Other libraries": [*map(str, dict.fromkeys([*peers.CPU, *peers.EIGHT_BITS])), *missing],
        "Targets": [] if options.quick else target_lines(rows),  # tiny tensors would mislead
    }
    settings = vars(options) | {"out": str(options.out)}
    harness.write(options.out / "results", about, rows, sections, settings=settings)


if __name__ == "__main__":
    main()
