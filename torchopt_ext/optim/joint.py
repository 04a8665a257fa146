"""Several optimizers stepped by one call of the engine, each as if it were stepped separately."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import unwrap
from operator import itemgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._C import clear_gradients
from torchopt_ext._torch import any_step_hooks, mark_step_for_schedulers
from torchopt_ext.ops import CONTROL_FIELDS
from torchopt_ext.optim.context import ALONE, amp_context
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.hooks import is_patched
from torchopt_ext.optim.placed_states import PlacedStates
from torchopt_ext.optim.step import fused_step
from torchopt_ext.state.algorithms import algorithm_of, keys_of
from torchopt_ext.state.devices import moved
from torchopt_ext.state.params import drop_replaced
from torchopt_ext.state.storage import Storage, place_of

_STEPS = CONTROL_FIELDS.index("steps")
_DECISION = slice(CONTROL_FIELDS.index("grad_norm"), _STEPS)  # grad_norm to grad_scale
_PLAIN = {"max_grad_norm": 0.0, "skip_nonfinite": 0.0}


def has_own_step(optimizer: Any) -> TypeGuard[FusedOptimizer]:
    """Returns whether ``optimizer`` is a FusedAdam whose class does not override the step."""
    return isinstance(optimizer, FusedOptimizer) and unwrap(type(optimizer).step) is unwrap(
        FusedOptimizer.step
    )


def can_join(optimizer: Any) -> TypeGuard[FusedOptimizer]:
    """Returns whether a :class:`JointStep` can step it: one parameter, with FusedAdam's step."""
    return (
        has_own_step(optimizer)
        and not optimizer._options.track  # telemetry reads the optimizer's own plan
        and [len(group["params"]) for group in optimizer.param_groups] == [1]
        # The call costs little beside the products, and control counts the optimizer's matrices.
        and not algorithm_of(optimizer.param_groups[0]).steps_matrices
    )


def only_param(optimizer: Optimizer) -> Tensor:
    """Returns the parameter of an optimizer that has exactly one."""
    (param,) = optimizer.param_groups[0]["params"]
    return param


class JointStep(PlacedStates):
    """One plan for several optimizers of one parameter each, which stay separate optimizers.

    Every step reads their groups and state again, so hyperparameters may differ and change. If an
    optimizer has more to do than an update, all are stepped one by one: hooks, a norm, a schedule
    or loss scale of its own, a patched `step`.

    Args:
        optimizers: optimizers for which :func:`can_join` holds, built with equal arguments. The
            parameters are on one device and, if they are DTensors, split over the same ranks.
    """

    state: dict[Tensor, Any]  # type: ignore[assignment]

    def __init__(self, optimizers: Sequence[FusedOptimizer]) -> None:
        # Does not call Optimizer.__init__: nobody sees this object's groups and hooks.
        self.optimizers = list(optimizers)
        self.params: list[Tensor] = [only_param(opt) for opt in optimizers]
        for optimizer in optimizers:
            optimizer._select_fp32_moments()
        self._storage = self._common_storage()
        self._options = optimizers[0]._options
        self.parameter_names = [names for opt in optimizers for names in opt.parameter_names]
        self._init_control()
        # A group that stands for all.
        named = {"param_names": [name for names in self.parameter_names for name in names]}
        self._common: dict[str, Any] = {"params": self.params, **named}
        # The keys of groups that a plan reads (csrc/python/optimizer_plan.cpp).
        group = optimizers[0].param_groups[0]
        keys = keys_of(algorithm_of(group).name)
        self._keys = [key for key in keys if key in group]
        self._unusual = [key for key in keys if key not in group]
        self._read = itemgetter(*self._keys)
        self._stacked_controls: Tensor | None = None  # the optimizers' control blocks, stacked

    def step_gradients(
        self, gradients: Mapping[int, Tensor | None], step_one: Callable[[FusedOptimizer], Any]
    ) -> None:
        """Steps parameters with the given gradients, and then releases the gradients.

        Args:
            gradients: gradients by the parameter's position.
            step_one: steps an optimizer if it is not stepped jointly.
        """
        params = self.params
        chosen = params if len(gradients) == len(params) else [params[i] for i in gradients]
        # The plan steps all parameters that have a gradient.
        apart = chosen is not params and any(param.grad is not None for param in params)
        try:
            for i, gradient in gradients.items():
                params[i].grad = gradient
            if apart or not self._is_plain():
                for i in gradients:
                    step_one(self.optimizers[i])
            else:
                self._step_jointly(gradients)
        finally:
            clear_gradients(chosen)

    def step_all(self, step_one: Callable[[FusedOptimizer], Any]) -> None:
        """Steps all parameters that have a gradient; the gradients stay."""
        if self._is_plain():
            self._step_jointly([i for i, p in enumerate(self.params) if p.grad is not None])
        else:
            for optimizer in self.optimizers:
                step_one(optimizer)

    def _is_plain(self) -> bool:
        """Returns whether the optimizers would do nothing but the update."""
        if any_step_hooks(self.optimizers):
            return False
        for optimizer in self.optimizers:
            if optimizer._settings != _PLAIN or amp_context(optimizer) is not ALONE:
                return False
            if is_patched(optimizer) or optimizer._overlap is not None:
                return False
        return True

    @torch.no_grad()
    def _step_jointly(self, positions: Collection[int]) -> None:
        if not positions:
            return
        self.param_groups = self._groups()
        every = enumerate(zip(self.params, self.optimizers, strict=True))
        # A look-up would create the entry.
        self.state = {p: opt.state[p] for i, (p, opt) in every if opt.state or i in positions}
        controls = self._controls()  # takes memory: before the update
        try:
            fused_step([self])
            self._record_step(positions, controls)
        finally:
            self.state, self.param_groups = {}, []  # owned by the optimizers alone

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the optimizers' groups, or a single group if all are equal: reading a group takes
        longer than stepping a small parameter."""
        groups = [opt.param_groups[0] for opt in self.optimizers]
        read = [*map(self._read, groups)]
        if isinstance(groups[0]["lr"], Tensor) or read.count(read[0]) < len(read):
            return groups
        if any(key in group for key in self._unusual for group in groups):
            return groups
        self._common.update(zip(self._keys, read[0], strict=True))
        return [self._common]

    def _init_states(self, chooses: Callable[[Tensor], bool]) -> None:
        for optimizer in self.optimizers:
            drop_replaced(optimizer)
        super()._init_states(chooses)

    def _common_storage(self) -> Storage:
        """Returns how all optimizers hold states, which move together (optim/placed_states.py)."""
        fp32 = [opt._storage.fp32_moments for opt in self.optimizers]
        return replace(self.optimizers[0]._storage, fp32_moments=frozenset().union(*fp32))

    def _rebuild(self) -> Any:
        self._storage = self._common_storage()
        if self._options.stochastic_rounding:  # numbered as in the separate optimizers
            self._parameter_places = {
                param: place_of(opt._first_parameter_number, param)
                for param, opt in zip(self.params, self.optimizers, strict=True)
            }
        return super()._rebuild()

    def _controls(self) -> Tensor:
        """Returns the optimizers' control blocks, which are made rows of one tensor."""
        device = self._default_device
        if self._stacked_controls is None or self._stacked_controls.device != device:
            with torch.inference_mode(False):
                self._stacked_controls = torch.stack([o._block(device)[0] for o in self.optimizers])
            for optimizer, row in zip(self.optimizers, self._stacked_controls, strict=True):
                optimizer._blocks[device] = row, self._block(device)[1]
        return self._stacked_controls

    def _record_step(self, positions: Collection[int], controls: Tensor) -> None:
        """Records the step in the optimizers' control blocks, and for their schedulers."""
        for i in positions:
            optimizer = self.optimizers[i]
            mark_step_for_schedulers(optimizer)
            optimizer._norm_measured = False
        stepped: Any = slice(None)
        if len(positions) < len(self.optimizers):
            stepped = moved(torch.tensor([*positions]), controls.device)
        block, _ = self._block(controls.device)
        controls[stepped, _DECISION] = block[_DECISION]
        controls[stepped, _STEPS] += 1
