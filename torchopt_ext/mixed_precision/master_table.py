"""What MasterWeights knows of its parameters between steps, and a step's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import _C
from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.local import (
    NormKey,
    as_placed,
    local_gradients,
    local_tensor,
    norm_key,
    placed,
    same_placement,
)
from torchopt_ext.optim.storage import SIXTEEN_BIT, is_steppable, refuse_param

NormPart = tuple[torch.device, NormKey]


class MasterTable:
    """Parameters of the model, what the optimizer steps for each, and where.

    Whatever a step needs of thousands of parameters is worked out once, as Python takes longer
    for it than memory for their updates.

    Args:
        params: the model's, by group.
        optim: has masters or the parameters themselves in its groups.
    """

    def __init__(self, params: list[list[Tensor]], optim: Optimizer) -> None:
        self._lists = [group["params"] for group in optim.param_groups]
        self.params = [param for own in params for param in own]
        self.masters: list[Tensor] = [master for own in self._lists for master in own]
        self.names = all_names(optim)
        pairs = list(zip(self.params, self.masters, strict=True))
        self._is_wide = [master is not param for param, master in pairs]
        self.own_masters = [master for param, master in pairs if master is not param]
        self._without_master = [param for param, master in pairs if master is param]
        self._sharded = [i for i, param in enumerate(self.params) if is_dtensor(param)]
        # This rank's parts; those of DTensors may be replaced between steps.
        self.local_params: list[Tensor] = [local_tensor(param) for param in self.params]
        self.local_masters: list[Tensor] = [local_tensor(master) for master in self.masters]
        # Frozen parameters that no step can update, such as quantized weights.
        self._frozen = {i for i, param in enumerate(self.params) if not is_steppable(param)}
        keys = [
            part_of(param) if i not in self._frozen else None for i, param in enumerate(self.params)
        ]
        self.parts: list[NormPart] = list(dict.fromkeys(key for key in keys if key is not None))
        self.devices = list(dict.fromkeys(device for device, _ in self.parts))
        self._of_part = {part: [i for i, k in enumerate(keys) if k == part] for part in self.parts}
        self.gradients: list[Any] = []  # this step's by parameter, None where there is none

    def is_for(self, optim: Optimizer) -> bool:
        """Whether the groups have the same parameters still."""
        lists = [group["params"] for group in optim.param_groups]
        same = len(lists) == len(self._lists)
        return same and all(a is b for a, b in zip(lists, self._lists, strict=True))

    def check_unfrozen(self) -> None:
        """Raises TypeError if a parameter that no step can update has a gradient."""
        for i in self._frozen:
            if self.params[i].grad is not None:
                refuse_param(self.params[i], f"parameter {self.names[i]}")

    def unfrozen(self) -> bool:
        """Whether a parameter without master has a gradient that it needs one for."""
        return any(
            param.grad is not None and param.dtype in SIXTEEN_BIT for param in self._without_master
        )

    def take_gradients(self) -> None:
        """Takes this rank's parts of the gradients.

        Raises:
            RuntimeError: a gradient or parameter does not fit; names the parameter.
        """
        grads: list[Any] = [param.grad for param in self.params]
        for i in self._sharded:
            param, master = self.params[i], self.masters[i]
            if not same_placement(param, master):
                raise RuntimeError(
                    f"parameter {self.names[i]} is {placed(param)}, and was {placed(master)} when "
                    f"its master was made"
                )
            self.local_params[i], self.local_masters[i] = local_tensor(param), local_tensor(master)
        locals_ = local_gradients([self.params[i] for i in self._sharded])
        for i, local in zip(self._sharded, locals_, strict=True):
            grads[i] = local
        _C.check_step(self.local_params, self.local_masters, grads, self.names)
        self.gradients = grads

    def gradients_of(self, part: int) -> list[Tensor]:
        """The gradients of a part that there are."""
        grads = self.gradients
        return [grads[i] for i in self._of_part[self.parts[part]] if grads[i] is not None]

    def _stepped(self, device: torch.device, wide: bool) -> list[int]:
        return [
            i
            for part in self.parts
            if part[0] == device
            for i in self._of_part[part]
            if self.gradients[i] is not None and self._is_wide[i] == wide
        ]

    def with_masters(self, device: torch.device) -> list[int]:
        """Which parameters on a device have a gradient and a master."""
        return self._stepped(device, wide=True)

    def own_gradients(self, device: torch.device) -> list[Tensor]:
        """Gradients of parameters on a device that are stepped themselves, fit to be written."""
        return [self._writable(i) for i in self._stepped(device, wide=False)]

    def _writable(self, i: int) -> Tensor:
        param: Any = self.params[i]
        grad: Tensor = self.gradients[i]
        if grad is local_tensor(param.grad) and grad.stride() == self.local_params[i].stride():
            return grad
        own = torch.empty_like(self.local_params[i], dtype=grad.dtype).copy_(grad)
        param.grad = as_placed(own, param)
        return own


def part_of(param: Tensor) -> NormPart:
    """The device and the norm key of a parameter."""
    return local_tensor(param).device, norm_key(param)


def names_of(number: int, group: dict[str, Any]) -> list[str]:
    """What messages call the parameters of a group."""
    given = group.get("param_names")
    return [
        repr(given[i]) if given else f"{i} of group {number}" for i in range(len(group["params"]))
    ]


def all_names(optim: Optimizer) -> list[str]:
    """The names of all groups' parameters, in order."""
    groups = enumerate(optim.param_groups)
    return [name for number, group in groups for name in names_of(number, group)]
