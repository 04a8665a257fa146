"""Gradients that ranks need of each other: their norm, and averages for ranks out of data."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext.optim.agreement import all_gather
from torchopt_ext.optim.collective import collective, run
from torchopt_ext.zero.ranks import Ranks


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


@torch.no_grad()
def share(params: Sequence[Tensor], ranks: Ranks, out_of_data: bool) -> None:
    """Gives ranks out of data the gradients of the first rank that has some. All ranks call it.

    Every rank with data has the same averages. DDP's join hook computes them on the others as well,
    in buffers that it drops.
    """
    mine = torch.tensor([not out_of_data, *(param.grad is not None for param in params)])
    flags = all_gather(mine.to(torch.uint8), ranks.group, "exchanging which ranks have data")
    source = next(rank for rank, of_rank in enumerate(flags) if of_rank[0])
    if all(of_rank[0] for of_rank in flags):
        return
    for param, present in zip(params, flags[source][1:].tolist(), strict=True):
        if out_of_data:
            param.grad = torch.empty_like(param) if present else None
        if present and param.numel():
            assert param.grad is not None
            sent = param.grad.to(param.dtype).contiguous()
            with collective("sending gradients to ranks out of data"):
                memory = sent.view(-1).view(torch.uint8)
                run(dist.broadcast, memory, ranks.global_rank(source), group=ranks.group)
            if out_of_data:
                param.grad.copy_(sent)
