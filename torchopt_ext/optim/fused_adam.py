"""FusedAdam and FusedAdamW: torch.optim.Adam and AdamW in two passes over memory."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext._C import OptimizerPlan
from torchopt_ext.optim import state as param_state
from torchopt_ext.optim.control import ControlView
from torchopt_ext.optim.local import NormKey, local_tensor, moved
from torchopt_ext.optim.step import fused_step


class FusedAdamBase(Optimizer):
    """What FusedAdam and FusedAdamW share; they differ in where the weight decay goes."""

    # torch.amp.GradScaler then sets grad_scale and found_inf instead of unscaling gradients.
    _step_supports_amp_scaling = True

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
        self._init_runtime(max_grad_norm, skip_nonfinite, process_group)
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

    def _init_runtime(
        self,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
        process_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self._max_grad_norm = max_grad_norm
        self._skip_nonfinite = skip_nonfinite
        self.process_group = process_group
        self._plan: OptimizerPlan | None = None
        self._plan_objects: list[Any] = []
        self._norm_keys: list[NormKey] = []
        self._blocks: dict[torch.device, tuple[Tensor, Tensor]] = {}  # control, accumulator
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
                param_state.refuse_param(param, f"parameter {name!r} of {type(self).__name__}")
        except TypeError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's; checked whole before anything changes.

        Raises:
            ValueError: groups or shapes do not fit this optimizer.
        """
        given: set[int] = set()

        def check(_: Optimizer, hooked: dict[str, Any]) -> None:
            entries = hooked["state"].values()
            given.update(id(value) for entry in entries for value in entry.values())
            self._check_shapes(hooked)

        # As the last of the load hooks, which may adapt the dict.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch keeps the given tensors where device and dtype agree; stepping would change them.
        for entry in self.state.values():
            for name, value in entry.items():
                if id(value) in given and isinstance(value, Tensor):
                    entry[name] = value.clone()

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = list(param_state.named_group_params(self))
        if len(ids) != len(params):
            return  # torch's own message says which group differs
        for index, (_, _, name, param) in zip(ids, params, strict=True):
            entry = state_dict["state"].get(index)
            if not entry:
                continue
            what = f"parameter {index}" + (f" ({name!r})" if name else "")
            if missing := {"step", "exp_avg", "exp_avg_sq"} - entry.keys():
                raise ValueError(f"the state of {what} lacks {', '.join(sorted(missing))}")
            param_state.check_loaded_step(entry["step"], f"step of {what}")
            for moment in param_state.MOMENTS:
                if moment in entry:
                    param_state.check_loaded_moment(entry[moment], param, f"{moment} of {what}")

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
        return super().__getstate__() | {
            "_max_grad_norm": self._max_grad_norm,
            "_skip_nonfinite": self._skip_nonfinite,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_plan" not in self.__dict__:  # a copy or an unpickled optimizer
            self._init_runtime(None, False, None)
        super().__setstate__(state)
        for group in self.param_groups:  # state dicts of older torch versions lack some keys
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        self._plan = None

    # ---- beyond torch -----------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | None:
        """Clip threshold for the norm of all gradients; None for no clipping."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not value > 0.0:
            raise ValueError(f"Invalid max_grad_norm: {value}; None leaves gradients alone")
        self._max_grad_norm = value
        self._set_control("max_grad_norm", value or 0.0)

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step in which a gradient is not finite changes nothing."""
        return self._skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
        self._skip_nonfinite = value
        self._set_control("skip_nonfinite", float(value))

    @property
    def control(self) -> ControlView:
        """The last step's decision, such as ``control.grad_norm``; reading it is lazy."""
        return ControlView(self._block(self.home)[0])

    @property
    def gradients_copied(self) -> int:
        """How many gradients had other strides than their parameter and were copied, so far."""
        return self._copied_before + (self._plan.gradients_copied if self._plan else 0)

    def init_state(self) -> None:
        """Creates the state a first step would create, with step 0, for trainable parameters.

        A state dict taken before the first step is then complete, and taking it changes nothing.
        """
        for _, group, _, param in param_state.named_group_params(self):
            if param.requires_grad:
                param_state.init_param_state(group, param, self.state[param])

    # ---- the parts of fused_step ------------------------------------------------------------

    @property
    def home(self) -> torch.device:
        """The first parameter's device."""
        params = [param for group in self.param_groups for param in group["params"]]
        return local_tensor(params[0]).device if params else torch.device("cpu")

    @property
    def norm_settings(self) -> tuple[Any, ...]:
        """What optimizers that step together must agree on."""
        return self._max_grad_norm, self.skip_nonfinite, self.process_group

    @property
    def wants_norm(self) -> bool:
        """Whether a step needs pass A."""
        return self._max_grad_norm is not None or self.skip_nonfinite

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
        self._plan_or_raise().accumulate(part, accumulator)

    def update(self, total: dict[torch.device, Tensor]) -> None:
        """Control and pass B, given all gradients' squares by device (none without a norm)."""
        plan = self._plan_or_raise()
        for device in dict.fromkeys(plan.part_devices or [self.home]):
            control, accumulator = self._block(device)
            accumulated = total.get(device, accumulator.zero_())
            ops.control_update_(control, accumulated, *self._scaler_tensors(device))
        plan.update([self._block(device)[0] for device in plan.part_devices])

    def _block(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._blocks:
            with torch.inference_mode(False):  # steps will change them
                control = ops.new_control(
                    device,
                    max_grad_norm=self._max_grad_norm or 0.0,
                    skip_nonfinite=self.skip_nonfinite,
                )
                self._blocks[device] = control, ops.new_accumulator(device)
        return self._blocks[device]

    def _scaler_tensors(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """grad_scale and found_inf, where torch.amp.GradScaler has set them, on ``device``."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and (self.process_group is not None or any(self._norm_keys)):
            raise RuntimeError(
                "torch.amp.GradScaler keeps each rank's overflow to itself, so ranks that hold "
                "shards of the gradients would part; use skip_nonfinite=True instead"
            )
        return (
            None if scale is None else moved(scale, device),
            None if found_inf is None else moved(found_inf, device),
        )

    def _set_control(self, field: str, value: float) -> None:
        for control, _ in self._blocks.values():
            control[ops.CONTROL_FIELDS.index(field)] = value

    def _plan_or_raise(self) -> OptimizerPlan:
        if self._plan is None:
            raise RuntimeError(f"{type(self).__name__}: collect() has not been called")
        return self._plan

    def _rebuild(self) -> None:
        if self._plan is not None:
            self._copied_before += self._plan.gradients_copied
            self._plan = None
        for _, group, _, param in param_state.named_group_params(self):
            if param.grad is not None and not self.state.get(param):
                param_state.init_param_state(group, param, self.state[param])
        self._plan, self._norm_keys = param_state.build_plan(self)
        self._plan_objects = self._plan.objects()  # the plan itself holds addresses only


class FusedAdam(FusedAdamBase):
    """torch.optim.Adam (Kingma & Ba, arXiv:1412.6980), fused with clipping and overflow check.

    The arguments up to ``fused`` are torch.optim.Adam's; ``weight_decay`` is added to the gradient.
    ``foreach=True``, ``fused=False`` and ``differentiable=True`` raise ValueError. Per-parameter
    state is torch's: ``step``, ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq``.

    Args:
        params: parameters, named parameters or param groups; float32, float64, bfloat16 or
            float16, dense; DTensors are stepped by their local shards.
        max_grad_norm: clips the gradients, inside the step, to this 2-norm over all of them, as
            ``torch.nn.utils.clip_grad_norm_`` would; the gradients themselves are not changed.
        skip_nonfinite: a step in which any gradient is not finite changes nothing.
        decoupled_weight_decay: AdamW instead, as in torch.optim.Adam.
        process_group: ranks whose gradients are disjoint shards; norm and skip decision are taken
            over all of them. Leave it out under DDP (gradients are replicated) and for DTensors
            (the mesh is known).

    Raises:
        TypeError: a parameter that no step could update; names it.
        ValueError: an argument out of range.
    """


class FusedAdamW(FusedAdamBase):
    """torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101), fused as :class:`FusedAdam` is.

    ``weight_decay`` multiplies the parameter, apart from the gradient; everything else is as in
    :class:`FusedAdam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            process_group=process_group,
            decoupled_weight_decay=True,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict of Adam's says otherwise
            group["decoupled_weight_decay"] = True
