"""Lets any optimizer under FSDPadaptOptimizer step fp32 masters of the model's parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import _C
from torchopt_ext._arguments import restored_if_raised
from torchopt_ext.optim import FusedSGD
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.optim.norm import NormGroup
from torchopt_ext.state.local import as_placed, local_tensor
from torchopt_ext.state.masters import has_low_bits
from torchopt_ext.state.params import params_of
from torchopt_ext.state.storage import MASTER, SIXTEEN_BIT, is_steppable
from torchopt_ext.statedict.loaded import load_whole, raise_problems, read_indexed, undone_if_raised


class MasterOptimizer(FusedSGD):
    """Puts fp32 masters into the groups of any optimizer in place of 16-bit parameters.

    It holds the model's parameters and their masters, collects and measures gradients, and decides
    as every fused optimizer does. Only its update is the other optimizer's step: it writes unscaled
    and clipped fp32 gradients for the masters, steps, and rounds the masters to the parameters.

    Trainable 16-bit parameters have a master from the start, frozen parameters from their first
    gradient on. Others are stepped directly, and their gradients unscaled and clipped in place.

    Args:
        optim: the optimizer; masters take the parameters' places in its groups and state.

    Raises:
        TypeError: no step could update a parameter; names it. Nothing is changed.
    """

    optim: Optimizer | None = None  # None while the constructor adds the first groups
    _held: Sequence[Tensor] = ()  # the parameters of the optimizer's groups
    _stepped: Sequence[tuple[Any, Any]] = ()  # the plan's parameters, and what is stepped for them
    _rooms: Mapping[NormGroup, tuple[list[int], list[Tensor]]] = {}
    _skipped: float | None = None

    def __init__(self, optim: Optimizer) -> None:
        super().__init__([*map(_params_and_names, optim.param_groups)])
        self._keep_masters()
        self.optim = optim
        self._adopt(lambda param: param.requires_grad)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.optim is None:
            super().add_param_group(param_group)
            return
        with restored_if_raised([param_group], self.optim), restored_if_raised([], self):
            self.optim.add_param_group(param_group)
            super().add_param_group(_params_and_names(self.optim.param_groups[-1]))
            self._adopt(lambda param: param.requires_grad)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if len(set(group["params"])) != len(group["params"]):
            raise ValueError(f"group {len(self.param_groups) - 1} has a parameter twice")

    def _check_param(self, param: Tensor, name: str | int) -> None:
        super()._check_param(param, name)
        if param.is_complex():
            raise TypeError(f"parameter {name!r} is complex: only fused optimizers step those")
        if torch.nn.parameter.is_lazy(param):
            raise TypeError(f"parameter {name!r} has no shape yet: run the model once before")

    @torch.no_grad()
    def _adopt(self, needs: Callable[[Tensor], bool]) -> None:
        """Makes the masters of the parameters that need them, and gives them to the optimizer."""
        self._init_states(needs)
        self._give_masters()

    def _give_masters(self) -> None:
        """Puts the masters into the optimizer's groups, and the parameters' state under them.

        If this raises, for example because memory is short, nothing has changed.
        """
        assert self.optim is not None
        state = self.optim.state
        held = [self.state.get(param, {}).get(MASTER, param) for param in params_of(self)]
        pairs = [*zip(params_of(self.optim), held, strict=True)]
        replaced = [(old, new) for old, new in pairs if old is not new]
        entries = {new: _widened(state[old]) for old, new in replaced if old in state}
        for old, new in replaced:
            state.pop(old, None)
            new.is_master_weight = True  # copies of the base keep it
        state.update(entries)
        self._held, rest = held, iter(held)
        for group in self.optim.param_groups:
            group["params"] = [*islice(rest, len(group["params"]))]

    def _rebuild(self) -> Any:
        built = super()._rebuild()
        self._give_masters()  # a parameter may have got its first gradient
        pairs = zip(params_of(self), self._held, strict=True)
        self._stepped = [pair for pair in pairs if self.state.get(pair[0])]
        self._rooms = {}
        return built

    @torch.no_grad()
    def prepare_base(
        self, state_dict: Mapping[str, Any], weights: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Checks a state dict of the optimizer, and returns the function that loads it.

        Args:
            weights: what the parameters were rounded from, in order.
        """
        optim = self.optim
        assert optim is not None
        raise_problems(read_indexed(state_dict, optim.param_groups).problems(optim))
        ids = chain(*(group["params"] for group in state_dict["param_groups"]))
        saved = {
            param: (state_dict["state"].get(i), weight)
            for param, i, weight in zip(params_of(self), ids, weights, strict=True)
        }

        def needs_master(param: Tensor) -> bool:  # unfrozen late, in the saved run or here
            state, weight = saved[param]
            if not is_steppable(param) or weight.dtype != torch.float32:
                return False
            return param.requires_grad or bool(state) or has_low_bits(param, {MASTER: weight})

        def load() -> None:
            with undone_if_raised(self), undone_if_raised(optim):
                self._adopt(needs_master)
                self._forget_plan()  # whose marks are of other weights
                load_whole(optim, state_dict)

        return load

    def step(self, closure: Callable[[], Any] | None = None) -> float | None:  # type: ignore[override]
        """Makes one step.

        Returns:
            Nonzero if the step was skipped; None if only the device knows.
        """
        super().step(closure)
        return self._skipped

    def _local_step(self, context: StepContext, again: bool = True) -> bool:
        held = params_of(self.optim)
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            raise RuntimeError(
                "parameters were added, removed or replaced in the base's groups: "
                "FSDPadaptOptimizer.add_param_group() adds a group; for other parameters, build "
                "base and FSDPadaptOptimizer anew"
            )
        parts = (self._built or self._rebuild()).parts
        device = self._default_device
        if parts != [(device, ())] or self.process_group is not None:
            return False
        plan = self.collect().plan
        try:
            accumulator = self._block(device)[1].zero_()
            self.accumulate(0, accumulator)
            self.decide({device: accumulator}, context)
            self.update()
        finally:
            plan.release()
        return True

    def update(self) -> None:
        """Steps the optimizer with unscaled and clipped gradients, unless the step is skipped."""
        assert self._built is not None and self.optim is not None
        plan, parts, *_ = self._built
        self._skipped, found_inf = self.known("skip"), None
        if self._skipped is None:
            if skips_on_device(self.optim):
                found_inf = self.control.found_inf.float()
            else:
                self._skipped = self.control.skip.item()
                self.rejected_steps.check()
        if self._skipped:
            return
        rounded = [
            self._hand_over(part, *collected)
            for part, collected in zip(parts, plan.collected(), strict=True)
        ]
        plan.release()
        try:
            inner_step(self.optim, StepContext(found_inf=found_inf))
        except BaseException:  # some gradients have been unscaled, or are gone
            _C.clear_gradients([param for param, _ in self._stepped])
            raise
        finally:  # also if a hook has raised after the update
            for shards, masters, control in rounded:
                _C.scaled_copy_(shards, masters, control, unscale=False)
            plan.renew_marks()
            _C.clear_gradients([held for param, held in self._stepped if held is not param])

    def _hand_over(
        self,
        part: NormGroup,
        positions: list[int],
        shards: list[Tensor],
        masters: list[Tensor | None],
        gradients: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Gives masters unscaled and clipped gradients, and releases the parameters' gradients.

        Gradients of 16 and of 32 bits therefore exist together only during this call.

        Returns:
            What the step has to round: this rank's parts, their masters, and the control block.
        """
        control = self._block(part[0])[0]
        wide = [i for i, master in enumerate(masters) if master is not None]
        narrow = [i for i, master in enumerate(masters) if master is None]
        for i in narrow:
            param, _ = self._stepped[positions[i]]
            if gradients[i] is not local_tensor(param.grad):  # had other strides or placements
                param.grad = as_placed(gradients[i], param)
        stepped: list[Any] = [masters[i] for i in wide]
        room = self._room(part, [positions[i] for i in wide], stepped)
        in_place = [gradients[i] for i in narrow]
        sources = [gradients[i] for i in wide]
        _C.scaled_copy_([*room, *in_place], [*sources, *in_place], control, unscale=True)
        for i, grad in zip(wide, room, strict=True):
            _, master = self._stepped[positions[i]]
            master.grad = as_placed(grad, master)
        _C.clear_gradients([self._stepped[positions[i]][0] for i in wide])
        return [shards[i] for i in wide], stepped, control

    def _room(self, part: NormGroup, positions: list[int], masters: list[Tensor]) -> list[Tensor]:
        """Returns memory for the masters' gradients.

        A GPU's allocator caches memory. The host's allocator would get it from the system, page by
        page, at several times the cost of the step. The host's memory is therefore kept, except for
        optimizers other than torch's, which may keep gradients themselves.
        """
        kept = part[0].type == "cpu" and type(self.optim).__module__.startswith("torch.optim.")
        last, room = self._rooms.get(part, ((), []))
        if not kept or last != positions:
            room = _C.carve(masters)
        if kept:
            self._rooms = {**self._rooms, part: (positions, room)}
        return room

    def _portable_state(self) -> dict[str, Any]:
        return super()._portable_state() | {"optim": self.optim, "_held": self._held}


def _params_and_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: [*group[key]] for key in ("params", "param_names") if key in group}


def _widened(entry: Any) -> Any:
    """Returns a parameter's state as its master's: with float32 in place of 16-bit tensors."""
    if not isinstance(entry, dict):
        return entry
    narrow = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.dtype in SIXTEEN_BIT}
    return entry | {name: value.float() for name, value in narrow.items()}


def skips_on_device(optim: Optimizer) -> bool:
    """Returns whether a step with ``found_inf`` changes nothing, without help of the host.

    torch's fused Adam and AdamW are such optimizers. torch's fused SGD is not, because a skipped
    first step leaves uninitialized momentum (torch/optim/sgd.py).
    """
    fused = all(group.get("fused") for group in optim.param_groups)
    return fused and type(optim) in (torch.optim.Adam, torch.optim.AdamW)
