"""How a rank tells the others, in the collective they wait in, that it rejects a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim.local import is_captured, sent_to_host

FLAGS = slice(-2, None)
"""Where an accumulator counts what was infinite and what was a NaN (docs/numerics.md section 3)."""

_UNIT = 1 << 44
"""More than any count of elements. NaNs from here on are ranks that reject, infinities their number
in the default group, plus 1."""


@dataclass
class Agreement:
    """How far this rank is in a step that ranks agree on."""

    pending: bool = True  # it has yet to take part in the collective in which they agree
    accepted: bool = False  # all ranks have agreed there to make the step
    in_closure: bool = False  # a closure is under way, in which other ranks may wait for this one


def reject_in(accumulator: Tensor) -> None:
    """Adds this rank to those that reject the step; no rank uses the sum then."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    accumulator[-2] += (rank + 1) * _UNIT
    accumulator[-1] += _UNIT


def is_rejected(accumulator: Tensor) -> Tensor:
    """1.0 on the accumulator's device if a rank rejects the step, else 0.0."""
    return (accumulator[-1] >= _UNIT).float()


class Verdict:
    """What the ranks have said about an optimizer's steps.

    On the CPU all ranks raise in the step itself. No step waits for a GPU, which skips a rejected
    one: there a later step raises, the first that finds the answer on the host.
    """

    def __init__(self) -> None:
        self._later: list[tuple[Tensor, Any]] = []  # flags on their way to the host, and its end

    def note(self, total: Tensor) -> None:
        """Takes the joined accumulator of a step; raises if another rank rejects the step."""
        flags = total[FLAGS]
        if self.is_known(flags):
            _check(flags)
        elif (sent := sent_to_host(flags)) is not None:
            self._later.append(sent)

    @staticmethod
    def is_known(flags: Tensor) -> bool:
        """Whether the host can read ``flags`` without waiting."""
        return flags.is_cpu

    def check(self) -> None:
        """Raises if an earlier step is known by now to have been rejected; does not wait.

        Not while a graph is captured, in which CUDA allows no query of an event.
        """
        while self._later and not is_captured() and self._later[0][1].query():
            _check(self._later.pop(0)[0])

    def __reduce__(self) -> Any:
        return Verdict, ()


def _check(flags: Tensor) -> None:
    number, count = (flag // _UNIT for flag in flags.tolist())
    if count:
        who = f"rank {number - 1}" if count == 1 else f"{count} ranks"
        raise RuntimeError(f"{who} rejected the step: the error there says why")
