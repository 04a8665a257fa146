"""Draws the results of convergence.py: loss curves, and final losses relative to torch's."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]


def color(index: int) -> Any:
    return "black" if index == 0 else plt.get_cmap("tab10")(index - 1)


def curves(axis: Axes, rows: list[Row]) -> None:
    """Draws the mean over seeds, and a band from the smallest to the largest loss."""
    for index, row in enumerate(rows):
        steps = [step for step, _ in row["curves"][0]]
        losses = list(zip(*([loss for _, loss in curve] for curve in row["curves"]), strict=True))
        mean = [statistics.fmean(values) for values in losses]
        low, high = [min(values) for values in losses], [max(values) for values in losses]
        axis.plot(steps, mean, color=color(index), linewidth=2 if index == 0 else 1)
        axis.fill_between(steps, low, high, color=color(index), alpha=0.12, linewidth=0)
    final = [loss for row in rows for curve in row["curves"] for _, loss in curve]
    axis.set_yscale("log")
    axis.set_ylim(min(final) * 0.97, max(final) * 1.03)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_title(f"{rows[0]['task']} (black: {rows[0]['setting']})", loc="left", fontsize=10)
    axis.set_ylabel("validation loss (nats)")
    axis.set_xlabel("step")


def differences(axis: Axes, rows: list[Row]) -> None:
    """Draws a dot per seed and a bar at the mean. The passing range is shaded and linear."""
    unit = rows[0]["spread"] or 1.0
    axis.axvspan(-1, 1, color="black", alpha=0.08, linewidth=0)
    axis.axvline(0, color="black", linewidth=2)
    for y, row in enumerate(rows[1:], 1):
        dots = [difference / unit for difference in row["difference"]]
        axis.plot(dots, [y] * len(dots), "o", color=color(y), markersize=4)
        mean = row["mean_difference"] / unit
        axis.plot(mean, y, "|", color=color(y), markersize=14, markeredgewidth=2)
    names = [row["setting"] + ("" if row["recommended"] else " (not recommended)") for row in rows]
    axis.set_yticks(range(1, len(rows)), names[1:], fontsize=8)
    for index, label in enumerate(axis.get_yticklabels(), 1):
        label.set_color(color(index))
    axis.set_ylim(len(rows) - 0.5, 0.5)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks([-1, 0, 1, 10, 100], ["-1", "0", "1", "10", "100"])
    axis.set_xlim(-2, 100)
    axis.set_xlabel("last loss above the black curve's of the same seed, over its spread")


def draw(rows: list[Row], path: Path) -> None:
    """Draws a row of panels for each task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, panels = plt.subplots(
        len(tasks), 2, figsize=(12, 4.2 * len(tasks)), squeeze=False, layout="constrained"
    )
    for (left, right), task in zip(panels, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        curves(left, of_task)
        differences(right, of_task)
        for axis in (left, right):
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
