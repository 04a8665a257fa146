"""The environment of a measurement, and its table, JSON and chart."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from chart import chart
from rows import Row

import torchopt_ext
from torchopt_ext import _C, _build_info

TEXT_COLUMNS = 3  # columns of text, then columns of numbers
HEADER = (
    "tensors",
    "operation",
    "implementation",
    "n",
    "ms",
    "quartiles",
    "B/param",
    "GB/s",
    "x base",
    "/roof",
)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment() -> dict[str, Any]:
    """Returns versions, hardware, date and command."""
    about: dict[str, Any] = {
        "torchopt_ext": torchopt_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _build_info.CXX_COMPILER,
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torchopt_ext_kernels": _C.cpu_kernels(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }
    about["device"] = about["cpu"]
    return about


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def cells(row: Row) -> tuple[str, ...]:
    ms, per_parameter, roofline = row["milliseconds"], row["bytes_per_parameter"], row["roofline"]
    return (
        row["set"],
        row["operation"],
        row["implementation"],
        str(len(ms["samples"])),
        milliseconds(ms["median"]),
        f"{milliseconds(ms['q25'])}-{milliseconds(ms['q75'])}",
        "-" if per_parameter is None else f"{per_parameter:g}",
        number(row["gigabytes_per_second"], 1),
        number(row["times_as_fast_as"].get(row["baseline"])),
        number(roofline and roofline["ratio"], 3),
    )


def aligned(lines: Sequence[tuple[str, ...]], text_columns: int) -> list[str]:
    """Formats a header and rows of cells as lines of text, with a rule below the header."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    return text


def table(rows: list[Row]) -> list[str]:
    """Formats medians with quartiles, with an empty line between tensor sets."""
    text = aligned([HEADER, *map(cells, rows)], TEXT_COLUMNS)
    out = text[:2]
    for index, row in enumerate(rows):
        if index and row["set"] != rows[index - 1]["set"]:
            out.append("")
        out.append(text[2 + index])
    return out


def allocation_table(counted: list[Row]) -> list[str]:
    header = ("implementation", "operation", "tensors", "allocations", "peak bytes")
    lines = [
        (
            row["implementation"],
            row["operation"],
            f"{row['tensors']:,}",
            f"{row['allocations']:,}",
            f"{row['peak_bytes']:,}",
        )
        for row in counted
    ]
    return aligned([header, *lines], 2)


def write(
    sections: dict[str, list[str]],
    rows: list[Row],
    about: dict[str, Any],
    content: dict[str, Any],
    folder: Path,
) -> str:
    """Writes results.txt, results.json and results.png, and returns the text.

    Args:
        sections: lines under a heading, after the table.
        content: further entries of the JSON, in addition to the environment and the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*[f"{key}: {value}" for key, value in about.items()], "", *table(rows)]
    for heading, body in sections.items():
        if body:
            lines += ["", heading, *[f"  {line}" for line in body]]
    text = "\n".join(lines) + "\n"
    (folder / "results.txt").write_text(text)
    everything = {"environment": about, **content, "results": rows}
    (folder / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    chart(rows, about, folder / "results.png")
    return text
