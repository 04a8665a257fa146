"""What FusedAdam and FusedAdamW are made of: torch.optim.Optimizer over a step plan."""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext._C import OptimizerPlan
from torchopt_ext.optim import saved
from torchopt_ext.optim import state as param_state
from torchopt_ext.optim.control import ControlView
from torchopt_ext.optim.local import NormKey, local_tensor, moved
from torchopt_ext.optim.step import fused_step
from torchopt_ext.optim.storage import Storage, with_own_steps
from torchopt_ext.optim.telemetry import Telemetry, keep_digests, telemetry_of, track_bits


class FusedAdamBase(Optimizer):
    """What FusedAdam and FusedAdamW share; they differ in where the weight decay goes."""

    # torch.amp.GradScaler then sets grad_scale and found_inf instead of unscaling gradients.
    _step_supports_amp_scaling = True
    # torchopt_ext.GradScaler then leaves the overflow check to the step, and sets check_overflow.
    checks_overflow_in_step = True
    check_overflow = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
        master_weights: str | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        write_back_gradients: bool = False,
        track: bool | Collection[str] = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        name = type(self).__name__
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if isinstance(lr, Tensor) and lr.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Tensor lr has dtype {lr.dtype}, expected float32 or float64")
        if not 0.0 <= lr:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= eps:
            raise ValueError(f"Invalid epsilon value: {eps}")
        if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
            raise ValueError("betas must be either both floats or both Tensors")
        betas = (float(betas[0]), float(betas[1]))
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not 0.0 <= weight_decay:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if foreach or fused is False or differentiable:
            asked = {"foreach": foreach, "fused": fused, "differentiable": differentiable}
            raise ValueError(
                f"{name} is always fused and not differentiable; got {asked}. "
                f"Use torch.optim for the other implementations."
            )
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"Invalid max_grad_norm: {max_grad_norm}; None leaves gradients alone")
        if not 0 <= rounding_seed < 2**64:
            raise ValueError(f"Invalid rounding_seed: {rounding_seed}, expected 64 bits")
        self._storage = Storage(master_weights, state_dtype)
        self._options = param_state.PlanOptions(
            stochastic_rounding, rounding_seed, write_back_gradients, track_bits(track)
        )
        self._settings = {
            "max_grad_norm": max_grad_norm or 0.0,
            "skip_nonfinite": float(skip_nonfinite),
        }
        self._init_runtime(process_group)
        # The keys of torch's Adam and AdamW, so that state dicts move both ways.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": True,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def _init_runtime(self, process_group: torch.distributed.ProcessGroup | None) -> None:
        self.process_group = process_group
        self._plan: OptimizerPlan | None = None
        self._plan_objects: list[Any] = []
        self._norm_keys: list[NormKey] = []
        self._blocks: dict[torch.device, tuple[Tensor, Tensor]] = {}  # control, accumulator
        self._skips_for_scaler = False
        self._planned: list[Tensor] = []  # the plan's parameters, if it tracks them
        self._loading: dict[str, Any] | None = None
        self._copied_before = 0

    # ---- torch.optim.Optimizer --------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient does not fit its parameter; names it. Nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fused_step([self])
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or range(len(group["params"]))
        try:
            for name, param in zip(names, group["params"], strict=True):
                what = f"parameter {name!r} of {type(self).__name__}"
                param_state.refuse_param(param, what)
                self._storage.refuse(param, what, self._options.stochastic_rounding)
        except TypeError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with a schedule or a loss scale of its own also ``torchopt_ext.control``.

        Tensors are the optimizer's own but for the steps, which are copies.
        """
        packed = super().state_dict()
        packed["state"] = with_own_steps(packed["state"])
        if control := self.saved_control():
            packed[saved.CONTROL_KEY] = control
        return packed

    def saved_control(self) -> dict[str, float]:
        """What a checkpoint has to hold of the control block: its counts and loss scale.

        Empty without a schedule or a loss scale of its own, which alone depend on them.
        """
        if not (self._settings.get("scheduled") or self._settings.get("growth_interval")):
            return {}
        values = dict(zip(ops.CONTROL_FIELDS, self._block(self.home)[0].tolist(), strict=True))
        return {name: values[name] for name in saved.PERSISTENT}

    def load_control(self, control: Mapping[str, float]) -> None:
        """Takes what :meth:`saved_control` gave."""
        self._set_control(**{k: float(v) for k, v in control.items() if k in saved.PERSISTENT})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's; checked whole before anything changes.

        Nothing of the given dict is kept. Moments come in the dtype this optimizer keeps them in;
        a master weight, a remainder, or neither is converted to what this optimizer keeps, with
        the parameter as it is when the next step begins.

        Raises:
            ValueError: groups or shapes do not fit this optimizer.
        """

        def check(_: Optimizer, hooked: dict[str, Any]) -> dict[str, Any]:
            saved.check_saved(self, hooked)
            self._loading = hooked
            # torch casts what it is given; __setstate__ takes the entries as they are.
            return {**hooked, "state": {}}

        # As the last of the load hooks, which may adapt the dict.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
            loaded = self._loading or {}
        finally:
            handle.remove()
            self._loading = None
        self.load_control(loaded.get(saved.CONTROL_KEY, {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._portable_state(), memo))
        copied.process_group = self.process_group
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                f"a {type(self).__name__} with a process_group cannot be pickled: its ranks exist "
                f"in this run only; save its state_dict()"
            )
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        portable = super().__getstate__()
        return portable | {
            "state": defaultdict(dict, with_own_steps(portable["state"])),
            "_storage": self._storage,
            "_options": self._options,
            "_settings": self._settings,
            "_control": {device: block for device, (block, _) in self._blocks.items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_plan" not in self.__dict__:  # a copy or an unpickled optimizer
            self._init_runtime(None)
            controls: dict[torch.device, Tensor] = state.pop("_control", {})
            self._blocks = {d: (block, ops.new_accumulator(d)) for d, block in controls.items()}
        if self._loading is not None:
            loaded = saved.loaded_state(self._loading, state["param_groups"], self._storage)
            state["state"] = defaultdict(dict, loaded)
        super().__setstate__(state)
        for group in self.param_groups:  # state dicts of older torch versions lack some keys
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        self._plan = None

    # ---- beyond torch -----------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | None:
        """Clip threshold for the norm of all gradients; None for no clipping."""
        return self._settings["max_grad_norm"] or None

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not value > 0.0:
            raise ValueError(f"Invalid max_grad_norm: {value}; None leaves gradients alone")
        self._set_control(max_grad_norm=value or 0.0)

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step in which a gradient is not finite changes nothing."""
        return bool(self._settings["skip_nonfinite"])

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
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
        """Lets a warmup-stable-decay factor, computed on the device, multiply the learning rate.

        Skipped steps do not count. ``group["lr"]`` stays the base value; no other scheduler should
        change it. Arguments as :func:`torchopt_ext.ops.lr_factor`.

        Raises:
            ValueError: an argument out of range.
        """
        schedule = {
            "warmup_steps": warmup_steps,
            "stable_steps": stable_steps,
            "decay_steps": decay_steps,
        }
        ops.lr_factor(
            0, **schedule, decay_type=decay_type, min_factor=min_factor, generation=generation
        )  # checks the arguments
        self._set_control(
            **schedule,
            decay_type=float(("linear", "sqrt", "cosine").index(decay_type)),
            min_lr_factor=min_factor,
            schedule_generation=float(generation),
            scheduled=1.0,
        )

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Makes the master weights what the parameters are now.

        Call it after weights were changed from outside, such as by loading a checkpoint of the
        model alone: the next step would otherwise continue from the old master weights.
        """
        for _, _, _, param in param_state.named_group_params(self):
            param_state.refresh_master(param, self.state.get(param, {}))

    @property
    def telemetry(self) -> Telemetry:
        """What the last step saw of each parameter; for optimizers built with ``track``.

        Raises:
            RuntimeError: ``track`` is off, or there was no step yet.
        """
        if not self._options.track or self._plan is None:
            raise RuntimeError("there is no telemetry without track= and before the first step")
        names = [
            name or str(number)
            for number, (_, _, name, param) in enumerate(param_state.named_group_params(self))
            if self.state.get(param)
        ]
        return telemetry_of(self._plan, names)

    @property
    def control(self) -> ControlView:
        """The last step's decision, such as ``control.grad_norm``; reading it is lazy."""
        return ControlView(self._block(self.home)[0])

    @property
    def gradients_copied(self) -> int:
        """How many gradients had other strides than their parameter and were copied, so far."""
        return self._copied_before + (self._plan.gradients_copied if self._plan else 0)

    @torch.no_grad()
    def init_state(self) -> None:
        """Creates the state a first step would create, with step 0, for trainable parameters.

        A state dict taken before the first step is then complete, and taking it changes nothing.
        """
        for _, group, _, param in param_state.named_group_params(self):
            if param.requires_grad:
                param_state.init_param_state(group, param, self.state[param], self._storage)

    # ---- the parts of fused_step ------------------------------------------------------------

    @property
    def home(self) -> torch.device:
        """The first parameter's device."""
        for group in self.param_groups:
            for param in group["params"]:
                return torch.device(local_tensor(param).device)
        return torch.device("cpu")

    @property
    def norm_settings(self) -> tuple[Any, ...]:
        """What optimizers that step together must agree on."""
        return self.max_grad_norm, self.skip_nonfinite, self.process_group

    @property
    def wants_norm(self) -> bool:
        """Whether a step needs pass A."""
        reasons = ("max_grad_norm", "skip_nonfinite", "growth_interval")
        return self.check_overflow or any(self._settings.get(reason) for reason in reasons)

    @property
    def parts(self) -> list[tuple[torch.device, NormKey]]:
        """Device and norm key of each part of the plan."""
        return list(zip(self._plan_or_raise().part_devices, self._norm_keys, strict=True))

    def step_alone(self) -> bool:
        """The whole step in one call into C++, if one part with a norm of its own is all there is.

        Returns False, with nothing changed, if the step has to be made piece by piece.
        """
        for _ in range(2):
            plan = self._plan
            if plan is not None:
                if plan.parts != 1 or (
                    self.wants_norm and (self._norm_keys[0] or self.process_group is not None)
                ):
                    return False
                self._apply_overflow_check()
                control, accumulator = self._block(plan.part_devices[0])
                if plan.step(
                    self.param_groups,
                    self.state,
                    control,
                    accumulator,
                    self.wants_norm,
                    *self._scaler_tensors(plan.part_devices[0]),
                ):
                    return True
            self._rebuild()
        return False

    def collect(self) -> None:
        """Takes this step's gradients, after rebuilding the plan if it no longer fits."""
        if self._plan is None or not self._plan.collect(self.param_groups, self.state):
            self._rebuild()
            if not self._plan_or_raise().collect(self.param_groups, self.state):
                raise RuntimeError("the parameters' gradients changed while the step was prepared")

    def release(self) -> None:
        """Lets go of what collect() took, when a step is given up."""
        if self._plan is not None:
            self._plan.release()

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        """Pass A of one part."""
        self._plan_or_raise().accumulate(part, accumulator, normalize=True)

    def update(self, total: dict[torch.device, Tensor]) -> None:
        """Control and pass B, given all gradients' squares by device (none without a norm)."""
        plan = self._plan_or_raise()
        self._apply_overflow_check()
        for device in dict.fromkeys(plan.part_devices or [self.home]):
            control, accumulator = self._block(device)
            accumulated = total.get(device, accumulator.zero_())
            ops.control_update_(control, accumulated, *self._scaler_tensors(device))
        plan.update([self._block(device)[0] for device in plan.part_devices])

    def _block(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._blocks:
            with torch.inference_mode(False):  # steps will change them
                settings = dict(self._settings)
                if self._skips_for_scaler:
                    settings["skip_nonfinite"] = 1.0
                control = ops.new_control(device, **settings)  # type: ignore[arg-type]
                self._blocks[device] = control, ops.new_accumulator(device)
        return self._blocks[device]

    def _set_control(self, **fields: float) -> None:
        self._settings |= fields
        for control, _ in self._blocks.values():
            for name, value in fields.items():
                control[ops.CONTROL_FIELDS.index(name)] = value

    def _apply_overflow_check(self) -> None:
        """Lets an overflow skip the step while a scaler asks for it, whatever skip_nonfinite is."""
        if self.check_overflow != self._skips_for_scaler:
            self._skips_for_scaler = self.check_overflow
            skip = float(self.skip_nonfinite or self.check_overflow)
            for control, _ in self._blocks.values():
                control[ops.CONTROL_FIELDS.index("skip_nonfinite")] = skip

    @property
    def _sharded(self) -> bool:
        return self.process_group is not None or any(self._norm_keys)

    def _scaler_tensors(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """grad_scale and found_inf, where a gradient scaler has set them, on ``device``."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and self._sharded:
            if not self.check_overflow:
                raise RuntimeError(
                    "torch.amp.GradScaler keeps each rank's overflow to itself, so ranks that hold "
                    "shards of the gradients would part; use torchopt_ext.GradScaler instead"
                )
            found_inf = None  # summed over the ranks with the squares (step.py)
        return (
            None if scale is None else moved(scale, device),
            None if found_inf is None else moved(found_inf, device),
        )

    def _plan_or_raise(self) -> OptimizerPlan:
        if self._plan is None:
            raise RuntimeError(f"{type(self).__name__}: collect() has not been called")
        return self._plan

    def _rebuild(self) -> None:
        digests: dict[Tensor, Tensor] = {}
        if self._plan is not None:
            if self._options.track:
                seen = telemetry_of(self._plan, [""] * len(self._planned)).digests
                digests = dict(zip(self._planned, seen, strict=True))
            self._copied_before += self._plan.gradients_copied
            self._plan = None
        for _, group, _, param in param_state.named_group_params(self):
            if param.grad is not None and not self.state.get(param):
                param_state.init_param_state(group, param, self.state[param], self._storage)
        self._plan, self._norm_keys = param_state.build_plan(self, self._storage, self._options)
        self._plan_objects = self._plan.objects()  # the plan itself holds addresses only
        if self._options.track:
            named = param_state.named_group_params(self)
            self._planned = [param for _, _, _, param in named if self.state.get(param)]
            kept = {i: digests[p] for i, p in enumerate(self._planned) if p in digests}
            keep_digests(self._plan, kept)
