"""Draws the first two runs: loss, learning rate and gradient norm against steps."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from torchopt_ext.trainer.config import JobConfig

Metrics = list[dict[str, float]]


def series(metrics: Metrics, key: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of one metric; losses in bits."""
    unit = math.log(2) if "loss" in key else 1
    found = [line for line in metrics if key in line]
    return [line["step"] for line in found], [line[key] / unit for line in found]


def draw(
    peace: Metrics,
    killed: tuple[Metrics, Metrics],
    config: JobConfig,
    killed_step: int,
    title: str,
    path: Path,
) -> None:
    """Draws the killed run, in two parts, over the undisturbed run, which it should cover."""
    before, after = killed
    resume_step = after[0]["step"] - 1
    runs: list[tuple[Metrics, str, dict[str, Any]]] = [
        (peace, "undisturbed run", {"color": "#f6c58f", "linewidth": 4.5}),
        (before, "second run until killed", {"color": "#1f5a94", "linewidth": 1}),
        (after, "second run resumed", {"color": "#157a4c", "linewidth": 1}),
    ]
    figure, (loss, rate, norm) = plt.subplots(
        3, sharex=True, figsize=(9, 10), height_ratios=(2.2, 1, 1.3), layout="constrained"
    )

    def lines(axis: Axes, key: str, ylabel: str) -> None:
        for metrics, name, style in runs:
            axis.plot(*series(metrics, key), label=f"training, {name}", **style)
        axis.axvline(killed_step, color="#b02a2a", linestyle="--", linewidth=1.2)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)

    lines(loss, "loss_metrics/global_avg_loss", "loss (bits per byte)")
    for metrics, label, style in (
        (peace, "validation, undisturbed run", {"color": "#f6c58f", "markersize": 10}),
        (before + after, "validation, second run", {"color": "black", "markersize": 4}),
    ):
        points = series(metrics, "validation_metrics/loss")
        loss.plot(*points, "o", label=label, markeredgecolor="black", clip_on=False, **style)
    loss.annotate(
        f"killed after step {killed_step},\nresumed from the\ncheckpoint at step {resume_step:.0f}",
        (killed_step, 0.6),
        xycoords=("data", "axes fraction"),
        xytext=(8, 0),
        textcoords="offset points",
        color="#b02a2a",
    )
    loss.set_ylim(bottom=0)
    loss.set_title(title)
    loss.legend(frameon=False)

    lines(rate, "lr", "learning rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate.set_ylim(bottom=0)

    lines(norm, "grad_norm", "gradient norm\nbefore clipping")
    threshold = config.training.max_norm
    norm.axhline(threshold, color="black", linewidth=1.2, linestyle=":")
    norm.annotate(
        f"clipped to {threshold:g} above the dotted line",
        (0.99, 0.93),
        xycoords="axes fraction",
        ha="right",
        va="top",
    )
    norm.set_yscale("log")
    norm.yaxis.set_major_formatter("{x:g}")
    norm.set_xlabel("step")
    norm.set_xlim(0, config.training.steps)

    figure.align_ylabels()
    figure.savefig(path, dpi=120)
    plt.close(figure)
