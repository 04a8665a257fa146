"""Where and with what a measurement was made; its table, JSON and chart."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from cases import IMPLEMENTATIONS, OPERATIONS

import torchopt_ext
from torchopt_ext import _build_info
from torchopt_ext.optim.step import cpu_kernels

Row = dict[str, Any]
COLORS = {"torchopt_ext": "#1b6ca8", "torch fused": "#e08e45", "torch foreach": "#b8b8b8"}


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment() -> dict[str, Any]:
    """Versions, hardware, date and command."""
    return {
        "torchopt_ext": torchopt_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _build_info.CXX_COMPILER,
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torchopt_ext_kernels": cpu_kernels(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }


def table(rows: list[Row], about: dict[str, Any]) -> str:
    """Medians with quartiles; the last column is how many times as fast as torch fused."""
    header = ("tensors", "operation", "implementation", "ms", "quartiles", "GB/s", "x fused")
    lines = [header]
    for row in rows:
        ms = row["milliseconds"]
        lines.append(
            (
                row["set"],
                row["operation"],
                row["implementation"],
                f"{ms['median']:.2f}",
                f"{ms['q25']:.2f}-{ms['q75']:.2f}",
                f"{row['gigabytes_per_second']:.1f}",
                f"{row['speedup_over_torch_fused']:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    left = 3  # columns of text, then columns of numbers
    text = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    facts = [f"{key}: {value}" for key, value in about.items()]
    return "\n".join([*facts, "", *text]) + "\n"


def chart(rows: list[Row], about: dict[str, Any], path: Path) -> None:
    """One panel for each tensor set: bars with quartiles, labelled with their medians."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sets = list(dict.fromkeys(row["set"] for row in rows))
    figure, panels = plt.subplots(1, len(sets), figsize=(3.4 * len(sets), 4.2), squeeze=False)
    for panel, name in zip(panels[0], sets, strict=True):
        for position, implementation in enumerate(IMPLEMENTATIONS):
            mine = [r for r in rows if r["set"] == name and r["implementation"] == implementation]
            ms = [row["milliseconds"] for row in mine]
            medians = [m["median"] for m in ms]
            spread = [
                [m["median"] - m["q25"] for m in ms],
                [m["q75"] - m["median"] for m in ms],
            ]
            bars = panel.bar(
                [i + 0.28 * (position - 1) for i in range(len(mine))],
                medians,
                width=0.26,
                yerr=spread,
                capsize=2,
                color=COLORS[implementation],
                label=implementation,
            )
            panel.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        panel.set_xticks(range(len(OPERATIONS)), OPERATIONS)
        panel.set_title(name, fontsize=10)
        # a quartile of a disturbed run may lie far above; the bars are what to look at
        highest = max(row["milliseconds"]["median"] for row in rows if row["set"] == name)
        panel.set_ylim(0, 1.2 * highest)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("milliseconds, lower is better")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"AdamW, float32, {about['cpu']}, {about['threads']} threads, torch {about['torch']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(rows: list[Row], about: dict[str, Any], settings: dict[str, Any], folder: Path) -> str:
    """Writes results.txt, results.json and results.png, and returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = table(rows, about)
    (folder / "results.txt").write_text(text)
    content = {"environment": about, "settings": settings, "results": rows}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    chart(rows, about, folder / "results.png")
    return text
