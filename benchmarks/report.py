"""The table, JSON and chart of a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chart import chart
from rows import Row

from torchopt_ext.cli.terminal import table
from torchopt_ext.cli.timing import environment as environment

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


def rows_table(rows: list[Row]) -> list[str]:
    """Formats medians with quartiles, with an empty line between tensor sets."""
    out = table(HEADER, [cells(row) for row in rows], TEXT_COLUMNS).splitlines()
    changes = (i for i in range(len(rows) - 1, 0, -1) if rows[i]["set"] != rows[i - 1]["set"])
    for index in changes:
        out.insert(2 + index, "")
    return out


def allocation_table(counted: list[Row]) -> list[str]:
    header = ("implementation", "operation", "tensors", "allocations", "peak bytes")
    lines = [
        (
            row["implementation"],
            row["operation"],
            *(f"{row[key]:,}" for key in ("tensors", "allocations", "peak_bytes")),
        )
        for row in counted
    ]
    return table(header, lines, 2).splitlines()


def save(
    about: dict[str, Any], sections: dict[str, list[str]], content: dict[str, Any], path: Path
) -> str:
    """Writes ``path``.txt and ``path``.json, and returns the text: about, and lines under headings.

    Lines under an empty heading are not indented. Empty sections are left out.
    """
    lines = [f"{key}: {value}" for key, value in about.items()]
    for heading, body in sections.items():
        if body:
            lines += ["", *([heading] if heading else [])]
            lines += [f"  {line}".rstrip() if heading else line for line in body]
    text = "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text)
    everything = {"environment": about, **content}
    path.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    return text


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
    shown = {"": rows_table(rows), **sections}
    text = save(about, shown, content | {"results": rows}, folder / "results")
    chart(rows, about, folder / "results.png")
    return text
