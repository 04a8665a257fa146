"""How a rank that rejects a step tells the others, in the collective in which they wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.state.collective import collective, comm_device, run, wait
from torchopt_ext.state.devices import is_captured, moved, sent_to_host

FLAGS = slice(-2, None)
"""The accumulator's counters of infinities and of NaNs (docs/numerics.md section 3)."""

_UNIT = 1 << 44
"""More than any count of elements. In units of it, the counter of NaNs counts the ranks that
reject, and the counter of infinities adds up their numbers in the default group, each plus 1."""


@dataclass
class StepProgress:
    """How far this rank is in a step that ranks agree on."""

    pending: bool = True  # this rank has not yet joined the collective in which ranks agree
    accepted: bool = False  # all ranks have agreed to make the step
    in_closure: bool = False  # a closure is under way, in which other ranks may wait for this rank
    agreed: bool = False  # this rank has joined the agreement of ranks that share matrices
    took_gradients: bool = False  # this rank has joined ZeRO's exchanges before the norm


def reject_in(accumulator: Tensor) -> None:
    """Adds this rank to the ranks that reject the step; no rank uses the sum then."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    accumulator[-2] += (rank + 1) * _UNIT
    accumulator[-1] += _UNIT


def agree(
    total: Tensor,
    group: Any,
    progress: StepProgress,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Sums a step's accumulators, or their flags, over the ranks of a group, which all call it.

    ``meanwhile`` is called while the all-reduce is under way.
    """
    progress.pending = False
    # Parameters may be on the CPU (FSDP2's CPUOffloadPolicy) while their ranks use NCCL.
    sent = moved(total, comm_device(group, total.device))
    with collective("agreeing on the step and its gradient norm"):
        if meanwhile is None and not progress.in_closure:
            run(torch.distributed.all_reduce, sent, group=group)
        else:
            work = torch.distributed.all_reduce(sent, group=group, async_op=True)
            if progress.in_closure and not progress.accepted:
                return  # the other ranks may never join the collective
            if meanwhile is not None:
                meanwhile()
            wait(work)
    if sent is not total:
        total.copy_(sent)


def is_rejected(accumulator: Tensor) -> Tensor:
    """Returns 1.0 on the accumulator's device if a rank rejects the step, otherwise 0.0."""
    return (accumulator[-1] >= _UNIT).float()


class RejectedSteps:
    """What is known of steps that ranks rejected.

    On the CPU all ranks raise in the rejected step itself. On a GPU no step waits for the answer:
    the GPU skips the step, and the first later step that finds the answer on the host raises. An
    optimizer whose step makes further collectives waits for the answer.
    """

    def __init__(self) -> None:
        self._later: list[tuple[Tensor, Any]] = []  # flags on their way to the host, end events

    def note(self, total: Tensor, *, waits: bool = False) -> None:
        """Takes the reduced accumulator of a step; raises if a rank rejects the step."""
        flags = total[FLAGS]
        if waits or self.is_known(flags):
            _check(flags)
        elif (sent := sent_to_host(flags)) is not None:
            self._later.append(sent)

    @staticmethod
    def is_known(flags: Tensor) -> bool:
        """Returns whether the host can read ``flags`` without waiting."""
        return flags.is_cpu

    def check(self, *, waits: bool = False) -> None:
        """Raises if a step is known to have been rejected; ``waits`` until it is known.

        Does nothing while a graph is captured, because CUDA then allows no query of an event.
        """
        while self._later and not is_captured():
            if waits:
                self._later[0][1].synchronize()
            elif not self._later[0][1].query():
                return
            _check(self._later.pop(0)[0])

    def __reduce__(self) -> Any:
        return RejectedSteps, ()


def _check(flags: Tensor) -> None:
    number, count = (flag // _UNIT for flag in flags.tolist())
    if count:
        who = f"rank {number - 1}" if count == 1 else f"{count} ranks"
        raise RuntimeError(f"{who} rejected the step: the error there says why")
