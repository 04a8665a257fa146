"""The norm of gradients of which every rank holds a part."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_ext import ops


def sum_of_squares(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """An accumulator on ``device`` with the squares of the gradients of ``params``."""
    grads = [param.grad for param in params if param.grad is not None]
    total = ops.new_accumulator(device)
    for own in dict.fromkeys(grad.device for grad in grads):
        subtotal = ops.new_accumulator(own)
        ops.grad_sumsq_([grad for grad in grads if grad.device == own], subtotal)
        total += subtotal.to(device)
    return total
