"""Turns samples into rows: medians, ratios to the group's other cases and to the roofline."""

from __future__ import annotations

import statistics
from typing import Any

from group import Case, Group
from shapes import parameters

from torchopt_ext.cli.timing import paired, quartiles

Row = dict[str, Any]
Samples = list[float]  # milliseconds per call, one for each round
LOOP = "plain loop"  # the implementation name of the roofline's cases


def rows_of(name: str, group: Group, samples: list[Samples]) -> list[Row]:
    """Returns a row for each shown case, sorted by operation."""
    timed = list(zip(group.cases, samples, strict=True))
    count = parameters(group.shapes)
    rows = []
    for case, mine in timed:
        if group.shown is not None and case.implementation not in group.shown:
            continue
        low, median, high = quartiles(mine)
        rows.append(
            {
                "set": name,
                "operation": case.operation,
                "implementation": case.implementation,
                "tensors": len(group.shapes),
                "parameters": count,
                "bytes_per_parameter": case.bytes_per_parameter,
                "milliseconds": {
                    "median": median,
                    "min": min(mine),
                    "max": max(mine),
                    "q25": low,
                    "q75": high,
                    "samples": mine,
                },
                "gigabytes_per_second": (case.bytes_per_parameter or 0) * count / median / 1e6
                or None,
                "baseline": group.baseline,
                "times_as_fast_as": {
                    other.implementation: paired(theirs, mine)
                    for other, theirs in timed
                    if other.operation == case.operation
                },
                "roofline": roofline(case, mine, timed),
            }
        )
    operations = list(dict.fromkeys(case.operation for case in group.cases))
    return sorted(rows, key=lambda row: operations.index(row["operation"]))


def roofline(case: Case, mine: Samples, timed: list[tuple[Case, Samples]]) -> Row | None:
    """Returns the time of the case's plain loops, and the case's time relative to it."""
    for loop, samples in timed:
        if loop.implementation == LOOP and loop.operation == case.roofline:
            return {"milliseconds": statistics.median(samples), "ratio": paired(mine, samples)}
    return None


def find(rows: list[Row], name: str, operation: str, implementation: str) -> Row | None:
    key = (name, operation, implementation)
    for row in rows:
        if (row["set"], row["operation"], row["implementation"]) == key:
            return row
    return None
