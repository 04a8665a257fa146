"""Ranks that run out of data before others: torch.distributed.algorithms.join.Join."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from torchopt_ext.optim.agreement import all_gather
from torchopt_ext.optim.collective import collective, run
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.whole import WholeTensors


class _Hook(JoinHook):
    def __init__(self, zero: "StepsAlong") -> None:
        self.zero = zero
        super().__init__()

    def main_hook(self) -> None:
        """Steps along with the ranks that still have data: they wait for this rank's parameters."""
        if not self.zero._overlap_with_ddp:  # whose hook steps
            self.zero._out_of_data = True
            try:
                self.zero.step()
            finally:
                self.zero._out_of_data = False

    def post_hook(self, is_last_joiner: bool) -> None:
        self.zero._uneven = False


class StepsAlong(Joinable):
    """What a sharded optimizer does in a Join context."""

    ranks: Ranks
    parts: WholeTensors | BalancedBuckets
    process_group: Any
    step: Any
    _all_params: list[Tensor]
    _default_device: torch.device
    _overlap_with_ddp: bool

    _uneven = False  # given to a Join context, whose ranks may run out of data
    _out_of_data = False  # as this rank has

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``Join([ddp, optimizer])``: ranks out of data keep stepping their part.

        They step with the averages of the ranks that have data, which DDP does not leave there.

        Raises:
            RuntimeError: with ``sharded_gradients``, where ranks out of data cannot reduce along.
        """
        if isinstance(self.parts, BalancedBuckets) and self.parts.reducer.hooks:
            raise RuntimeError(
                "Join does not go with sharded_gradients=True: use DDP, with reduce_scatter_hook "
                "if traffic is to stay low"
            )
        self._uneven = True
        return _Hook(self)

    @property
    def _in_join(self) -> bool:
        return self._uneven and self._join_config.enable

    @property
    def join_device(self) -> torch.device:
        return self._default_device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _notify_join(self) -> None:
        """Tells ranks out of data that this one steps."""
        if not self._out_of_data:
            Join.notify_join_context(self)

    def _take_gradients(self) -> None:
        """Gives this rank's parts their gradients, those of other ranks if it is out of data."""
        if self._in_join and not self.parts.hides_gradients:
            share(self._all_params, self.ranks, self._out_of_data)
        self.parts.take_gradients()


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
