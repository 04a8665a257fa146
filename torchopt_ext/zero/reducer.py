"""Gradients reduced to their owners while backward runs: one reduction a bucket."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext._torch import graph_task
from torchopt_ext.optim.collective import collective, comm_device, run, wait
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of
from torchopt_ext.zero.backward import BackwardPasses
from torchopt_ext.zero.bucket import Bucket
from torchopt_ext.zero.part import in_memory_order
from torchopt_ext.zero.ranks import Ranks

IN_FLIGHT = 2
"""Reductions under way at a time: each holds a bucket's gradients of all ranks."""


class Reduction:
    """A bucket's gradients of one backward pass on their way.

    Attributes:
        staging: for each rank a window with its elements; freed once reduced.
        arrived: parameters whose gradient is in it.
        work, received: the collective under way, and what it fills.
    """

    def __init__(self, bucket: Bucket, number: int) -> None:
        self.bucket = bucket
        self.number = number
        self.staging: Tensor | None = None
        self.arrived: set[Tensor] = set()
        self.work: Any = None
        self.received: Tensor | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every trainable parameter's gradient has arrived."""
        return all(p in self.arrived or not p.requires_grad for p, _ in self.bucket.params)


class Reducer:
    """Averages gradients over the ranks; each keeps its own elements only.

    Gradients come from post-accumulate hooks, which free them at once (``hooks``), or from a DDP
    communication hook, in either case in the order of backward. Buckets are reduced in the order
    last to first, on every rank alike, and all of them in every backward pass.

    Args:
        ranks: among whom.
        hooks: put hooks on the parameters.

    Attributes:
        active: gradients come here.
        number, alone, early: see backward.Reduces.
        wrong: what is wrong with a gradient, for :meth:`finish` to raise.
    """

    def __init__(self, ranks: Ranks, hooks: bool) -> None:
        self.ranks = ranks
        self.hooks = hooks
        self.active = hooks
        self.passes = BackwardPasses.of(ranks.group)
        self.number = self.passes.number() if hooks else 0
        self.alone = False
        self.early = False
        self._reductions: list[Reduction] = []
        self._of: dict[Tensor, tuple[Reduction, int]] = {}
        self._under_way: list[Reduction] = []  # oldest first
        self._present: set[Tensor] = set()
        self.wrong: str | None = None
        self._stepped = False  # whether a step has used the gradients that are there
        self._next = -1  # the bucket to reduce next, in this backward pass
        self._hooked: set[Tensor] = set()
        self._unfrozen: list[Tensor] = []  # whose first gradient came before their hook
        self._handles = handles_of(self)

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Takes charge of further buckets."""
        for bucket in buckets:
            reduction = Reduction(bucket, len(self._reductions))
            self._reductions.append(reduction)
            for param, start in bucket.params:
                self._of[param] = (reduction, start)

    def install(self) -> None:
        """Puts hooks on the trainable parameters, before any backward pass."""
        self.hook_trainable()
        self._unfrozen.clear()

    def serve_hook(self) -> None:
        """Prepares for gradients from a DDP communication hook, which brings those of unused
        parameters, too: parameters themselves say which were used."""
        self.number = self.passes.number()
        self.active = True
        note = WeakHook(self, "_note_used")
        for param in self._of:
            if param.requires_grad:
                hooked: Any = param
                self._handles.append(hooked.register_post_accumulate_grad_hook(note))

    def _note_used(self, param: Tensor) -> None:
        self._present.add(param)

    def hook_trainable(self) -> None:
        """Puts hooks on parameters that have become trainable."""
        if not self.hooks:
            return
        take = WeakHook(self, "_on_gradient")
        for param in self._of:
            if param.requires_grad and param not in self._hooked:
                hooked: Any = param
                self._handles.append(hooked.register_post_accumulate_grad_hook(take))
                self._hooked.add(param)
                self._unfrozen.append(param)

    def _on_gradient(self, param: Tensor) -> None:
        gradient = param.grad
        if gradient is None:
            raise RuntimeError(
                f"another optimizer has taken the gradient of a parameter of shape "
                f"{tuple(param.shape)}: only one may have sharded_gradients=True for it"
            )
        param.grad = None
        self._present.add(param)
        self.take(param, gradient)

    @torch.no_grad()
    def take(self, param: Tensor, gradient: Tensor) -> None:
        """Takes a parameter's gradient of the backward pass under way; it may be freed after this.

        Raises:
            RuntimeError: the parameter is unknown, or gradients of the last step were not cleared.
                A gradient of another dtype or layout makes :meth:`finish` raise.
        """
        if param not in self._of:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has a gradient but is not in the "
                f"sharded optimizer: give it all of the model's parameters"
            )
        self._begin()
        reduction, start = self._of[param]
        bucket = reduction.bucket
        if reduction.number > self._next:  # reduced already: reentrant segments share the parameter
            self.reduce_rest()
            self._next = len(self._reductions) - 1
        if reduction.staging is None:
            size = self.ranks.size * bucket.window
            reduction.staging = torch.zeros(size, dtype=param.dtype, device=param.device)
        if gradient.layout is not torch.strided or gradient.dtype != param.dtype:
            # To raise here would leave the other ranks waiting for this one's reductions.
            self.wrong = (
                f"the gradient of a parameter of shape {tuple(param.shape)} is {gradient.dtype}, "
                f"{gradient.layout}; expected {param.dtype}, dense"
            )
            gradient = torch.zeros_like(param)
        flat = in_memory_order(gradient, param)
        rank = bisect.bisect_right(bucket.cuts, start) - 1
        while rank < self.ranks.size and bucket.cuts[rank] < start + flat.numel():
            lo, hi = bucket.cuts[rank], bucket.cuts[rank + 1]
            begin, end = max(lo - start, 0), min(hi - start, flat.numel())
            if begin < end:
                first = rank * bucket.window + start + begin - lo
                reduction.staging[first : first + end - begin] += flat[begin:end]
            rank += 1
        reduction.arrived.add(param)
        while self.early and self._next >= 0 and self._reductions[self._next].is_complete:
            self._start(self._reductions[self._next])

    def _begin(self) -> None:
        """Notices the beginning of a backward pass."""
        if self._stepped and graph_task() < 0:  # DDP's join hook, on a rank out of data
            self.zero_grad(set_to_none=True)
        if not self.passes.enter(self):
            return
        if self._stepped:
            raise RuntimeError(
                "the gradients of the last step are still there: call the optimizer's "
                "zero_grad() after each step; the model's does not reach them"
            )
        self._next = len(self._reductions) - 1

    def reduce_rest(self) -> None:
        """Starts what the backward pass has left, so that all ranks reduce all buckets."""
        while self._next >= 0:
            self._start(self._reductions[self._next])

    def _take_unfrozen(self) -> None:
        """Reduces the gradients that unfrozen parameters got before they had hooks."""
        self._begin()
        for param in self._unfrozen:
            if param.grad is not None:
                self._on_gradient(param)
        self._unfrozen.clear()
        self.passes.end()

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
            if staging.is_cpu:
                # gloo reduces-scatters by an all-reduce; this moves what is needed, and no more.
                reduction.received = torch.empty_like(staging)
                reduction.work = dist.all_to_all_single(
                    reduction.received.view(torch.uint8),
                    staging.view(torch.uint8),
                    group=self.ranks.group,
                    async_op=True,
                )
            else:
                if staging.dtype == torch.float16:  # whose sum could overflow; as DDP does
                    staging.div_(self.ranks.size)
                reduction.received = staging.new_empty(bucket.window)
                reduction.work = dist.reduce_scatter_tensor(
                    reduction.received, staging, group=self.ranks.group, async_op=True
                )

    def _accumulate_all(self) -> None:
        while self._under_way:
            self._accumulate(self._under_way[0])

    def _accumulate(self, reduction: Reduction) -> None:
        """Waits for a reduction and adds its average to this rank's gradient."""
        with collective("reducing gradients", self.ranks.timeout):
            wait(reduction.work)
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
        if received.is_cpu or received.dtype != torch.float16:
            total.div_(self.ranks.size)
        total = total.to(received.dtype)
        bucket.grad = total if bucket.grad is None else bucket.grad.add_(total)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for all reductions and gives parts their gradients; None where no rank had one.

        Raises:
            RuntimeError: a gradient does not fit its parameter.
        """
        self.passes.end()
        if self._unfrozen:
            self._take_unfrozen()
        self._accumulate_all()
        self._present |= self._used_elsewhere()
        if self.wrong is not None:
            raise RuntimeError(self.wrong)
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

    def _used_elsewhere(self) -> set[Tensor]:
        """Parameters that other ranks used since gradients were cleared, and this one did not."""
        params = list(self._of)
        if self.ranks.size == 1 or not params:
            return set()
        seen = torch.tensor([p in self._present for p in params], dtype=torch.int32)
        complete = all(p in self._present or not p.requires_grad for p in params)
        seen = seen.to(comm_device(self.ranks.group))
        with collective("agreeing on which parameters have gradients", self.ranks.timeout):
            run(dist.all_reduce, seen, dist.ReduceOp.MAX, group=self.ranks.group)
        if complete:  # then the answer is known, and nobody waits for the device
            return set()
        return {p for p, here in zip(params, seen.tolist(), strict=True) if here}

    def mark_stepped(self) -> None:
        """Says that a step has used the gradients."""
        self._stepped = self.active

    def copy_gradients_of(self, other: "Reducer", copies: Mapping[Tensor, Tensor]) -> None:
        """Takes over what ``other`` has reduced; ``copies`` of its parameters are ours."""
        other.passes.end()
        other._accumulate_all()
        self.active = other.active
        self._present = {copies[param] for param in other._present}
        for mine, theirs in zip(self._reductions, other._reductions, strict=True):
            grad = theirs.bucket.grad
            mine.bucket.grad = None if grad is None else grad.clone()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops the reduced gradients, or sets them to zero."""
        self.passes.end()
        self._accumulate_all()
        self._stepped, self.wrong = False, None
        for reduction in self._reductions:
            if set_to_none:
                reduction.bucket.grad = None
            elif reduction.bucket.grad is not None:
                reduction.bucket.grad.zero_()
        if set_to_none:
            self._present.clear()
