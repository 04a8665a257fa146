"""An orderly end on SIGTERM: all ranks stop after the same step."""

import os
import signal
import threading
from collections import deque
from types import FrameType
from typing import Any

import torch

from torchopt_ext._torch import default_store

_KEY = "torchopt_ext.trainer.stop_after"


class StopOnSignal:
    """Lets all ranks end after one step when any of them gets SIGTERM, as schedulers send it.

    A rank that got the signal writes after which step to stop into the store that all ranks share;
    each asks the store before every step, which takes some 50 us. On a CPU that is the step that
    the rank is about to make. No other rank can be past it, since it needs every rank's gradients.

    Beside a GPU the host runs ahead of the steps, and would of any number of them. Here it waits
    for the step before the last one that it started, which leaves the GPU a step to work on. So a
    host may have started the step after the one that another is about to make, and no later one:
    all stop after that.

    Signals reach Python's main thread only: from another one nothing is watched.

    Args:
        device: where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event: Any = torch.cuda.Event  # untyped
        self._ends: deque[Any] = deque()  # of the steps that were started
        # torchrun's store outlives a restart of the ranks.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store, self._key = default_store(), f"{_KEY}.{restarts}"
        self.received = False
        self._before: Any = None

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = True

    def last_step(self, step: int) -> int | None:
        """The step after which to stop, if that is decided; call it once before each step.

        Args:
            step: the one that is about to be made.
        """
        if self._on_gpu:
            self._ends.append(self._event())
            self._ends[-1].record()
            if len(self._ends) > 1:
                self._ends.popleft().synchronize()
        if self.received:
            last = step + self._on_gpu
            return int(self._store.compare_set(self._key, "", str(last)))
        return int(self._store.get(self._key)) if self._store.check([self._key]) else None
