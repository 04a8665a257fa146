"""The step that fused optimizers share: pass A, one decision, pass B (docs/numerics.md)."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import get_ident

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchopt_ext import ops
from torchopt_ext._torch import allows_mutation, run_eagerly
from torchopt_ext.optim.agreement import agree_on_matrices
from torchopt_ext.optim.context import ALONE, StepContext
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.exchange import ExchangeError
from torchopt_ext.optim.gradients import show_writes
from torchopt_ext.optim.norm import NormKey, all_reduce_, is_counted_replica, shares_only_this_rank
from torchopt_ext.optim.planned import PlannedStep
from torchopt_ext.optim.rejection import FLAGS, StepProgress, agree, is_rejected, reject_in
from torchopt_ext.state.devices import is_captured, moved
from torchopt_ext.state.params import params_of


@run_eagerly
def fused_step(optimizers: Sequence[PlannedStep], context: StepContext = ALONE) -> None:
    """Steps several optimizers with one gradient norm, one clip factor and one skip decision.

    Closures and step hooks are left to the caller, such as ``Optimizer.step``.

    Args:
        optimizers: fused optimizers, all with the same ``max_grad_norm``, ``skip_nonfinite`` and
            ``process_group``.
        context: the context of the scaler or optimizer that this step is part of.

    Raises:
        ValueError: the optimizers' settings differ, or an optimizer is listed twice.
        RuntimeError: a gradient does not fit its parameter, here or on a rank that shares the norm
            (the message names it), another thread is stepping an optimizer, or make_fx or
            torch.jit.trace records operators. Nothing is changed, except that parameters without
            state may have got the state of step 0.
    """
    # No torch context managers here: they take a thirtieth of a step over 2,000 small tensors.
    progress = context.progress
    _begin_use(optimizers)
    try:
        if is_captured():
            _warn_of_fixed_lr(optimizers)
        _expect_steppable(optimizers)
        if allows_mutation():
            show_writes(params_of(*optimizers))
        alone = len(optimizers) == 1 and context.measured is None
        if not (alone and optimizers[0]._local_step(context)):
            progress = progress or StepProgress()
            _step_together(optimizers, context, progress)
            progress.accepted = True
    except Exception:
        reject(optimizers, context, progress or StepProgress())
        raise
    finally:
        _end_use(optimizers)
    if context.progress is None:
        # Only now: the rank that rejected an earlier step takes part in this one.
        optimizers[0].rejected_steps.check()


def _expect_steppable(optimizers: Sequence[PlannedStep]) -> None:
    """Raises RuntimeError if a step cannot be made now.

    That is also if operators are recorded: a step is none, so a replay would lack it.
    """
    traced_by_jit = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if traced_by_jit or get_proxy_mode() is not None:
        raise RuntimeError(
            "make_fx and torch.jit.trace cannot record the step of this optimizer, so the recorded "
            "program would not update the weights: trace loss and gradients, and call step() "
            "outside, or trace torchopt_ext.ops.adam_"
        )
    for optimizer in optimizers:
        optimizer._expect_steppable()


def _warn_of_fixed_lr(optimizers: Sequence[PlannedStep]) -> None:
    groups = [group for o in optimizers if not o.has_schedule for group in o.param_groups]
    if fixed := {group["lr"] for group in groups if not isinstance(group["lr"], Tensor)}:
        warnings.warn(
            f"the captured graph keeps the learning rates {sorted(fixed)} and does not see later "
            f'changes of group["lr"]: to change them between replays, make lr a tensor on the GPU '
            f"or call set_schedule() (docs/step.md, Schedule on the device)",
            stacklevel=2,
        )


def _begin_use(optimizers: Sequence[PlannedStep]) -> None:
    """Keeps other threads from the optimizers' plans and gradients until :func:`_end_use`.

    A step lets other threads run Python while it waits, for its kernels or for a collective.
    """
    if len(set(map(id, optimizers))) < len(optimizers):
        seen = [any(o is other for other in optimizers[:i]) for i, o in enumerate(optimizers)]
        raise ValueError(
            f"optimizer {seen.index(True)} is listed twice; it can make one step at a time"
        )
    user = get_ident()
    for i, optimizer in enumerate(optimizers):
        # In effect a lock: setdefault() is atomic, and copies do not include the attribute. If
        # KeyboardInterrupt left it, its thread may go on.
        if vars(optimizer).setdefault("_user", user) != user:
            _end_use(optimizers[:i])
            raise RuntimeError("another thread is stepping this optimizer; let its step end first")


def _end_use(optimizers: Sequence[PlannedStep]) -> None:
    for optimizer in optimizers:
        vars(optimizer).pop("_user", None)


@torch.no_grad()
def _step_together(
    optimizers: Sequence[PlannedStep], context: StepContext, progress: StepProgress
) -> None:
    first = optimizers[0]
    settings = [(o.max_grad_norm, o.skip_nonfinite, o.process_group) for o in optimizers]
    if any(other != settings[0] for other in settings):
        raise ValueError(
            f"optimizers of one step differ in (max_grad_norm, skip_nonfinite, process_group): "
            f"{settings}"
        )
    built = []
    try:
        for optimizer in optimizers:
            built.append(optimizer.collect())
        first._check_scaler(context)
        if exchanging := [optimizer for optimizer in optimizers if optimizer._exchange_groups]:
            progress.agreed = True
            agree_on_matrices(exchanging)
        total = dict(context.measured or {})
        measured = bool(total) or first._wants_norm(context)
        if not total and (measured or context.progress is not None):
            total = accumulated_norm(optimizers, context, progress, measured=measured)
            if context.check_overflow:
                context = context._replace(found_inf=None)  # counted with the squares
        if total:
            context = _unless_rejected(optimizers, total, context)
        for optimizer in optimizers:
            optimizer.decide(total if measured else {}, context)
        for number, optimizer in enumerate(optimizers):  # when nothing can fail in another one
            try:
                optimizer.update()
            except ExchangeError as error:
                before = [name for o in optimizers[:number] for name in o._stepped_names()]
                before += optimizer._stepped_names(error.part)
                raise error.after(before) from error.__cause__
    finally:
        for plan, *_ in built:
            plan.release()


@run_eagerly
@torch.no_grad()
def measure_norm(optimizers: Sequence[PlannedStep]) -> dict[torch.device, Tensor]:
    """Runs pass A separately: returns the squares of all gradients by device.

    The next step takes the result as its context's ``measured`` and is then pass B alone. The
    gradients must not change until then.

    Raises:
        RuntimeError: a gradient does not fit its parameter, here or on a rank that shares the norm.
    """
    progress = StepProgress(agreed=True)  # the step that follows agrees on matrices
    context = StepContext(progress=progress)  # the ranks wait for each other even without a norm
    _begin_use(optimizers)
    built = []
    try:
        _expect_steppable(optimizers)
        for optimizer in optimizers:
            built.append(optimizer.collect())
        return accumulated_norm(optimizers, context, progress)
    except Exception:
        reject(optimizers, context, progress)
        raise
    finally:
        for plan, *_ in built:
            plan.release()
        _end_use(optimizers)


def _unless_rejected(
    optimizers: Sequence[Controlled], total: dict[torch.device, Tensor], context: StepContext
) -> StepContext:
    """Lets a GPU skip a step that another rank rejects. On the CPU the step has raised already."""
    if _knows_rejections(optimizers, total):
        return context
    skip = is_rejected(next(iter(total.values())))
    if context.found_inf is not None:
        skip += moved(context.found_inf, skip.device).reshape(())
    return context._replace(found_inf=skip, found_inf_agreed=True)


@torch.no_grad()
def reject(optimizers: Sequence[Controlled], context: StepContext, progress: StepProgress) -> None:
    """Tells the ranks that wait in this step's norm that this rank rejects the step."""
    in_doubt = not (progress.agreed or progress.in_closure)
    if in_doubt and (sharing := [o for o in optimizers if o._exchange_groups]):
        progress.agreed = True
        with suppress(Exception):
            agree_on_matrices(sharing, rejects=True)
    if context.measured is not None:
        return  # the ranks exchanged the norm before the step, so none waits
    if progress.pending and (context.progress is not None or optimizers[0]._wants_norm(context)):
        with suppress(Exception):
            total = accumulated_norm(optimizers, context, progress, rejects=True)
            if not _knows_rejections(optimizers, total):
                for optimizer in optimizers:
                    optimizer._count_rejected(total, context)


def _knows_rejections(optimizers: Sequence[Controlled], total: dict[torch.device, Tensor]) -> bool:
    """Returns whether no other rank takes part in a step, or a rejection has raised already."""
    first = optimizers[0]
    alone = first.process_group is None and not any(key for o in optimizers for _, key in o.parts)
    alone = alone and all(o.orthogonalize_over is None for o in optimizers)
    return alone or first.rejected_steps.is_known(next(iter(total.values())))


def accumulated_norm(
    optimizers: Sequence[Controlled],
    context: StepContext,
    progress: StepProgress,
    *,
    measured: bool = True,
    rejects: bool = False,
) -> dict[torch.device, Tensor]:
    """Returns the sum of all gradients' squares, on every device that has gradients.

    Without a process group, parameters that are split over the same ranks are summed here first and
    then over these ranks. With a group, every rank adds what no other rank of the group adds, and
    one all-reduce joins the sums. Parameters whose meshes cross the group are summed over their
    meshes first. The sum is exact, so order and grouping do not change it.

    Raises:
        ValueError: some parameters' meshes cross the process group, and some lie within it.
    """
    group = optimizers[0].process_group
    devices = list(dict.fromkeys(device for o in optimizers for device in o.devices))
    first = devices[0]
    sums: dict[NormKey, Tensor] = {}
    elsewhere: list[tuple[Tensor, Tensor]] = []
    for optimizer in optimizers:
        for part, (device, key) in enumerate(optimizer.parts):
            if key not in sums:
                sums[key] = ops.new_accumulator(first)
            if rejects or not measured:
                continue
            counts = group is None or is_counted_replica(key, group)
            squares = sums[key] if counts and device == first else ops.new_accumulator(device)
            optimizer.accumulate(part, squares)
            if not counts:  # another replica's squares count; here only the non-finite flags do
                squares[: FLAGS.start] = 0
            if squares is not sums[key]:
                elsewhere.append((sums[key], squares))
    for subtotal, squares in elsewhere:  # only when all devices are at work
        subtotal += moved(squares, first)
    total = ops.new_accumulator(first)
    if context.check_overflow and context.found_inf is not None:
        # An overflow that a scaler found when it unscaled this rank's gradients counts as a NaN.
        total[-1] += (moved(context.found_inf, first) != 0).sum()
    if rejects:
        reject_in(total)
    # Leaves out meshes of one rank: their squares count once in either order.
    crossing = [shares_only_this_rank(key, group) for key in sums if key and key[0].size() > 1]
    if group is not None and any(crossing) and not all(crossing):
        raise ValueError(
            "some parameters' meshes lie within process_group and some cross it, so that no order "
            "of sums counts each once"
        )
    over_meshes = group is None or any(crossing)
    if over_meshes and not rejects:  # before other ranks get anything: a warning may be an error
        _warn_of_different_norms(sums)
    progress.pending = False
    if over_meshes:
        _sum_over_meshes(sums, total)
    for subtotal in sums.values():
        total += subtotal
    equal = {over for o in optimizers if (over := o.orthogonalize_over) is not None}
    for over in equal:  # ranks whose gradients should be equal: one skips the step with all
        flags = total[FLAGS].clone()
        all_reduce_(flags, over, torch.distributed.ReduceOp.MAX)
        total[FLAGS] = flags
    if group is not None:
        agree(total, group, progress)
    if not rejects and (group is not None or equal or any(sums)):
        # Other ranks make no exchange with one that rejects the step.
        optimizers[0].rejected_steps.note(total, waits=any(o._exchange_groups for o in optimizers))
    return {device: moved(total, device) for device in devices}


def _sum_over_meshes(sums: dict[NormKey, Tensor], total: Tensor) -> None:
    """Sums over the mesh dimensions that split parameters, and sends flags to all of the ranks.

    The sums alone do not reach replicas, of which one may be broken, nor the ranks of another
    parameter's mesh. If one sum reaches all ranks, it carries all flags, those of ``total`` too.
    """
    meshes = dict.fromkeys(key[0] for key in sums if key)
    joined = [(mesh, d) for mesh in meshes for d in range(mesh.ndim) if mesh.size(d) > 1]
    reached = {key: {(key[0], d) for d in key[1]} if key else set() for key in sums}
    flags = total[FLAGS] + sum(subtotal[FLAGS] for subtotal in sums.values())
    carrier = next((key for key in sums if joined and reached[key].issuperset(joined)), None)
    if carrier is not None:
        sums[carrier][FLAGS] = flags
    for key, subtotal in sums.items():
        for dimension in key[1] if key else ():
            all_reduce_(subtotal, key[0].get_group(dimension))
    if carrier is None:
        for mesh, dimension in joined:
            all_reduce_(flags, mesh.get_group(dimension), torch.distributed.ReduceOp.MAX)
        total[FLAGS] = torch.maximum(total[FLAGS], flags)


def _warn_of_different_norms(keys: Iterable[NormKey]) -> None:
    """Warns if ranks of one parameter have different norms, and so clip by different factors."""
    meshes = dict.fromkeys(key[0] for key in keys if key and key[1])
    ranks = [sorted(mesh.mesh.flatten().tolist()) for mesh in meshes if len(meshes) > 1]
    if any(its != ranks[0] for its in ranks):
        warnings.warn(
            f"parameters are split over different ranks, {ranks}, so the gradient norm is not the "
            f"same on all of them: pass process_group=, the ranks that take one norm together",
            stacklevel=2,
        )
