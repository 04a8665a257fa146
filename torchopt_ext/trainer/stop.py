"""An orderly end on SIGTERM: all ranks stop after the same step."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from torchopt_ext._torch import default_store

_KEY = "torchopt_ext.trainer.stop_after"


class StopOnSignal:
    """Lets all ranks end after one step when any of them gets SIGTERM, as schedulers send it.

    A rank that got the signal writes the step that it is about to make into the store that all
    ranks share. No other rank can be past that step, since it needs every rank's gradients; each
    asks the store before every step, which takes some 50 us.

    Signals reach Python's main thread only: from another one nothing is watched.
    """

    def __init__(self) -> None:
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
        """The step after which to stop, if that is decided; call it before each step.

        Args:
            step: the one that is about to be made.
        """
        if self.received:
            return int(self._store.compare_set(self._key, "", str(step)))
        return int(self._store.get(self._key)) if self._store.check([self._key]) else None
