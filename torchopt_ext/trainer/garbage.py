"""Python's garbage collection at the same steps on all ranks, so that no rank waits."""

import gc
import logging
import time

logger = logging.getLogger(__name__)


class GarbageCollection:
    """Turns automatic collection off and collects every ``gc_freq`` steps, or in all to debug."""

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
