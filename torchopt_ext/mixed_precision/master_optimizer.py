"""Lets any optimizer under FSDPadaptOptimizer step fp32 masters of the model's parameters.

A step reads the gradients for their norm, writes unscaled and clipped fp32 gradients for the
masters, steps the optimizer, and rounds the masters to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import _C, ops
from torchopt_ext._arguments import restored_if_raised
from torchopt_ext._torch import allows_mutation, is_dtensor
from torchopt_ext.optim.context import ALONE, StepContext
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.gradients import local_gradients, show_writes
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.optim.norm import SHARDS_ELSEWHERE, NormPart, is_flattened, part_of
from torchopt_ext.optim.rejection import Agreement
from torchopt_ext.optim.shards import watch_weights
from torchopt_ext.optim.step import accumulated_norm, reject, reject_tracing
from torchopt_ext.state.devices import moved
from torchopt_ext.state.local import as_placed, local_tensor, placed, same_placement
from torchopt_ext.state.masters import copy_local_, has_low_bits
from torchopt_ext.state.params import named_params, params_of
from torchopt_ext.state.storage import MASTER, SIXTEEN_BIT, is_steppable, reject_param
from torchopt_ext.statedict.loaded import load_whole, raise_problems, read_indexed, undone_if_raised
from torchopt_ext.statedict.weights import read_weights


class MasterOptimizer(Controlled):
    """Puts fp32 masters into the groups of an optimizer in place of 16-bit parameters.

    Trainable 16-bit parameters have a master from the start, frozen parameters from their first
    gradient on. Others are stepped directly, and their gradients unscaled and clipped in place.

    Args:
        optim: the optimizer; masters take the parameters' places in its groups and state.
        process_group: ranks that agree on norm and overflow; None for the DTensors' own meshes.

    Raises:
        TypeError: no step could update a parameter; names it. Nothing is changed.
    """

    def __init__(self, optim: Optimizer, process_group: Any) -> None:
        self.optim = optim
        self.process_group = process_group
        self.param_groups = []  # the model's parameters and their names
        self._init_control()
        self.skip_nonfinite = True
        self._table: _Table | None = None
        self._adopt(optim.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        known = set(params_of(self))
        with restored_if_raised([param_group], self.optim):
            self.optim.add_param_group(param_group)
            group = self.optim.param_groups[-1]
            if known & set(group["params"]):
                raise ValueError("some parameters appear in more than one parameter group")
            self._adopt([group])

    def _adopt(self, groups: Sequence[dict[str, Any]]) -> None:
        for number, group in enumerate(groups, len(self.param_groups)):
            self._refuse(number, group)
        params = chain(*(group["params"] for group in groups))
        masters = self._make_masters(param for param in params if param.requires_grad)
        for group in groups:
            own = group["params"]
            self.param_groups.append({"params": own, "param_names": group.get("param_names")})
            group["params"] = [masters.get(param, param) for param in own]
        self._table = None

    def _refuse(self, number: int, group: dict[str, Any]) -> None:
        for name, param in zip(_names_of(number, group), group["params"], strict=True):
            what = f"parameter {name} of {type(self.optim).__name__}"
            if param.requires_grad:
                reject_param(param, what)
                if param.is_complex():
                    raise TypeError(f"{what} is complex: only fused optimizers step those")
                if is_flattened(param) and self.process_group is None:
                    raise ValueError(f"{what} {SHARDS_ELSEWHERE}")
            if torch.nn.parameter.is_lazy(param):
                raise TypeError(f"{what} has no shape yet: run the model once before")
        if len(set(group["params"])) != len(group["params"]):
            raise ValueError(f"group {number} has a parameter twice")

    @torch.no_grad()
    def _make_masters(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Makes masters of 16-bit parameters, to which the parameters' state moves.

        If this raises, for example because memory is short, nothing has changed.
        """
        masters: dict[Tensor, Any] = {}
        entries: dict[Tensor, dict[str, Any]] = {}
        for param in params:
            if param.dtype not in SIXTEEN_BIT:
                continue
            masters[param] = as_placed(local_tensor(param).detach().float(), param)
            masters[param].is_master_weight = True  # copies of the base keep this attribute
            if param in self.optim.state:
                entries[param] = {
                    name: value.float()
                    if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT
                    else value
                    for name, value in self.optim.state[param].items()
                }
        for param, entry in entries.items():
            del self.optim.state[param]
            self.optim.state[masters[param]] = entry
        return masters

    def create_masters(self, needs: Callable[[Tensor], bool]) -> None:
        """Makes masters for the 16-bit parameters that have none and satisfy ``needs``."""
        masters = self._make_masters(p for p, held in self._pairs() if held is p and needs(p))
        for group in self.optim.param_groups if masters else ():
            group["params"] = [masters.get(param, param) for param in group["params"]]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns every parameter of the model, and the tensor that the optimizer steps for it.

        Raises:
            RuntimeError: the groups do not have as many parameters as they had.
        """
        own = [group["params"] for group in self.param_groups]
        held = [group["params"] for group in self.optim.param_groups]
        if list(map(len, held)) != list(map(len, own)):
            raise RuntimeError(
                f"the base's groups have {[*map(len, held)]} parameters, expected "
                f"{[*map(len, own)]}: FSDPadaptOptimizer.add_param_group() is what adds a group"
            )
        return [*zip(chain(*own), chain(*held), strict=True)]

    # ---- weights and state --------------------------------------------------------------------

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The masters by parameter, as a fused optimizer's state has them."""
        return {param: {MASTER: held} for param, held in self._pairs() if held is not param}

    @torch.no_grad()
    def refresh_masters(self, from_: Mapping[Any, Tensor] | None) -> None:
        """Sets the masters from the parameters, or both from float32 weights."""
        pairs = [(param, param) for param in self.state]
        if from_ is not None:
            pairs = read_weights(from_, named_params(self), lambda _: True)
            self.create_masters(lambda param: param.requires_grad and is_steppable(param))
        self.set_weights(pairs)

    def set_weights(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets parameters and their masters to weights of the same shapes and placements."""
        master_of = dict(self._pairs())
        for param, weight in pairs:
            for target in (param, master_of[param]) if is_steppable(param) else ():
                copy_local_(target, weight)

    @torch.no_grad()
    def prepare_load(
        self, state_dict: Mapping[str, Any], weights: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Checks a state dict of the optimizer, and returns the function that loads it.

        Args:
            weights: what the parameters were rounded from, in order.
        """
        raise_problems(read_indexed(state_dict, self.optim.param_groups).problems(self.optim))
        ids = chain(*(group["params"] for group in state_dict["param_groups"]))
        saved = {
            p: (state_dict["state"].get(i), w)
            for i, (p, _), w in zip(ids, self._pairs(), weights, strict=True)
        }

        def needs_master(param: Tensor) -> bool:  # unfrozen late, in the saved run or here
            state, weight = saved[param]
            if not is_steppable(param) or weight.dtype != torch.float32:
                return False
            return param.requires_grad or bool(state) or has_low_bits(param, {MASTER: weight})

        def load() -> None:
            with undone_if_raised(self.optim):
                self.create_masters(needs_master)
                load_whole(self.optim, state_dict)

        return load

    # ---- step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, scale: Tensor) -> float | None:
        """Makes one step with gradients that are too large by ``scale``, one float32 element.

        Returns:
            Nonzero if the step was skipped; None if only the device knows.

        Raises:
            RuntimeError: a gradient or parameter does not fit, on this rank or on a rank that
                shares the norm; names it. Nothing is changed.
        """
        agreement = Agreement()
        try:
            reject_tracing()
            table = self._collect()
            self._decide(table, scale, agreement)
            skip, found_inf = self.known("skip"), None
            if skip is None and skips_on_device(self.optim):
                found_inf = self.control.found_inf.float()
            elif skip is None:
                skip = self.control.skip.item()
                self.verdict.check()
            if not skip:
                self._update(table, found_inf)
            return skip
        except Exception:
            reject([self], ALONE, agreement)
            raise
        finally:
            if self._table is not None:
                self._table.release()

    def _collect(self) -> _Table:
        """Returns the table of all parameters, with this step's gradients checked."""
        pairs = self._pairs()
        if self._table is None or not self._table.take(pairs):
            self._table = _Table(pairs, self.optim)
        if self._table.unfrozen():
            self.create_masters(lambda param: param.grad is not None)
            self._table = _Table(self._pairs(), self.optim)
        self._table.take_gradients()
        self._table.follow_weights()
        return self._table

    def _decide(self, table: _Table, scale: Tensor, agreement: Agreement) -> None:
        self._norm_measured = True
        if len(table.parts) == 1 and self.process_group is None and not table.parts[0][1]:
            control, accumulator = self._block(self.default_device)
            ops.grad_sumsq_(table.gradients_of(0), accumulator.zero_())
            ops.control_update_(control, accumulator, moved(scale, self.default_device))
            agreement.pending = False
            return
        total = accumulated_norm([self], ALONE, agreement)
        self.update_control(total, StepContext(grad_scale=scale, check_overflow=True))

    def _update(self, table: _Table, found_inf: Tensor | None) -> None:
        if allows_mutation():
            show_writes(table.params)
        stepped = {device: table.stepped(device, wide=True) for device in table.devices}
        for device, wide in stepped.items():
            self._hand_over(table, device, wide)
        try:
            inner_step(self.optim, StepContext(found_inf=found_inf))
        except BaseException:  # some gradients have been unscaled, or are gone
            _C.clear_gradients(table.params)
            raise
        finally:  # also if a hook has raised after the update
            for device, wide in stepped.items():
                params = [table.local_params[i] for i in wide]
                masters = [table.local_masters[i] for i in wide]
                _C.scaled_copy_(params, masters, self._block(device)[0], unscale=False)
            table.written()

    def _hand_over(self, table: _Table, device: torch.device, wide: list[int]) -> None:
        """Gives masters unscaled and clipped gradients, and releases the parameters' gradients.

        Gradients of 16 and of 32 bits therefore exist together only during this call.
        """
        made = self._room(table, device, wide)
        itself = [table.writable_gradient(i) for i in table.stepped(device, wide=False)]
        sources = [table.gradients[i] for i in wide]
        control = self._block(device)[0]
        _C.scaled_copy_([*made, *itself], [*sources, *itself], control, unscale=True)
        for i, grad in zip(wide, made, strict=True):
            table.masters[i].grad = as_placed(grad, table.masters[i])
        _C.clear_gradients([table.params[i] for i in wide])

    def _room(self, table: _Table, device: torch.device, wide: list[int]) -> list[Tensor]:
        """Returns memory for the masters' gradients.

        A GPU's allocator caches memory. The host's allocator would get it from the system, page by
        page, at several times the cost of the step. The host's memory is therefore kept, except for
        optimizers other than torch's, which may keep gradients themselves.
        """
        kept = device.type == "cpu" and type(self.optim).__module__.startswith("torch.optim.")
        if kept and table.room[0] == wide:
            return table.room[1]
        room = _C.carve([table.local_masters[i] for i in wide])
        if kept:
            table.room = wide, room
        return room

    # ---- what accumulated_norm() needs --------------------------------------------------------

    @property
    def parts(self) -> list[NormPart]:
        """Devices and norm keys by which parameters are summed, the same on all ranks."""
        if self._table is not None:
            return self._table.parts
        return list(dict.fromkeys(map(part_of, filter(is_steppable, params_of(self)))))

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        assert self._table is not None
        ops.grad_sumsq_(self._table.gradients_of(part), accumulator)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled or copied: its ranks exist in "
                "this run only; save its state_dict()"
            )
        return vars(self) | {"_table": None, "_view": None}


class _Table:
    """The model's parameters, the tensors that the optimizer steps for them, and their gradients.

    What a step needs to know of thousands of parameters is computed once, because Python takes
    longer for it than the updates take for their memory traffic.

    Args:
        pairs: the model's parameters by group, and what the optimizer steps for them.
        optim: the optimizer, whose groups hold masters or the parameters themselves.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], optim: Optimizer) -> None:
        self._identity = _C.Identity([*chain(*pairs)])
        self.params = [param for param, _ in pairs]
        self.masters = [master for _, master in pairs]
        self.names = list(chain(*(_names_of(n, g) for n, g in enumerate(optim.param_groups))))
        self._is_wide = [master is not param for param, master in pairs]
        self.own_masters = [master for param, master in pairs if master is not param]
        for name, (param, master) in zip(self.names, pairs, strict=True):
            if master is not param and not getattr(master, "is_master_weight", False):
                raise RuntimeError(
                    f"parameter {name} was replaced in the base's groups: build the base and "
                    f"FSDPadaptOptimizer for the new parameters"
                )
        # The parameters that are not this rank's tensors themselves, and the DTensors among them.
        self._wrapped = [i for i, p in enumerate(self.params) if local_tensor(p) is not p]
        self._sharded = [i for i in self._wrapped if is_dtensor(self.params[i])]
        # Frozen parameters that no step can update, such as quantized weights.
        self._frozen: list[int] = []
        self._of_part: dict[NormPart, list[int]] = {}
        for i, param in enumerate(self.params):
            if is_steppable(param):
                self._of_part.setdefault(part_of(param), []).append(i)
            else:
                self._frozen.append(i)
        self.parts = list(self._of_part)
        self.devices = list(dict.fromkeys(device for device, _ in self.parts))
        if self._sharded:  # the hook would slow other steps of this wrapper by some percent
            watch_weights(self.params)
        self._marks = _C.WeightMarks()
        self.gradients: list[Any] = []  # this step's gradients by parameter, or None
        self.room: tuple[list[int], list[Tensor]] = [], []  # parameters, memory for gradients
        self.take(pairs)

    def take(self, pairs: list[tuple[Tensor, Tensor]]) -> bool:
        """Takes this rank's parts for a step; returns False if the table is of other tensors."""
        if self._identity != _C.Identity([*chain(*pairs)]):
            return False
        # Parts of DTensors may be replaced between steps.
        self.local_params, self.local_masters = self.params.copy(), self.masters.copy()
        for i in self._wrapped:
            self.local_params[i], self.local_masters[i] = map(local_tensor, pairs[i])
        return True

    def release(self) -> None:
        """Drops gradients, and parts of DTensors, whose memory the user may give back."""
        self.gradients, self.local_params, self.local_masters = [], [], []
        _C.clear_gradients(self.own_masters)

    def written(self) -> list[int]:
        """Returns the parameters with a master that were written to since the last call."""
        written = self._marks.renew(self.params, self.local_params)
        return [i for i in written if self._is_wide[i]]

    def follow_weights(self) -> None:
        """Lets masters follow weights that user code has written to since the last step."""
        for i in self.written():
            _C.take_weight(self.local_masters[i], self.local_params[i])

    def unfrozen(self) -> bool:
        """Returns whether a 16-bit parameter without master has a gradient, so that it needs one.

        Raises:
            TypeError: a parameter that no step can update has a gradient; names it.
        """
        for i in self._frozen:
            if self.params[i].grad is not None:
                reject_param(self.params[i], f"parameter {self.names[i]}")
        return any(
            not wide and param.grad is not None and param.dtype in SIXTEEN_BIT
            for param, wide in zip(self.params, self._is_wide, strict=True)
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
        locals_ = local_gradients([self.params[i] for i in self._sharded])
        for i, local in zip(self._sharded, locals_, strict=True):
            grads[i] = local
        _C.check_step(self.local_params, self.local_masters, grads, self.names)
        self.gradients = grads

    def gradients_of(self, part: int) -> list[Tensor]:
        """Returns the gradients that a part's parameters have."""
        grads = self.gradients
        return [grads[i] for i in self._of_part[self.parts[part]] if grads[i] is not None]

    def stepped(self, device: torch.device, *, wide: bool) -> list[int]:
        """Returns the parameters on a device with a gradient, and with (``wide``) or no master."""
        return [
            i
            for part in self.parts
            if part[0] == device
            for i in self._of_part[part]
            if self.gradients[i] is not None and self._is_wide[i] == wide
        ]

    def writable_gradient(self, i: int) -> Tensor:
        """Returns the gradient of a parameter without master, copied if it cannot be written."""
        param: Any = self.params[i]
        grad: Tensor = self.gradients[i]
        if grad is local_tensor(param.grad) and grad.stride() == self.local_params[i].stride():
            return grad
        own = torch.empty_like(self.local_params[i], dtype=grad.dtype).copy_(grad)
        param.grad = as_placed(own, param)
        return own


def _names_of(number: int, group: dict[str, Any]) -> list[str]:
    """Returns the names of a group's parameters for messages."""
    given = group.get("param_names")
    return [
        repr(given[i]) if given else f"{i} of group {number}" for i in range(len(group["params"]))
    ]


def skips_on_device(optim: Optimizer) -> bool:
    """Returns whether a step with ``found_inf`` changes nothing, without help of the host.

    torch's fused Adam and AdamW are such optimizers. torch's fused SGD is not, because a skipped
    first step leaves uninitialized momentum (torch/optim/sgd.py).
    """
    fused = all(group.get("fused") for group in optim.param_groups)
    return fused and type(optim) in (torch.optim.Adam, torch.optim.AdamW)
