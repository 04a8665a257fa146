"""Any optimizer under FSDPadaptOptimizer: it steps fp32 masters of the model's parameters.

A step reads the gradients for their norm, writes unscaled and clipped fp32 gradients for the
masters, lets the optimizer step, and rounds the masters to the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import _C, ops
from torchopt_ext.mixed_precision import base_state
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.local import (
    NormKey,
    is_dtensor,
    is_split,
    local_gradients,
    local_tensor,
    moved,
    norm_key,
    placed,
    same_placement,
)
from torchopt_ext.optim.state import refuse_param
from torchopt_ext.optim.step import accumulated_norm
from torchopt_ext.optim.storage import SIXTEEN_BIT

Part = tuple[torch.device, NormKey]


class MasterWeights(Controlled):
    """Puts fp32 masters into the groups of an optimizer in place of 16-bit parameters.

    Trainable 16-bit parameters have a master from the start, frozen ones from their first gradient
    on; others are stepped themselves, and their gradients unscaled and clipped in place.

    Args:
        optim: its groups and state are changed to the masters.
        process_group: ranks that agree on norm and overflow; None for those of DTensors' meshes.

    Raises:
        TypeError: a parameter that no step could update; names it. Nothing is changed.
    """

    check_overflow = True

    def __init__(self, optim: Optimizer, process_group: Any) -> None:
        self.optim = optim
        self.process_group = process_group
        self.params: list[list[Tensor]] = []  # the model's, by group
        self._settings = {"max_grad_norm": 0.0, "skip_nonfinite": 1.0}
        self._init_control()
        self._init_tables()
        for number, group in enumerate(optim.param_groups):
            self._refuse(number, group)
        for group in optim.param_groups:
            self._adopt(group)

    def _init_tables(self) -> None:
        self._names: list[str] = []
        self._keys: list[Part] = []
        self._gradients: dict[Part, list[Tensor]] = {}  # this step's

    @property
    def controlled(self) -> Controlled:
        """Whose control block has the last step's decision."""
        return self

    # Where Controlled looks for the first parameter's device.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"params": own} for own in self.params]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        known = {param for own in self.params for param in own}
        self.optim.add_param_group(param_group)
        group = self.optim.param_groups[-1]
        try:
            self._refuse(len(self.params), group)
            if known & set(group["params"]):
                raise ValueError("some parameters appear in more than one parameter group")
        except (TypeError, ValueError):
            self.optim.param_groups.pop()
            raise
        self._adopt(group)

    def _refuse(self, number: int, group: dict[str, Any]) -> None:
        for name, param in zip(names_of(number, group), group["params"], strict=True):
            refuse_param(param, f"parameter {name} of {type(self.optim).__name__}")

    def _adopt(self, group: dict[str, Any]) -> None:
        params = list(group["params"])
        self.params.append(params)
        group["params"] = [
            self._master_of(p) if p.requires_grad and p.dtype in SIXTEEN_BIT else p for p in params
        ]
        self._init_tables()

    @torch.no_grad()
    def _master_of(self, param: Tensor) -> Tensor:
        """A new master, which takes over the state that the parameter had."""
        master = param.detach().float()
        if param in self.optim.state:
            self.optim.state[master] = {
                name: value.float()
                if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT
                else value
                for name, value in self.optim.state.pop(param).items()
            }
        return master

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter of the model, and what the optimizer steps for it."""
        return [
            pair
            for own, group in zip(self.params, self.optim.param_groups, strict=True)
            for pair in zip(own, group["params"], strict=True)
        ]

    def names(self) -> list[str]:
        """What messages call the parameters, in the order of :meth:`pairs`."""
        groups = enumerate(self.optim.param_groups)
        return [name for number, group in groups for name in names_of(number, group)]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Makes the masters what the parameters are now."""
        for param, master in self.pairs():
            if master is not param:
                local_tensor(master).copy_(local_tensor(param))

    # ---- step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, scale: Tensor) -> None:
        """One step with gradients that are ``scale``, one float32 element, times too large.

        Raises:
            RuntimeError: a gradient or parameter does not fit; names it. Nothing is changed.
        """
        pairs, grads = self._collect()
        try:
            self._decide(scale)
        finally:
            self._gradients = {}
        optim: Any = self.optim
        found_inf = None
        if (skip := self.known("skip")) is None:
            if getattr(optim, "_step_supports_amp_scaling", False):  # it leaves all as it is
                found_inf = self.control.found_inf.float()
            else:
                skip = self.control.skip.item()
        if skip:
            return
        of_device: dict[torch.device, list[int]] = {}
        for i, grad in enumerate(grads):
            if grad is not None:
                of_device.setdefault(self._keys[i][0], []).append(i)
        try:
            for device, indices in of_device.items():
                self._hand_over(device, [(*pairs[i], grads[i]) for i in indices])
            if found_inf is not None:
                optim.grad_scale, optim.found_inf = None, found_inf
            optim.step()
        finally:
            if found_inf is not None:
                vars(optim).pop("grad_scale", None)
                vars(optim).pop("found_inf", None)
            _C.clear_gradients([master for param, master in pairs if master is not param])
        for device, indices in of_device.items():
            wide = [pairs[i] for i in indices if pairs[i][1] is not pairs[i][0]]
            params = [local_tensor(param) for param, _ in wide]
            masters = [local_tensor(master) for _, master in wide]
            ops.scaled_copy_(params, masters, self._block(device)[0], unscale=False)

    def _collect(self) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor | None]]:
        """All pairs and this rank's parts of their gradients, checked."""
        if any(
            master is param and param.grad is not None and param.dtype in SIXTEEN_BIT
            for param, master in self.pairs()
        ):
            self._thaw()
        pairs = self.pairs()
        if not self._keys:
            self._keys = [(local_tensor(param).device, norm_key(param)) for param, _ in pairs]
            self._names = self.names()
        grads: list[Tensor | None] = [param.grad for param, _ in pairs]
        sharded = [i for i, (param, _) in enumerate(pairs) if is_dtensor(param)]
        for i in sharded:
            param, master = pairs[i]
            if not same_placement(param, master):
                raise RuntimeError(
                    f"parameter {self._names[i]} is {placed(param)}, and was {placed(master)} when "
                    f"its master was made"
                )
        for i, local in zip(sharded, local_gradients([pairs[i][0] for i in sharded]), strict=True):
            grads[i] = local
        params = [local_tensor(param) for param, _ in pairs]
        _C.check_step(params, [local_tensor(master) for _, master in pairs], grads, self._names)
        self._gradients = {key: [] for key in self._keys}
        for key, grad in zip(self._keys, grads, strict=True):
            if grad is not None:
                self._gradients[key].append(grad)
        return pairs, grads

    def _thaw(self) -> None:
        """Gives parameters that were frozen until now their masters."""
        for own, group in zip(self.params, self.optim.param_groups, strict=True):
            for i, param in enumerate(own):
                frozen = group["params"][i] is param and param.dtype in SIXTEEN_BIT
                if frozen and param.grad is not None:
                    group["params"][i] = self._master_of(param)

    def _decide(self, scale: Tensor) -> None:
        shared = self.process_group is not None or any(is_split(key) for _, key in self.parts)
        if len(self.parts) == 1 and not shared:
            control, accumulator = self._block(self.home)
            ops.grad_sumsq_(next(iter(self._gradients.values())), accumulator.zero_())
            ops.control_update_(control, accumulator, moved(scale, self.home))
            return
        total = accumulated_norm([self])
        for device in self.devices:
            ops.control_update_(self._block(device)[0], total[device], moved(scale, device))

    def _hand_over(
        self, device: torch.device, stepped: Sequence[tuple[Tensor, Tensor, Any]]
    ) -> None:
        """Gives masters their gradients, unscaled and clipped, and lets go of the parameters'.

        So gradients of 16 and of 32 bits are there together for this long only.
        """
        wide = [(p, master, grad) for p, master, grad in stepped if master is not p]
        itself = [own_gradient(p, grad) for p, master, grad in stepped if master is p]
        made = _C.carve([local_tensor(master) for _, master, _ in wide])
        sources = [grad for _, _, grad in wide]
        control = self._block(device)[0]
        ops.scaled_copy_([*made, *itself], [*sources, *itself], control, unscale=True)
        for (_, master, _), grad in zip(wide, made, strict=True):
            master.grad = as_placed(grad, master)
        _C.clear_gradients([param for param, _, _ in wide])

    # ---- what accumulated_norm() needs --------------------------------------------------------

    @property
    def parts(self) -> list[Part]:
        """Device and norm key of the parameters' parts, the same on all ranks."""
        return list(dict.fromkeys(self._keys))

    @property
    def devices(self) -> list[torch.device]:
        """Where a control block has to know the decision."""
        return list(dict.fromkeys([self.home, *(device for device, _ in self._keys)]))

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        """Pass A of one part."""
        ops.grad_sumsq_(self._gradients[self.parts[part]], accumulator)

    # ---- state --------------------------------------------------------------------------------

    def weights(self) -> list[list[Tensor]]:
        """The masters by group; of parameters without one, the parameter as float32 or wider."""
        return [
            [
                master.detach().float() if master.dtype in SIXTEEN_BIT else master.detach()
                for master in group["params"]
            ]
            for group in self.optim.param_groups
        ]

    def base_state(self) -> dict[str, Any]:
        """The optimizer's state dict."""
        return self.optim.state_dict()

    def check_base_state(self, states: dict[str, Any]) -> None:
        """Raises ValueError unless :meth:`load` takes it."""
        base_state.check(self.optim, states, self.names())

    def load(self, states: dict[str, Any], weights: list[list[Tensor]]) -> None:
        """Takes state and weights that were checked."""
        base_state.load(self.optim, states)
        flat = [weight for own in weights for weight in own]
        for (param, master), weight in zip(self.pairs(), flat, strict=True):
            for target in (param, master):
                local_tensor(target).copy_(local_tensor(weight))

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled or copied: its ranks exist in "
                "this run only; save its state_dict()"
            )
        empty: dict[str, Any] = {"_names": [], "_keys": [], "_gradients": {}}
        return vars(self) | empty | {"_view": None, "_read": None}


def names_of(number: int, group: dict[str, Any]) -> list[str]:
    """What messages call the parameters of a group."""
    given = group.get("param_names")
    return [
        repr(given[i]) if given else f"{i} of group {number}" for i in range(len(group["params"]))
    ]


def own_gradient(param: Any, grad: Tensor) -> Tensor:
    """The gradient of a parameter that is stepped itself, as memory that may be written."""
    local = local_tensor(param)
    if grad is local_tensor(param.grad) and grad.stride() == local.stride():
        return grad
    own = torch.empty_like(local, dtype=grad.dtype).copy_(grad)
    param.grad = as_placed(own, param)
    return own


def as_placed(local: Tensor, like: Any) -> Any:
    """A rank's part of a tensor as a DTensor placed as ``like`` is; itself if that is plain."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
