"""Times several cases in turn, so that a change of the machine's speed affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from group import Case
from rows import Samples
from tqdm import tqdm

from torchopt_ext.cli.timing import in_turn

Clock = Callable[[Callable[[], object]], float]


def wall_milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


class Flush:
    """Writes more memory than the caches hold, from every thread."""

    def __init__(self, megabytes: int) -> None:
        self.memory = torch.zeros(megabytes << 18)

    def __call__(self) -> None:
        self.memory.add_(1.0)


def time_in_turn(
    cases: Sequence[Case], rounds: int, calls: int, clock: Clock, flush: Flush | None = None
) -> list[Samples]:
    """Times every case once per round.

    Args:
        calls: how many calls in a row give one sample, their mean. An untimed call comes first.
        flush: called before each timed call.
    """
    for case in cases:  # creates state and plans
        case.call()

    def sample(call: Callable[[], object]) -> float:
        spent = 0.0
        call()
        for _ in range(calls):
            if flush is not None:
                flush()
            spent += clock(call)
        return spent / calls

    turns = in_turn([case.call for case in cases], sample)
    taken = [next(turns) for _ in tqdm(range(rounds), leave=False, desc="rounds")]
    return [list(samples) for samples in zip(*taken, strict=True)]
