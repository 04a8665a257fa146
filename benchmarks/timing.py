"""Timing of several cases in turn, so that a change of the machine's speed meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from cases import Case
from tqdm import tqdm


@dataclass(frozen=True)
class Times:
    """Milliseconds per call, one for each round."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high


class Flush:
    """Touches more memory than the caches hold, from every thread."""

    def __init__(self, megabytes: int) -> None:
        self.memory = torch.zeros(megabytes << 18)

    def __call__(self) -> None:
        self.memory.add_(1.0)


def orders(count: int, rounds: int) -> Iterator[list[int]]:
    """Forwards and backwards by turns, each time starting with another case."""
    for index in range(rounds):
        start = index // 2 % count
        order = [(start + i) % count for i in range(count)]
        yield order if index % 2 == 0 else order[::-1]


def time_in_turn(
    cases: Sequence[Case], rounds: int, calls: int, flush: Flush | None = None
) -> list[Times]:
    """Times every case once per round.

    Args:
        calls: calls in a row whose mean is one sample, after one that is not timed. With ``flush``
            each call is timed alone, with caches flushed before it.
    """
    for case in cases:  # creates state and plans
        case.call()
    samples: list[list[float]] = [[] for _ in cases]
    for order in tqdm(list(orders(len(cases), rounds)), leave=False, desc="rounds"):
        for index in order:
            call, spent = cases[index].call, 0
            if flush is None:
                call()
            for _ in range(calls):
                if flush is not None:
                    flush()
                start = time.perf_counter_ns()
                call()
                spent += time.perf_counter_ns() - start
            samples[index].append(spent / calls / 1e6)
    return [Times(s) for s in samples]
