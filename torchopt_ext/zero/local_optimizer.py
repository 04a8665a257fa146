"""The optimizer that steps this rank's part: how it is built, and what it is told."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext.optim import FusedAdam
from torchopt_ext.optim.collective import all_or_none, collective, wait
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.optim.rejection import Agreement, reject_in
from torchopt_ext.optim.state import named_group_params
from torchopt_ext.statedict.masters import read_weights
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.sharded import ShardedOptimizer


def local_group(zero: ShardedOptimizer, number: int) -> dict[str, Any]:
    """A group as the local optimizer gets it: this rank's part, with the names it belongs to."""
    group, own = zero.param_groups[number], zero.parts.mine[number]
    local = {**group, "params": own}
    if names := local.get("param_names"):
        name_of = dict(zip(group["params"], names, strict=True))
        local["param_names"] = [name_of[zero.parts.part_of(param).param] for param in own]
    return local


def fp32_moments(zero: ShardedOptimizer) -> tuple[Tensor, ...]:
    """This rank's parts of the parameters that ``fp32_moments`` of the local optimizer chooses."""
    named = [(name, param) for _, _, name, param in named_group_params(cast(Optimizer, zero))]
    chosen = fp32_params(named, zero._optim_defaults.get("fp32_moments", EMBEDDINGS))
    mine = chain(*zero.parts.mine)
    return tuple(part for part in mine if zero.parts.part_of(part).param in chosen)


def fused(zero: ShardedOptimizer) -> FusedAdam:
    """The local optimizer; AttributeError unless it is FusedAdam or FusedAdamW."""
    optim = getattr(zero, "optim", None)
    if not isinstance(optim, FusedAdam):
        found = "not built yet" if optim is None else f"a {type(optim).__name__}"
        raise AttributeError(f"the local optimizer is {found}, expected FusedAdam or FusedAdamW")
    return optim


def refresh_masters(zero: ShardedOptimizer, from_: Mapping[Any, Tensor] | None) -> None:
    """Makes this rank's masters what the parameters are, or both what the given weights are."""
    optim = fused(zero)
    with all_or_none(zero.process_group):
        named = [(name, param) for _, _, name, param in named_group_params(cast(Optimizer, zero))]
        pairs = [] if from_ is None else read_weights(from_, named, optim.keeps_master)
    if from_ is None:
        optim.refresh_masters()
    for param, weight in pairs:
        param.copy_(weight)  # on every rank; the rounding is that of a master's owner
    weight_of = dict(pairs)
    parts = [zero.parts.part_of(own) for own in chain(*zero.parts.mine)]
    optim.begin_with((p.tensor, p.of(weight_of[p.param])) for p in parts if p.param in weight_of)
    zero._consolidated = None


def build(zero: ShardedOptimizer) -> None:
    """Makes ``zero.optim``, and lets the groups say what its groups say."""
    defaults = dict(zero._optim_defaults)
    constructor = zero._optim_constructor
    if is_8_bit(defaults.get("state_dtype")):
        defaults["fp32_moments"] = fp32_moments(zero)
    if zero._overlap_with_ddp:
        if "_allow_empty_param_list" in inspect.signature(constructor).parameters:
            defaults["_allow_empty_param_list"] = True
        zero.optim = constructor(zero.parts.mine[0], **defaults)
        if not hasattr(zero.optim, "param_groups"):
            zero.optim.param_groups = [zero.optim.param_group]
        for key, value in zero.optim.param_groups[0].items():
            zero.param_groups[0].setdefault(key, value)  # a schedule may have changed others
        return
    if isinstance(constructor, type) and issubclass(constructor, FusedAdam):
        defaults["process_group"] = zero.process_group
    groups = range(len(zero.param_groups))
    zero.optim = constructor([local_group(zero, number) for number in groups], **defaults)
    if isinstance(zero.optim, FusedAdam):
        zero.optim.process_group = zero.process_group  # a function that makes one leaves it out
        zero.optim.device_without_params = zero._default_device
        if is_8_bit(zero.optim._storage.state_dtype) and "fp32_moments" not in defaults:
            raise ValueError(
                "8-bit moments depend on whole parameters: give state_dtype to "
                "ZeroRedundancyOptimizer, not to a function that makes the optimizer"
            )
    zero.defaults = dict(zero.optim.defaults)
    sync(zero)


def sync(zero: ShardedOptimizer) -> None:
    """Groups say what the local optimizer's say, in its order, so that state dicts do.

    It learns where its parts are: random rounding and digests count elements of whole parameters.
    """
    zero.verdict = getattr(zero.optim, "verdict", zero.verdict)
    if isinstance(zero.optim, FusedAdam):
        index = {param: index for index, param in enumerate(zero._all_params)}
        parts = map(zero.parts.part_of, chain(*zero.parts.mine))
        if isinstance(zero.parts, BalancedBuckets):
            zero.parts.reducer.squares = zero.optim.norm_in_backward
        zero.optim.parameter_places = {p.tensor: (index[p.param], p.begin, 0, 0) for p in parts}
    for group, local in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        own = {key: group[key] for key in ("params", "param_names") if key in group}
        merged = {key: own.get(key, value) for key, value in local.items()} | own
        group.clear()
        group.update(merged)


def copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copies what groups hold besides their parameters to another list of groups."""
    for group, other in zip(source, target, strict=True):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                other[key] = value


def step_alone(zero: ShardedOptimizer, context: StepContext, kwargs: dict[str, Any]) -> Any:
    """The local step: takes this rank's gradients, and fires no global hooks.

    A closure in ``kwargs`` makes the gradients, so they are taken after it. The local optimizer
    changes nothing before all ranks agree to make the step; ours agree within their norm.
    """
    agreement, closure = context.agreement or Agreement(), kwargs.get("closure")

    def prepare() -> Any:
        nonlocal context
        loss = None
        if callable(closure):
            agreement.in_closure = True
            loss = closure()
            agreement.in_closure = False
        context = zero._take_gradients(context)
        if context.agreement is not None and not isinstance(zero.optim, FusedAdam):
            if kwargs.keys() - {"closure"}:
                inspect.signature(zero.optim.step).bind(**kwargs)
            agree(zero, agreement)
        return loss

    if callable(closure):
        kwargs["closure"] = prepare
    else:
        prepare()
    if not zero.parts.hides_gradients:  # a scaler has seen the same gradients on every rank
        context = context._replace(agreed=True)
    result = inner_step(zero.optim, context, **kwargs)
    zero.parts.finish_step()
    return result


def squares_of(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """An accumulator on ``device`` of all gradients' squares."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in [param.grad for param in params if param.grad is not None]:
        real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        by_device[gradient.device].append(real)
    total = ops.new_accumulator(device)
    for its_device, gradients in by_device.items():
        own = ops.new_accumulator(its_device)
        ops.grad_sumsq_(gradients, own)
        total += own.to(device)
    return total


def agree(
    zero: ShardedOptimizer,
    agreement: Agreement,
    *,
    rejects: bool = False,
    total: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Lets the ranks know whether one of them does not go on, as this one if it ``rejects``.

    Args:
        total: what to sum over the ranks: an accumulator, or its flags alone, as by default.
        meanwhile: what to do while the ranks tell each other.

    Raises:
        RuntimeError: another rank does not; says which. On a GPU a later step raises it.
    """
    agreement.pending = False
    if total is None:
        total = torch.zeros(2, dtype=torch.int64, device=zero._default_device)
    if rejects:
        reject_in(total)
    with collective("agreeing to make the step", zero.ranks.timeout):
        work = dist.all_reduce(total, group=zero.ranks.group, async_op=True)
        if agreement.in_closure:  # the others may never come
            return
        if meanwhile is not None:
            meanwhile()
        wait(work)
    if not rejects:
        zero.verdict.note(total)
        agreement.accepted = True


def reject(zero: ShardedOptimizer, agreement: Agreement, *, with_norm: bool) -> None:
    """Tells the ranks that wait for this one, for its part of a norm or not, that it rejects."""
    if zero.ranks.size == 1 or (agreement.in_closure and zero.parts.hides_gradients):
        return  # in a closure, the others wait in its reductions
    with suppress(Exception):
        if agreement.pending:
            total = ops.new_accumulator(zero._default_device) if with_norm else None
            agree(zero, agreement, rejects=True, total=total)
        elif agreement.accepted:  # in the middle of its step: the others return parameters
            agree(zero, agreement, rejects=True, meanwhile=zero.parts.return_params)
