"""Times ZeroRedundancyOptimizer and torch's, on gloo ranks of one machine. See README.md.

python benchmarks/zero.py --out out/bench-zero
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import report
from ranks import run_ranks
from zero_worker import BALANCED, FULL, GREEDY, GREEDY_VIEW, LOCAL, TORCH

Run = dict[str, Any]


def training(runs: list[Run]) -> list[str]:
    """Formats whole training steps. Bytes sent are the loopback device's, frames included."""
    lines = [
        f"{'ranks':<6}{'way':<30}{'ms':>9}{'B/param sent':>14}{'computed':>10}{'peak B/param':>14}"
    ]
    for result in runs:
        share = 4 * (result["world_size"] - 1) / result["world_size"]
        for row in result["training"]:
            halves = 2 if "hook" in row["way"] or "sharded" in row["way"] else 3
            lines.append(
                f"{result['world_size']:<6}{row['way']:<30}{row['milliseconds']:>9.1f}"
                f"{row['sent_bytes_per_parameter']:>14.2f}{halves * share:>10.2f}"
                f"{row['peak_bytes_per_parameter']:>14.2f}"
            )
    return lines


def moved_bytes(row: Run, ranks: int) -> float:
    """Returns the bytes a parameter that all ranks together move in clipping and the local step.

    The ranks share the machine's memory, so the time depends on the sum over ranks. Torch's
    clip_grad_norm_ reads all gradients twice and writes them once on every rank.
    """
    return 12 * ranks + 28 if row["implementation"].startswith(TORCH) else 4 + 28


def table(runs: list[Run]) -> list[str]:
    lines = [
        f"{'ranks':<6}{'tensors':<22}{'operation':<30}{'implementation':<22}"
        f"{'ms':>9}{'x torch':>9}{'x view':>8}{'state/share':>13}{'B/param':>9}{'GB/s':>7}"
    ]
    for result in runs:
        for row in result["rows"]:
            traffic = " " * 16
            if row["operation"] == LOCAL:
                size = moved_bytes(row, result["world_size"])
                speed = size * row["parameters"] / row["milliseconds"] / 1e6
                traffic = f"{size:>9.1f}{speed:>7.1f}"
            lines.append(
                f"{result['world_size']:<6}{row['set']:<22}{row['operation']:<30}"
                f"{row['implementation']:<22}{row['milliseconds']:>9.2f}"
                f"{row['times_as_fast']:>9.2f}{row['times_as_fast_as_view']:>8.2f}"
                f"{row['state_over_share']:>13.4f}{traffic}".rstrip()
            )
    return lines


def consolidation(runs: list[Run]) -> list[str]:
    lines = [f"{'ranks':<6}{'implementation':<22}{'ms':>9}{'x torch':>9}{'sender + MB':>13}"]
    for result in runs:
        for row in result["consolidation"]:
            lines.append(
                f"{result['world_size']:<6}{row['implementation']:<22}"
                f"{row['milliseconds']:>9.0f}{row['times_as_fast']:>9.2f}"
                f"{row['sender_peak_bytes'] / 1e6:>13.1f}"
            )
    return lines


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
    text = "\n".join(f"{key}: {value}" for key, value in about.items())
    for title, lines in sections.items():
        text += f"\n\n{title}\n\n" + "\n".join(lines)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "zero.txt").write_text(text + "\n")
    (options.out / "zero.json").write_text(json.dumps({"about": about, "runs": runs}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
