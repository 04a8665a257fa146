"""Support for ranks that run out of data early (torch.distributed.algorithms.join.Join)."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from torchopt_ext.optim.context import StepContext
from torchopt_ext.state.collective import all_gather_text, collective, wait
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.metadata import DTYPES
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.whole import WholeTensors


class _Hook(JoinHook):
    def __init__(self, zero: "JoinSupport") -> None:
        self.zero, self.ended = zero, False
        super().__init__()

    def main_hook(self) -> None:
        """Steps along with the ranks that still have data: they wait for this rank's parameters."""
        if not self.zero._overlap_with_ddp:  # DDP's communication hook steps then
            self.zero._out_of_data = True
            try:
                self.zero.step()
            finally:
                self.zero._out_of_data = False

    def post_hook(self, is_last_joiner: bool) -> None:
        self.ended = True


class JoinSupport(Joinable):
    """A sharded optimizer's behavior in a Join context."""

    # Attributes of ZeroRedundancyOptimizer.
    ranks: Ranks
    partition: WholeTensors | BalancedBuckets
    step: Callable[..., Any]
    _overlap_with_ddp: bool
    _all_params: list[Tensor]

    # The hook given to the Join context. If an exception ends the context, no method of the hook is
    # called, but the hook is gone.
    _hook: "ReferenceType[_Hook] | None" = None
    _out_of_data = False  # this rank has run out of data

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for ``Join([ddp, optimizer])``: ranks out of data step their part.

        They step with the averages of the ranks that have data. DDP does not leave these averages.
        """
        if isinstance(self.partition, BalancedBuckets) and self.partition.reducer.hooks:
            raise RuntimeError(
                "Join does not support sharded_gradients=True: use DDP, with reduce_scatter_hook "
                "if traffic is to stay low"
            )
        hook = _Hook(self)
        self._hook = ref(hook)
        return hook

    @property
    def _in_join(self) -> bool:
        hook = None if self._hook is None else self._hook()
        return hook is not None and not hook.ended and self._join_config.enable

    @property
    def join_device(self) -> torch.device:
        return self._all_params[0].device

    @property
    def join_process_group(self) -> Any:
        return self.ranks.group

    def _take_gradients(self, context: StepContext) -> StepContext:
        """Gives this rank's parts their gradients, out of data those of a rank with data.

        Returns the step's context, with the scale and flags of these gradients.
        """
        if self._in_join:
            shared = [] if self.partition.hides_gradients else self._all_params
            context = share(shared, self.ranks, self._out_of_data, context)
        self.partition.take_gradients()
        return context


@torch.no_grad()
def share(
    params: Sequence[Tensor], ranks: Ranks, out_of_data: bool, context: StepContext
) -> StepContext:
    """Gives ranks out of data the gradients of the first rank that has data. All ranks call it.

    Every rank with data has the same averages, and the same scale. DDP's join hook computes the
    averages on ranks out of data as well, but in buffers that it drops.

    Returns:
        The step's context. On ranks out of data it has the scale and flags of the sending rank.
    """
    scaling = [None if t is None else float(t) for t in (context.grad_scale, context.found_inf)]
    # A gradient's dtype may be another than the parameter's: grad_dtype sets it.
    dtypes = ["" if param.grad is None else str(param.grad.dtype) for param in params]
    mine = [out_of_data, scaling, context.check_overflow, dtypes]
    texts = all_gather_text(json.dumps(mine), ranks.group, "exchanging which ranks have data")
    found = [json.loads(text) for text in texts]
    source = next(rank for rank, (is_out, *_) in enumerate(found) if not is_out)
    if not any(is_out for is_out, *_ in found):
        return context
    _, scaling, check_overflow, dtypes = found[source]
    for param, name in zip(params, dtypes, strict=True):
        dtype = DTYPES.get(name)
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
