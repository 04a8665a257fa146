"""BaseOptimizer: an optimizer that wraps another optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext.optim.hooks import HookedStep, forwarded, inner_step, is_left_out, run_hooks
from torchopt_ext.statedict.loaded import expect_dict


class BaseOptimizer(HookedStep, Optimizer):
    """Wraps an optimizer and shares its param groups, state and defaults.

    It has the interface of InternEvo's and LightRFT's class. It is a torch.optim.Optimizer, so that
    schedulers, hooks and isinstance checks accept it.

    Args:
        optim: any optimizer.

    Raises:
        TypeError: ``optim`` is not an optimizer.
    """

    _offloader: Any = None  # an Offloader (mixed_precision/offload.py) once state was offloaded

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got {type(optim).__name__}")
        self.optim = optim
        defaults = dict(optim.defaults)
        super().__setstate__({})  # creates tables of hooks, but no param groups
        optim.defaults = defaults  # torch adds "differentiable", which not all optimizers have

    # torch's Optimizer reads and sets these attributes.
    param_groups = forwarded("optim", "param_groups")
    state = forwarded("optim", "state")
    defaults = forwarded("optim", "defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return inner_step(self.optim, self._context, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        run_hooks(self, "state_dict_pre")
        return run_hooks(self, "state_dict_post", self.optim.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        expect_dict(state_dict)
        state_dict = run_hooks(self, "load_state_dict_pre", state_dict.copy())
        self.optim.load_state_dict(state_dict)
        run_hooks(self, "load_state_dict_post")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Computes the gradients of ``loss``, a tensor of one element."""
        torch.autograd.backward(loss, retain_graph=retain_graph)

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """Continues backward from the gradients ``grad`` of ``tensor``, as pipeline stages do."""
        torch.autograd.backward(tensors=tensor, grad_tensors=grad)

    def clip_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing. Subclasses that clip in :meth:`step` override it."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, without hooks, as torch's optimizers do."""
        return {
            key: value
            for key, value in vars(self).items()
            if key != "_offloader" and not is_left_out(self, key)
        }
