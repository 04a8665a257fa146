"""Times cases in turn, and writes their rows as a table and as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shapes import Shapes, parameters

from torchopt_ext.cli.terminal import Progress, table
from torchopt_ext.cli.timing import environment, in_turn, paired, quartiles

Call = Callable[[], object]
Clock = Callable[[Call], float]
Row = dict[str, Any]
Samples = list[float]  # milliseconds per call, one for each round
LOOP = "plain loop"  # the implementation name of the roofline's cases
SLOW = 5_000.0  # milliseconds: what the caches hold and a repetition do not count
CACHED = 10_000_000  # parameters; a smaller set fits into the caches of some machines


@dataclass(frozen=True)
class Case:
    """One thing to time: ``call`` does it once.

    ``bytes_per_parameter`` is how much the passes read and write, counted from the algorithm, and
    None for other libraries. ``roofline`` is the operation of the plain-loop case in the group that
    takes the time that memory allows.
    """

    implementation: str
    operation: str
    call: Call
    bytes_per_parameter: float | None = None
    roofline: str | None = None


@dataclass
class Group:
    """Cases on one set of tensors. Ratios are taken inside a group only.

    The table's ratios compare with the implementation ``baseline``. ``shown`` are the
    implementations that get rows, all if None. ``rounds`` limits the rounds of slow cases.
    ``clock`` measures a call, in place of the whole call's time.
    """

    name: str
    shapes: Shapes
    cases: list[Case]
    baseline: str | None
    shown: tuple[str, ...] | None = None
    rounds: int | None = None
    flushed: bool = False  # timed once more with caches flushed
    clock: Clock | None = None


# ---- timing --------------------------------------------------------------------------------------


def wall_milliseconds(call: Call) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


def time_in_turn(
    cases: Sequence[Case], rounds: int, calls: int, clock: Clock, flush: Call | None = None
) -> list[Samples]:
    """Times every case once per round.

    Args:
        calls: how many calls in a row give one sample, their mean. An untimed call comes first. A
            call of more than SLOW is a sample by itself.
        flush: called before each timed call.
    """
    for case in cases:  # creates state and plans
        case.call()

    def sample(call: Call) -> float:
        if (spent := clock(call)) > SLOW:
            return spent
        spent = 0.0
        for _ in range(calls):
            if flush is not None:
                flush()
            spent += clock(call)
        return spent / calls

    turns = in_turn([case.call for case in cases], sample)
    return [list(samples) for samples in zip(*islice(turns, rounds), strict=True)]


def measure(
    builds: Sequence[Callable[[], Group]],
    rounds: int,
    clock: Clock = wall_milliseconds,
    flush_megabytes: int = 256,
) -> tuple[list[Row], list[str]]:
    """Returns the rows of all groups, sorted by tensor set, and the groups' import errors.

    A group is built when its turn comes and freed before the next, to save memory.

    Args:
        flush_megabytes: more than the caches hold.
    """
    rows: list[Row] = []
    missing: dict[str, None] = {}
    with Progress("timing", len(builds)) as progress:
        for build in builds:
            try:
                group = build()
            except ImportError as error:
                missing[str(error)] = None
                continue
            count = min(rounds, group.rounds or rounds)
            calls = 5 if parameters(group.shapes) < CACHED else 1
            own = group.clock or clock
            rows += rows_of(group.name, group, time_in_turn(group.cases, count, calls, own))
            if group.flushed:
                memory = torch.zeros(flush_megabytes << 18)  # written from every thread
                samples = time_in_turn(group.cases, count, 3, own, partial(memory.add_, 1.0))
                rows += rows_of(f"{group.name}, caches flushed", group, samples)
            del group
            gc.collect()
            progress.add(1)
    sets = list(dict.fromkeys(row["set"] for row in rows))
    return sorted(rows, key=lambda row: sets.index(row["set"])), list(missing)


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(name: str, group: Group, samples: Sequence[Samples]) -> list[Row]:
    """Returns a row for each shown case, sorted by operation."""
    timed = list(zip(group.cases, samples, strict=True))
    count = parameters(group.shapes)
    rows = []
    for case, mine in timed:
        if group.shown is not None and case.implementation not in group.shown:
            continue
        low, median, high = quartiles(mine)
        moved = case.bytes_per_parameter
        times = {"median": median, "min": min(mine), "max": max(mine), "q25": low, "q75": high}
        rows.append(
            {
                "set": name,
                "operation": case.operation,
                "implementation": case.implementation,
                "tensors": len(group.shapes),
                "parameters": count,
                "bytes_per_parameter": moved,
                "milliseconds": times | {"samples": mine},
                "gigabytes_per_second": moved * count / median / 1e6 if moved else None,
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


def find(rows: Sequence[Row], name: str, operation: str, implementation: str) -> Row | None:
    key = (name, operation, implementation)
    matching = (r for r in rows if (r["set"], r["operation"], r["implementation"]) == key)
    return next(matching, None)


def target_line(what: str, value: float | None, bound: float, at_least: bool = True) -> str:
    """Says whether a figure that the library promises was reached."""
    text = f"{what} {'>=' if at_least else '<='} {bound:g}"
    if value is None:
        return f"not measured  {text}"
    met = value >= bound if at_least else value <= bound
    return f"{'met' if met else 'NOT MET':<12}  {text}: {value:.3g}"


# ---- output --------------------------------------------------------------------------------------

HEADER = ("tensors", "operation", "implementation", "n", "ms", "quartiles", "B/param", "GB/s")
HEADER += ("x base", "/roof")


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def cells(row: Row) -> tuple[str, ...]:
    ms = row["milliseconds"]
    return (
        row["set"],
        row["operation"],
        row["implementation"],
        str(len(ms["samples"])),
        milliseconds(ms["median"]),
        f"{milliseconds(ms['q25'])}-{milliseconds(ms['q75'])}",
        number(row["bytes_per_parameter"], "g"),
        number(row["gigabytes_per_second"], ".1f"),
        number(row["times_as_fast_as"].get(row["baseline"]), ".2f"),
        number(row["roofline"] and row["roofline"]["ratio"], ".3f"),
    )


def rows_table(rows: list[Row]) -> list[str]:
    """Formats medians with quartiles, with an empty line between tensor sets."""
    out = table(HEADER, [cells(row) for row in rows], 3).splitlines()
    changes = (i for i in range(len(rows) - 1, 0, -1) if rows[i]["set"] != rows[i - 1]["set"])
    for index in changes:
        out.insert(2 + index, "")
    return out


def write(
    path: Path,
    about: dict[str, Any],
    rows: list[Row],
    sections: dict[str, str | list[str]],
    **content: Any,
) -> None:
    """Writes ``path``.txt and ``path``.json, and prints the text.

    Args:
        sections: lines under a heading, after the rows' table. Empty sections are left out.
        content: further entries of the JSON, in addition to the environment and the rows.
    """
    lines = [f"{key}: {value}" for key, value in about.items()]
    if rows:
        lines += ["", *rows_table(rows)]
    for heading, body in sections.items():
        if body:
            body = body.splitlines() if isinstance(body, str) else body
            lines += ["", heading, *(f"  {line}".rstrip() for line in body)]
    text = "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text)
    everything = {"environment": about, **content, "results": rows}
    path.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    print(f"{text}\nwritten to {path.parent}: {path.stem}.txt, {path.stem}.json")


def parser(program: str | None, out: str, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark. ``program`` is its docstring."""
    made = argparse.ArgumentParser(description=(program or "").partition("\n")[0])
    made.add_argument("--out", type=Path, default=Path("out") / out, help="folder for results")
    made.add_argument("--rounds", type=int, default=rounds, help="samples of each case, at most")
    made.add_argument("--quick", action="store_true", help="few rounds and tiny tensors, to try it")
    return made


def start(options: argparse.Namespace, threads: int | None = None) -> dict[str, Any]:
    """Sets this process's threads, and describes the machine; None: ranks have a thread each."""
    if threads is not None:
        torch.set_num_threads(threads)
    about = environment()
    if threads is None:
        about["threads"] = "1 for each rank"
    if options.quick:
        options.rounds = 2
        about["quick"] = "few rounds, and tiny tensors for the sets: the times mean nothing"
    return about
