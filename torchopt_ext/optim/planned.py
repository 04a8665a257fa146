"""The plan of a fused optimizer's steps, and the parts of such a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._C import OptimizerPlan, WeightMarks
from torchopt_ext.optim import param_states
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.exchange import Exchangers
from torchopt_ext.optim.host_step import HostStep
from torchopt_ext.optim.norm import FSDP1_HELP, NormGroup, is_flattened, part_of
from torchopt_ext.optim.options import StepOptions
from torchopt_ext.optim.owners import groups_of_shared
from torchopt_ext.optim.param_states import Apart
from torchopt_ext.optim.shards import watch_weights
from torchopt_ext.optim.telemetry import Telemetry, telemetry_of, track_bits
from torchopt_ext.state.algorithms import algorithm_of, expect_keys
from torchopt_ext.state.entries import CONTROL_KEY
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.masters import refresh_stale_elements
from torchopt_ext.state.matrices import matrices_of
from torchopt_ext.state.params import drop_replaced, named_group_params, params_of
from torchopt_ext.state.storage import MASTER, Place, Storage, param_problem, place_of


class _Built(NamedTuple):
    """A plan, and what is known about it. Owns no parameter, which the user may drop."""

    plan: OptimizerPlan
    parts: list[NormGroup]
    names: list[str]  # of the parameters, or their numbers
    only_device: torch.device | None  # the default device, if the plan has one part, on it
    flattened: str | None  # name or number of a parameter that FSDP1 flattened and sharded
    exchangers: Exchangers
    apart: list[Apart]  # what the last parts are for
    host_steps: Mapping[int, HostStep]  # by part


class PlannedStep(Controlled, Optimizer):
    """An optimizer with a plan in C++, which keeps parameters, state and options between steps.

    The plan is rebuilt if a step finds other parameters or other state (docs/between_steps.md).
    """

    # The number of the first parameter in draws and digests (docs/numerics.md sections 8 and 9). A
    # container numbers the parameters of its optimizers consecutively.
    _first_parameter_number = 0
    # How many of a container's matrices come before, for the turns of their owners.
    _first_matrix_number = 0
    # Places of parameters that are parts of larger parameters: set by ZeroRedundancyOptimizer.
    _parameter_places: Mapping[Tensor, Place] = {}
    # Names for messages and telemetry if groups have no param_names: set by containers.
    parameter_names: Sequence[Sequence[str]] = ()  # of each group, "" for none
    _storage: Storage
    _options: StepOptions
    _built: _Built | None = None
    _copies_of_dropped_plans = 0
    _marked: Tensor | None = None  # the counts that _mark_control() added
    _last_parts: Sequence[NormGroup] = ()  # of the last plan, while there is no plan
    _last_exchange_groups: Mapping[int, Any] = {}  # the same
    # Weights when their fp32 masters were made or stepped, by id, while there is no plan.
    _marks: Mapping[int, WeightMarks] = {}

    @property
    def telemetry(self) -> Telemetry:
        """The last step's record of each parameter, for optimizers built with ``track``.

        Raises:
            RuntimeError: ``track`` is off, or no step was made with this state.
        """
        self._wait_for_modules()
        if not self._options.track or self._built is None:
            raise RuntimeError(
                "there is no telemetry without track=, or before the first step with this state"
            )
        return telemetry_of(self._built.plan, self._built.names, track_bits(self._options.track))

    @property
    def gradients_copied(self) -> int:
        """How many gradients were copied so far because their strides are not the parameter's."""
        copied = 0 if self._built is None else self._built.plan.gradients_copied
        return self._copies_of_dropped_plans + copied

    @torch.no_grad()
    def init_state(self) -> None:
        """Creates the state that a first step would create, with step 0, for trainable parameters.

        A state dict taken before the first step is then complete. A loaded master weight or
        remainder of another kind stays until the next step converts it.
        """
        self._init_states(lambda param: param.requires_grad)

    def _init_states(self, chooses: Callable[[Tensor], bool]) -> None:
        drop_replaced(self)
        named = enumerate(named_group_params(self))
        chosen = [(group, n or i, param) for i, (_, group, n, param) in named if chooses(param)]
        for group, name, param in chosen:
            self._check_param(param, name)
            if algorithm_of(group).steps_matrices:
                matrices_of(group, param, name)
            param_states.reject_incomplete(name, self.state.get(param, {}), group)
        entries = [(group, param, self.state[param]) for group, _, param in chosen]
        new = [param for _, param, state in entries if MASTER not in state]
        param_states.init_param_states(entries, self._storage)
        self._mark_weights(new)
        if self._storage.master_weights == "fp32":
            watch_weights(params_of(self))
        self._mark_control(follow=True)

    def _check_param(self, param: Tensor, name: str | int) -> None:
        """Raises TypeError or ValueError unless steps can update the parameter."""
        if problem := param_problem(param) or self._storage.problem(param):
            raise TypeError(f"parameter {name!r} of {type(self).__name__} {problem}")
        if self._draws_bits:
            place_of(0, param, name)

    def _mark_weights(self, params: Iterable[Tensor]) -> None:
        """Records that the fp32 masters of these parameters belong to the present weights."""
        with_master = [param for param in params if MASTER in self.state.get(param, {})]
        marks = {id(param): WeightMarks([param], [local_tensor(param)]) for param in with_master}
        self._marks = {**self._marks, **marks}

    @torch.no_grad()
    def _take_written_weights(self) -> None:
        """Lets fp32 masters follow weights that user code has written to since the last step.

        A step of a plan that fits does the same (csrc/python/collect.cpp).
        """
        built = self._built
        marks = {**self._marks, **({} if built is None else built.plan.weight_marks())}
        for param in params_of(self):
            state = self.state.get(param)
            if isinstance(state, dict) and MASTER in state:
                mark = marks.get(id(param), WeightMarks())
                if mark.renew([param], [local_tensor(param)]):
                    refresh_stale_elements(param, state)

    def _mark_control(self, *, follow: bool = False) -> None:
        """Adds the control's live counts to the first parameter's state, if they are saved.

        torch's set_optimizer_state_dict takes from a dict only entries that the state has: the
        entries of the first parameter that has state, in the order of the groups.

        Args:
            follow: continue from the counts that a program has moved here with the state, and at
                least from the parameters' steps. Does not wait for the device.
        """
        entries = [self.state.get(param) for param in params_of(self)] if self._keeps_counts else []
        states = [entry for entry in entries if isinstance(entry, dict) and "step" in entry]
        if states:
            held = [f for entry in states if len(f := entry.pop(CONTROL_KEY, ()))]
            live = self._live_counts()
            if follow and not (held and held[0] is self._marked):
                self._take_counts(*held[:1])
                self._count_at_least([entry["step"] for entry in states])
            states[0][CONTROL_KEY] = self._marked = live

    def _follow_moved(self) -> None:
        if self._keeps_counts:
            entries = (self.state.get(param) for param in params_of(self))
            first = next((e for e in entries if isinstance(e, dict) and "step" in e), None)
            if first is not None and first.get(CONTROL_KEY) is not self._marked:
                self._mark_control(follow=True)

    def _set_control(self, **fields: float) -> None:
        kept = self.has_schedule, self.has_loss_scale
        super()._set_control(**fields)
        if kept != (self.has_schedule, self.has_loss_scale):
            self._mark_control()

    @property
    def _draws_bits(self) -> bool:
        """Whether a step may round at random, for which shards must know their places."""
        return self._options.stochastic_rounding or self._storage.ema_dtype == torch.bfloat16

    def _parts_apart(self) -> Mapping[int, Apart]:
        """Returns the parameters that are in a part of their own, by ids."""
        return {}

    def _staging_bytes(self) -> int:
        """Returns the bytes of a slot in which the step stages states (optim/host_steps.py)."""
        return 0

    def _module_numbers(self) -> Mapping[int, int]:
        """Returns the modules with which parameters are stepped, by ids (optim/overlapped.py)."""
        return {}

    def _expect_steppable(self) -> None:
        """Raises RuntimeError if a step, or a measured norm, could not be made now."""

    @property
    def parts(self) -> list[NormGroup]:
        """Device and norm key of each part of the plan, also if the plan could not be made."""
        return list(param_states.norm_parts(self)) if self._built is None else self._built.parts

    def _check_scaler(self, context: StepContext) -> None:
        """Raises the errors of a gradient scaler's tensors that update() would raise."""
        for name in ("grad_scale", "found_inf"):
            value = getattr(context, name)
            if value is not None and (value.dtype != torch.float32 or value.numel() != 1):
                raise RuntimeError(f"{name} is not one float32 element on {self._default_device}")
        self._scaler_tensors(context, self._default_device)

    def _local_step(self, context: StepContext, again: bool = True) -> bool:
        """Makes the whole step in one call into C++, if the plan has one part with its own norm.

        Returns False, with nothing changed, if the step must be made piece by piece.
        """
        built = self._built or self._rebuild()
        device, with_norm = built.only_device, self._wants_norm(context)
        if with_norm:
            self._expect_all_shards(built)
        reduced = self.process_group is not None or any(key for _, key in built.parts)
        shared = (with_norm and reduced) or built.exchangers.groups
        if device is None or shared or context.progress is not None:
            return False
        self._begin_step(context)
        control, accumulator = self._block(device)
        grad_scale, found_inf = self._scaler_tensors(context, device)
        if built.plan.step(
            self.param_groups, self.state, control, accumulator, with_norm, grad_scale, found_inf
        ):
            self._norm_measured = with_norm
            return True
        del built  # it may own copies of parameters that are not dense
        self._rebuild()
        return again and self._local_step(context, again=False)

    def collect(self) -> _Built:
        """Gives this step's gradients to a plan that fits; the caller must release the plan."""
        built = self._built or self._rebuild()
        if not built.plan.collect(self.param_groups, self.state):
            built = self._rebuild()
            if not built.plan.collect(self.param_groups, self.state):
                raise RuntimeError("the parameters' gradients changed while the step was prepared")
        return built

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        assert self._built is not None, "collect() comes first"
        self._expect_all_shards(self._built)
        self._built.plan.accumulate(part, accumulator)

    def _expect_all_shards(self, built: _Built) -> None:
        """Raises ValueError if the norm would leave out other ranks' shards."""
        if built.flattened is not None and self.process_group is None:
            raise ValueError(f"parameter {built.flattened!r} {FSDP1_HELP}")

    def decide(self, total: dict[torch.device, Tensor], context: StepContext) -> None:
        """Updates control, given all squares by device (empty without a norm)."""
        self._begin_step(context)
        self._update_control(total, context)
        self._norm_measured = bool(total)

    @property
    def _exchange_groups(self) -> Mapping[int, Any]:
        if self._built is not None:
            return self._built.exchangers.groups
        try:
            return groups_of_shared(self)
        except (AttributeError, LookupError, TypeError, ValueError):
            # A group that no step takes, such as of an unknown algorithm: tell the same ranks.
            return self._last_exchange_groups

    @property
    def _exchangers(self) -> Exchangers:
        assert self._built is not None, "collect() comes first"
        return self._built.exchangers

    def update(self) -> None:
        """Runs pass B, after :meth:`decide`."""
        assert self._built is not None, "collect() comes first"
        plan, parts, *_ = self._built
        plan.update([self._block(device)[0] for device, _ in parts])

    def _stepped_names(self, exchanging: int | None = None) -> list[str]:
        """Returns what messages call the parameters with a gradient that :meth:`update` has
        stepped.

        Args:
            exchanging: the part of the plan whose exchanges have failed. What these step is left
                out.
        """
        parts, exchanged = self.parts, self._exchangers.numbers
        found = []
        for position, (_, _, name, param) in enumerate(named_group_params(self)):
            part = parts.index(part_of(param)) if param.grad is not None else len(parts)
            ended = exchanging is None or (part, position in exchanged) < (exchanging, True)
            if part < len(parts) and ended:
                number = self._parameter_places.get(param, (position,))[0]
                found.append(repr(name) if name else f"parameter {number}")
        return found

    def _forget_plan(self) -> None:
        if self._built is not None:
            self._last_parts = self._built.parts
            self._last_exchange_groups = self._built.exchangers.groups
            self._marks = {**self._marks, **self._built.plan.weight_marks()}
        self._copies_of_dropped_plans, self._built = self.gradients_copied, None

    @torch.no_grad()
    def _rebuild(self) -> _Built:
        expect_keys(self.param_groups)
        self._forget_plan()
        self._take_written_weights()
        self._init_states(
            lambda param: param.grad is not None and "step" not in self.state.get(param, ())
        )
        plan, parts, named, shared, apart, hosts = param_states.build_plan(
            self, self._storage, self._options
        )
        self._marks = {}
        only = [device for device, _ in parts] == [self._default_device]
        device = self._default_device if only else None
        flattened = (name for name, param in named if is_flattened(param))
        names = [name for name, _ in named]
        self._built = _Built(
            plan, parts, names, device, next(flattened, None), shared, apart, hosts
        )
        return self._built
