"""Reduces gradients to their owners while backward runs, with one reduction per bucket."""

import bisect
import copy
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext.optim.weak_hooks import WeakHook, handles_of
from torchopt_ext.state.collective import collective, comm_device, run, wait
from torchopt_ext.zero.backward import BackwardPasses
from torchopt_ext.zero.bucket import Bucket
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.part import in_memory_order
from torchopt_ext.zero.ranks import Ranks

IN_FLIGHT = 2
"""The maximum number of reductions under way. Each holds a bucket's gradients of all ranks."""


class Reducer:
    """Averages gradients over the ranks. Each rank keeps only its own elements.

    Gradients come from post-accumulate hooks, which free them at once (``hooks``), or from a DDP
    communication hook. Both follow the order of backward. Every backward pass reduces all buckets,
    from last to first, in the same order on every rank. :meth:`finish` reduces in the same way what
    parameters still have in ``grad``: gradients that were set by hand, that came before the
    parameter's hook or group, or that DDP has not reduced.

    ``hooks`` are put on the parameters. ``buckets`` grows when a group is added.
    """

    def __init__(
        self, ranks: Ranks, params: Parameters, buckets: list[Bucket], *, hooks: bool
    ) -> None:
        self.ranks = ranks
        self.params = params
        self.buckets = buckets
        self.hooks = hooks
        self.active = hooks  # the reducer receives the gradients
        self.bucket_of: dict[Tensor, Bucket] = {}
        self.passes = BackwardPasses.of(ranks.group)
        self.number = -1  # the place among the group's reducers, the same on all ranks
        self.early = False  # starts reductions before the pass ends, on all ranks
        self.stepped = False  # a step has used the current gradients
        self.wrong: str | None = None  # an error about a gradient, which finish() raises
        # Buckets, their collectives and the tensors that these fill, oldest first.
        self._under_way: list[tuple[Bucket, Any, Tensor]] = []
        self.present: set[Tensor] = set()  # have a gradient, on any rank after finish()
        self._next = -1  # the bucket to reduce next, in this backward pass
        self._hooked: set[Tensor] = set()
        self._handles = handles_of(self)
        if hooks:
            self.passes.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        params, buckets = copy.deepcopy((self.params, self.buckets), memo)
        copied = type(self)(self.ranks, params, buckets, hooks=self.hooks)
        copied.active, copied.stepped = self.active, self.stepped
        copied.bucket_of = copy.deepcopy(self.bucket_of, memo)
        copied.present = copy.deepcopy(self.present, memo)
        copied.hook_trainable()
        return copied

    def hook_trainable(self) -> None:
        """Puts hooks on parameters that have become trainable."""
        if not self.hooks:
            return
        hook = WeakHook(self, "_on_gradient")
        found = [p for p in self.bucket_of if p.requires_grad and p not in self._hooked]
        for param in found:
            hooked: Any = param
            self._handles.append(hooked.register_post_accumulate_grad_hook(hook))
        self._hooked.update(found)

    def _on_gradient(self, param: Tensor) -> None:
        gradient = param.grad
        if gradient is None:
            raise RuntimeError(
                f"another optimizer has taken the gradient of {self.params.called(param)}: only "
                f"one may have sharded_gradients=True for it"
            )
        param.grad = None
        self.present.add(param)
        self.take(param, gradient)

    @torch.no_grad()
    def take(self, param: Tensor, gradient: Tensor) -> None:
        """Takes a parameter's gradient in backward. The caller may free the gradient afterwards.

        Raises:
            RuntimeError: the parameter is unknown, or gradients of the last step were not cleared.
                A gradient of another dtype or layout makes :meth:`finish` raise.
        """
        bucket = self.bucket_of.get(param)
        if bucket is None:
            raise RuntimeError(
                f"{self.params.called(param)} has a gradient but is not in the sharded optimizer: "
                f"give it all of the model's parameters"
            )
        self._begin()
        if bucket.number > self._next:  # reduced already: reentrant segments share the parameter
            self.reduce_rest()
            self._next = len(self.buckets) - 1
        if bucket.staging is None:
            bucket.staging = bucket.flat.new_zeros(self.ranks.size * bucket.window)
        if gradient.layout is not torch.strided or gradient.dtype != param.dtype:
            # Raising here would leave the other ranks waiting for this rank's reductions.
            self.wrong = (
                f"the gradient of {self.params.called(param)} is {gradient.dtype}, "
                f"{gradient.layout}; expected {param.dtype}, dense"
            )
            gradient = torch.zeros_like(param)
        flat = in_memory_order(gradient, param)
        start = bucket.starts[param]
        end = start + flat.numel()
        cuts = bucket.cuts
        for rank in range(bisect.bisect_right(cuts, start) - 1, bisect.bisect_left(cuts, end)):
            lo, hi = max(cuts[rank], start), min(cuts[rank + 1], end)
            first = rank * bucket.window + lo - cuts[rank]
            bucket.staging[first : first + hi - lo] += flat[lo - start : hi - start]
        bucket.arrived.add(param)
        while self.early and self._next >= 0 and self.buckets[self._next].is_complete:
            self._start_next()

    def _begin(self) -> None:
        """Detects the beginning of a backward pass."""
        if not self.passes.enter(self):
            return
        if self.stepped:
            raise RuntimeError(
                "the gradients of the last step are still there: call the optimizer's "
                "zero_grad() after each step; the model's does not reach them"
            )
        self._next = len(self.buckets) - 1

    def reduce_rest(self) -> None:
        """Starts the pass's remaining reductions, so that all ranks reduce all buckets."""
        while self._next >= 0:
            self._start_next()

    def _start_next(self) -> None:
        """Starts the reduction of the next bucket. Skips buckets that were never trainable."""
        bucket = self.buckets[self._next]
        self._next -= 1
        if not bucket.note_trainable():
            return
        if len(self._under_way) == IN_FLIGHT:
            self._accumulate_oldest()
        staging = bucket.staging
        if staging is None:
            staging = bucket.flat.new_zeros(self.ranks.size * bucket.window)
        bucket.staging, bucket.arrived = None, set()
        with collective("reducing gradients"):
            if staging.is_cpu:
                # gloo's reduce-scatter is an all-reduce. An all-to-all sends only what is needed.
                received = torch.empty_like(staging)
                work = dist.all_to_all_single(
                    received.view(torch.uint8),
                    staging.view(torch.uint8),
                    group=self.ranks.group,
                    async_op=True,
                )
            else:
                if staging.dtype == torch.float16:  # the sum could overflow; DDP divides, too
                    staging.div_(self.ranks.size)
                received = staging.new_empty(bucket.window)
                work = dist.reduce_scatter_tensor(
                    received, staging, group=self.ranks.group, async_op=True
                )
        self._under_way.append((bucket, work, received))

    def _accumulate_oldest(self) -> None:
        """Waits for the oldest reduction and adds its average to this rank's gradient."""
        bucket, work, received = self._under_way.pop(0)
        with collective("reducing gradients", self.ranks.timeout):
            wait(work)
        rank = self.ranks.rank
        count = bucket.cuts[rank + 1] - bucket.cuts[rank]
        windows = [window[:count] for window in torch.split(received, bucket.window)]
        wide = torch.promote_types(received.dtype, torch.float32)
        total = windows[0].to(wide, copy=True)
        for window in windows[1:]:  # in the order of ranks
            total += window
        if received.is_cpu or received.dtype != torch.float16:
            total.div_(self.ranks.size)
        total = total.to(received.dtype)
        bucket.grad = total if bucket.grad is None else bucket.grad.add_(total)

    @torch.no_grad()
    def settle(self) -> None:
        """Ends the backward pass, and waits for all reductions."""
        self.passes.end()
        while self._under_way:
            self._accumulate_oldest()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for all reductions and sets the parts' gradients; None if no rank had a gradient.

        Raises:
            RuntimeError: a gradient does not fit its parameter.
        """
        self.settle()
        late = [p for p, bucket in self.bucket_of.items() if p.grad is not None and bucket.sent]
        problem = self.wrong
        for param in self.present.intersection(late):
            problem = (
                f"{self.params.called(param)} has a gradient in p.grad, and another that was "
                f"reduced to its owners: call the optimizer's zero_grad() before you set "
                f"gradients, and let a pass that reduces follow those under no_sync()"
            )
        if self._agree(late if problem is None else []):
            self.stepped = False  # this step may use the last step's gradients again
            self._begin()
            for param in late:
                self._on_gradient(param)
            self.settle()
        elif late and problem is None:
            problem = (
                "this rank has gradients in p.grad that were not reduced, and another rank has "
                "none or rejects the step: set gradients on all ranks, or on none"
            )
        if problem := problem or self.wrong:
            raise RuntimeError(problem)
        for bucket in self.buckets:
            for part in bucket.parts:
                part.tensor.grad = None
                if bucket.grad is not None and part.param in self.present:
                    begin = bucket.starts[part.param] + part.begin - bucket.cuts[self.ranks.rank]
                    like = part.tensor
                    like.grad = bucket.grad.as_strided(like.shape, like.stride(), begin)

    def _agree(self, late: list[Tensor]) -> bool:
        """Adds the parameters that other ranks used. Returns whether all ranks reduce once more.

        Args:
            late: parameters with a gradient that this rank can reduce in addition.

        Ranks also agree on whether the reducer may start early, from the next pass on.
        """
        params, reduces, first = list(self.bucket_of), bool(late), self.passes.is_first(self)
        if self.ranks.size == 1:
            self.early = first
            return reduces
        here = self.present.union(late)
        flags = [not first, not reduces, *(p in here for p in params)]
        seen = torch.tensor(flags, dtype=torch.int32).to(comm_device(self.ranks.group))
        complete = all(p in here or not p.requires_grad for p in params)
        with collective("agreeing on which parameters have gradients", self.ranks.timeout):
            run(dist.all_reduce, seen, dist.ReduceOp.MAX, group=self.ranks.group)
        if complete and not reduces and (self.early or not first):  # known without the device
            return False
        waits, differ, *used = seen.tolist()
        self.early = not waits
        if reduces and differ:
            return False
        self.present.update(p for p, of_any in zip(params, used, strict=True) if of_any)
        return reduces

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops the reduced gradients, or sets them to zero."""
        self.settle()
        self.stepped, self.wrong = False, None
        for bucket in self.buckets:
            if set_to_none:
                bucket.grad = None
            elif bucket.grad is not None:
                bucket.grad.zero_()
        if set_to_none:
            self.present.clear()
