"""Measures the time of optimizer steps on their device."""

import time
from collections import deque
from typing import Any

import torch


class OptimizerTime:
    """A context manager that times each step. On a GPU, :meth:`mean` reads the events."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=100 if self._on_gpu else None)
        self._started: Any = None

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: Any) -> None:
        self._steps.append((self._started, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mean(self) -> float:
        """Returns the mean seconds of the steps since the last call; 0 without steps."""
        seconds = []
        while self._steps:
            started, ended = self._steps.popleft()
            if self._on_gpu:
                ended.synchronize()
            took = started.elapsed_time(ended) / 1000 if self._on_gpu else ended - started
            seconds.append(took)
        return sum(seconds) / max(len(seconds), 1)
