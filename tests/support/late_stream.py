"""A simulated side stream, whose work on memory ends late."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compare import bits


class _Late(NamedTuple):
    event: int
    written: list[tuple[Tensor, Tensor]]  # memory, and what it will hold
    read: list[tuple[Tensor, bytes]]  # gradients, and what they must hold until then


class LateStreams:
    """Makes streams in place of torchopt_ext.optim.forward_overlap.SideStream.

    As with a GPU, what the host does in a step is done at once. The memory of the optimizers then
    gets its former values back, and the new ones when the step's event is waited for, or before
    that, with a probability of ``early`` after each launch. So code that does not wait reads old
    weights and states, and code that writes to gradients too early fails.
    """

    def __init__(self, early: float = 0.0, seed: int = 0) -> None:
        self.optimizers: list[Any] = []
        self.running: list[_Late] = []
        self.reads: list[Tensor] = []  # what the streams keep from being reused
        self._early, self._random, self._events = early, random.Random(seed), 0

    def __call__(self, _: torch.device) -> LateStreams:
        return self

    def run(self, work: Callable[[], None], reads: Sequence[Tensor]) -> int:
        before = [(tensor, tensor.detach().clone()) for tensor in self._memory()]
        work()
        written = []
        for tensor, was in before:
            if bits(tensor) != bits(was):
                written.append((tensor, tensor.detach().clone()))
                tensor.data.copy_(was)
        self._events += 1
        self.reads += reads
        self.running.append(_Late(self._events, written, [(g, bits(g)) for g in reads]))
        while self.running and self._random.random() < self._early:
            self._end_first()
        return self._events

    def wait(self, event: int) -> None:
        while self.running and self.running[0].event <= event:
            self._end_first()

    def _end_first(self) -> None:
        late = self.running.pop(0)
        for gradient, was in late.read:
            assert bits(gradient) == was, "a gradient was written before the step had read it"
        for tensor, new in late.written:
            tensor.data.copy_(new)

    def _memory(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
            if optimizer._options.track:
                yield from (t for traces in optimizer._built.plan.traces() for t in traces[:2])
