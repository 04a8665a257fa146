"""Times the optimizer's part of torchtitan's training steps. See README.md.

python benchmarks/torchtitan_step.py --out out/bench-torchtitan
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from cases import FUSED, OURS
from group import Case, Group
from ranks import run_ranks
from rows import Row, rows_of

ROOT = Path(__file__).parents[1]
DEFERRED = f"{OURS}, deferred clipping"
NAMES = {"stock": FUSED, "ours": DEFERRED}
WHOLE, PART = "training step", "clip+step"
WARM_UP = 4  # untimed steps of the worker


def options_of(version: str, folder: Path, steps: int) -> list[str]:
    """Returns the command line of the example's job, which clips in the step."""
    if version.startswith("0.2."):
        return [
            f"--job.config_file={ROOT / 'examples/torchtitan_0_2/job.toml'}",
            *[f"--job.dump_folder={folder}", f"--model.hf_assets_path={folder / 'tokenizer'}"],
            *[f"--training.dataset_path={folder / 'data'}", f"--training.steps={steps}"],
            "--metrics.log_freq=1000",
        ]
    return [
        *["--module=config", "--config=llama3", f"--dump_folder={folder}"],
        *[f"--hf_assets_path={folder / 'tokenizer'}", f"--training.steps={steps}"],
        *[f"--dataloader.dataset_path={folder / 'data'}", "--metrics.log_freq=1000"],
    ]


def rows_of_layout(name: str, result: dict[str, Any]) -> list[Row]:
    """Returns rows for the optimizers' operations in a training step."""
    cases, samples = [], []
    for key, implementation in NAMES.items():
        for operation, values in result["samples"][key].items():
            if operation != WHOLE:
                cases.append(Case(implementation, operation, lambda: None, None))
                samples.append(values)
    return rows_of(name, Group(name, [(n,) for n in result["sizes"]], cases, FUSED), samples)


def shares(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the milliseconds of a training step, and the share of clipping and step in it."""
    lines = []
    for key, implementation in NAMES.items():
        of = {what: statistics.median(values) for what, values in result["samples"][key].items()}
        share = f"{100 * of[PART] / of[WHOLE]:.2f} %"
        lines.append((name, implementation, f"{of[WHOLE]:.1f}", share))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-torchtitan"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=30, help="steps with each optimizer")
    options = parser.parse_args()
    version = importlib.metadata.version("torchtitan")
    options.out.mkdir(parents=True, exist_ok=True)
    about = report.environment()
    about |= {"torchtitan": version, "threads": f"{options.threads} of all ranks together"}
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    samples: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assets = ROOT / "tests/distributed/torchtitan_cpu/assets.py"
        subprocess.run([sys.executable, assets, folder], check=True)
        for ranks in options.ranks:
            layout = "1 process" if ranks == 1 else f"FSDP2 on {ranks} ranks"
            result = run_ranks(
                "torchtitan_worker.py",
                ranks,
                *options_of(version, folder, WARM_UP + 2 * options.rounds),
                threads=max(1, options.threads // ranks),
                log=options.out / f"{ranks}.log",
            )
            about["optimizers"] = ", ".join(result["classes"].values())
            rows += rows_of_layout(f"llama3 debugmodel, {layout}", result)
            lines += shares(layout, result)
            samples[layout] = result["samples"]
    header = ("layout", "implementation", "ms", PART)
    sections = {"A training step": report.table(header, lines, 2).splitlines()}
    print(report.write(sections, rows, about, {"samples": samples}, options.out))


if __name__ == "__main__":
    main()
