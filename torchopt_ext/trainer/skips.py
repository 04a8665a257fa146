"""Counts skipped steps without waiting for the device."""

from collections import deque
from typing import Any

from torch import Tensor

from torchopt_ext.state.devices import sent_to_host


class SkippedSteps:
    """Counts consecutive skipped steps from the control block's total.

    On a GPU the total is copied to the host asynchronously and read when it has arrived, so that
    the limit takes effect a step or two late.

    Attributes:
        limit: consecutive skipped steps at which to stop; 0: never.
        total: total of skipped steps. Set it if the control block does not begin at 0.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = self.consecutive = 0
        self._coming: deque[tuple[Tensor, Any]] = deque()

    def note(self, skipped_steps: Tensor) -> None:
        """Records the total after a step: 0-dim, skipped steps so far."""
        if not skipped_steps.is_cuda:
            self.count(int(skipped_steps))
            return
        if (sent := sent_to_host(skipped_steps)) is not None:
            self._coming.append(sent)
        while self._coming and self._coming[0][1].query():
            self.count(int(self._coming.popleft()[0]))

    def wait(self) -> None:
        """Counts all steps, waiting for the device."""
        while self._coming:
            total, end = self._coming.popleft()
            end.synchronize()
            self.count(int(total))

    def count(self, total: int) -> None:
        """Records the total after a step, as a number on the host."""
        self.consecutive = self.consecutive + 1 if total > self.total else 0
        self.total = total

    @property
    def since_good(self) -> int:
        """Steps since the last step known not to be skipped, including steps not known yet."""
        return self.consecutive + len(self._coming)
