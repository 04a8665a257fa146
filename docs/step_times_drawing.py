"""Draws docs/step_times.png: one AdamW step beside torch's, from recorded figures.

python docs/step_times_drawing.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/results/2026-11-24-xeon.txt"
CLIP, SCALER = "clip+step", "scaler+clip+step"
TORCH = "torch fused"
CASES = (
    ("GPT-2 124 M, fp32", "GPT-2 124 M", CLIP, "torchopt_ext", TORCH),
    ("GPT-2 124 M, fp32, with a gradient scaler", "GPT-2 124 M", SCALER, "torchopt_ext", TORCH),
    ("2,000 tensors of 1,000, fp32", "2,000 of 1,000", CLIP, "torchopt_ext", TORCH),
    (
        "GPT-2 124 M, bf16, fp32 masters, scaler",
        "GPT-2 124 M, bf16",
        SCALER,
        "torchopt_ext, fp32 masters",
        "torch foreach, preallocated",
    ),
)
OURS, TORCHS = "#1b6ca8", "#e08e45"


def main() -> None:
    text = RECORD.read_text()
    about = dict(re.findall(r"^(\w+): (.+)$", text, re.M))
    cells = (re.split(r" {2,}", line) for line in text.splitlines())
    medians = {
        tuple(row[:3]): float(row[4]) for row in cells if len(row) == 10 and row[3].isdigit()
    }
    figure, panels = plt.subplots(len(CASES), figsize=(9, 4.2), layout="constrained")
    for panel, (title, tensors, operation, ours, torchs) in zip(panels, CASES, strict=True):
        times = [medians[tensors, operation, name] for name in (ours, torchs)]
        panel.barh([0, 1], times, color=[OURS, TORCHS], height=0.75)
        for y, (name, ms) in enumerate(zip(("torchopt_ext", "torch"), times, strict=True)):
            label = f" {name}, {ms:.3g} ms"
            panel.text(ms, y, label, ha="left", va="center", fontsize=9)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlim(0, 1.3 * max(times))
        panel.set_ylim(1.5, -0.5)
        panel.axis("off")
    figure.suptitle("One AdamW step with clipping, less is better", fontsize=11)
    figure.supxlabel(
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "
        f"{about['date'][:10]}; each panel has a scale of its own",
        fontsize=8,
    )
    figure.savefig(Path(__file__).with_name("step_times.png"), dpi=110)


if __name__ == "__main__":
    main()
