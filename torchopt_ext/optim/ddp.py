"""The gradient norm under DistributedDataParallel, measured bucket by bucket."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from torchopt_ext._C import TensorMark
from torchopt_ext._torch import call_at_end_of_backward, graph_task, run_eagerly
from torchopt_ext.optim.arguments import inner_optimizer
from torchopt_ext.optim.local import params_of
from torchopt_ext.optim.norm_in_backward import NormInBackward

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], Future]


def norm_hook(optimizer: Any, hook: Hook = allreduce_hook) -> Hook:
    """Returns a DDP communication hook that measures gradients as soon as they are reduced.

    Register it by ``ddp.register_comm_hook(None, norm_hook(optimizer))``. Parameters that are added
    to the optimizer later are measured in the step.

    Args:
        optimizer: FusedAdam, FusedAdamW or a container of them, built with ``norm_in_backward``.
        hook: another communication hook, which reduces the gradients; it gets DDP's state.

    Raises:
        ValueError: the optimizer was built without ``norm_in_backward=True``.
    """
    optimizer = inner_optimizer(optimizer)
    found: dict[int, NormInBackward] = {}
    for one in getattr(optimizer, "optimizers", [optimizer]):
        squares = getattr(one, "norm_in_backward", None)
        if squares is None:
            raise ValueError(
                f"norm_hook needs an optimizer built with norm_in_backward=True, found "
                f"{type(one).__name__} without"
            )
        found |= {id(param): squares for param in params_of(one)}
    norms = _BucketNorms(found, hook)

    @run_eagerly
    def measuring_hook(state: Any, bucket: GradBucket) -> Future:
        return norms.reduce(state, bucket)

    # DDP recognizes a hook that needs bfloat16 by its name.
    measuring_hook.__name__ = getattr(hook, "__name__", measuring_hook.__name__)
    return measuring_hook


class _BucketNorms:
    def __init__(self, squares_of: dict[int, NormInBackward], hook: Hook) -> None:
        self._squares_of = squares_of  # by the parameter's id
        self._hook = hook
        self._task: int | None = None  # the backward pass under way
        # The measured parameters, their parts of the bucket, their gradients before the reduction.
        self._measured: list[tuple[Tensor, Tensor, TensorMark | None]] = []

    def reduce(self, state: Any, bucket: GradBucket) -> Future:
        future = self._hook(state, bucket)
        chosen: defaultdict[NormInBackward, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for param, gradient in zip(bucket.parameters(), bucket_gradients(bucket), strict=True):
            squares = self._squares_of.get(id(param))
            if squares is None:
                continue
            if graph_task() < 0:  # DDP's join hook: this rank's gradients stay as they are
                squares.spoil()
            elif squares.is_last(param):
                chosen[squares].append((param, gradient))
                before = None if param.grad is None else TensorMark(param.grad)
                self._expect_end()
                self._measured.append((param, gradient, before))
        if not chosen:
            return future
        buffer = bucket.buffer()

        def measure(done: Any) -> Tensor:
            value = done.value()
            reduced = value[0] if isinstance(value, list) else value
            if reduced.data_ptr() != buffer.data_ptr():
                buffer.copy_(reduced)
            for squares, pairs in chosen.items():
                squares.measure(pairs)
            return buffer

        return future.then(measure)

    def _expect_end(self) -> None:
        """Schedules :meth:`_mark` for the end of backward, after DDP's own callback."""
        if (task := graph_task()) != self._task:
            self._task = task
            self._measured.clear()
            call_at_end_of_backward(lambda: call_at_end_of_backward(self._mark))

    def _mark(self) -> None:
        """Marks the gradients that DDP has set to the measured values."""
        self._task = None
        while self._measured:
            param, part, before = self._measured.pop()
            if param.grad is None:  # no rank has used the parameter: zeros were measured
                continue
            viewed = param.grad.data_ptr() == part.data_ptr()
            written = viewed or before is None or not before.fits(param.grad)
            if written and param.grad.dtype == part.dtype:
                self._squares_of[id(param)].mark(param, param.grad)
            else:  # no rank has used the parameter, so DDP has left its gradient unchanged
                self._squares_of[id(param)].spoil()


def bucket_gradients(bucket: GradBucket) -> list[Tensor]:
    """Returns a bucket's gradients with the strides of its parameters.

    DDP's bucket holds a dense gradient in the parameter's own order of dimensions, but
    ``bucket.gradients()`` assumes the contiguous order (torch/csrc/distributed/c10d/reducer.cpp and
    comm.hpp). So it would return channels_last gradients with their elements shuffled.
    """
    return [
        gradient.as_strided(param.shape, param.stride(), gradient.storage_offset())
        if torch.ops.aten.is_non_overlapping_and_dense(param)
        else gradient
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
