"""Optimizers that treat every element by itself: they may step any part of a parameter."""

from typing import Any

import torch

from torchopt_ext.optim.base import FusedAdamBase

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")

ELEMENTWISE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adam: _MOMENTS,
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.AdamW: _MOMENTS,
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
    torch.optim.NAdam: (*_MOMENTS, "mu_product"),
    torch.optim.RAdam: _MOMENTS,
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.SGD: (),
}
"""What a parameter's state holds in any case, by class."""


def is_elementwise(optimizer_class: Any) -> bool:
    """Whether the class is known to be; a subclass may do anything and is not."""
    if not isinstance(optimizer_class, type):
        return False
    return optimizer_class in ELEMENTWISE or issubclass(optimizer_class, FusedAdamBase)


def check_elementwise(optimizer_class: Any, promised: bool) -> None:
    """Raises ValueError for an optimizer that is not known to be elementwise, nor said to be."""
    if not promised and not is_elementwise(optimizer_class):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        raise ValueError(
            f"partition='balanced' divides parameters among ranks, which suits FusedAdam, "
            f"FusedAdamW, {known}; {optimizer_class} may look at whole parameters. If it does not, "
            f"say so with elementwise=True"
        )
