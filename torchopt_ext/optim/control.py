"""The control block of an optimizer: its settings, and read access by field name."""

import copy
import math
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext._arguments import expect_counts, expect_numbers
from torchopt_ext._torch import run_eagerly
from torchopt_ext.ops import CONTROL_FIELDS
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    expect_scale,
    scale_settings,
)
from torchopt_ext.optim.norm import NormGroup
from torchopt_ext.optim.rejection import RejectedSteps
from torchopt_ext.state.devices import is_captured, moved
from torchopt_ext.state.local import local_tensor

__all__ = ["ControlView"]

DECAY_TYPES = ("linear", "sqrt", "cosine")
PERSISTENT = ("steps", "skipped_steps", "loss_scale", "growth_tracker", "hysteresis_tracker")
"""The fields that a checkpoint saves; the others are settings of the run that loads it."""
_STEPS = CONTROL_FIELDS.index("steps")  # the other persistent fields follow, in this order


def read_fields(block: Tensor) -> dict[str, float]:
    """Returns a control block's fields by name; waits for the block's device."""
    return dict(zip(CONTROL_FIELDS, block.tolist(), strict=True))


class ControlView:
    """The decision of an optimizer's last step: ``control.grad_norm`` and so on.

    Reading a field copies it on the parameters' device, to a 0-dim float64 tensor that later steps
    do not change. Only asking for the tensor's value synchronizes. ``grad_norm`` is NaN if the last
    step measured no norm. Other fields that steps write are ``clip_factor``, ``found_inf``,
    ``skip``, ``grad_scale``, ``steps``, ``skipped_steps``, ``loss_scale``, ``lr_factor`` and
    ``orthogonalized``, which counts for all parts of a container, in the last step of each.
    csrc/kernels/control.h says what each field means. ``repr`` shows the decision, and ``dir``
    names all fields.
    """

    _others: Sequence[Any] = ()  # parts of a container, which have made the same decision

    def __init__(self, block: Tensor, owner: "Controlled") -> None:
        self._block = block
        self._views = block.unbind()  # made once: each view costs an operator call
        self._owner = weakref.ref(owner)

    def __getattr__(self, name: str) -> Tensor:
        if name not in CONTROL_FIELDS:
            raise AttributeError(f"no field {name!r}; the fields are {', '.join(CONTROL_FIELDS)}")
        return self.live(name).clone()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *CONTROL_FIELDS]

    @property
    def grad_norm(self) -> Tensor:
        norm, owner = self.live("grad_norm").clone(), self._owner()
        return norm if owner is None or owner._norm_measured else norm.fill_(math.nan)

    @property
    def orthogonalized(self) -> Tensor:
        count = self.live("orthogonalized").clone()
        for part in self._others:
            count += moved(part.control.live("orthogonalized"), count.device)
        return count

    def _with_others(self, parts: Sequence[Any]) -> "ControlView":
        """Returns a view that also counts what other optimizers have done in this step."""
        view = copy.copy(self)
        view._others = parts
        return view

    def live(self, name: str) -> Tensor:
        """Returns the field itself, a 0-dim float64 tensor that later steps change."""
        return self._views[CONTROL_FIELDS.index(name)]

    def __repr__(self) -> str:
        known = {name: getattr(self, name).item() for name in ("grad_norm", "orthogonalized")}
        fields = read_fields(self._block) | known
        shown = ["steps", "skipped_steps", "skip", "grad_norm", "clip_factor"]
        settings = {"loss_scale": "growth_interval", "lr_factor": "scheduled"}
        shown += [name for name, setting in settings.items() if fields[setting]]
        shown += ["orthogonalized"] if fields["orthogonalized"] else []
        return f"ControlView({', '.join(f'{name}={fields[name]:g}' for name in shown)})"


class Controlled:
    """Base of classes that step by a gradient norm: settings, and a control block per device."""

    param_groups: list[dict[str, Any]]
    process_group: Any = None
    # The ranks that have equal parameters and divide the orthogonalization of their matrices.
    orthogonalize_over: Any = None
    # The device on which a rank without parameters takes part in the norm.
    _device_without_params = torch.device("cpu")
    _view: ControlView | None = None
    _norm_measured = False  # by the last step
    _written_skip: bool | None = None  # skip_nonfinite in the control blocks, if known

    @property
    def _exchange_groups(self) -> Mapping[int, Any]:
        """The process groups of parameters whose matrices ranks share in pass B, by position."""
        return {}

    def _init_control(self) -> None:
        self._settings = {"max_grad_norm": 0.0, "skip_nonfinite": 0.0}
        self._blocks: dict[torch.device, tuple[Tensor, Tensor]] = {}  # control, accumulator
        self.rejected_steps = RejectedSteps()

    @property
    def max_grad_norm(self) -> float | None:
        """Clip threshold for the norm of all gradients.

        None and 0 turn clipping off. ``math.inf`` measures the norm without clipping. A negative
        number or NaN raises ValueError. A value that is not a number raises TypeError.
        """
        return self._settings["max_grad_norm"] or None

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        expect_numbers(max_grad_norm=0.0 if value is None else value)
        if value is not None and not value >= 0.0:
            raise ValueError(
                f"Invalid max_grad_norm: {value}, expected None or a number of 0 or more"
            )
        if (threshold := float(value or 0.0)) != self._settings["max_grad_norm"]:
            self._set_control(max_grad_norm=threshold)  # a write to the device

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step with a gradient that is not finite changes nothing."""
        return bool(self._settings["skip_nonfinite"])

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
        expect_numbers(skip_nonfinite=value)
        self._set_control(skip_nonfinite=float(value))

    def set_schedule(
        self,
        *,
        warmup_steps: int,
        stable_steps: int,
        decay_steps: int,
        decay_type: str = "linear",
        min_factor: float = 0.0,
        generation: int = 1,
    ) -> None:
        """Multiplies the learning rate by a warmup-stable-decay factor, computed on the device.

        Skipped steps do not count. ``group["lr"]`` stays the base value; no other scheduler should
        change it. The arguments are as for :func:`torchopt_ext.ops.lr_factor`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range.
        """
        steps = {
            "warmup_steps": warmup_steps,
            "stable_steps": stable_steps,
            "decay_steps": decay_steps,
        }
        expect_counts(**steps, generation=generation)
        expect_numbers(min_factor=min_factor)
        if decay_type not in DECAY_TYPES:
            raise ValueError(f"decay_type is {decay_type!r}, expected one of {DECAY_TYPES}")
        ops.lr_factor(
            0, decay_type=decay_type, min_factor=min_factor, generation=generation, **steps
        )  # checks the arguments
        self._set_control(
            **steps,
            decay_type=float(DECAY_TYPES.index(decay_type)),
            min_lr_factor=min_factor,
            schedule_generation=float(generation),
            scheduled=1.0,
        )

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate follows :meth:`set_schedule`."""
        return bool(self._settings.get("scheduled"))

    def set_loss_scale(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float = 0.0,
    ) -> None:
        """Keeps a loss scale in the control block, which follows overflows without a scaler.

        Multiply losses by ``optimizer.control.loss_scale`` before backward. Steps with overflow are
        skipped. The arguments are as for :class:`torchopt_ext.GradScaler`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range.
        """
        rule = scale_settings(
            growth_factor=growth_factor, backoff_factor=backoff_factor,
            growth_interval=growth_interval, hysteresis=hysteresis,
            min_scale=min_scale, max_scale=max_scale,
        )  # fmt: skip
        expect_scale("init_scale", init_scale, rule)
        counts = {"growth_tracker": 0.0, "hysteresis_tracker": 0.0}
        self._set_control(**rule, loss_scale=init_scale, **counts)

    @property
    def has_loss_scale(self) -> bool:
        """Whether the control block keeps a loss scale (:meth:`set_loss_scale`)."""
        return bool(self._settings.get("growth_interval"))

    @property
    def _skips_overflow(self) -> bool:
        """Whether a gradient that is not finite skips a step even if no scaler asks for it."""
        return self.has_loss_scale or bool(self._settings["skip_nonfinite"])

    @property
    def _keeps_counts(self) -> bool:
        """Whether a schedule, a loss scale or ``ema_warmup`` depends on the block's counts."""
        return self.has_schedule or self.has_loss_scale or bool(self._settings.get("ema_warmup"))

    def _saved_control(self) -> dict[str, float]:
        """Returns the control block's counts and loss scale (0: none), for a checkpoint.

        Returns an empty dict without a schedule or loss scale: nothing else depends on the fields.
        """
        if not self._keeps_counts:
            return {}
        values = read_fields(self._block(self._default_device)[0])
        if not self.has_loss_scale:
            values["loss_scale"] = 0.0
        return {name: values[name] for name in PERSISTENT}

    def _live_counts(self) -> Tensor:
        """Returns the counts on which a schedule and a loss scale depend: a view of the block."""
        count = len(PERSISTENT) if self.has_loss_scale else 2
        return self._block(self._default_device)[0][_STEPS : _STEPS + count]

    def _take_counts(self, moved_here: Any = ()) -> None:
        """Sets the counts to those of a tensor or state dict, but not to what no count can be.

        Programs edit state without knowing its entries: a loss scale of 0 would end the training.
        """
        live, device = self._live_counts(), self._default_device
        if isinstance(moved_here, Mapping):  # it is from a state dict
            moved_here = [moved_here.get(n, now) for n, now in zip(PERSISTENT, live, strict=False)]
        for name, now, value in zip(PERSISTENT, live.clone(), moved_here, strict=False):
            count: Any = torch.as_tensor(value, dtype=torch.float64, device=device)
            usable = (count >= 0.0) & (count.frac() == 0.0)
            if name == "loss_scale":
                usable = (count >= SMALLEST_SCALE) & (count <= LARGEST_SCALE)
            count = torch.where(usable, count, now)
            self._write_control({name: count})

    def _wait_for_modules(self) -> None:
        """Lets the current streams wait for steps that end during a forward (optim/overlapped.py).

        Other streams may still have to wait.
        """

    def _follow_moved(self) -> None:
        """Continues from counts that a program has moved here with the state."""

    def _count_at_least(self, steps: Iterable[Any]) -> None:
        """Raises the count of steps to the largest of parameters' step counts."""
        self._wait_for_modules()
        counts = [torch.as_tensor(local_tensor(step)).reshape(()) for step in steps]
        for block, _ in self._blocks.values():
            done = block[_STEPS] - block[_STEPS + 1]
            largest = torch.stack([moved(count, block.device) for count in counts]).max()
            block[_STEPS] += (largest - done).clamp_(min=0.0)

    def _control_to_load(
        self, control: Mapping[str, float], largest: float, largest_before: float
    ) -> dict[str, float]:
        """Returns the fields to load, given those that :meth:`_saved_control` returned.

        It warns of fields that begin anew, before anything changes: a warning may be an error.

        Args:
            control: empty for the state dict of an optimizer that keeps no counts.
            largest: the largest step count of a parameter. Steps of an optimizer that keeps no
                counts appear only here. They are added to the loaded counts, with a warning.
            largest_before: the largest step count before loading.
        """
        saved = {name: float(value) for name, value in control.items() if name in PERSISTENT}
        done = saved.get("steps", 0.0) - saved.get("skipped_steps", 0.0)
        if done != largest != largest_before and saved == self._saved_control():
            # torch's set_optimizer_state_dict fills a missing entry with this optimizer's own
            # counts, which belong to other steps than the loaded state.
            saved, done = {}, 0.0
        fields = dict.fromkeys(PERSISTENT, 0.0) | saved
        if not self.has_loss_scale:
            fields["loss_scale"] = 1.0  # nobody scales this optimizer's gradients
        elif fields["loss_scale"] == 0.0:
            fields["loss_scale"] = self._settings["loss_scale"]
            if done >= largest > 0.0:
                warnings.warn(
                    "the state dict was saved without a loss scale: it begins anew, with "
                    f"{fields['loss_scale']:g}",
                    stacklevel=3,
                )
        if done < largest:
            fields["steps"] = largest + fields["skipped_steps"]
            if self._keeps_counts:
                warnings.warn(
                    f"the state dict does not count all steps for the schedule and the loss scale: "
                    f"both continue from step {largest:g}, the largest step count of a parameter, "
                    f"with the loss scale {fields['loss_scale']:g}",
                    stacklevel=3,
                )
        return fields

    def _load_control(self, fields: Mapping[str, float]) -> None:
        """Sets the result of :meth:`_control_to_load`."""
        self._block(self._default_device)  # blocks made later copy the counts of an existing block
        self._write_control(fields)

    @property
    @run_eagerly  # torch 2.11 cannot compile code that sets attributes of an optimizer
    def control(self) -> ControlView:
        """The last step's decision, such as ``control.grad_norm``; only its values synchronize."""
        self._follow_moved()
        block = self._block(self._default_device)[0]
        if self._view is None or self._view._block is not block:
            self._view = ControlView(block, self)
        return self._view

    def known(self, name: str) -> float | None:
        """Returns a field's value if reading it does not wait for a device, otherwise None."""
        value = self.control.live(name)
        return value.item() if value.is_cpu else None

    @property
    def _default_device(self) -> torch.device:
        """The device of the first parameter that is not on the meta device."""
        for group in self.param_groups:
            for param in group["params"]:
                if not param.is_meta:
                    return torch.device(param.device)
        return self._device_without_params

    def _block(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if (blocks := self._blocks.get(device)) is not None:
            return blocks
        fields = dict(self._settings)
        for block, _ in self._blocks.values():  # continue the counts of another device's block
            values = read_fields(block)
            fields |= {name: values[name] for name in PERSISTENT}
        if self._written_skip is not None:
            fields["skip_nonfinite"] = self._written_skip
        with torch.inference_mode(False):  # steps outside inference mode will change them
            control = ops.new_control(device, **_as_stored(fields))
            self._blocks[device] = control, ops.new_accumulator(device)
        return self._blocks[device]

    def _set_control(self, **fields: float) -> None:
        self._settings = self._settings | fields  # a copied optimizer may share the old dict
        self._written_skip = None
        self._write_control(fields)

    def _write_control(self, fields: Mapping[str, float]) -> None:
        for control, _ in self._blocks.values():
            for name, value in _as_stored(fields).items():
                control[CONTROL_FIELDS.index(name)] = value

    def _begin_step(self, context: StepContext) -> None:
        """Lets an overflow skip the step, also if a scaler or loss scale asks for it."""
        skip = context.check_overflow or self._skips_overflow
        if skip is not self._written_skip:
            self._written_skip = None if is_captured() else skip  # a capture writes nothing yet
            self._write_control({"skip_nonfinite": skip})

    def _update_control(self, total: Mapping[torch.device, Tensor], context: StepContext) -> None:
        """Decides about a step on every device, given all squares by device (empty: no norm)."""
        self._wait_for_modules()  # they read the last decision
        for device in self.devices:
            control, accumulator = self._block(device)
            accumulated = total[device] if total else accumulator.zero_()
            ops.control_update_(control, accumulated, *self._scaler_tensors(context, device))

    def _count_rejected(self, total: Mapping[torch.device, Tensor], context: StepContext) -> None:
        """Counts a step that this rank rejects as other ranks' GPUs do: as one that overflowed."""
        self._update_control(
            total, context._replace(found_inf=torch.ones(1), found_inf_agreed=True)
        )

    def _scaler_tensors(
        self, context: StepContext, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the context's grad_scale and found_inf on ``device``.

        Raises:
            RuntimeError: ranks that hold plain shards of the gradients would decide differently:
                torch.amp.GradScaler reduces its flag over the mesh of DTensor gradients, but its
                flag of plain tensors covers one rank only.
        """
        scale, found_inf = context.grad_scale, context.found_inf
        if found_inf is not None:
            if self.process_group is not None and not (
                context.found_inf_agreed or context.check_overflow
            ):
                raise RuntimeError(
                    "torch.amp.GradScaler keeps the overflow flag of plain tensors to one rank, so "
                    "ranks of a process_group would decide differently: use torchopt_ext.GradScaler"
                )
            found_inf = moved(found_inf, device)
        return None if scale is None else moved(scale, device), found_inf

    def _wants_norm(self, context: StepContext) -> bool:
        """Returns whether a step measures the gradients' norm or checks that they are finite."""
        clips = self._settings["max_grad_norm"] != 0.0
        return clips or context.check_overflow or self._skips_overflow

    @property
    def parts(self) -> list[NormGroup]:
        """Device and norm key of each part; keys and order are the same on all ranks."""
        raise NotImplementedError

    @property
    def devices(self) -> list[torch.device]:
        """The devices with a control block: the first parameter's, for reading, and the parts'."""
        return list(dict.fromkeys([self._default_device, *(device for device, _ in self.parts)]))

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        """Adds the squares of a part's gradients to the accumulator (pass A)."""
        raise NotImplementedError


def _as_stored(fields: Mapping[str, float]) -> Mapping[str, float]:
    """Returns fields as the control block stores them: infinity becomes 0, which clips nothing."""
    return {**fields, "max_grad_norm": 0.0} if fields.get("max_grad_norm") == math.inf else fields
