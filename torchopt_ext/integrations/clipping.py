"""Finds optimizers that clip in their step inside a framework's optimizer."""

import math
from collections.abc import Sequence
from typing import Any

from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.optim.control import Controlled


def clipping_optimizers(optimizer: Any) -> Sequence[Controlled]:
    """Returns the optimizers that clip in an optimizer's step; none for other packages' optimizers.

    Args:
        optimizer: a fused optimizer, or ZeroRedundancyOptimizer or a container with some.

    Raises:
        TypeError: `optimizer` is FSDPadaptOptimizer, with its own threshold and loss scale.
    """
    if isinstance(optimizer, FSDPadaptOptimizer):
        raise TypeError(
            "FSDPadaptOptimizer scales losses and clips by itself, which the framework does, too: "
            'give it FusedAdamW(master_weights="fp32") instead'
        )
    inner = [optimizer, getattr(optimizer, "optim", None)]
    if controlled := [o for o in inner if isinstance(o, Controlled)]:
        return controlled
    parts = list(getattr(optimizer, "optimizers", ()))
    return parts if all(isinstance(part, Controlled) for part in parts) else []


def set_threshold(optimizer: Any, max_norm: float | None) -> None:
    """Sets the threshold of the next step of an optimizer that clips in its step.

    Raises:
        ValueError: a container steps in backward, which comes before, and has another threshold;
            or its deferred_clipping sets the threshold.
    """
    early = isinstance(optimizer, OptimizersInBackwardContainer)
    if early and not optimizer._checks_overflow_in_step:
        thresholds = {one.max_grad_norm for one in clipping_optimizers(optimizer)}
        if {threshold or math.inf for threshold in thresholds} != {max_norm or math.inf}:
            raise ValueError(
                f"gradients should be clipped to {max_norm}, but the container has stepped in "
                f"backward, with max_grad_norm={thresholds.pop()}: pass its constructor "
                f"max_grad_norm={max_norm}, or ask for no clipping"
            )
        return
    if isinstance(optimizer, OptimizersContainer):
        optimizer.max_grad_norm = max_norm
        return
    for one in clipping_optimizers(optimizer):
        one.max_grad_norm = max_norm


def was_skipped(optimizers: Sequence[Controlled], scaled: bool) -> bool:
    """Returns whether the last step was skipped. Waits for the device only if steps can be skipped.

    Args:
        scaled: whether a loss scaler was used in the step.
    """
    return any((scaled or o._skips_overflow) and bool(o.control.skip != 0.0) for o in optimizers)


def expect_first(mixin: type, cls: type, method: str) -> None:
    """Rejects a class with a base before the mixin that has this method, and hides the mixin's."""
    order = cls.__mro__
    for base in order[: order.index(mixin)]:
        if method in vars(base) and not issubclass(base, mixin):
            raise TypeError(
                f"{cls.__name__} has {base.__name__} before {mixin.__name__}, which then does "
                f"nothing: class {cls.__name__}({mixin.__name__}, {base.__name__})"
            )
