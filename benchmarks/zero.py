"""Times ZeroRedundancyOptimizer and torch's, on gloo ranks of one machine. See README.md.

python benchmarks/zero.py --out out/bench-zero
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import report
from ranks import run_ranks
from zero_worker import BALANCED, FULL, GREEDY, GREEDY_VIEW, LOCAL, TORCH

Run = dict[str, Any]


def training(runs: list[Run]) -> list[str]:
    """Formats whole training steps. Bytes sent are the loopback device's, frames included."""
    header = ("ranks", "way", "ms", "B/param sent", "computed", "peak B/param")
    lines = []
    for result in runs:
        share = 4 * (result["world_size"] - 1) / result["world_size"]
        for row in result["training"]:
            halves = 2 if "hook" in row["way"] or "sharded" in row["way"] else 3
            sent, peak = row["sent_bytes_per_parameter"], row["peak_bytes_per_parameter"]
            lines.append(
                (
                    *(str(result["world_size"]), row["way"], f"{row['milliseconds']:.1f}"),
                    *map("{:.2f}".format, (sent, halves * share, peak)),
                )
            )
    return report.table(header, lines, 2).splitlines()


def moved_bytes(row: Run, ranks: int) -> float:
    """Returns the bytes a parameter that all ranks together move in clipping and the local step.

    The ranks share the machine's memory, so the time depends on the sum over ranks. Torch's
    clip_grad_norm_ reads all gradients twice and writes them once on every rank.
    """
    return 12 * ranks + 28 if row["implementation"].startswith(TORCH) else 4 + 28


def table(runs: list[Run]) -> list[str]:
    header = ("ranks", "tensors", "operation", "implementation", "ms", "x torch", "x view")
    header += ("state/share", "B/param", "GB/s")
    lines = []
    for result in runs:
        for row in result["rows"]:
            traffic = ("", "")
            if row["operation"] == LOCAL:
                size = moved_bytes(row, result["world_size"])
                speed = size * row["parameters"] / row["milliseconds"] / 1e6
                traffic = (f"{size:.1f}", f"{speed:.1f}")
            ratios = (row["times_as_fast"], row["times_as_fast_as_view"])
            lines.append(
                (
                    *(str(result["world_size"]), row["set"], row["operation"]),
                    *(row["implementation"], f"{row['milliseconds']:.2f}"),
                    *(*map("{:.2f}".format, ratios), f"{row['state_over_share']:.4f}", *traffic),
                )
            )
    return report.table(header, lines, 4).splitlines()


def consolidation(runs: list[Run]) -> list[str]:
    header = ("ranks", "implementation", "ms", "x torch", "sender + MB")
    lines = [
        (
            *(str(result["world_size"]), row["implementation"], f"{row['milliseconds']:.0f}"),
            *(f"{row['times_as_fast']:.2f}", f"{row['sender_peak_bytes'] / 1e6:.1f}"),
        )
        for result in runs
        for row in result["consolidation"]
    ]
    return report.table(header, lines, 2).splitlines()


def targets(runs: list[Run]) -> list[str]:
    """Formats ZeRO's targets, and whether this run met them."""
    lines = []

    def judge(what: str, value: float, least: float | None, at_most: float | None = None) -> None:
        good = (least is None or value >= least) and (at_most is None or value <= at_most)
        bound = f"at least {least}" if at_most is None else f"at most {at_most}"
        lines.append(f"{'ok' if good else 'MISSED':<8}{what:<72}{value:9.3f}  {bound}")

    for result in runs:
        ranks = result["world_size"]
        rows = {(r["set"], r["operation"], r["implementation"]): r for r in result["rows"]}
        for name in dict.fromkeys(r["set"] for r in result["rows"]):
            small = not name.startswith("GPT-2")
            least = 8.0 if small else (1.8 if ranks == 2 else 2.5)
            ours, theirs = (rows[name, LOCAL, kind] for kind in (BALANCED, TORCH))
            traffic = moved_bytes(theirs, ranks) / moved_bytes(ours, ranks)
            what = f"{ranks} ranks, {name}: {LOCAL}, times as fast"
            judge(f"{what} (bytes: {traffic:.2f})", ours["times_as_fast"], least)
            for kind in (GREEDY, GREEDY_VIEW, BALANCED):
                row = rows[name, FULL, kind]
                figure = "times_as_fast_as_view" if kind == GREEDY_VIEW else "times_as_fast"
                least = 3.0 if small and kind != GREEDY_VIEW else 1.0
                judge(f"{ranks} ranks, {name}: {FULL}, {kind}", row[figure], least)
            held = rows[name, FULL, BALANCED]
            extra = 2 * 4 * 4160 * 16 / held["state_bytes"]
            judge(
                f"{ranks} ranks, {name}: state over 1/{ranks}",
                held["state_over_share"],
                None,
                round(1 + extra, 4),
            )
        ways = {row["way"]: row for row in result["training"]}
        sent = ways["balanced, sharded_gradients"]["sent_bytes_per_parameter"]
        share = sent / ways["torch, DDP"]["sent_bytes_per_parameter"]
        judge(f"{ranks} ranks, bytes sent, of torch's", share, None, 0.68)
        for row in result["consolidation"][1:]:
            kind = row["implementation"]
            judge(f"{ranks} ranks, consolidation, {kind}", row["times_as_fast"], 3.0)
            peak = row["sender_peak_bytes"] / 1e6
            judge(f"{ranks} ranks, consolidation, {kind}: senders' MB", peak, None, 64.0)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-zero"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=512, help="of the GPT-2-like model")
    parser.add_argument("--state-mib", type=int, default=1024, help="state to consolidate")
    options = parser.parse_args()
    about = report.environment()
    about["threads"] = "1 for each rank"
    sizes = (options.rounds, options.width, options.state_mib)
    runs = [run_ranks("zero_worker.py", ranks, *sizes) for ranks in options.ranks]
    sections = {
        "Steps: median of the slowest rank": table(runs),
        "Consolidation of the state on rank 0": consolidation(runs),
        "Training steps: traffic and memory above the model's own": training(runs),
        "Targets": targets(runs),
    }
    print(report.save(about, sections, {"runs": runs}, options.out / "zero"))


if __name__ == "__main__":
    main()
