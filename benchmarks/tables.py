"""Writes the table of each machine in README.md from the machine's file in results/.

python benchmarks/tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
CLIP, SCALER = "clip+step", "scaler+clip+step"
OURS, FUSED = "torchopt_ext", "torch fused"
GPT2, SMALL = "GPT-2 124 M", "2,000 of 1,000"
INT8 = f"{OURS}, remainder8, int8 moments"
Row = tuple[str, str, str, str]  # set, operation, our implementation, the other
CPU: list[Row] = [
    ("4 of 16 M", "step", OURS, FUSED),
    (GPT2, "step", OURS, FUSED),
    (GPT2, CLIP, OURS, FUSED),
    (GPT2, SCALER, OURS, FUSED),
    ("1,000 of 1,000", CLIP, OURS, FUSED),
    (SMALL, CLIP, OURS, FUSED),
    (f"{SMALL}, caches flushed", CLIP, OURS, FUSED),
    (f"{GPT2}, bf16", SCALER, f"{OURS}, fp32 masters", "torch operators"),
    (f"{GPT2}, bf16", SCALER, f"{OURS}, remainder", "torch operators"),
    (f"{GPT2}, bf16", SCALER, INT8, "torch operators"),
    (f"{GPT2}, torchao AdamW8bit", "step", INT8, "torchao AdamW8bit"),
]
BILLION, GRAPH = "30 of 32 M", f"{CLIP}, as a CUDA graph"
PREALLOCATED = "torch foreach, preallocated"
GPU: list[Row] = [
    *[(tensors, op, OURS, FUSED) for tensors in (BILLION, GPT2) for op in ("step", CLIP, SCALER)],
    *[
        (f"{tensors}, bf16", SCALER, f"{OURS}, {kind}", PREALLOCATED)
        for tensors in (BILLION, GPT2)
        for kind in ("fp32 masters", "remainder")
    ],
    *[(f"{tensors}, bf16 throughout", CLIP, OURS, FUSED) for tensors in (BILLION, GPT2)],
    *[(SMALL, op, OURS, FUSED) for op in (CLIP, GRAPH, f"{GRAPH}, caches flushed")],
]


def cells(file: str) -> dict[tuple[str, ...], list[str]]:
    """Returns the numbers of a file's table by set, operation and implementation."""
    lines = (HERE / "results" / file).read_text().splitlines()
    rows = (re.split(r" {2,}", line) for line in lines)
    return {tuple(row[:3]): row[3:] for row in rows if len(row) in (9, 10)}


def cpu(file: str) -> list[tuple[str, ...]]:
    found = cells(file)
    header = ("tensors", "step", "ours", "ms", "other", "ms", "times as fast", "of plain loops")
    lines = [header]
    for tensors, operation, ours, other in CPU:
        _, ms, _, _, _, faster, loops = found[tensors, operation, ours]
        _, theirs, *_ = found[tensors, operation, other]
        lines.append((tensors, operation, ours, ms, other, theirs, faster, loops))
    return lines


def gpu(file: str) -> list[tuple[str, ...]]:
    found = cells(file)
    header = ("tensors", "step", "ours", "ms", "% of a copy", "other", "ms", "times as fast")
    lines = [header]
    for tensors, operation, ours, other in GPU:
        ms, _, _, _, copy, faster = found[tensors, operation, ours]
        theirs, *_ = found[tensors, operation, other]
        lines.append((tensors, operation, ours, ms, copy, other, theirs, faster))
    return lines


def markdown(lines: list[tuple[str, ...]]) -> str:
    rule = ("---",) * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def filled(text: str) -> str:
    """Returns the page with the tables between its marks written again."""

    def table(mark: re.Match[str]) -> str:
        lines = {"cpu": cpu, "gpu": gpu}[mark["kind"]](mark["file"])
        return f"{mark['begin']}\n\n{markdown(lines)}\n\n<!-- end -->"

    marks = r"(?P<begin><!-- table: (?P<kind>cpu|gpu) (?P<file>\S+) -->).*?<!-- end -->"
    return re.sub(marks, table, text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
