"""Deferred gradient clipping: a call before the step only measures the norm, and the step clips.

torchtitan's Trainers clip between backward and step (torchtitan/train.py, train_step), which reads
every gradient twice and writes it once before the step reads it again. A deferred call reads the
gradients once, for the norm. The step multiplies them while it reads them anyway.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext.containers.in_backward import OptimizersInBackwardContainer
from torchopt_ext.containers.optimizers import ClipsInStep, OptimizersContainer
from torchopt_ext.containers.weights import fused_of
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.step import measure_norm

__all__ = ["DeferredClipping", "defer_clipping"]


class DeferredClipping:
    """Clips a container's gradients in its steps, to the norm that :meth:`clip` was given.

    A call counts for one step: the next step that succeeds. Of several calls before a step the
    smallest `max_norm` counts, as for gradients that are clipped several times. `zero_grad` cancels
    the calls. A step without a call before it clips nothing.

    Args:
        optimizers: the container's optimizers: fused optimizers without `max_grad_norm`.

    Raises:
        ValueError: an optimizer is of another class, or has `max_grad_norm`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = fused_of(optimizers)
        for optimizer in optimizers:
            if not isinstance(optimizer, FusedOptimizer):
                raise ValueError(
                    f"deferred clipping needs fused optimizers, found "
                    f"{type(optimizer).__name__}, whose step cannot clip"
                )
            if optimizer.max_grad_norm is not None:
                raise ValueError(
                    f"deferred clipping takes its threshold from the call before each step, but "
                    f"max_grad_norm is {optimizer.max_grad_norm}: leave out one of the two"
                )
        self._max_norm: float | None = None  # of the calls for the next step
        self._measured: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def clip(self, max_norm: float, process_group: Any = None) -> Tensor:
        """Measures the norm of all gradients, and makes the next step clip them to `max_norm`.

        The gradients are not changed, and must not change until the step. All ranks that share the
        norm must call this.

        Args:
            max_norm: above 0; infinity only measures the norm.
            process_group: ranks that hold other parameters, such as pipeline stages, as in
                FusedAdamW; by default the optimizers' own group.

        Returns:
            The norm over all shards and the group before clipping: 0-dim, float64, on the first
            parameter's device. It is complete, and later calls do not change it.

        Raises:
            ValueError: `max_norm` is not above 0.
            RuntimeError: a gradient does not fit its parameter, on this rank or another rank.
        """
        if not max_norm > 0.0:
            raise ValueError(f"max_norm is {max_norm}, expected a number above 0")
        max_norm = min(float(max_norm), self._max_norm or math.inf)
        self._forget()
        for optimizer in self._optimizers:
            if process_group is not None:
                optimizer.process_group = process_group
            optimizer.max_grad_norm = max_norm
        self._measured = measure_norm(self._optimizers)
        self._max_norm = max_norm
        # Prefer an optimizer with parameters: without parameters, control blocks are on the host.
        first = max(self._optimizers, key=lambda opt: bool(opt.param_groups[0]["params"]))
        total = ops.accumulator_total(self._measured[first._default_device])
        return total.sqrt() / first.control.loss_scale

    def _for_step(self, context: StepContext, *, new_gradients: bool) -> StepContext:
        """Returns the context of a step, which clips if :meth:`clip` was called.

        Args:
            context: the step's context without clipping. A scaler adds flags to the sums that ranks
                exchange, so its step measures the norm again.
            new_gradients: a closure will compute the gradients.
        """
        if self._max_norm is None:
            for optimizer in self._optimizers:
                optimizer.max_grad_norm = None
            return context
        if new_gradients or not context.is_default:
            return context
        return context._replace(measured=self._measured)

    def _forget(self) -> None:
        """Cancels the calls for the next step."""
        self._max_norm, self._measured = None, {}


def defer_clipping(container: OptimizersContainer[Any]) -> ClipsInStep:
    """Makes a container clip in its steps when `clip` of the returned object was called.

    Raises:
        TypeError: `container` is not an OptimizersContainer, or steps in backward.
        ValueError: its optimizers cannot clip this way, as in :class:`DeferredClipping`.
    """
    in_backward = isinstance(container, OptimizersInBackwardContainer)
    if in_backward or not isinstance(container, OptimizersContainer):
        kind = type(container).__name__
        raise TypeError(f"deferred clipping needs an OptimizersContainer, found a {kind}")
    if container.deferred_clipping is None:
        container.deferred_clipping = DeferredClipping(container.optimizers)
    return container.deferred_clipping
