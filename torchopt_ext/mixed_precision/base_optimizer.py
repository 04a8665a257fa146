"""BaseOptimizer: an optimizer around another one."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._torch import is_hook_table
from torchopt_ext.optim.hooks import HookedStep, inner_step, run_hooks


def _of_base(name: str) -> Any:
    """An attribute that is the base's."""
    return property(
        attrgetter(f"optim.{name}"), lambda self, value: setattr(self.optim, name, value)
    )


class BaseOptimizer(HookedStep, Optimizer):
    """An optimizer whose groups, state and defaults are those of the one in it, ``optim``.

    The interface of InternEvo's and LightRFT's class; it is a torch.optim.Optimizer, so that
    schedulers, hooks and isinstance checks take it for one.

    Args:
        optim: any optimizer.

    Raises:
        TypeError: ``optim`` is no optimizer.
    """

    _offloader: Any = None  # of mixed_precision/offload.py, once there is one

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got a {type(optim).__name__}")
        self.optim = optim
        super().__setstate__({})  # hooks, without groups of its own

    # torch's Optimizer reads and sets these.
    param_groups = _of_base("param_groups")
    state = _of_base("state")
    defaults = _of_base("defaults")

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
            return patched or is_hook_table(key) or key == "_offloader"

        return {key: value for key, value in vars(self).items() if not left_out(key)}
