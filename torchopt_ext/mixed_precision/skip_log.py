"""Logs skipped steps, without waiting for the device that decides them."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import Tensor

from torchopt_ext.optim.local import sent_to_host

logger = logging.getLogger(__name__)


def log_if(skipped: float) -> None:
    """Logs a skipped step, on rank 0."""
    if skipped and os.environ.get("RANK", "0") == "0":
        logger.warning("a gradient was not finite: the step was skipped")


class SkipLog:
    """The last decision on its way from a GPU to the host."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, Any] | None = None

    def add(self, skip: Tensor) -> None:
        """Starts copying a decision, one element on a GPU; nonzero for a skipped step."""
        self._pending = sent_to_host(skip)

    def flush(self) -> None:
        """Logs the decision, which the device has long made when the next step begins."""
        if self._pending is not None:
            skip, event = self._pending
            self._pending = None
            event.synchronize()
            log_if(skip.item())
