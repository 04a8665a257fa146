"""Support for ranks that run out of data early (torch.distributed.algorithms.join.Join)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from torchopt_ext.optim.context import StepContext
from torchopt_ext.state.collective import all_gather_text, collective, wait
from torchopt_ext.zero.exchange import decode, encode
from torchopt_ext.zero.ranks import Ranks


class SteppingHook(JoinHook):
    """Steps a sharded optimizer on a rank out of data, along with the ranks that have data."""

    def __init__(self, zero: Any) -> None:
        self.zero, self.ended = zero, False
        super().__init__()

    def main_hook(self) -> None:
        if not self.zero._overlap_with_ddp:  # with overlap, DDP's communication hook steps
            self.zero._out_of_data = True
            try:
                self.zero.step()
            finally:
                self.zero._out_of_data = False

    def post_hook(self, is_last_joiner: bool) -> None:
        self.ended = True


@torch.no_grad()
def share(
    params: Sequence[Tensor], ranks: Ranks, out_of_data: bool, context: StepContext
) -> StepContext:
    """Gives ranks out of data the gradients of the first rank that has data. All ranks call it.

    Every rank with data has the same averages and scale. DDP's join hook computes the averages on
    ranks out of data as well, but drops them. Returns the context, with the sending rank's scale.
    """
    scaling = [None if t is None else float(t) for t in (context.grad_scale, context.found_inf)]
    # A gradient's dtype may be another than the parameter's: grad_dtype sets it.
    dtypes = [None if param.grad is None else param.grad.dtype for param in params]
    mine, _ = encode([out_of_data, scaling, context.check_overflow, dtypes], "gradients")
    texts = all_gather_text(mine, ranks.group, "exchanging which ranks have data")
    of_ranks = [decode(text, ()) for text in texts]
    source = next(rank for rank, (is_out, *_) in enumerate(of_ranks) if not is_out)
    if not any(is_out for is_out, *_ in of_ranks):
        return context
    _, scaling, check_overflow, dtypes = of_ranks[source]
    for param, dtype in zip(params, dtypes, strict=True):
        if out_of_data:
            param.grad = None if dtype is None else torch.empty_like(param, dtype=dtype)
        if dtype is not None and param.numel():
            assert param.grad is not None
            sent = param.grad.to(dtype).contiguous()
            with collective("sending gradients to ranks out of data"):
                wait(ranks.broadcast(sent.view(-1), source))
            if out_of_data:
                param.grad.copy_(sent)
    if not out_of_data:
        return context
    scale, flag = (t if t is None else torch.tensor(t, dtype=torch.float32) for t in scaling)
    return context._replace(grad_scale=scale, found_inf=flag, check_overflow=check_overflow)
