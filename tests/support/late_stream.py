"""A simulated side stream, whose work on memory ends late."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchopt_ext.optim import forward_overlap, host_steps

from .compare import bits


class _Late(NamedTuple):
    event: int
    stream: _Stream
    written: list[tuple[Tensor, Tensor]]  # memory, and what it will hold
    read: list[tuple[Tensor, bytes]]  # gradients, and what they must hold until then


def stand_for_a_gpu(monkeypatch: pytest.MonkeyPatch, streams: LateStreams) -> None:
    """Lets the memory of parameters stand for a GPU's, and these streams for its side streams."""
    for module in ("state.host_memory", "state.storage", "optim.overlapped"):
        monkeypatch.setattr(f"torchopt_ext.{module}.ACCELERATORS", {"cuda", "cpu"})
    monkeypatch.setattr(forward_overlap, "SideStream", streams)
    monkeypatch.setattr(host_steps, "SideStream", streams)


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

    def __call__(self, _: torch.device) -> _Stream:
        return _Stream(self)

    def run(self, stream: _Stream, work: Callable[[], None], reads: Sequence[Tensor]) -> int:
        before = [(tensor, tensor.detach().clone()) for tensor in self._memory()]
        work()
        written = []
        for tensor, was in before:
            if bits(tensor) != bits(was):
                written.append((tensor, tensor.detach().clone()))
                tensor.data.copy_(was)
        self._events += 1
        self.reads += reads
        self.running.append(_Late(self._events, stream, written, [(g, bits(g)) for g in reads]))
        while self.running and self._random.random() < self._early:
            self._end(self._random.choice(self.running))
        return self._events

    def wait(self, event: int) -> None:
        for late in [late for late in self.running if late.event == event]:
            self._end(late)

    def _end(self, last: _Late) -> None:
        """Ends a launch, after those before it in its stream."""
        for late in [late for late in self.running if late.stream is last.stream]:
            if late.event <= last.event:
                self.running.remove(late)
                self._finish(late)

    def _finish(self, late: _Late) -> None:
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
            if optimizer._built is None:
                continue
            for host in optimizer._built.host_steps.values():
                yield from (*host._weights, *host._gradients, host._control)
                yield from (value for state in host._state.values() for value in state.values())
            if optimizer._options.track:
                yield from (t for traces in optimizer._built.plan.traces() for t in traces[:2])


class _Stream:
    def __init__(self, streams: LateStreams) -> None:
        self.run = partial(streams.run, self)
        self.wait = self.synchronize = streams.wait
