"""What every wrapper with fp32 master weights does, around any optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from torchopt_ext import _C
from torchopt_ext._arguments import inner_optimizer
from torchopt_ext.mixed_precision.base_optimizer import BaseOptimizer
from torchopt_ext.mixed_precision.master_optimizer import MasterOptimizer
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.hooks import forwarded, inner_step
from torchopt_ext.state.entries import MASTERS, tensor_problem
from torchopt_ext.state.masters import weight_of
from torchopt_ext.state.params import named_params, params_of
from torchopt_ext.state.storage import is_steppable
from torchopt_ext.statedict.loaded import raise_problems

# The wrapper of each base, to reject a second wrapper.
_wrappers: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


class MasterWeights(BaseOptimizer):
    """Wraps an optimizer that steps fp32 masters of 16-bit parameters.

    A fused optimizer keeps masters itself, in ``state[p]["master_weight"]``. Around any other, a
    :class:`.master_optimizer.MasterOptimizer` puts them into its groups.

    Raises:
        TypeError: the base cannot be wrapped.
    """

    # The stepper's groups hold the model's parameters. It also holds the last step's decision.
    _stepper: Any
    control = forwarded("_stepper", "control")
    process_group = forwarded("_stepper", "process_group")
    grad_norm = forwarded("_stepper.control", "grad_norm")
    """The last step's norm of all gradients, unscaled and before clipping; float64, 0-dim."""
    skipped_steps = forwarded("_stepper.control", "skipped_steps")
    """The number of skipped steps; float64, 0-dim."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        _reject_base(optimizer)

    def _make_masters(self, process_group: Any) -> None:
        """Lets the base step masters from now on.

        Raises:
            TypeError: a parameter cannot be stepped; names it.
        """
        fused = isinstance(self.optim, FusedOptimizer)
        self._stepper = self.optim if fused else MasterOptimizer(self.optim)
        if process_group is not None:
            self._stepper.process_group = process_group
        self._stepper.skip_nonfinite = True
        self._stepper.keep_masters()
        _wrappers[self.optim] = weakref.ref(self)

    @property
    def params_by_group(self) -> list[list[Tensor]]:
        """The model's parameters, by group."""
        return [group["params"] for group in self._stepper.param_groups]

    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in params_of(self._stepper))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters."""
        if set_to_none:
            _C.clear_gradients(params_of(self._stepper))
        else:
            self._stepper.zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and masters for its parameters."""
        self._stepper.add_param_group(param_group)

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Sets the masters from the parameters, or both from float32 weights.

        Masters follow weights that user code writes. Call this only after writes that torch does
        not count (docs/step.md).

        Args:
            from_: float32 weights, as in :meth:`torchopt_ext.FusedAdamW.refresh_masters`.
        """
        if self._offloader is not None:
            self._offloader.bring_back()
        self._stepper.refresh_masters(from_)

    def _step_in(self, context: StepContext, wait: bool) -> float | None:
        """Makes a step. Returns nonzero if it was skipped; None if only a GPU knows."""
        stepper = self._stepper
        skipped = inner_step(stepper, context)
        if skipped is None:
            skipped = stepper.known("skip")
        if skipped is None and wait:
            skipped = stepper.control.skip.item()
            stepper.verdict.check()  # here: the rank that rejects keeps scale and gradients
        return skipped

    def base_state(self) -> dict[str, Any]:
        """Returns the base's state dict, without masters."""
        packed = self.optim.state_dict()
        if self._stepper is self.optim:
            entries = {
                index: {name: value for name, value in entry.items() if name not in MASTERS}
                for index, entry in packed["state"].items()
            }
            packed["state"] = {index: entry for index, entry in entries.items() if entry}
        return packed

    def weights(self) -> dict[int, list[Tensor]]:
        """Returns what parameters are rounded from, by group."""
        held = self._stepper.state
        groups = enumerate(self.params_by_group)
        return {i: [weight_of(p, held.get(p, {})) for p in params] for i, params in groups}

    def prepare_weights(self, base: Any, saved: Mapping[int, list[Tensor]]) -> Callable[[], None]:
        """Checks :meth:`base_state` and :meth:`weights`, and returns the function that loads them.

        Raises:
            AssertionError: the number of groups or their tensors differs.
            ValueError: a tensor has another shape or placement; names the parameter.
        """
        groups = self.params_by_group
        assert set(saved) == set(range(len(groups))), (
            f"The groups of the saved weights are {sorted(saved)}, expected 0 to {len(groups) - 1}"
        )
        for index, own in enumerate(groups):
            assert len(saved[index]) == len(own), (
                f"The number of flat tensor is inconsistent, {len(own)} != {len(saved[index])}"
            )
        weights = list(chain(*(saved[index] for index in range(len(groups)))))
        named = named_params(self._stepper)
        raise_problems(
            f"the saved weight of parameter {name or number!r} {found}"
            for number, ((name, param), weight) in enumerate(zip(named, weights, strict=True))
            if is_steppable(param) and (found := tensor_problem(weight, param))
        )
        stepper = self._stepper
        if isinstance(stepper, MasterOptimizer):
            load_base = stepper.prepare_base(base, weights)
        else:
            load_base = stepper.prepare_load(dict(base))
        pairs = [*zip(params_of(stepper), weights, strict=True)]

        def load() -> None:
            load_base()
            self._stepper.set_weights(pairs)

        return load

    def __getstate__(self) -> dict[str, Any]:
        if self._offloader is not None:  # a copy has no offloader, so its state must be on device
            self._offloader.bring_back()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _wrappers[self.optim] = weakref.ref(self)


def _reject_base(optimizer: Optimizer) -> None:
    """Raises TypeError for an optimizer that cannot be wrapped, ValueError for its settings."""
    name = type(optimizer).__name__
    wrapper = _wrappers.get(optimizer)
    if getattr(optimizer, "has_loss_scale", False):
        raise ValueError(
            f"the {name} keeps a loss scale of its own (set_loss_scale), which FSDPadaptOptimizer "
            "would not use: give it grad_scal_cfg"
        )
    if (inner := inner_optimizer(optimizer)) is not optimizer:
        raise TypeError(
            f"the {name} is a framework's wrapper: give FSDPadaptOptimizer the "
            f"{type(inner).__name__} in it"
        )
    if any(getattr(param, "is_master_weight", False) for param in params_of(optimizer)):
        raise TypeError(f"the {name} has the masters of another FSDPadaptOptimizer in its groups")
    if isinstance(optimizer, BaseOptimizer):
        raise TypeError(f"the optimizer is a {name} already: wrap the one in it")
    if wrapper is not None and wrapper() is not None:
        raise TypeError(f"the {name} is wrapped by another FSDPadaptOptimizer already")
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS evaluates the model within a step; its gradients cannot be scaled")
    if hasattr(optimizer, "consolidate_state_dict"):
        raise TypeError(
            f"a {name} shards parameters by itself: give it master weights "
            f"(optimizer_class=FusedAdamW, master_weights='fp32') and torchopt_ext.GradScaler"
        )
