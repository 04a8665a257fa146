"""What a step must know besides its gradients, as one value that is passed down."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from torchopt_ext.optim.rejection import Agreement


class StepContext(NamedTuple):  # made in a third of a frozen dataclass's time
    """Given to a step by GradScaler, container, ZeRO or FSDPadaptOptimizer (hooks.step_in).

    Args:
        grad_scale: gradients are this many times too large; one float32 element, None for 1.
        found_inf: nonzero skips the step; one float32 element.
        check_overflow: a gradient that is not finite skips the step.
        agreed: every rank that shares the decision has the same ``found_inf``.
        inner: the step is part of another optimizer's, for which global step hooks have fired.
        agreement: all ranks of the process group agree to make the step, also without a norm.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    check_overflow: bool = False
    agreed: bool = False
    inner: bool = False
    agreement: Agreement | None = None


ALONE = StepContext()
IDLE = StepContext()
"""While no step is under way."""


def amp_context(optimizer: Any) -> StepContext:
    """What torch.amp.GradScaler has set on an optimizer (torch/amp/grad_scaler.py, step)."""
    attributes = vars(optimizer)
    if "grad_scale" not in attributes and "found_inf" not in attributes:
        return ALONE
    return StepContext(attributes.get("grad_scale"), attributes.get("found_inf"))


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
