"""What a step must know besides its gradients, as one value that is passed down."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_ext.optim.rejection import Agreement


class StepContext(NamedTuple):  # made in a third of a frozen dataclass's time
    """Given to a step by GradScaler, container, ZeRO or FSDPadaptOptimizer (hooks.step_in)."""

    grad_scale: Tensor | None = None  # gradients are this many times too large; one float32 element
    found_inf: Tensor | None = None  # nonzero skips the step; one float32 element
    check_overflow: bool = False  # a gradient that is not finite skips the step
    agreed: bool = False  # every rank that shares the decision has the same found_inf
    inner: bool = False  # a part of another optimizer's step, for which global hooks have fired
    agreement: Agreement | None = None  # all ranks of the group agree to the step, norm or not
    measured: Mapping[torch.device, Tensor] | None = None  # all gradients' squares, by device

    @property
    def is_plain(self) -> bool:
        """Whether no scaler or wrapper adds a flag to what ranks exchange, or a scale."""
        scaled = self.grad_scale is not None or self.found_inf is not None or self.check_overflow
        return not scaled and self.agreement is None


ALONE = StepContext()
IDLE = StepContext()
"""While no step is under way."""


def amp_context(optimizer: Any) -> StepContext:
    """What torch.amp.GradScaler has set on an optimizer (torch/amp/grad_scaler.py, step)."""
    attributes = vars(optimizer)
    if "grad_scale" not in attributes and "found_inf" not in attributes:
        return ALONE
    found_inf = attributes.get("found_inf")
    if not isinstance(found_inf, Tensor):  # of no gradients torch's scaler makes the number 0
        found_inf = None
    return StepContext(attributes.get("grad_scale"), found_inf)


def taken_grad_scale(optimizer: Any) -> Any:
    """A scale that the user has set for one step, which the scaler multiplies and removes."""
    return vars(optimizer).pop("grad_scale", None)


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
