"""The plan of a fused optimizer's steps, and the parts that such a step is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext._C import OptimizerPlan
from torchopt_ext.optim import state as param_state
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.local import NormKey, is_split, moved
from torchopt_ext.optim.storage import Storage, refuse_param
from torchopt_ext.optim.telemetry import Telemetry, keep_digests, telemetry_of


class _Built(NamedTuple):
    """A plan, and the objects whose addresses are all it holds: whoever uses it keeps both."""

    plan: OptimizerPlan
    objects: list[Any]
    only_device: torch.device | None  # the default device, if all the plan has is one part there


class PlannedStep(Controlled, Optimizer):
    """An optimizer whose parameters, state and options a plan in C++ knows from step to step.

    It is built anew when parameters or state are others than it knows (docs/step.md).
    """

    process_group: Any
    _storage: Storage
    _options: param_state.PlanOptions

    def _init_plan(self) -> None:
        self._built: _Built | None = None
        self._norm_keys: list[NormKey] = []
        self._planned: list[tuple[str, Tensor]] = []  # the plan's parameters, if it tracks them
        self._digests: dict[Tensor, Tensor] = {}  # while there is no plan, for the next one
        self._copied_before = 0

    @property
    def telemetry(self) -> Telemetry:
        """What the last step saw of each parameter; for optimizers built with ``track``.

        Raises:
            RuntimeError: ``track`` is off, or there was no step yet.
        """
        if not self._options.track or self._plan is None:
            raise RuntimeError(
                "there is no telemetry without track= and before the first step with this state"
            )
        return telemetry_of(self._plan, [name for name, _ in self._planned])

    @property
    def gradients_copied(self) -> int:
        """How many gradients had other strides than their parameter and were copied, so far."""
        return self._copied_before + (self._plan.gradients_copied if self._plan else 0)

    @torch.no_grad()
    def init_state(self) -> None:
        """Creates the state a first step would create, with step 0, for trainable parameters.

        A state dict taken before the first step is then complete, and taking it changes nothing:
        a loaded master weight or remainder of the other kind is left for the next step.
        """
        self._init_states(lambda param: param.requires_grad)

    def _init_states(self, wanted: Callable[[Tensor], bool]) -> None:
        named = enumerate(param_state.named_group_params(self))
        chosen = [(group, n or i, param) for i, (_, group, n, param) in named if wanted(param)]
        for _, name, param in chosen:
            self._check_param(param, name)
        entries = [(group, param, self.state[param]) for group, _, param in chosen]
        param_state.init_param_states(entries, self._storage)

    def _check_param(self, param: Tensor, name: str | int) -> None:
        """Raises TypeError unless steps can update the parameter."""
        what = f"parameter {name!r} of {type(self).__name__}"
        refuse_param(param, what)
        self._storage.refuse(param, what, self._options.stochastic_rounding)

    # ---- the parts of fused_step ------------------------------------------------------------

    @property
    def norm_settings(self) -> tuple[Any, ...]:
        """What optimizers that step together must agree on."""
        return self.max_grad_norm, self.skip_nonfinite, self.process_group

    def wants_norm(self, context: StepContext) -> bool:
        """Whether a step needs pass A."""
        return context.check_overflow or self.needs_norm

    @property
    def parts(self) -> list[tuple[torch.device, NormKey]]:
        """Device and norm key of each part of the plan, or of the plan that could not be made."""
        if self._plan is None:
            return list(param_state.norm_parts(self))
        return list(zip(self._plan.part_devices, self._norm_keys, strict=True))

    @property
    def devices(self) -> list[torch.device]:
        """Where a control block has to know the decision: the first parameter's device, from
        which it is read, and those of the plan's parts."""
        return list(dict.fromkeys([self.default_device, *(device for device, _ in self.parts)]))

    def check_scaler(self, context: StepContext) -> None:
        """Raises what a gradient scaler's tensors would raise in update()."""
        for device in self.devices:
            tensors = self._scaler_tensors(context, device)
            for name, tensor in zip(("grad_scale", "found_inf"), tensors, strict=True):
                if tensor is not None and (tensor.dtype != torch.float32 or tensor.numel() != 1):
                    raise RuntimeError(f"{name} is not one float32 element on {device}")

    def step_alone(self, context: StepContext) -> bool:
        """The whole step in one call into C++, if one part with a norm of its own is all there is.

        Returns False, with nothing changed, if the step has to be made piece by piece.
        """
        for _ in range(2):
            built = self._built  # kept while it is used, whatever other threads do
            if built is not None:
                device, with_norm = built.only_device, self.wants_norm(context)
                own_norm = self.process_group is None and not any(self._norm_keys)
                agrees = context.agreement is not None
                if device is None or agrees or (with_norm and not own_norm):
                    return False
                self._begin_step(context.check_overflow, with_norm)
                blocks, scaler = self._block(device), self._scaler_tensors(context, device)
                if built.plan.step(self.param_groups, self.state, *blocks, with_norm, *scaler):
                    return True
            self._rebuild()
        return False

    def collect(self) -> None:
        """Takes this step's gradients, after rebuilding the plan if it no longer fits."""
        if self._plan is None or not self._plan.collect(self.param_groups, self.state):
            self._rebuild()
            if not self._plan_or_raise().collect(self.param_groups, self.state):
                raise RuntimeError("the parameters' gradients changed while the step was prepared")

    def kept(self) -> object:
        """What has to live as long as the collected step is under way."""
        return self._built

    def release(self) -> None:
        """Lets go of what collect() took, when a step is given up."""
        if self._plan is not None:
            self._plan.release()

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        """Pass A of one part."""
        self._plan_or_raise().accumulate(part, accumulator, normalize=True)

    def update(self, total: dict[torch.device, Tensor], context: StepContext) -> None:
        """Control and pass B, given all gradients' squares by device (none without a norm)."""
        plan = self._plan_or_raise()
        self._begin_step(context.check_overflow, bool(total))
        for device in self.devices:
            control, accumulator = self._block(device)
            accumulated = total.get(device, accumulator.zero_())
            ops.control_update_(control, accumulated, *self._scaler_tensors(context, device))
        plan.update([self._block(device)[0] for device in plan.part_devices])

    def _scaler_tensors(
        self, context: StepContext, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """The context's grad_scale and found_inf on ``device``.

        torch.amp.GradScaler reduces its flag over the mesh of DTensor gradients, but keeps that of
        plain tensors to its rank. A flag under ``check_overflow`` is summed with the squares.

        Raises:
            RuntimeError: ranks that hold plain shards of the gradients would decide differently.
        """
        scale, found_inf = context.grad_scale, context.found_inf
        if found_inf is not None and not context.agreed:
            if context.check_overflow:
                if self.process_group is not None or any(map(is_split, self._norm_keys)):
                    found_inf = None
            elif self.process_group is not None:
                raise RuntimeError(
                    "torch.amp.GradScaler keeps the overflow flag of plain tensors to one rank, so "
                    "ranks of a process_group would decide differently: use torchopt_ext.GradScaler"
                )
        return (
            None if scale is None else moved(scale, device),
            None if found_inf is None else moved(found_inf, device),
        )

    @property
    def _plan(self) -> OptimizerPlan | None:
        return None if self._built is None else self._built.plan

    def _plan_or_raise(self) -> OptimizerPlan:
        if self._plan is None:
            raise RuntimeError(f"{type(self).__name__}: collect() has not been called")
        return self._plan

    @torch.no_grad()
    def _rebuild(self) -> None:
        if self._plan is not None:
            if self._options.track:
                seen = telemetry_of(self._plan, [name for name, _ in self._planned]).digests
                self._digests = dict(zip((p for _, p in self._planned), seen, strict=True))
            self._copied_before += self._plan.gradients_copied
            self._built = None
        self._init_states(
            lambda param: param.grad is not None and "step" not in self.state.get(param, ())
        )
        plan, self._norm_keys = param_state.build_plan(self, self._storage, self._options)
        only = plan.part_devices == [self.default_device]
        self._built = _Built(plan, plan.objects(), self.default_device if only else None)
        if self._options.track:
            named = enumerate(param_state.named_group_params(self))
            self._planned = [
                (name or str(i), param) for i, (_, _, name, param) in named if self.state.get(param)
            ]
            known = self._digests
            keep_digests(
                plan, {i: known[p] for i, (_, p) in enumerate(self._planned) if p in known}
            )
            self._digests = {}
