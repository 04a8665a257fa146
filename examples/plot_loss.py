"""Draws a job's loss against its steps: python -m examples.plot_loss METRICS.jsonl PICTURE.png"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .plot import series


def draw(metrics: Path, picture: Path) -> None:
    """Draws training and validation losses, in bits per byte, of one metrics.jsonl."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axis.plot(*series(lines, "loss_metrics/global_avg_loss"), color="#1f5a94", label="training")
    validated = series(lines, "validation_metrics/loss")
    if validated[0]:
        axis.plot(*validated, "o", color="#b02a2a", label="validation")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (bits per byte)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
