"""Reduces gradients to their owners while backward runs, with one reduction per bucket."""

import bisect
import copy
import weakref
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext._torch import call_at_end_of_backward, current_node, graph_task
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of
from torchopt_ext.state.collective import collective, comm_device, run, wait
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.part import Bucket, in_memory_order
from torchopt_ext.zero.ranks import Ranks

IN_FLIGHT = 2
"""The maximum number of reductions under way. Each holds a bucket's gradients of all ranks."""


class BackwardPasses:
    """Detects where backward passes begin and end, and orders the reducers of a process group.

    A pass ends with the outermost backward call. Reentrant activation checkpointing runs a graph
    task inside a node of another task. The inner task's callbacks see this node as the current node
    (NodeGuard in torch/csrc/autograd/engine.cpp). The outermost task's final callbacks see none.

    All ranks start a group's collectives in the same order: that in which reducers were built.
    Ranks may use different parameters and complete the buckets of several reducers in different
    orders, so reducers wait for the end of the pass. Only the first of them may start earlier, once
    all ranks know it as the first: they may drop an earlier reducer at different times.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Any, "BackwardPasses"]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._count = 0
        self._reducers: weakref.WeakSet[Any] = weakref.WeakSet()  # all of the group
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()  # those in the current pass
        self._task: int | None = None  # the graph task of the last gradient
        # Final callbacks by graph task. Only the task keeps a callback alive: an error drops it.
        self._callbacks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, group: Any) -> "BackwardPasses":
        return cls._of.setdefault(group, cls())

    def add(self, reducer: Any) -> None:
        reducer.number = self._count
        reducer.early = self._count == 0
        self._count += 1
        self._reducers.add(reducer)

    def is_first(self, reducer: Any) -> bool:
        """Returns whether this rank holds no earlier reducer."""
        return reducer.number == min(other.number for other in self._reducers)

    def enter(self, reducer: Any) -> bool:
        """Records a gradient. Returns whether it is the reducer's first in this pass."""
        task = graph_task()
        if task != self._task:
            if not self._callbacks:  # an error has ended the previous pass
                self.end()
            self._task = task
            self._call_at_end_of(task)
        if reducer in self._members:
            return False
        self._members.add(reducer)
        return True

    def _call_at_end_of(self, task: int) -> None:
        if task < 0 or task in self._callbacks:
            return
        here = weakref.ref(self)

        def ended() -> None:
            passes, node = here(), current_node()
            if passes is None:
                return
            if node is None:
                passes.end()
                return

            def left(*_: Any) -> None:
                passes = here()
                if passes is not None:
                    passes._callbacks.pop(-1, None)
                    passes._call_at_end_of(graph_task())

            node.register_hook(left)
            passes._callbacks[-1] = left

        self._callbacks[task] = ended
        call_at_end_of_backward(ended)

    def end(self) -> None:
        """Ends the pass. Every reducer starts its remaining reductions."""
        members = sorted(self._members, key=lambda member: member.number)
        self._members.clear()
        self._task = None
        for reducer in members:
            reducer.reduce_rest()


class Reducer:
    """Averages gradients over the ranks. Each rank keeps only its own elements.

    Gradients come from post-accumulate hooks, which free them at once (``hooks``), or from a DDP
    communication hook. Both follow the order of backward. Every backward pass reduces all buckets,
    from last to first, in the same order on every rank. :meth:`finish` reduces in the same way what
    parameters still have in ``grad``: gradients that were set by hand, that came before the
    parameter's hook or group, or that DDP has not reduced.
    """

    def __init__(
        self, ranks: Ranks, params: Parameters, buckets: list[Bucket], *, hooks: bool
    ) -> None:
        self.ranks, self.params = ranks, params
        self.buckets = buckets  # grows when a group is added
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
        hook = WeakHook(self, "_on_gradient")
        params: list[Any] = [*self.bucket_of] if self.hooks else []
        for param in params:
            if param.requires_grad and param not in self._hooked:
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
                self._hooked.add(param)

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
        staging = bucket.stage(self.ranks.size)
        place = bucket.places[param]
        kinds = [(of.shape, of.dtype, of.layout) for of in (gradient, place)]
        problem = bucket.problem(param, self.params.called)
        if problem or kinds[0] != kinds[1]:
            # Raising here would leave the other ranks waiting for this rank's reductions.
            self.wrong = problem or (
                f"the gradient of {self.params.called(param)} is {gradient.dtype}, "
                f"{gradient.layout}; expected {place.dtype}, dense"
            )
            gradient = torch.zeros_like(place)
        flat = in_memory_order(gradient, place)
        start, cuts = bucket.start(param), bucket.cuts
        end = start + flat.numel()
        for rank in range(bisect.bisect_right(cuts, start) - 1, bisect.bisect_left(cuts, end)):
            lo, hi = max(cuts[rank], start), min(cuts[rank + 1], end)
            first = rank * bucket.window + lo - cuts[rank]
            staging[first : first + hi - lo] += flat[lo - start : hi - start]
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
        staging = bucket.stage(self.ranks.size)
        bucket.staging, bucket.arrived = None, set()
        with collective("reducing gradients"):
            group = self.ranks.group
            if staging.is_cpu:
                # gloo's reduce-scatter is an all-reduce. An all-to-all sends only what is needed.
                received = torch.empty_like(staging)
                target, source = received.view(torch.uint8), staging.view(torch.uint8)
                work = dist.all_to_all_single(target, source, group=group, async_op=True)
            else:
                if staging.dtype == torch.float16:  # the sum could overflow; DDP divides, too
                    staging.div_(self.ranks.size)
                received = staging.new_empty(bucket.window)
                work = dist.reduce_scatter_tensor(received, staging, group=group, async_op=True)
        self._under_way.append((bucket, work, received))

    def _accumulate_oldest(self) -> None:
        """Waits for the oldest reduction and adds its average to this rank's gradient."""
        bucket, work, received = self._under_way.pop(0)
        with collective("reducing gradients", self.ranks.timeout):
            wait(work)
        lo, hi = bucket.range_of(self.ranks.rank)
        windows = [window[: hi - lo] for window in torch.split(received, bucket.window)]
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
                    begin = bucket.start(part.param) + part.begin - bucket.cuts[self.ranks.rank]
                    like = part.tensor
                    first = 0 if part.is_empty else begin
                    like.grad = bucket.grad.as_strided(like.shape, like.stride(), first)

    def _agree(self, late: list[Tensor]) -> bool:
        """Adds the parameters that other ranks used. Returns whether all ranks reduce ``late``.

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
