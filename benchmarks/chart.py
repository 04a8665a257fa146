"""Draws all medians and the roofline in one chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import FOREACH, FUSED, OURS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rows import LOOP, Row

COLORS = {OURS: "#1b6ca8", FUSED: "#e08e45", FOREACH: "#b8b8b8"}
OUR_COLORS = ["#1b6ca8", "#5aa2d6", "#0b3c5d", "#93c6e8", "#4b8f8c"]
PEER_COLORS = ["#e08e45", "#b8b8b8", "#8c6bb1", "#6b9e5b", "#c25b56"]
OUR_NAMES = (OURS, "FSDPadaptOptimizer")
COLUMNS = 3
CUT = 2.5  # bars longer than this times the largest median of ours and the baseline are cut


def chart(rows: list[Row], about: dict[str, Any], path: Path) -> None:
    """Draws one panel for each tensor set."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    columns = min(COLUMNS, len(sets))
    lines = -(-len(sets) // columns)
    height = 4.2 * lines
    figure = Figure(figsize=(6.0 * columns, height))
    panels = figure.subplots(lines, columns, squeeze=False)
    for panel, name in zip(panels.flat, sets, strict=False):
        draw(panel, [row for row in rows if row["set"] == name and row["implementation"] != LOOP])
        panel.set_title(name, fontsize=10)
    for panel in panels.flat[len(sets) :]:
        panel.remove()
    processor = f"{about['device']}, {about['threads']} threads"
    title = f"One AdamW step, {processor}, torch {about['torch']}"
    figure.suptitle(f"{title}{', TINY TENSORS' if 'quick' in about else ''}", fontsize=11)
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.25 / height))  # below the title
    figure.savefig(path, dpi=130)


def colors_of(implementations: list[str]) -> dict[str, str]:
    taken = {COLORS[name] for name in implementations if name in COLORS}
    ours = (color for color in OUR_COLORS if color not in taken)
    others = (color for color in PEER_COLORS if color not in taken)
    return {
        name: COLORS.get(name) or next(ours if name.startswith(OUR_NAMES) else others)
        for name in implementations
    }


def draw(panel: Axes, rows: list[Row]) -> None:
    """Draws bars of medians with quartiles, grouped by operation.

    A black line is a bar's roofline. A bar that is cut has an arrow at its figure.
    """
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    colors = colors_of(list(dict.fromkeys(row["implementation"] for row in rows)))
    compared = [r for r in rows if r["implementation"] in (r["baseline"], OURS)] or rows
    limit = CUT * max(row["milliseconds"]["median"] for row in compared)
    x, ticks, labelled, highest = 0.0, [], set(), 0.0
    for operation in operations:
        mine = [row for row in rows if row["operation"] == operation]
        ticks.append(x + (len(mine) - 1) / 2)
        for row in mine:
            ms, name = row["milliseconds"], row["implementation"]
            median, cut = ms["median"], ms["median"] > limit
            spread = None if cut else [[median - ms["q25"]], [ms["q75"] - median]]
            panel.bar(
                x,
                min(median, limit),
                width=0.9,
                color=colors[name],
                label=None if name in labelled else name,
                yerr=spread,
                capsize=2,
                hatch="//" if cut else None,
                edgecolor="white",
            )
            labelled.add(name)
            text = f"{median:,.0f}" if median >= 1000 else f"{median:.3g}"
            text, top = text + ("\u2191" if cut else ""), limit if cut else ms["q75"]
            highest = max(highest, top)
            panel.text(x, top, text, ha="center", va="bottom", fontsize=7)
            if row["roofline"] is not None:
                height = row["roofline"]["milliseconds"]
                label = None if LOOP in labelled else "roofline"
                panel.hlines(height, x - 0.5, x + 0.5, color="black", lw=1.6, label=label)
                labelled.add(LOOP)
            x += 1
        x += 0.7
    labels = [operation.replace("scaler+", "scaler+\n") for operation in operations]
    panel.set_xticks(ticks, labels, fontsize=8)
    panel.set_ylim(0, (1.15 + 0.07 * len(labelled)) * highest)  # leaves room for the legend
    panel.set_ylabel("milliseconds, lower is better", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=7, loc="upper right")
