"""The local optimizer, which steps this rank's parts as all ranks agree."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim.utils import functional_optim_map

from torchopt_ext import ops
from torchopt_ext._names import meant
from torchopt_ext.optim import FusedOptimizer, step
from torchopt_ext.optim.agreement import agree_on_matrices
from torchopt_ext.optim.averaged_weights import averages_in, fitting
from torchopt_ext.optim.context import ALONE, StepContext
from torchopt_ext.optim.embeddings import searched_once
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.optim.norm import squares_of
from torchopt_ext.optim.options import StepOptions
from torchopt_ext.optim.rejection import RejectedSteps, StepProgress, agree, reject_in
from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.collective import fail_together, waits_at_most
from torchopt_ext.state.masters import refresh_stale_elements
from torchopt_ext.state.params import named_params, params_of
from torchopt_ext.state.pieces import marked_cut
from torchopt_ext.statedict.weights import read_weights
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.parameters import Parameters, is_fused
from torchopt_ext.zero.part import Part
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.whole import WholeTensors


class LocalOptimizer:
    """The optimizer of this rank's parts, and its agreement with the other ranks.

    ``params`` are whole, in groups that have the current settings.
    """

    def __init__(
        self,
        params: Parameters,
        partition: WholeTensors | BalancedBuckets,
        ranks: Ranks,
        constructor: Any,
        arguments: dict[str, Any],
    ) -> None:
        self.params, self.partition, self.ranks = params, partition, ranks
        self.constructor, self.arguments = constructor, arguments
        self.device: torch.device = params_of(self.params)[0].device
        self.optimizer: Any = None  # until build()
        self._rejected_steps = RejectedSteps()

    @property
    def parts(self) -> list[Part]:
        """This rank's parts of parameters, in the order in which its state is numbered.

        Raises:
            RuntimeError: DDP's buckets are not known yet (``overlap_with_ddp``).
        """
        if not self.partition.mine:
            raise RuntimeError("overlap_with_ddp=True: not fully initialized before the first step")
        return [self.partition.part_of(param) for param in chain(*self.partition.mine)]

    @property
    def is_fused(self) -> bool:
        return isinstance(self.optimizer, FusedOptimizer)

    @property
    def fused(self) -> FusedOptimizer:
        """The optimizer. Raises AttributeError unless it is a FusedOptimizer."""
        if isinstance(self.optimizer, FusedOptimizer):
            return self.optimizer
        kind = "not built yet" if self.optimizer is None else f"a {type(self.optimizer).__name__}"
        raise AttributeError(f"the local optimizer is {kind}, expected a FusedOptimizer")

    @property
    def rejected_steps(self) -> RejectedSteps:
        return self.fused.rejected_steps if self.is_fused else self._rejected_steps

    def build(self, params_per_rank: Sequence[Sequence[Tensor]] | None) -> None:
        """Assigns parameters to ranks and builds the optimizer, whose settings the groups get."""
        with searched_once():
            self._build(params_per_rank)
        self.sync()
        self._expect_known_matrices()

    def _build(self, params_per_rank: Sequence[Sequence[Tensor]] | None) -> None:
        for group in self.params.param_groups:
            known = is_fused(self.constructor)
            muon = self._if_muon(self.with_defaults(group)) if known else None
            self.partition.add_group(group["params"], muon, params_per_rank)
        arguments = dict(self.arguments)
        if is_8_bit(arguments.get("state_dtype")):
            arguments["fp32_moments"] = self._fp32_moments()
        groups = [self._group(number) for number in range(len(self.params.param_groups))]
        self.optimizer = self.constructor(groups, **arguments)
        if self.is_fused:
            self.fused.process_group = self.ranks.group  # the ranks that share norm and skip
            self.fused._device_without_params = self.device
            if is_8_bit(self.fused._storage.state_dtype) and "fp32_moments" not in arguments:
                raise ValueError(
                    "8-bit moments depend on whole parameters: give state_dtype to "
                    "ZeroRedundancyOptimizer, not to a function that makes the optimizer"
                )

    def add_group(self, settled: dict[str, Any]) -> None:
        """Divides the last of the groups, and adds this rank's parts of it.

        Args:
            settled: the group as :meth:`with_defaults` returns it.
        """
        params = self.params.param_groups[-1]["params"]
        self.partition.add_group(params, self._if_muon(settled) if self.is_fused else None)
        if is_8_bit(self.arguments.get("state_dtype")):
            self.optimizer._fp32_moments = self._fp32_moments()
        # A learning rate may have changed since the last step.
        copy_settings(self.params.param_groups[:-1], self.optimizer.param_groups)
        self.optimizer.add_param_group(self._group(-1))
        self.sync()
        self._expect_known_matrices()
        self.partition.build_buckets()

    def with_defaults(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns a group of whole parameters as the optimizer would hold it. Checks its values."""
        # fp32_moments may hold parameters of other groups.
        arguments = {k: v for k, v in self.arguments.items() if k != "fp32_moments"}
        return dict(self.constructor([dict(group)], **arguments).param_groups[0])

    def _if_muon(self, settled: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the group if ranks share its matrices, which are orthogonalized, else None."""
        return settled if self.ranks.size > 1 and algorithm_of(settled).steps_matrices else None

    def _expect_known_matrices(self) -> None:
        """Raises ValueError if a part may be taken for a matrix, or ranks for equal ones.

        Groups count as they are now: programs change them.
        """
        if self.ranks.size == 1 or not self.is_fused:
            return
        if self.fused.orthogonalize_over is not None:
            raise ValueError("orthogonalize_over is for equal parameters: ZeRO's ranks share them")
        if not isinstance(self.partition, BalancedBuckets):
            return
        groups = zip(self.params.param_groups, self.partition.mine, strict=True)
        for number, (group, parts) in enumerate(groups):
            if algorithm_of(group).steps_matrices and None in map(marked_cut, parts):
                raise ValueError(
                    f"param group {number} is of Muon, but partition='balanced' has divided it "
                    f"without knowing its matrices: build the optimizer with this algorithm in "
                    f"the group, by the optimizer's class, not a function that makes it"
                )

    def _group(self, number: int) -> dict[str, Any]:
        """Returns a param group for the optimizer: this rank's parts, with parameter names."""
        group, mine = self.params.param_groups[number], self.partition.mine[number]
        local = {**group, "params": mine}
        if names := local.get("param_names"):
            name_of = dict(zip(group["params"], names, strict=True))
            parts = map(self.partition.part_of, mine)
            local["param_names"] = [name_of[part.param] for part in parts]
        return local

    def _fp32_moments(self) -> tuple[Tensor, ...]:
        """Returns this rank's parts of the parameters that ``fp32_moments`` selects."""
        selection = self.arguments.get("fp32_moments", EMBEDDINGS)
        params = fp32_params(named_params(self.params), selection)
        return tuple(part.tensor for part in self.parts if part.param in params)

    def take_settings(self) -> None:
        """Copies the sharded optimizer's settings, which programs change, to the optimizer."""
        self._expect_known_matrices()
        copy_settings(self.params.param_groups, self.optimizer.param_groups)

    def sync(self) -> None:
        """Copies the optimizer's settings, in their order, to the groups that state dicts save.

        The optimizer gets its parts' places: random rounding and digests count whole parameters.
        """
        if self.is_fused:
            index = {param: index for index, param in enumerate(params_of(self.params))}
            self.fused._parameter_places = {
                part.tensor: (index[part.param], part.begin, 0, 0, 0, 0) for part in self.parts
            }
        for group, local in zip(self.params.param_groups, self.optimizer.param_groups, strict=True):
            whole = {key: group[key] for key in ("params", "param_names") if key in group}
            group.clear()
            group.update(local | whole)

    def check_in_backward(self) -> None:
        """Raises RuntimeError if the optimizer has got an option that needs all gradients."""
        options = ("max_grad_norm", "skip_nonfinite", "has_loss_scale", "has_schedule")
        if wrong := [name for name in options if self.is_fused and getattr(self.fused, name)]:
            raise RuntimeError(
                f"overlap_with_ddp=True steps bucket by bucket, without norms, skipped steps, loss "
                f"scale and schedule of the optimizer; it has got {', '.join(wrong)}"
            )

    def step_bucket(self, gradients: Sequence[Tensor | None]) -> Any:
        """Steps by some gradients, for a hook of DDP; ``grad`` of the parameters stays as it is."""
        self.check_in_backward()
        self.take_settings()
        params = self.partition.mine[0]
        before = [param.grad for param in params]
        try:
            set_gradients(params, gradients)
            result = inner_step(self.optimizer, ALONE)
        finally:
            set_gradients(params, before)
        copy_settings(self.optimizer.param_groups, self.params.param_groups)
        return result

    def step(
        self,
        progress: StepProgress,
        context: StepContext,
        take_gradients: Callable[[StepContext], StepContext],
        kwargs: dict[str, Any],
    ) -> Any:
        """Steps this rank's parts, and fires no global hooks.

        A closure in ``kwargs`` computes the gradients, so they are taken after it. The optimizer
        changes nothing before all ranks agree to step; FusedAdam agrees in its norm's all-reduce.
        """
        closure, shared = kwargs.get("closure"), self.ranks.size > 1
        if shared:
            context = context._replace(progress=progress)

        def prepare() -> Any:
            nonlocal context
            loss = None
            if callable(closure):
                progress.in_closure = True
                loss = closure()
                progress.in_closure = False
            progress.took_gradients = True
            context = take_gradients(context)
            self._take_written_weights()
            if shared and not self.is_fused and progress.pending:
                # Once: LBFGS calls a closure more often on some ranks.
                if kwargs.keys() - {"closure"}:
                    inspect.signature(self.optimizer.step).bind(**kwargs)
                self.agree(progress)
            return loss

        self.take_settings()
        if callable(closure):
            kwargs["closure"] = prepare
        else:
            prepare()
        if not self.partition.gradients_are_sharded:
            # A scaler has checked the same gradients on all ranks.
            context = context._replace(found_inf_agreed=True)
        result = inner_step(self.optimizer, context, **kwargs)
        if shared:
            # A GPU knows already, and has skipped the step if a rank rejects it. The host waits for
            # the norm, not for the update, before it sends updates, which a rejecting rank would
            # not join.
            if self.is_fused:
                progress.accepted = False  # until the answer is known
            self.rejected_steps.check(waits=True)
        self.partition.finish_step()
        copy_settings(self.optimizer.param_groups, self.params.param_groups)
        return result

    @torch.no_grad()
    def _take_written_weights(self) -> None:
        """Lets this rank's masters follow parameters that user code has written to."""
        for tensor in self.partition.written():
            refresh_stale_elements(tensor, self.optimizer.state.get(tensor, {}))

    def send_updates(self, progress: StepProgress) -> None:
        """Sends the parts to the other ranks, unless one of them has failed in the step."""
        if self.ranks.size == 1 or self.is_fused:
            self.partition.send_updates()
        else:
            self.agree(progress, meanwhile=self.partition.send_updates)

    def clip(self, max_norm: float, check: Callable[[], None]) -> Tensor:
        """Clips by the norm over all ranks, and returns it. All raise if ``check`` does."""
        progress = StepProgress()
        try:
            check()
            progress.took_gradients = True
            self.partition.take_gradients()
            mine = list(chain(*self.partition.mine))
            grads = [param.grad for param in mine if param.grad is not None]
            total = squares_of(grads, self.device)
        except Exception:
            self.reject(progress, ops.new_accumulator(self.device))
            raise
        if self.ranks.size > 1:
            self.agree(progress, total)
        norm = ops.accumulator_total(total).sqrt()
        torch.nn.utils.clip_grads_with_norm_(mine, max_norm, norm)
        return norm

    def agree(
        self,
        progress: StepProgress,
        total: Tensor | None = None,
        *,
        rejects: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Sums an accumulator, by default only its two flags, over the ranks.

        Raises:
            RuntimeError: another rank rejects the step; says which.
        """
        if total is None:
            total = torch.zeros(2, dtype=torch.int64, device=self.device)
        if rejects:
            reject_in(total)
        agree(total, self.ranks.group, progress, meanwhile)
        if not rejects:
            # Waits: torch's classes cannot skip a step on the device.
            self.rejected_steps.note(total, waits=True)
            progress.accepted = True

    def reject(self, progress: StepProgress, total: Tensor | None = None) -> None:
        """Tells waiting ranks that this rank rejects; ``total`` if they wait in :meth:`clip`."""
        sharded = self.partition.gradients_are_sharded
        if self.ranks.size == 1 or (progress.in_closure and sharded):
            return  # in a closure, the other ranks wait in the reductions of gradients
        with suppress(Exception), waits_at_most(self.ranks.timeout):
            if progress.pending:
                if sharded and not progress.took_gradients:
                    with suppress(Exception):
                        self.partition.take_gradients()
                if self.is_fused and total is None:
                    if progress.in_closure:
                        progress.agreed = True
                        agree_on_matrices([self.fused], rejects=True, waits=False)
                    step.reject([self.fused], StepContext(progress=progress), progress)
                else:
                    self.agree(progress, total, rejects=True)
            elif progress.accepted and self.is_fused:  # a hook failed after the step
                self.rejected_steps.check(waits=True)
                self.partition.finish_step()
                self.partition.send_updates()
            elif progress.accepted:  # the step failed midway: the other ranks return parameters
                self.agree(progress, rejects=True, meanwhile=self.partition.send_updates)

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None) -> None:
        """Sets this rank's masters from the parameters, or both from the given weights."""
        optimizer = self.fused
        with fail_together(self.ranks.group):
            optimizer._reject_exchanged()
            self.partition.follow_memory()
            named = named_params(self.params)
            pairs = [] if from_ is None else read_weights(from_, named, optimizer._keeps_master)
        if from_ is None:
            optimizer.refresh_masters()
        for param, weight in pairs:
            param.copy_(weight)  # on every rank; rounds as the rank that owns the master does
        weight_of = dict(pairs)
        optimizer._set_weights_and_state(
            (p.tensor, p.of(weight_of[p.param])) for p in self.parts if p.param in weight_of
        )

    def load_ema(self, source: Mapping[str, Any], model: nn.Module | None) -> None:
        """Cuts whole averages to this rank's parts, and continues with them."""
        pairs = named_params(self.params) if model is None else model.named_parameters()
        names = {param: name for name, param in pairs if isinstance(name, str)}
        with fail_together(self.ranks.group):
            self.fused._expect_averages()
            averages = fitting(averages_in(source, names, params_of(self.params)))
        with fail_together(self.ranks.group):
            mine = [(part, averages[part.param]) for part in self.parts if part.param in averages]
            self.fused._take_averages({part.tensor: part.of(whole) for part, whole in mine})


def unwrap_partial(optimizer_class: Any, defaults: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Unwraps functools.partial, because its arguments decide how the ranks work together."""
    while isinstance(optimizer_class, functools.partial) and not optimizer_class.args:
        defaults = {**optimizer_class.keywords, **defaults}
        optimizer_class = optimizer_class.func
    return optimizer_class, defaults


def plain_class(
    optimizer_class: Any, defaults: dict[str, Any], overlap_with_ddp: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns the class of the local optimizer and its arguments.

    With overlap a class of torch.optim has the defaults of its functional counterpart.

    Raises:
        ValueError: the class is functional but there is no overlap, or with overlap it may need all
            gradients at once.
    """
    if not overlap_with_ddp and optimizer_class in functional_optim_map.values():
        raise ValueError(f"{optimizer_class} is a functional optimizer: overlap_with_ddp=True only")
    if not overlap_with_ddp or is_fused(optimizer_class):
        return optimizer_class, defaults
    for plain, functional in functional_optim_map.items():
        # Other pairs may differ in what their steps compute.
        is_torchs = plain.__module__.startswith("torch.optim.")
        is_torchs &= functional.__module__.startswith("torch.distributed.optim.")
        if is_torchs and optimizer_class in (plain, functional):
            names = inspect.signature(plain).parameters.keys() - {"params"}
            signature = inspect.signature(functional).parameters
            missing = {name: p.default for name, p in signature.items() if name in names}
            return plain, missing | defaults
    raise ValueError(
        f"overlap_with_ddp=True: {optimizer_class} has no functional counterpart in torch; "
        f"expected a FusedOptimizer, or a class of torch.optim that has one, or this counterpart"
    )


def reject_misplaced(constructor: Any, defaults: Mapping[str, Any], zero_class: Any) -> None:
    """Raises TypeError for an argument that the local class lacks, and that is meant for ZeRO."""
    known, own = (inspect.signature(one).parameters for one in (constructor, zero_class))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in sorted(defaults.keys() - known.keys()):
        if (ours := meant(name, [*known, *own])) in own:
            raise TypeError(
                f"neither {zero_class.__name__} nor {constructor.__name__} has an argument "
                f"{name!r}; did you mean {ours!r}?"
            )


def settings_in_backward(optimizer_class: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an optimizer that steps inside DDP's backward.

    Raises:
        ValueError: the arguments need all gradients at once, or change the storage.
    """
    optimizer = optimizer_class([torch.zeros(1)], **defaults)
    if getattr(optimizer, "options", StepOptions()) != StepOptions():
        raise ValueError(
            f"steps inside DDP's backward have no norms, skipped steps, master weights, state "
            f"dtypes, random rounding or tracking; got {defaults}"
        )
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def set_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Makes all settings of groups, except the parameters, those of another list of groups."""
    own = {"params", "param_names"}
    for group, other in zip(source, target, strict=True):
        for key in other.keys() - group.keys() - own:
            del other[key]
        other.update({key: value for key, value in group.items() if key not in own})
