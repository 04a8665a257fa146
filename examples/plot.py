"""One picture of the two runs: loss, learning rate and gradient norm against steps."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from config import JobConfig
from matplotlib.axes import Axes

Events = list[dict[str, Any]]


def series(events: Events, kind: str, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one kind of event."""
    found = [event for event in events if event["event"] == kind]
    return [event["step"] for event in found], [event[key] for event in found]


def draw(
    peace: Events, killed: Events, config: JobConfig, killed_step: int, title: str, path: Path
) -> None:
    """Draws the killed and resumed run over the uninterrupted one, which it should cover."""
    restart = max(i for i, event in enumerate(killed) if event["event"] == "start")
    resume_step = killed[restart]["step"]
    runs: list[tuple[Events, str, dict[str, Any]]] = [
        (peace, "uninterrupted run", {"color": "#f6c58f", "linewidth": 4.5}),
        (killed[:restart], "second run until killed", {"color": "#1f5a94", "linewidth": 1}),
        (killed[restart:], "second run resumed", {"color": "#157a4c", "linewidth": 1}),
    ]
    figure, (loss, rate, norm) = plt.subplots(
        3, sharex=True, figsize=(9, 10), height_ratios=(2.2, 1, 1.3), layout="constrained"
    )

    def lines(axis: Axes, key: str, ylabel: str) -> None:
        for events, name, style in runs:
            axis.plot(*series(events, "train", key), label=f"training, {name}", **style)
        axis.axvline(killed_step, color="#b02a2a", linestyle="--", linewidth=1.2)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)

    lines(loss, "bits_per_byte", "loss (bits per byte)")
    for events, label, style in (
        (peace, "validation, uninterrupted run", {"color": "#f6c58f", "markersize": 10}),
        (killed, "validation, second run", {"color": "black", "markersize": 4}),
    ):
        points = series(events, "validation", "bits_per_byte")
        loss.plot(*points, "o", label=label, markeredgecolor="black", clip_on=False, **style)
    loss.annotate(
        f"killed after step {killed_step},\nresumed from the\ncheckpoint at step {resume_step}",
        (killed_step, 0.6),
        xycoords=("data", "axes fraction"),
        xytext=(8, 0),
        textcoords="offset points",
        color="#b02a2a",
    )
    loss.set_title(title)
    loss.legend(frameon=False)

    lines(rate, "lr", "learning rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate.set_ylim(bottom=0)

    lines(norm, "grad_norm", "gradient norm\nbefore clipping")
    threshold = config.optimizer.max_grad_norm
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
