"""Measures the time of optimizer steps on their device."""

import time
from collections import deque
from typing import Any

import torch


class OptimizerTime:
    """A context manager that times each step. On a GPU, :meth:`mean` reads the events.

    Args:
        device: the device that the step runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event: Any = torch.cuda.Event  # untyped
        self._events: deque[tuple[Any, Any]] = deque(maxlen=100)
        self._seconds: list[float] = []
        self._started: Any = None

    def __enter__(self) -> None:
        if self._on_gpu:
            self._started = self._event(enable_timing=True)
            self._started.record()
        else:
            self._started = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        if self._on_gpu:
            ended = self._event(enable_timing=True)
            ended.record()
            self._events.append((self._started, ended))
        else:
            self._seconds.append(time.perf_counter() - self._started)

    def mean(self) -> float:
        """Returns the mean seconds of the steps since the last call; 0 without steps."""
        for started, ended in self._events:
            ended.synchronize()
            self._seconds.append(started.elapsed_time(ended) / 1000)
        mean = sum(self._seconds) / max(len(self._seconds), 1)
        self._events.clear()
        self._seconds.clear()
        return mean
