"""GradScaler: torch.amp.GradScaler without its pass over the gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._arguments import expect_counts, expect_numbers, inner_optimizer
from torchopt_ext._torch import OptState, fresh_optimizer_state, run_eagerly
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.hooks import HookedStep, step_in
from torchopt_ext.optim.loss_scale import (
    LossScale,
    expect_scale,
    is_count,
    is_scale,
    scale_settings,
)
from torchopt_ext.optim.options import answers_other_names
from torchopt_ext.state.devices import moved
from torchopt_ext.state.params import params_of
from torchopt_ext.statedict.loaded import expect_dict

_SAVED = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that checks and unscales gradients inside a fused optimizer's step.

    torch's class reads and writes every gradient before the step, and its overflow flag covers only
    this rank. With fused optimizers and containers of them, this class passes the scale to the
    step, whose norm pass finds overflows on any rank that holds a shard. With other optimizers it
    works as torch's class. Gradients in memory stay scaled. To see unscaled gradients, call
    ``unscale_``, which unscales them in memory.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in
            torch.amp.GradScaler.
        hysteresis: overflows until the scale backs off; 1 as in torch's class. Growth resets the
            count (Megatron-LM, DeepSpeed).
        min_scale, max_scale: limits of the scale; 0 for no limit. Unlike in torch's class, the
            scale stays a normal float32 number, whose reciprocal is finite.

    Raises:
        TypeError: an argument is not a number.
        ValueError: ``init_scale``, ``growth_interval``, ``hysteresis``, ``min_scale`` or
            ``max_scale`` is out of range. torch asserts ``growth_factor`` and ``backoff_factor``.
    """

    @answers_other_names()
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float = 0.0,
    ) -> None:
        expect_numbers(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )
        if not is_count(float(growth_interval), 0):
            raise ValueError(
                f"Invalid growth_interval: {growth_interval}, expected a whole number, 0 or more"
            )
        settings = scale_settings(hysteresis=hysteresis, min_scale=min_scale, max_scale=max_scale)
        if enabled:
            expect_scale("init_scale", init_scale, settings)
        self._settings = settings  # without growth settings, which _growth_settings() adds
        self._loss_scale: LossScale | None = None
        self._init_hysteresis_tracker = 0
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth = self._growth_settings()
        counts = self._init_growth_tracker, self._init_hysteresis_tracker
        self._loss_scale = LossScale(self._scale, self._settings | self._growth, *counts)
        # torch's methods read and fill this tensor.
        self._growth_tracker = self._loss_scale.field("growth_tracker")

    def _growth_settings(self) -> dict[str, float]:
        return {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": float(self._growth_interval),
        }

    @run_eagerly
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer with unscaled gradients. Skips the step if a gradient overflowed.

        Returns what ``optimizer.step(*args, **kwargs)`` returns.

        Raises:
            RuntimeError: the scaler is enabled, and ``step`` was called twice since the last
                ``update()`` or with a closure other than None. Or ``unscale_`` was called with
                another optimizer that has some of these gradients, such as a part of a container.
            TypeError: the object only hands on attributes of another optimizer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = kwargs.pop("closure", args[0] if args else None)
        if closure is not None:
            raise RuntimeError("a closure cannot be used while gradients are scaled")
        self._reject_unscaled(optimizer)
        if not getattr(optimizer, "_checks_overflow_in_step", False):
            return super().step(optimizer, *args[1:], **kwargs)
        if not isinstance(optimizer, HookedStep) or inner_optimizer(optimizer) is not optimizer:
            raise TypeError(
                f"a {type(optimizer).__name__} hands attributes of another optimizer on, but not "
                f"the scale: pass the scaler that optimizer itself"
            )
        scale, _ = self._check_scale_growth_tracker("step")
        mine = self._per_optimizer_states[id(optimizer)]
        if mine["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if mine["stage"] is OptState.READY:
            own = vars(optimizer).pop("grad_scale", None)  # set by the user, for one step
            context = StepContext(scale if own is None else scale * own, check_overflow=True)
        else:  # the check of unscale_ counts, even if the gradients have changed since
            flags = [moved(f, scale.device) for f in mine["found_inf_per_device"].values()]
            total = torch.stack(flags).sum() if flags else torch.zeros_like(scale)
            mine["found_inf_per_device"] = {scale.device: total}
            context = StepContext(found_inf=total, check_overflow=True)
        fused: Any = optimizer
        result = step_in(fused, context, *args[1:], **kwargs)
        mine["found_inf_per_device"] = {}
        if getattr(fused, "committed", True):  # replica groups may refuse a step
            found_inf = fused.control.found_inf
            mine["found_inf_per_device"] = {found_inf.device: found_inf}
        mine["stage"] = OptState.STEPPED
        return result

    @run_eagerly
    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales the optimizer's gradients in memory, as torch's class does.

        Raises:
            RuntimeError: the parameters do not hold the optimizer's gradients
                (ZeroRedundancyOptimizer with sharded gradients). Its step unscales them. Or the
                optimizer has stepped in backward, with scaled gradients, or as for :meth:`step`.
        """
        if not self._enabled:
            return
        if getattr(optimizer, "_steps_in_backward", False):
            raise RuntimeError(
                f"this {type(optimizer).__name__} steps in backward, before a gradient scaler can "
                f"unscale gradients: use no scaler, or an optimizer that updates in step()"
            )
        if getattr(optimizer, "_gradients_are_sharded", False):
            raise RuntimeError(
                f"the gradients of {type(optimizer).__name__} went to the ranks that own them; "
                f"leave unscale_() out: step() unscales, checks and clips them"
            )
        self._reject_unscaled(optimizer)
        super().unscale_(optimizer)
        self._per_optimizer_states[id(optimizer)]["params"] = {*map(id, params_of(optimizer))}

    def _reject_unscaled(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if gradients were unscaled already, through another object."""
        others = [s for key, s in self._per_optimizer_states.items() if key != id(optimizer)]
        unscaled: set[int] = set().union(*(state.get("params", ()) for state in others))
        if unscaled and not unscaled.isdisjoint(map(id, params_of(optimizer))):
            raise RuntimeError(
                f"unscale_() has unscaled gradients of this {type(optimizer).__name__} as another "
                f"optimizer's, such as a container's or that of a part: give unscale_() and step() "
                f"the same object"
            )

    @run_eagerly
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Backs the scale off after an overflow, or grows it after enough steps without one.

        Steps that raised, and steps that replica groups refused to commit, leave the scale and its
        counts unchanged.

        Args:
            new_scale: sets the scale to this value instead.

        Raises:
            AssertionError: no gradient was checked since the last call, as in torch's class.
        """
        if not self._enabled or new_scale is not None:
            super().update(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [
            moved(found_inf, scale.device)
            for state in states
            for found_inf in state["found_inf_per_device"].values()
        ]
        # Without a flag no step was made, or it raised.
        if not flags and (not states or any(s["stage"] is OptState.UNSCALED for s in states)):
            raise AssertionError("No inf checks were recorded prior to update.")
        loss_scale, growth = self._loss_scale, self._growth_settings()
        assert loss_scale is not None
        if growth != self._growth:  # torch's setters have changed the settings
            self._growth = growth
            for name, value in growth.items():
                loss_scale.field(name).fill_(value)
        if flags:
            several = len(flags) > 1
            loss_scale.update(
                torch.stack([f.double() for f in flags]).sum() if several else flags[0]
            )
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and ``_hysteresis_tracker`` if hysteresis is above 1."""
        state = super().state_dict()
        if state and self._settings["hysteresis"] > 1.0:
            state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch.amp.GradScaler.

        Raises:
            KeyError, TypeError, ValueError: a value is missing or not a number, or ``scale`` is not
                a valid scale. Nothing is changed.
        """
        expect_dict(state_dict)
        overflows = state_dict.get("_hysteresis_tracker", 0)
        if self._enabled and state_dict:
            expect_numbers(**{name: state_dict[name] for name in _SAVED})
            expect_counts(_hysteresis_tracker=overflows)
            if not is_scale(float(state_dict["scale"])):
                raise ValueError(
                    f"scale is {state_dict['scale']!r}, expected a positive and finite float32"
                )
        super().load_state_dict(state_dict)
        self._init_hysteresis_tracker = int(overflows)
        if self._loss_scale is not None:
            self._loss_scale.field("hysteresis_tracker").fill_(self._init_hysteresis_tracker)

    def _get_growth_tracker(self) -> int:
        return int(super()._get_growth_tracker())

    def _get_hysteresis_tracker(self) -> int:
        if self._loss_scale is None:
            return self._init_hysteresis_tracker
        return int(self._loss_scale.field("hysteresis_tracker").item())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        state["_loss_scale"] = None
        return state
