"""Any optimizer under FSDPadaptOptimizer: it steps fp32 masters of the model's parameters.

A step reads the gradients for their norm, writes unscaled and clipped fp32 gradients for the
masters, lets the optimizer step, and rounds the masters to the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import _C, ops
from torchopt_ext.mixed_precision.master_table import (
    MasterTable,
    NormPart,
    names_of,
    part_of,
)
from torchopt_ext.optim.context import ALONE, StepContext
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.optim.local import as_placed, local_tensor, moved
from torchopt_ext.optim.rejection import Agreement
from torchopt_ext.optim.step import accumulated_norm, reject
from torchopt_ext.optim.storage import SIXTEEN_BIT, is_steppable, refuse_param
from torchopt_ext.statedict.loaded import load_whole
from torchopt_ext.statedict.masters import read_weights, weight_of


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

    def __init__(self, optim: Optimizer, process_group: Any) -> None:
        self.optim = optim
        self.process_group = process_group
        self.params: list[list[Tensor]] = []  # the model's, by group
        self._init_control()
        self.skip_nonfinite = True
        self._table: MasterTable | None = None
        self._kept_room: list[Tensor] = []  # for the masters' gradients
        self._room_shapes: list[torch.Size] = []
        for number, group in enumerate(optim.param_groups):
            self._refuse(number, group)
        for group in optim.param_groups:
            self._adopt(group)

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
            what = f"parameter {name} of {type(self.optim).__name__}"
            if param.requires_grad:
                refuse_param(param, what)
                if param.is_complex():
                    raise TypeError(f"{what} is complex: only FusedAdam and FusedAdamW step those")
            if torch.nn.parameter.is_lazy(param):
                raise TypeError(f"{what} has no shape yet: run the model once before")
        if len(set(group["params"])) != len(group["params"]):
            raise ValueError(f"group {number} has a parameter twice")

    def _adopt(self, group: dict[str, Any]) -> None:
        params = list(group["params"])
        self.params.append(params)
        group["params"] = [
            self._master_of(p) if p.requires_grad and p.dtype in SIXTEEN_BIT else p for p in params
        ]
        self._table = None

    @torch.no_grad()
    def _master_of(self, param: Tensor) -> Tensor:
        """A new master, which takes over the state that the parameter had."""
        master: Any = as_placed(local_tensor(param).detach().float(), param)
        master.is_master_weight = True  # copies of the base keep it, too
        if param in self.optim.state:
            self.optim.state[master] = {
                name: value.float()
                if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT
                else value
                for name, value in self.optim.state.pop(param).items()
            }
        made: Tensor = master
        return made

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter of the model, and what the optimizer steps for it."""
        return [
            pair
            for own, group in zip(self.params, self.optim.param_groups, strict=True)
            for pair in zip(own, group["params"], strict=True)
        ]

    @torch.no_grad()
    def refresh_masters(self, from_: Mapping[Any, Tensor] | None) -> None:
        """Makes the masters what the parameters are now, or sets both from float32 weights."""
        if from_ is not None:
            master_of = dict(self.pairs())
            params = [param for own in self.params for param in own]
            names = chain(
                *(g.get("param_names") or [""] * len(g["params"]) for g in self.optim.param_groups)
            )
            named = zip(names, params, strict=True)
            self.set_weights(read_weights(from_, named, lambda p: master_of[p] is not p))
            return
        for param, master in self.pairs():
            if master is not param:
                local_tensor(master).copy_(local_tensor(param))

    def set_weights(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets parameters and their masters to weights that fit them."""
        master_of = dict(self.pairs())
        for param, weight in pairs:
            for target in (param, master_of[param]) if is_steppable(param) else ():
                local_tensor(target).copy_(local_tensor(weight))

    # ---- step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, scale: Tensor) -> float | None:
        """One step with gradients that are ``scale``, one float32 element, times too large.

        Returns:
            Nonzero if the step was skipped; None if only the device knows.

        Raises:
            RuntimeError: a gradient or parameter does not fit, here or on a rank that shares the
                norm; names it. Nothing is changed.
        """
        self.verdict.check()
        agreement, optim = Agreement(), self.optim
        try:
            table = self._collect()
            self._decide(table, scale, agreement)
            found_inf = None
            if (skip := self.known("skip")) is None:
                if skips_by_itself(optim):
                    found_inf = self.control.found_inf.float()
                else:
                    skip = self.control.skip.item()
            if skip:
                return skip
            stepped = {device: table.with_masters(device) for device in table.devices}
            for device, wide in stepped.items():
                self._hand_over(table, device, wide)
            try:
                inner_step(optim, StepContext(found_inf=found_inf))
            except BaseException:  # some gradients have been unscaled, or are gone
                _C.clear_gradients(table.params)
                raise
            for device, wide in stepped.items():
                params = [table.local_params[i] for i in wide]
                masters = [table.local_masters[i] for i in wide]
                _C.scaled_copy_(params, masters, self._block(device)[0], unscale=False)
            return skip
        except Exception:
            reject([self], ALONE, agreement)
            raise
        finally:
            if self._table is not None:
                _C.clear_gradients(self._table.own_masters)
                self._table.gradients = []

    def _collect(self) -> MasterTable:
        """The table of all parameters with this step's gradients, checked."""
        sizes = [len(group["params"]) for group in self.optim.param_groups]
        if sizes != [len(own) for own in self.params]:
            expected = [len(own) for own in self.params]
            raise RuntimeError(
                f"the base's groups have {sizes} parameters, expected {expected}: "
                f"FSDPadaptOptimizer.add_param_group() is what adds a group"
            )
        if self._table is None or not self._table.is_for(self.optim):
            self._table = MasterTable(self.params, self.optim)
        self._table.check_unfrozen()
        if self._table.unfrozen():
            self._unfreeze()
            self._table = MasterTable(self.params, self.optim)
        self._table.take_gradients()
        return self._table

    def _unfreeze(self) -> None:
        """Gives parameters that were frozen until now their masters."""
        for own, group in zip(self.params, self.optim.param_groups, strict=True):
            for i, param in enumerate(own):
                frozen = group["params"][i] is param and param.dtype in SIXTEEN_BIT
                if frozen and param.grad is not None:
                    group["params"][i] = self._master_of(param)

    def _decide(self, table: MasterTable, scale: Tensor, agreement: Agreement) -> None:
        self._norm_measured = True
        if len(table.parts) == 1 and self.process_group is None and not table.parts[0][1]:
            control, accumulator = self._block(self.default_device)
            ops.grad_sumsq_(table.gradients_of(0), accumulator.zero_())
            ops.control_update_(control, accumulator, moved(scale, self.default_device))
            agreement.pending = False
            return
        total = accumulated_norm([self], ALONE, agreement)
        for device in self.devices:
            ops.control_update_(self._block(device)[0], total[device], moved(scale, device))

    def _hand_over(self, table: MasterTable, device: torch.device, wide: list[int]) -> None:
        """Gives masters their gradients, unscaled and clipped, and lets go of the parameters'.

        So gradients of 16 and of 32 bits are there together for this long only.
        """
        made = self._room(device, [table.local_masters[i] for i in wide])
        itself = table.own_gradients(device)
        sources = [table.gradients[i] for i in wide]
        control = self._block(device)[0]
        _C.scaled_copy_([*made, *itself], [*sources, *itself], control, unscale=True)
        for i, grad in zip(wide, made, strict=True):
            table.masters[i].grad = as_placed(grad, table.masters[i])
        _C.clear_gradients([table.params[i] for i in wide])

    def _room(self, device: torch.device, masters: list[Tensor]) -> list[Tensor]:
        """Memory for the masters' gradients.

        A GPU's allocator has it at hand. The host's would get it from the system, page by page, at
        several times the cost of the step, so there it is kept.
        """
        if device.type != "cpu" or not is_torchs(self.optim):  # others may keep gradients
            return _C.carve(masters)
        shapes = [master.shape for master in masters]
        if shapes != self._room_shapes:
            self._kept_room, self._room_shapes = _C.carve(masters), shapes
        return self._kept_room

    # ---- what accumulated_norm() needs --------------------------------------------------------

    @property
    def parts(self) -> list[NormPart]:
        """Device and norm key of the parameters' parts, the same on all ranks."""
        if self._table is not None:
            return self._table.parts
        stepped = [param for own in self.params for param in own if is_steppable(param)]
        return list(dict.fromkeys(map(part_of, stepped)))

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        assert self._table is not None
        ops.grad_sumsq_(self._table.gradients_of(part), accumulator)

    # ---- state --------------------------------------------------------------------------------

    def weights(self) -> list[list[Tensor]]:
        """The masters by group; of parameters without one, what :func:`weight_of` says."""
        groups = self.optim.param_groups
        return [[weight_of(master, {}) for master in group["params"]] for group in groups]

    def base_state(self) -> dict[str, Any]:
        """The optimizer's state dict."""
        return self.optim.state_dict()

    def load(self, states: dict[str, Any], weights: list[list[Tensor]]) -> None:
        """Takes state and weights that were checked."""
        load_whole(self.optim, states)
        self.set_weights(zip(chain(*self.params), chain(*weights), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled or copied: its ranks exist in "
                "this run only; save its state_dict()"
            )
        made_anew: dict[str, Any] = {"_table": None, "_kept_room": [], "_room_shapes": []}
        return vars(self) | made_anew | {"_view": None}


def is_torchs(optim: Optimizer) -> bool:
    """Whether an optimizer is one of torch.optim."""
    return type(optim).__module__.startswith("torch.optim.")


def skips_by_itself(optim: Optimizer) -> bool:
    """Whether a step with ``found_inf`` leaves all as it is, without the host having to know.

    torch's fused Adam and AdamW do; its fused SGD leaves momentum that a skipped first step made
    uninitialised (torch/optim/sgd.py).
    """
    fused = all(group.get("fused") for group in optim.param_groups)
    return fused and type(optim) in (torch.optim.Adam, torch.optim.AdamW)
