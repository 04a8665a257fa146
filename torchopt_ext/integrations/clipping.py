"""Optimizers that clip in their step, in what frameworks hand over."""

from collections.abc import Sequence
from typing import Any

from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.optim.control import Controlled


def clipping_optimizers(optimizer: Any) -> Sequence[Controlled]:
    """Those that decide in an optimizer's step; none for an optimizer of another package.

    Args:
        optimizer: FusedAdam or FusedAdamW; ZeroRedundancyOptimizer or a container of such.

    Raises:
        TypeError: FSDPadaptOptimizer, which has a threshold and a loss scale of its own.
    """
    if isinstance(optimizer, FSDPadaptOptimizer):
        raise TypeError(
            "FSDPadaptOptimizer scales losses and clips by itself, which the framework does, too: "
            'give it FusedAdamW(master_weights="fp32") instead'
        )
    inner = [optimizer, getattr(optimizer, "optim", None)]
    if found := [o for o in inner if isinstance(o, Controlled)]:
        return found
    parts = list(getattr(optimizer, "optimizers", ()))
    return parts if all(isinstance(part, Controlled) for part in parts) else []


def set_threshold(optimizers: Sequence[Controlled], max_grad_norm: float) -> None:
    """Lets the next steps clip by a norm; ``math.inf`` only measures it."""
    for optimizer in optimizers:
        if optimizer.max_grad_norm != max_grad_norm:
            optimizer.max_grad_norm = max_grad_norm


def was_skipped(optimizers: Sequence[Controlled], scaled: bool) -> bool:
    """Whether the last step was skipped; waits for its device only if it could have been.

    Args:
        scaled: a scaler took part in it.
    """
    return any((scaled or o.skips_overflow) and bool(o.control.skip != 0.0) for o in optimizers)


def expect_first(mixin: type, cls: type, method: str) -> None:
    """Rejects a class whose bases hide the mixin's method.

    Raises:
        TypeError: a base of the class that knows nothing of the mixin comes before it.
    """
    order = cls.__mro__
    for base in order[: order.index(mixin)]:
        if method in vars(base) and not issubclass(base, mixin):
            raise TypeError(
                f"{cls.__name__} has {base.__name__} before {mixin.__name__}, which then does "
                f"nothing: class {cls.__name__}({mixin.__name__}, {base.__name__})"
            )
