"""The figures that the library promises of run.py's cases, and whether they were reached."""

from __future__ import annotations

from bf16_cases import INT8, MASTERS, OPERATORS, PREALLOCATED, REMAINDER
from cases import CLIP, FUSED, OURS, SCALER, STEP
from harness import Row, find, target_line
from peers import EIGHT_BITS
from shapes import GPT2, LARGE, ONES, SMALL

BF16, FLUSHED = f"{GPT2}, bf16", f"{SMALL}, caches flushed"
OVER_ROOFLINE, HOST_MILLISECONDS = 1.08, 0.3

# A row, the other implementation, and how many times as fast as the other it is at least. Memory
# that is faster than 80 GB/s gives higher figures: there the other's arithmetic shows as well.
FASTER: list[tuple[tuple[str, str, str], str, float]] = [
    ((GPT2, CLIP, OURS), FUSED, 1.3),
    ((GPT2, SCALER, OURS), FUSED, 1.5),
    ((SMALL, CLIP, OURS), FUSED, 15),
    ((FLUSHED, CLIP, OURS), FUSED, 10),
    ((BF16, SCALER, MASTERS), OPERATORS, 2.5),
    ((BF16, SCALER, MASTERS), PREALLOCATED, 2.0),
    ((BF16, SCALER, REMAINDER), MASTERS, 1.0),
    ((BF16, SCALER, INT8), MASTERS, 1.6),
    *[
        ((f"{GPT2}, {peer.name}", STEP, INT8), peer.name, least)
        for peer, least in zip(EIGHT_BITS, (12, 50), strict=True)
    ],
]


def target_lines(rows: list[Row]) -> list[str]:
    lines = []
    for key, other, least in FASTER:
        row = find(rows, *key)
        if row is not None:
            what = f"{', '.join(key)}: times as fast as {other}"
            lines.append(target_line(what, row["times_as_fast_as"][other], least))
    for row in rows:
        if row["set"] in (LARGE, GPT2, BF16, SMALL, FLUSHED) and row["roofline"] is not None:
            what = f"{row['set']}, {row['operation']}, {row['implementation']}: of plain loops"
            lines.append(target_line(what, row["roofline"]["ratio"], OVER_ROOFLINE, False))
    if (row := find(rows, ONES, STEP, OURS)) is not None:
        what, ms = f"{ONES}, {STEP}: milliseconds of the host", row["milliseconds"]["median"]
        lines.append(target_line(what, ms, HOST_MILLISECONDS, False))
    return lines
