"""Gradients reduced to their owners while backward runs: one reduction a bucket."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext.optim.collective import collective
from torchopt_ext.zero.exchange import comm_device
from torchopt_ext.zero.part import in_memory_order
from torchopt_ext.zero.ranks import Ranks

if TYPE_CHECKING:
    from torchopt_ext.zero.balanced import Bucket

IN_FLIGHT = 2
"""Reductions under way at a time: each holds a bucket's gradients of all ranks."""


class Reduction:
    """A bucket's gradients of one backward pass on their way.

    Attributes:
        staging: for each rank a window with its elements; freed once reduced.
        arrived: parameters whose gradient is in it.
        work, received: the collective under way, and what it fills.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self.staging: Tensor | None = None
        self.arrived: set[Tensor] = set()
        self.work: Any = None
        self.received: Tensor | None = None


class Reducer:
    """Averages gradients over the ranks; each keeps its own elements only.

    Gradients come from post-accumulate hooks, which free them at once (``hooks``), or from a DDP
    communication hook, in either case in the order of backward. Buckets are reduced in the order
    last to first, on every rank alike, and all of them in every backward pass.

    Args:
        ranks: among whom.
        hooks: register hooks on the parameters.
    """

    def __init__(self, ranks: Ranks, hooks: bool) -> None:
        self.ranks = ranks
        self.hooks = hooks
        self.active = hooks
        self._reductions: list[Reduction] = []
        self._of: dict[Tensor, tuple[Reduction, int]] = {}
        self._under_way: list[Reduction] = []  # oldest first
        self._present: set[Tensor] = set()
        self._next = -1  # the bucket to reduce next, in this backward pass
        self._in_backward = False
        self._hooked: set[Tensor] = set()
        self._thawed: list[Tensor] = []  # whose first gradient came before their hook

    def watch(self, buckets: Sequence["Bucket"]) -> None:
        """Takes charge of further buckets."""
        for bucket in buckets:
            reduction = Reduction(bucket)
            self._reductions.append(reduction)
            for param, start in bucket.params:
                self._of[param] = (reduction, start)
        self.hook_trainable()
        self._thawed.clear()

    def hook_trainable(self) -> None:
        """Puts hooks on parameters that have become trainable."""
        if not self.hooks:
            return
        for param in self._of:
            if param.requires_grad and param not in self._hooked:
                hooked: Any = param
                hooked.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooked.add(param)
                self._thawed.append(param)

    def _on_gradient(self, param: Tensor) -> None:
        gradient = param.grad
        param.grad = None
        assert gradient is not None
        self.take(param, gradient)

    @torch.no_grad()
    def take(self, param: Tensor, gradient: Tensor) -> None:
        """Takes a parameter's gradient of the backward pass under way; it may be freed after this.

        Raises:
            RuntimeError: its shape, dtype or layout is not the parameter's.
        """
        if gradient.layout is not torch.strided or gradient.dtype != param.dtype:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is {gradient.dtype}, "
                f"{gradient.layout}; expected {param.dtype}, dense"
            )
        self._begin()
        reduction, start = self._of[param]
        bucket = reduction.bucket
        if reduction.staging is None:
            size = self.ranks.size * bucket.window
            reduction.staging = torch.zeros(size, dtype=param.dtype, device=param.device)
        flat = in_memory_order(gradient, param)
        for rank, (lo, hi) in enumerate(itertools.pairwise(bucket.cuts)):
            begin, end = max(lo - start, 0), min(hi - start, flat.numel())
            if begin < end:
                first = rank * bucket.window + start + begin - lo
                reduction.staging[first : first + end - begin] += flat[begin:end]
        reduction.arrived.add(param)
        self._present.add(param)
        self._reduce_complete()

    def _begin(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._next = len(self._reductions) - 1
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_of_backward)

    def _take_thawed(self) -> None:
        """Reduces the gradients that thawed parameters got before they had hooks."""
        self._in_backward = True
        self._next = len(self._reductions) - 1
        for param in self._thawed:
            if param.grad is not None:
                self._on_gradient(param)
        self._thawed.clear()
        self._end_of_backward()

    def _end_of_backward(self) -> None:
        while self._next >= 0:
            self._start(self._reductions[self._next])
        self._in_backward = False

    def _reduce_complete(self) -> None:
        while self._next >= 0:
            reduction = self._reductions[self._next]
            if any(
                p.requires_grad and p not in reduction.arrived for p, _ in reduction.bucket.params
            ):
                return
            self._start(reduction)

    def _start(self, reduction: Reduction) -> None:
        """Starts the reduction of the next bucket; frozen buckets have none."""
        self._next -= 1
        bucket = reduction.bucket
        if not bucket.returned:
            return
        while len(self._under_way) == IN_FLIGHT or reduction in self._under_way:
            self._accumulate(self._under_way[0])
        staging = reduction.staging
        if staging is None:
            staging = bucket.flat.new_zeros(self.ranks.size * bucket.window)
        reduction.staging, reduction.arrived = None, set()
        self._under_way.append(reduction)
        with collective("reducing gradients"):
            if comm_device(self.ranks.group).type == "cpu":
                # gloo reduces-scatters by an all-reduce; this moves what is needed, and no more.
                reduction.received = torch.empty_like(staging)
                reduction.work = dist.all_to_all_single(
                    reduction.received.view(torch.uint8),
                    staging.view(torch.uint8),
                    group=self.ranks.group,
                    async_op=True,
                )
            else:
                reduction.received = staging.new_empty(bucket.window)
                reduction.work = dist.reduce_scatter_tensor(
                    reduction.received, staging, group=self.ranks.group, async_op=True
                )

    def _accumulate_all(self) -> None:
        while self._under_way:
            self._accumulate(self._under_way[0])

    def _accumulate(self, reduction: Reduction) -> None:
        """Waits for a reduction and adds its average to this rank's gradient."""
        with collective("reducing gradients"):
            reduction.work.wait()
        self._under_way.remove(reduction)
        received, bucket = reduction.received, reduction.bucket
        assert received is not None
        reduction.work, reduction.received = None, None
        rank = self.ranks.rank
        count = bucket.cuts[rank + 1] - bucket.cuts[rank]
        windows = received.view(-1, bucket.window)[:, :count]
        wide = torch.promote_types(received.dtype, torch.float32)
        total = windows[0].to(wide, copy=True)
        for window in windows[1:]:  # in the order of ranks
            total += window
        total = total.div_(self.ranks.size).to(received.dtype)
        bucket.grad = total if bucket.grad is None else bucket.grad.add_(total)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for all reductions and gives parts their gradients; None where no rank had one."""
        if self._thawed:
            self._take_thawed()
        self._accumulate_all()
        for param in self._anywhere():
            self._present.add(param)
        for reduction in self._reductions:
            bucket = reduction.bucket
            first = bucket.cuts[self.ranks.rank]
            start_of = dict(bucket.params)
            for part in bucket.parts:
                part.tensor.grad = None
                if bucket.grad is not None and part.param in self._present:
                    begin = start_of[part.param] + part.begin - first
                    run = bucket.grad[begin : begin + part.end - part.begin]
                    part.tensor.grad = run.as_strided(
                        part.tensor.shape, part.tensor.stride(), run.storage_offset()
                    )

    def _anywhere(self) -> list[Tensor]:
        """Parameters that had a gradient on some rank since gradients were cleared."""
        params = list(self._of)
        if self.ranks.size == 1 or not params:
            return []
        seen = torch.tensor([p in self._present for p in params], dtype=torch.int32)
        seen = seen.to(comm_device(self.ranks.group))
        with collective("agreeing on which parameters have gradients"):
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.ranks.group)
        return [p for p, here in zip(params, seen.tolist(), strict=True) if here]

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops the reduced gradients, or sets them to zero."""
        self._accumulate_all()
        for reduction in self._reductions:
            if set_to_none:
                reduction.bucket.grad = None
            elif reduction.bucket.grad is not None:
                reduction.bucket.grad.zero_()
        if set_to_none:
            self._present.clear()
