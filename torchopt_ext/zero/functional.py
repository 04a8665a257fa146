"""Fused optimizers as functional optimizers: gradients are an argument of ``step``.

torch.distributed.optim.utils.functional_optim_map expects this form. Steps inside DDP's backward
need it because they update one bucket's parameters at a time.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim.utils import functional_optim_map, register_functional_optim

from torchopt_ext import ops
from torchopt_ext.optim import FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD
from torchopt_ext.optim.options import StepOptions
from torchopt_ext.optim.param_states import init_param_states, moments_of
from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.storage import Storage


class FunctionalFused:
    """A fused optimizer whose ``step`` takes the gradients. State and arithmetic are the same.

    Args:
        params: the parameters to update.
        defaults: the optimizer's arguments, except arguments that need all gradients at once
            (``max_grad_norm``, ``skip_nonfinite``), change the storage, round randomly or track.

    Raises:
        ValueError: an argument is not available here, or there are no parameters.
    """

    optimizer_class: type[FusedOptimizer]

    def __init__(
        self, params: Sequence[Tensor], *, _allow_empty_param_list: bool = False, **defaults: Any
    ) -> None:
        if not params and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        checked = self.optimizer_class([torch.zeros(1)], **defaults)
        if checked.options != StepOptions():
            raise ValueError(
                f"steps inside DDP's backward have no norms, skipped steps, master "
                f"weights, state dtypes, random rounding or tracking; got {defaults}"
            )
        self.defaults = checked.defaults
        self.param_group: dict[str, Any] = {**checked.param_groups[0], "params": list(params)}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._control_on = functools.cache(ops.new_control)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Updates the parameters that have a gradient.

        Args:
            gradients: for each parameter a gradient of its shape and dtype, or None. All are on
                one device, as in a DDP bucket.

        Raises:
            ValueError: the number of gradients differs from the number of parameters.
        """
        group = self.param_group
        given = zip(group["params"], gradients, strict=True)
        pairs = [(param, gradient) for param, gradient in given if gradient is not None]
        if not pairs:
            return
        params = [param for param, _ in pairs]
        new = [(group, p, self.state.setdefault(p, {})) for p in params if not self.state.get(p)]
        init_param_states(new, Storage())
        names = ("step", *moments_of(group, params[0], Storage()))
        held = {name: [self.state[param][name] for param in params] for name in names}
        algorithm = algorithm_of(group)
        getattr(torch.ops.torchopt_ext, f"{algorithm.name}_")(
            [param.detach() for param in params],
            [gradient for _, gradient in pairs],
            *(held.get(state.name, []) for state in algorithm.states),
            held["step"],
            self._control_on(params[0].device),
            **algorithm.arguments(group),
        )


register: Any = register_functional_optim
for fused in (FusedAdam, FusedAdamW, FusedLion, FusedSGD):
    functional = {"optimizer_class": fused, "__module__": __name__, "__doc__": fused.__doc__}
    register(fused, type(f"Functional{fused.__name__}", (FunctionalFused,), functional))


def unwrap_partial(optimizer_class: Any, defaults: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Unwraps functools.partial, because its arguments decide how the ranks work together."""
    while isinstance(optimizer_class, functools.partial) and not optimizer_class.args:
        defaults = {**optimizer_class.keywords, **defaults}
        optimizer_class = optimizer_class.func
    return optimizer_class, defaults


def constructor_of(
    optimizer_class: Any, overlap_with_ddp: bool, defaults: Mapping[str, Any]
) -> Any:
    """Returns the class of the local optimizer; with overlap its functional counterpart.

    Raises:
        ValueError: the class is functional but there is no overlap. With overlap, the class has no
            functional counterpart, or it rejects the arguments.
    """
    functional = optimizer_class in functional_optim_map.values()
    if functional and not overlap_with_ddp:
        raise ValueError(f"{optimizer_class} is a functional optimizer: overlap_with_ddp=True only")
    if functional or not overlap_with_ddp:
        return optimizer_class
    if optimizer_class not in functional_optim_map:
        raise ValueError(f"overlap_with_ddp=True: {optimizer_class} has no functional counterpart")
    found = functional_optim_map[optimizer_class]
    if issubclass(found, FunctionalFused):
        found([torch.zeros(1)], **defaults)  # otherwise this raises in the third backward pass
    return found
