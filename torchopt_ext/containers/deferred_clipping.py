"""Deferred gradient clipping: a call before the step only measures the norm, and the step clips.

torchtitan's Trainers clip between backward and step (torchtitan/train.py, train_step), which reads
every gradient twice and writes it once before the step reads it again. A deferred call reads the
gradients once, for the norm. The step multiplies them while it reads them anyway.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext.containers.in_backward import OptimizersInBackwardContainer
from torchopt_ext.containers.optimizers import (
    ClipsInStep,
    OptimizersContainer,
    all_containers,
    make_latest,
)
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.step import measure_norm
from torchopt_ext.state.params import params_of


class DeferredClipping:
    """Clips a container's gradients in its steps, to the norm that :meth:`clip` was given.

    A call counts for one step: the next step that succeeds. Of several calls before a step the
    smallest `max_norm` counts, as for gradients that are clipped several times. `zero_grad` cancels
    the calls. A step without a call before it clips nothing.

    Args:
        optimizers: the container's optimizers: FusedAdam or FusedAdamW without `max_grad_norm`.

    Raises:
        ValueError: an optimizer is of another class, or has `max_grad_norm`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers: list[FusedOptimizer] = []
        for optimizer in optimizers:
            if not isinstance(optimizer, FusedOptimizer):
                raise ValueError(
                    f"deferred clipping needs FusedAdam or FusedAdamW, found "
                    f"{type(optimizer).__name__}, whose step cannot clip"
                )
            if optimizer.max_grad_norm is not None:
                raise ValueError(
                    f"deferred clipping takes its threshold from the call before each step, but "
                    f"max_grad_norm is {optimizer.max_grad_norm}: leave out one of the two"
                )
            self._optimizers.append(optimizer)
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
        self.forget()
        for optimizer in self._optimizers:
            if process_group is not None:
                optimizer.process_group = process_group
            optimizer.max_grad_norm = max_norm
        self._measured = measure_norm(self._optimizers)
        self._max_norm = max_norm
        # Prefer an optimizer with parameters: without parameters, control blocks are on the host.
        first = max(self._optimizers, key=lambda opt: bool(opt.param_groups[0]["params"]))
        total = ops.accumulator_total(self._measured[first.default_device])
        return total.sqrt() / first.control.loss_scale

    def for_step(self, context: StepContext, *, new_gradients: bool) -> StepContext:
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
        if new_gradients or not context.is_plain:
            return context
        return context._replace(measured=self._measured)

    def forget(self) -> None:
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
    make_latest(container)
    return container.deferred_clipping


def take_over(module: Any) -> None:
    """Replaces `clip_grad_norm_` of torchtitan's `distributed.utils`, in 0.2 and 0.3.

    A call with exactly the parameters of a container with deferred clipping then measures their
    norm for the container's next step. A call with the parameters of a container in backward
    returns the norm that it measured: torchtitan would see no gradients, and a norm of 0.
    torchtitan's function handles every other call: other parameters that have gradients, another
    norm than the 2-norm, `error_if_nonfinite`, and a `max_norm` that is not above 0. The choice
    must be the same on all ranks.
    """
    stock: Callable[..., Tensor] = module.clip_grad_norm_
    if getattr(stock, "torchopt_ext_defers", False):
        return

    @functools.wraps(stock)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        pp_mesh: Any = None,
        ep_enabled: bool = False,
    ) -> Tensor:
        # A generator can be read only once.
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        container = _container_of(params)
        alike = norm_type == 2.0 and not error_if_nonfinite and max_norm > 0.0
        if container is None or not alike:
            return stock(
                params, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh, ep_enabled
            )
        if container.deferred_clipping is None:
            return container.control.grad_norm  # of the update that backward has made
        group = None if pp_mesh is None else pp_mesh.get_group()
        return container.deferred_clipping.clip(max_norm, group)

    clip_grad_norm_.torchopt_ext_defers = True  # type: ignore[attr-defined]
    module.clip_grad_norm_ = clip_grad_norm_


def _container_of(parameters: Sequence[Tensor]) -> OptimizersContainer[Any] | None:
    """Returns the container that clips exactly these parameters, or None if torchtitan clips them.

    Their container decides, whether it defers clipping or not. Parameters that it does not step may
    come along if they have no gradients. If several containers match, it is the one with the most
    parameters, because a stage may train none. If several have as many, it is the latest, because
    an older one may not be collected yet.
    """
    given, most = set(map(id, parameters)), -1
    decides: OptimizersContainer[Any] | None = None
    for container in [*all_containers]:
        own = set(map(id, params_of(container)))
        if len(own) < most or not own <= given:
            continue
        if all(p.grad is None for p in parameters if id(p) not in own):
            decides, most = container, len(own)
    if isinstance(decides, OptimizersInBackwardContainer):
        # Gradients that backward has left are not in the norm that it measured.
        measured = decides.measures_norm and all(p.grad is None for p in parameters)
        return decides if measured else None
    return None if decides is None or decides.deferred_clipping is None else decides
