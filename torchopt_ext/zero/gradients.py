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


@torch.no_grad()
def clip(params: Sequence[Tensor], total: Tensor, max_norm: float) -> Tensor:
    """Clips the gradients of ``params`` by the norm whose squares ``total`` has.

    Returns:
        The norm before clipping: float64, 0-dim; as torch.nn.utils.clip_grad_norm_, the gradients
        are multiplied by ``max_norm / (norm + 1e-6)`` where that is below 1.
    """
    grads = [param.grad for param in params if param.grad is not None]
    norm = ops.accumulator_total(total).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for device in dict.fromkeys(grad.device for grad in grads):
        torch._foreach_mul_([g for g in grads if g.device == device], factor.to(device))
    return norm
