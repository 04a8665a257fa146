"""BaseOptimizer: an optimizer around another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._torch import is_hook_table
from torchopt_ext.optim.hooks import HookedStep, inner_step, run_hooks


class BaseOptimizer(HookedStep, Optimizer):
    """An optimizer whose groups, state and defaults are those of the one in it, ``optim``.

    The interface of InternEvo's and LightRFT's class; it is a torch.optim.Optimizer, so that
    schedulers, hooks and isinstance checks take it for one.

    Args:
        optim: any optimizer.

    Raises:
        TypeError: ``optim`` is no optimizer.
    """

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got a {type(optim).__name__}")
        self.optim = optim
        super().__setstate__({})  # hooks, without groups of its own

    # torch's Optimizer reads and sets these.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optim.defaults = defaults

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
        state_dict = run_hooks(self, "load_state_dict_pre", state_dict.copy())
        self.optim.load_state_dict(state_dict)
        run_hooks(self, "load_state_dict_post")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The gradients of ``loss``, a tensor of one element."""
        torch.autograd.backward(loss, retain_graph=retain_graph)

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """Goes on with the gradients ``grad`` of ``tensor``, as a pipeline's stages do."""
        torch.autograd.backward(tensors=tensor, grad_tensors=grad)

    def clip_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        """Nothing; for subclasses that clip in :meth:`step`."""

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle has; hooks stay with the original, as with torch's optimizers."""

        def left_out(key: str) -> bool:
            patched = callable(getattr(type(self), key, None))  # by a scheduler, say
            return patched or is_hook_table(key)

        return {key: value for key, value in vars(self).items() if not left_out(key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
