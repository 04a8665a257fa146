"""What FSDPadaptOptimizer.step() returns: true or false, read when it is asked for."""

from __future__ import annotations

import logging
import os

from torch import Tensor

logger = logging.getLogger(__name__)


class StepResult:
    """True if the step was made, false if a gradient was not finite.

    On a GPU the answer is on the device until it is asked for, which waits for the step.

    Args:
        skipped: one element, nonzero if the step was skipped, or the number itself.
    """

    def __init__(self, skipped: Tensor | float) -> None:
        self._skipped: Tensor | None = None
        self._stepped: bool | None = None
        if isinstance(skipped, Tensor):
            self._skipped = skipped
        else:
            self._decide(skipped)

    def _decide(self, skipped: float) -> bool:
        self._stepped = not skipped
        if skipped and os.environ.get("RANK", "0") == "0":
            logger.warning("a gradient was not finite: the step was skipped")
        return self._stepped

    def __bool__(self) -> bool:
        if self._stepped is None:
            assert self._skipped is not None
            self._decide(self._skipped.item())
        return bool(self._stepped)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, bool | StepResult):
            return bool(self) == bool(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))
