"""The local optimizer, which steps this rank's part: building it and keeping it in sync."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.collective import collective, fail_together, wait
from torchopt_ext.optim.context import ALONE, StepContext
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.optim.local import moved, squares_of
from torchopt_ext.optim.rejection import Agreement, reject_in
from torchopt_ext.optim.state import named_params
from torchopt_ext.statedict.masters import read_weights, refresh_stale_elements
from torchopt_ext.zero.part import Part

if TYPE_CHECKING:
    from torchopt_ext.zero.optimizer import ZeroRedundancyOptimizer


def local_group(zero: ZeroRedundancyOptimizer, number: int) -> dict[str, Any]:
    """Returns a param group for the local optimizer: this rank's parts, with parameter names."""
    group, own = zero.param_groups[number], zero.partition.mine[number]
    local = {**group, "params": own}
    if names := local.get("param_names"):
        name_of = dict(zip(group["params"], names, strict=True))
        local["param_names"] = [name_of[zero.partition.part_of(param).param] for param in own]
    return local


def local_parts(zero: ZeroRedundancyOptimizer) -> list[Part]:
    """Returns this rank's parts of parameters, in the order in which its state is numbered.

    Raises:
        RuntimeError: DDP's buckets are not known yet (``overlap_with_ddp``).
    """
    if not zero.partition.mine:
        raise RuntimeError("overlap_with_ddp=True: not fully initialized before the first step")
    return [zero.partition.part_of(param) for param in chain(*zero.partition.mine)]


def fp32_moments(zero: ZeroRedundancyOptimizer) -> tuple[Tensor, ...]:
    """Returns this rank's parts of the parameters that the ``fp32_moments`` argument selects."""
    chosen = fp32_params(named_params(zero), zero._optim_defaults.get("fp32_moments", EMBEDDINGS))
    return tuple(part.tensor for part in local_parts(zero) if part.param in chosen)


def fused(zero: ZeroRedundancyOptimizer) -> FusedOptimizer:
    """Returns the local optimizer. Raises AttributeError unless it is a FusedOptimizer."""
    optim = getattr(zero, "optim", None)
    if not isinstance(optim, FusedOptimizer):
        found = "not built yet" if optim is None else f"a {type(optim).__name__}"
        raise AttributeError(f"the local optimizer is {found}, expected a FusedOptimizer")
    return optim


def setting(name: str, doc: str) -> Any:
    """Returns a property of ``zero`` that is a property of its local FusedOptimizer."""
    return property(
        lambda zero: getattr(fused(zero), name),
        lambda zero, value: setattr(fused(zero), name, value),
        doc=doc,
    )


def refresh_masters(zero: ZeroRedundancyOptimizer, from_: Mapping[Any, Tensor] | None) -> None:
    """Sets this rank's masters from the parameters, or both from the given weights."""
    optim = fused(zero)
    with fail_together(zero.process_group):
        named = named_params(zero)
        pairs = [] if from_ is None else read_weights(from_, named, optim.keeps_master)
    if from_ is None:
        optim.refresh_masters()
    for param, weight in pairs:
        param.copy_(weight)  # on every rank; rounds as the rank that owns the master does
    weight_of = dict(pairs)
    optim.set_weights_and_state(
        (p.tensor, p.of(weight_of[p.param])) for p in local_parts(zero) if p.param in weight_of
    )
    zero._consolidated = None


@torch.no_grad()
def take_written_weights(zero: ZeroRedundancyOptimizer) -> None:
    """Lets this rank's masters follow parameters that user code has written to."""
    for tensor in zero.partition.written():
        refresh_stale_elements(tensor, zero.optim.state.get(tensor, {}))


def build(zero: ZeroRedundancyOptimizer) -> None:
    """Builds ``zero.optim`` and copies the settings of its groups into the groups of ``zero``."""
    defaults = dict(zero._optim_defaults)
    constructor = zero._optim_constructor
    if is_8_bit(defaults.get("state_dtype")):
        defaults["fp32_moments"] = fp32_moments(zero)
    if zero._overlap_with_ddp:
        if "_allow_empty_param_list" in inspect.signature(constructor).parameters:
            defaults["_allow_empty_param_list"] = True
        zero.optim = constructor(zero.partition.mine[0], **defaults)
        if not hasattr(zero.optim, "param_groups"):
            zero.optim.param_groups = [zero.optim.param_group]
        for key, value in zero.optim.param_groups[0].items():
            zero.param_groups[0].setdefault(key, value)  # a schedule may have changed existing keys
        return
    groups = range(len(zero.param_groups))
    zero.optim = constructor([local_group(zero, number) for number in groups], **defaults)
    if isinstance(zero.optim, FusedOptimizer):
        zero.optim.process_group = zero.process_group  # the ranks that share norm and skip
        zero.optim._device_without_params = zero._default_device
        if is_8_bit(zero.optim._storage.state_dtype) and "fp32_moments" not in defaults:
            raise ValueError(
                "8-bit moments depend on whole parameters: give state_dtype to "
                "ZeroRedundancyOptimizer, not to a function that makes the optimizer"
            )
    zero.defaults = dict(zero.optim.defaults)
    sync(zero)


def sync(zero: ZeroRedundancyOptimizer) -> None:
    """Copies the local groups' settings, in their order, to the groups that state dicts save.

    The local optimizer gets its parts' places: random rounding and digests count whole parameters.
    """
    zero.verdict = getattr(zero.optim, "verdict", zero.verdict)
    if isinstance(zero.optim, FusedOptimizer):
        index = {param: index for index, param in enumerate(zero._all_params)}
        zero.optim.parameter_places = {
            part.tensor: (index[part.param], part.begin, 0, 0, 0, 0) for part in local_parts(zero)
        }
    for group, local in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        own = {key: group[key] for key in ("params", "param_names") if key in group}
        merged = {key: own.get(key, value) for key, value in local.items()} | own
        group.clear()
        group.update(merged)


def copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copies all settings of groups, except the parameters, to another list of groups."""
    for group, other in zip(source, target, strict=True):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                other[key] = value


def local_step(zero: ZeroRedundancyOptimizer, context: StepContext, kwargs: dict[str, Any]) -> Any:
    """Makes the local step: takes this rank's gradients, and fires no global hooks.

    A closure in ``kwargs`` computes the gradients, so they are taken after it. The local optimizer
    changes nothing before all ranks agree to step; FusedAdam agrees in its norm's all-reduce.
    """
    agreement, closure = context.agreement or Agreement(), kwargs.get("closure")

    def prepare() -> Any:
        nonlocal context
        loss = None
        if callable(closure):
            agreement.in_closure = True
            loss = closure()
            agreement.in_closure = False
        agreement.took_gradients = True
        context = zero._take_gradients(context)
        take_written_weights(zero)
        agrees = context.agreement is not None and not isinstance(zero.optim, FusedOptimizer)
        if agrees and agreement.pending:  # LBFGS calls a closure more often on some ranks
            if kwargs.keys() - {"closure"}:
                inspect.signature(zero.optim.step).bind(**kwargs)
            agree(zero, agreement)
        return loss

    if callable(closure):
        kwargs["closure"] = prepare
    else:
        prepare()
    if not zero.partition.hides_gradients:  # a scaler has checked the same gradients on every rank
        context = context._replace(same_flag=True)
    result = inner_step(zero.optim, context, **kwargs)
    if context.agreement is not None:
        # A GPU knows already, and has skipped the step if a rank rejects it. The host waits for the
        # norm, not for the update, before it sends updates, which a rejecting rank would not join.
        if isinstance(zero.optim, FusedOptimizer):
            agreement.accepted = False  # until the answer is known
        zero.verdict.check(waits=True)
    zero.partition.finish_step()
    return result


def agree(
    zero: ZeroRedundancyOptimizer,
    agreement: Agreement,
    *,
    rejects: bool = False,
    total: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Agrees with the other ranks on whether all make the step; ``rejects`` if this rank does not.

    Args:
        total: the accumulator to sum over the ranks; by default only its two flags.
        meanwhile: called while the all-reduce is under way.

    Raises:
        RuntimeError: another rank rejects the step; says which.
    """
    agreement.pending = False
    if total is None:
        total = torch.zeros(2, dtype=torch.int64, device=zero._default_device)
    if rejects:
        reject_in(total)
    with collective("agreeing to make the step", zero.ranks.timeout):
        work = dist.all_reduce(total, group=zero.ranks.group, async_op=True)
        if agreement.in_closure and not agreement.accepted:
            return  # the other ranks may never join the collective
        if meanwhile is not None:
            meanwhile()
        wait(work)
    if not rejects:
        zero.verdict.note(total, waits=True)  # torch's classes cannot skip a step on the device
        agreement.accepted = True


def reject(zero: ZeroRedundancyOptimizer, agreement: Agreement, *, with_norm: bool) -> None:
    """Tells waiting ranks that this rank rejects; ``with_norm`` if they wait to sum a norm."""
    if zero.ranks.size == 1 or (agreement.in_closure and zero.partition.hides_gradients):
        return  # in a closure, the other ranks wait in the reductions of gradients
    with suppress(Exception):
        if agreement.pending:
            if zero.partition.hides_gradients and not agreement.took_gradients:
                with suppress(Exception):
                    zero.partition.take_gradients()
            total = ops.new_accumulator(zero._default_device) if with_norm else None
            agree(zero, agreement, rejects=True, total=total)
            if total is not None and not zero.verdict.is_known(total):
                devices = fused(zero).devices
                fused(zero).count_rejected({d: moved(total, d) for d in devices}, ALONE)
        elif agreement.accepted and with_norm:  # a hook failed after the step
            zero.verdict.check(waits=True)
            zero.partition.finish_step()
            zero.partition.send_updates()
        elif agreement.accepted:  # the step failed midway: the other ranks return parameters
            agree(zero, agreement, rejects=True, meanwhile=zero.partition.send_updates)


def clip(zero: ZeroRedundancyOptimizer, max_norm: float) -> Tensor:
    """Clips this rank's parts of the gradients by the norm over all ranks' parts; returns it."""
    agreement = Agreement()
    try:
        zero._notice_trainability()
        agreement.took_gradients = True
        zero.partition.take_gradients()
        mine = list(chain(*zero.partition.mine))
        grads = [param.grad for param in mine if param.grad is not None]
        total = squares_of(grads, zero._default_device)
    except Exception:
        reject(zero, agreement, with_norm=True)
        raise
    if zero.world_size > 1:
        agree(zero, agreement, total=total)
    norm = ops.accumulator_total(total).sqrt()
    torch.nn.utils.clip_grads_with_norm_(mine, max_norm, norm)
    return norm


def rejects_if_raised(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a hook of ``zero`` that comes before a step, for which the other ranks may wait."""

    @functools.wraps(hook)
    def wrapper(zero: ZeroRedundancyOptimizer, *args: Any) -> Any:
        try:
            return hook(zero, *args)
        except Exception:
            if not zero._overlap_with_ddp:  # with overlap, step() does nothing
                given, named = args
                agreement = Agreement(in_closure=len(given) > 1 or "closure" in named)
                reject(zero, agreement, with_norm=isinstance(zero.optim, FusedOptimizer))
            raise

    return wrapper
