"""The context of a step: all that it must know in addition to its gradients, in one value."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_ext.optim.rejection import StepProgress


class StepContext(NamedTuple):  # made in a third of a frozen dataclass's time
    """Passed to a step by GradScaler, a container, ZeRO or FSDPadaptOptimizer (hooks.step_in)."""

    grad_scale: Tensor | None = None  # the loss scale of the gradients; one float32 element
    found_inf: Tensor | None = None  # nonzero skips the step; one float32 element
    check_overflow: bool = False  # a gradient that is not finite skips the step
    found_inf_agreed: bool = False  # every rank that shares the decision has the same found_inf
    nested: bool = False  # a part of another optimizer's step, which has fired the global hooks
    progress: StepProgress | None = None  # all ranks of the group agree on the step, norm or not
    measured: Mapping[torch.device, Tensor] | None = None  # sums of all squares, by device

    @property
    def is_default(self) -> bool:
        """Whether no scaler or wrapper has set a scale, flag, check or agreement of ranks."""
        scaled = self.grad_scale is not None or self.found_inf is not None or self.check_overflow
        return not scaled and self.progress is None


ALONE = StepContext()
IDLE = StepContext()
"""The context while no step is under way."""


def amp_context(optimizer: Any) -> StepContext:
    """Returns what torch.amp.GradScaler (torch/amp/grad_scaler.py, step) set on an optimizer."""
    attributes = vars(optimizer)
    if "grad_scale" not in attributes and "found_inf" not in attributes:
        return ALONE
    found_inf = attributes.get("found_inf")
    if not isinstance(found_inf, Tensor):  # without gradients torch's scaler sets the number 0
        found_inf = None
    return StepContext(attributes.get("grad_scale"), found_inf)


@contextmanager
def amp_attributes(optimizer: Any, context: StepContext) -> Iterator[None]:
    """Hands the context to one of torch's optimizers for one step, as torch.amp.GradScaler does."""
    if context.found_inf is None and context.grad_scale is None:
        yield
        return
    optimizer.grad_scale, optimizer.found_inf = context.grad_scale, context.found_inf
    try:
        yield
    finally:
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)
