"""Times the Trainer and loops written by hand, on gloo ranks of one machine. See README.md.

python benchmarks/trainer.py --out out/bench-trainer
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
TRAINER, OURS = "Trainer", "loop with FusedAdamW"
TORCH = "loop with torch's clip + fused AdamW"
MODELS = {"demo": 128, "small_tensors": 32, "debug": 64}
"""Sequence lengths by flavor of examples/byte_llama.py."""


def run(ranks: int, flavor: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
            *["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"],
            *[str(HERE / "trainer_worker.py"), str(out), flavor, str(MODELS[flavor]), str(rounds)],
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(out.read_text()))


def start_seconds() -> float:
    """Returns the time from a process's start to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchopt_ext", "train", "--config"]
        command += ["examples/debug.toml", "--training.steps", "1", "--job.dump_folder", folder]
        started = time.perf_counter()
        subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True)
        return time.perf_counter() - started


def table(runs: list[dict[str, Any]]) -> list[str]:
    header = ("model", "tensors", "ranks", "Trainer", "loop", "torch", "over the loop")
    header += ("async save", "copy")
    lines = []
    for result in runs:
        median, low, high = result["trainer_minus_loop"]
        taken = [result["milliseconds"][name] for name in (TRAINER, OURS, TORCH)]
        saves = (result["async_save_milliseconds"], result["copy_milliseconds"])
        lines.append(
            (
                *(result["model"], str(result["tensors"]), str(result["ranks"])),
                *(*map("{:.2f}".format, taken), f"{median:.2f} ({low:.2f} to {high:.2f})"),
                *map("{:.2f}".format, saves),
            )
        )
    return report.table(header, lines).splitlines()


def targets(runs: list[dict[str, Any]], seconds: float) -> list[str]:
    """Formats the Trainer's targets, and whether this run met them."""
    lines = []

    def judge(what: str, value: float, at_most: float) -> None:
        good = "ok" if value <= at_most else "MISSED"
        lines.append(f"{good:<8}{what:<64}{value:9.3f}  at most {at_most:.3f}")

    for result in runs:
        taken, name = result["milliseconds"], f"{result['model']}, {result['ranks']} ranks"
        over = result["trainer_minus_loop"][0]
        judge(f"{name}: ms over a loop by hand", over, max(2.0, 0.02 * taken[OURS]))
        judge(f"{name}: of torch's loop", taken[TRAINER] / taken[TORCH], 1.0)
        save, copy = result["async_save_milliseconds"], result["copy_milliseconds"]
        judge(f"{name}: ms that an async save stops training, copy", save, copy)
        if (grown := result["grown_mib_in_2000_steps"]) is not None:
            judge(f"{name}: MiB grown in 2,000 steps", grown, 1.0)
    judge("seconds from a process's start to the end of step 1", seconds, 10.0)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-trainer"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="of ten steps of each contender")
    options = parser.parse_args()
    about = report.environment() | {"threads": "1 for each rank"}
    runs = [run(n, model, options.rounds) for n in options.ranks for model in options.models]
    start_seconds()  # fills the file cache
    sections = {
        "Milliseconds of a training step, median": table(runs),
        "Targets": targets(runs, start_seconds()),
    }
    print(report.save(about, sections, {"runs": runs}, options.out / "trainer"))


if __name__ == "__main__":
    main()
