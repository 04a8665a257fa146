"""The process around a training: garbage collection, SIGTERM, and the file of a rank's error."""

import gc
import logging
import os
import signal
import threading
import time
from collections import deque
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.distributed.elastic.multiprocessing.errors import record as torch_record

from torchopt_ext._torch import default_store

logger = logging.getLogger(__name__)

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class _WholeFiles(ErrorHandler):
    """Writes the error next to the error file, and renames it when it is complete.

    When a rank fails, torchrun ends the other ranks and reads their error files
    (torch/distributed/elastic/multiprocessing/api.py). A truncated file raises in torchrun itself,
    which then restarts nothing.
    """

    def record_exception(self, e: BaseException) -> None:
        file = os.environ.get(_ERROR_FILE)
        if file is None:
            super().record_exception(e)
            return
        os.environ[_ERROR_FILE] = f"{file}.part"
        try:
            super().record_exception(e)
            os.replace(f"{file}.part", file)
        finally:
            os.environ[_ERROR_FILE] = file


record = partial(torch_record, error_handler=_WholeFiles())
"""torch's ``record``, with an error file that is complete or absent."""


class GarbageCollection:
    """Collects garbage at the same steps on all ranks, so that no rank waits.

    Turns automatic collection off and collects every ``gc_freq`` steps, or in all to debug.
    """

    def __init__(self, gc_freq: int = 1000, debug: bool = False) -> None:
        self.gc_freq, self.debug = gc_freq, debug
        gc.disable()
        self.collect()

    def run(self, step: int) -> None:
        if self.debug:
            self.collect(2)
        elif step > 1 and step % self.gc_freq == 0:
            self.collect()

    @staticmethod
    def collect(generation: int = 1) -> None:
        """Collects young objects by default. The model and other long-lived objects are older."""
        started = time.monotonic()
        gc.collect(generation)
        logger.debug("garbage collection took %.3f s", time.monotonic() - started)

    def close(self) -> None:
        gc.enable()


class StopOnSignal:
    """Stops all ranks after the same step when any rank gets SIGTERM, which schedulers send.

    A rank that got the signal writes the last step into the store that all ranks share. Each rank
    reads the store before every step, which takes about 50 us. On a CPU the last step is the step
    that the rank is about to make. No other rank can be past it: it needs every rank's gradients.

    With a GPU the host waits for the step before the last step that it started. Another rank's host
    may have started the step after the step that this rank is about to make, but no later step: all
    stop after that one. In a thread other than Python's main thread no signal is watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event: Any = torch.cuda.Event  # untyped
        self._ends: deque[Any] = deque()  # of the started steps
        # torchrun's store outlives a restart of the ranks.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store, self._key = default_store(), f"torchopt_ext.trainer.stop_after.{restarts}"
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
        """Returns the step after which to stop, or None. Call it once before each step."""
        if self._on_gpu:
            self._ends.append(self._event())
            self._ends[-1].record()
            if len(self._ends) > 1:
                self._ends.popleft().synchronize()
        if self.received:
            last = step + self._on_gpu
            return int(self._store.compare_set(self._key, "", str(last)))
        return int(self._store.get(self._key)) if self._store.check([self._key]) else None
