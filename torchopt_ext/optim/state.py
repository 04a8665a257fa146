"""Per-parameter state that looks like torch's, and the plan built from it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._C import OptimizerPlan, carve
from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.local import (
    NormKey,
    local_gradients,
    local_tensor,
    norm_key,
)
from torchopt_ext.optim.storage import MASTER, REMAINDER, Place, Storage, packed_steps, place_of
from torchopt_ext.statedict.entries import MASTERS, MOMENTS, step_problem, tensor_problem
from torchopt_ext.statedict.masters import fit_master, zeros_like

SMALL = 1 << 16  # elements; in larger ones the prefetcher has time to start


def named_group_params(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any], str, Tensor]]:
    """(group index, group, name or "", parameter) of every parameter, in order."""
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            yield index, group, name, param


def moments_of(group: dict[str, Any]) -> tuple[str, ...]:
    """The moments a group's parameters have."""
    return MOMENTS if group["amsgrad"] else MOMENTS[:2]


def init_param_states(
    entries: Sequence[tuple[dict[str, Any], Tensor, dict[str, Any]]], storage: Storage
) -> None:
    """:func:`init_param_state` of many: groups, parameters and their states.

    Moments of small parameters on the host lie one after the other, which lets the processor's
    prefetcher go on from one to the next: a seventh of the step over 2,000 tensors of 1,000.
    """
    for _, param, state in entries:
        _init_step(param, state)
    for moment in MOMENTS:
        by_dtype: dict[torch.dtype, list[tuple[Tensor, dict[str, Any]]]] = {}
        for group, param, state in entries:
            if moment in moments_of(group) and moment not in state and _lies_with_others(param):
                by_dtype.setdefault(storage.moment_dtype(param), []).append((param, state))
        for dtype, members in by_dtype.items():
            # A step changes all of them: counting that once saves it a look at each.
            like = [local_tensor(param).detach() for param, _ in members]
            made = carve(like, dtype, one_version=True)
            torch._foreach_zero_(made)
            for (_, state), tensor in zip(members, made, strict=True):
                state[moment] = tensor
    for group, param, state in entries:
        init_param_state(group, param, state, storage)


def _lies_with_others(param: Tensor) -> bool:
    plain = not is_dtensor(param) and param.device.type == "cpu"
    dense = plain and torch.ops.aten.is_non_overlapping_and_dense(param)
    return bool(dense and 0 < param.numel() <= SMALL)


def _init_step(param: Tensor, state: dict[str, Any]) -> None:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)


def init_param_state(
    group: dict[str, Any], param: Tensor, state: dict[str, Any], storage: Storage
) -> None:
    """Adds what is missing of a parameter's state: step 0, moments of zeros, the master weight."""
    _init_step(param, state)
    for name in moments_of(group):
        if name not in state:
            state[name] = zeros_like(param, storage.moment_dtype(param))
    if MASTER not in state and REMAINDER not in state:
        fit_master(param, state, storage)


def _fit_step(step: Any, device: torch.device) -> Tensor:
    """A step count as one float32 element on ``device``, whatever an older state dict holds."""
    if isinstance(step, Tensor):
        step = local_tensor(step)
        if step.dtype == torch.float32 and step.device == device and step.numel() == 1:
            return step  # unread: reading would wait for the device
    if found := step_problem(step):
        raise ValueError(f"step {found}")
    if not isinstance(step, Tensor):
        return torch.tensor(float(step), dtype=torch.float32, device=device)
    return step.detach().to(device, torch.float32).reshape(())


def _fit_moment(moment: Tensor, param: Tensor, what: str, dtype: torch.dtype | None) -> Tensor:
    """A moment on the parameter's device, in its storage order and of ``dtype``, None for any.

    It is copied only if it was not so.
    """
    if found := tensor_problem(moment, param):
        raise ValueError(f"{what} {found}")
    return _fit(moment, param, dtype or moment.dtype)


def _fit(value: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    local, like = local_tensor(value), local_tensor(param)
    dense = torch.empty_like(like, dtype=dtype, memory_format=torch.preserve_format)
    same = local.device == like.device and local.stride() == dense.stride()
    if same and local.dtype == dtype:
        return value
    fitted = zeros_like(param, dtype)
    local_tensor(fitted).copy_(local)
    return fitted


@dataclass(frozen=True)
class PlanOptions:
    """What an optimizer's steps do beyond the update: csrc/plan/chunk_table.h, StepOptions."""

    stochastic_rounding: bool = False
    rounding_seed: int = 0
    write_back_gradients: bool = False
    track: int = 0


def norm_parts(optimizer: Optimizer) -> dict[tuple[torch.device, NormKey], int]:
    """The number of each part of a plan: parameters of one device and norm key."""
    parts: dict[tuple[torch.device, NormKey], int] = {}
    for _, _, _, param in named_group_params(optimizer):
        # Of parameters without a gradient, too: other ranks may have one, and sum over its mesh.
        if optimizer.state.get(param) or (param.requires_grad and not param.is_meta):
            parts.setdefault((local_tensor(param).device, norm_key(param)), len(parts))
    return parts


def build_plan(
    optimizer: Optimizer, storage: Storage, options: PlanOptions
) -> tuple[OptimizerPlan, list[NormKey]]:
    """A plan for every parameter that has state, and the norm key of each of its parts.

    State entries that do not fit (other device, strides or dtype, a step that is a number) are
    replaced in ``optimizer.state`` by ones that do.

    Raises:
        ValueError: a state entry has another shape than its parameter.
        RuntimeError: what csrc/plan/step_plan.h refuses.
    """
    params: list[tuple[Any, ...]] = []
    parts = norm_parts(optimizer)
    by_device: dict[torch.device, list[dict[str, Any]]] = {}
    entries: list[tuple[int, int, dict[str, Any], str, Tensor]] = []
    idle: list[Tensor] = []
    needs_place = options.stochastic_rounding or options.track
    first_number: int = getattr(optimizer, "first_parameter_number", 0)
    places: Mapping[Tensor, Place] = getattr(optimizer, "parameter_places", {})
    for number, (index, group, name, param) in enumerate(
        named_group_params(optimizer), start=first_number
    ):
        state = optimizer.state.get(param)
        if not state:
            idle.append(param)
            continue
        init_param_state(group, param, state, storage)
        fit_master(param, state, storage)
        local = local_tensor(param)
        what = repr(name) if name else f"parameter {len(entries)}"
        state["step"] = _fit_step(state["step"], local.device)
        dtype = storage.moment_dtype(param) if storage.says_moment_dtype else None
        for moment in moments_of(group):
            state[moment] = _fit_moment(state[moment], param, f"{moment} of {what}", dtype)
        for master in MASTERS.keys() & state.keys():
            if found := tensor_problem(state[master], param, MASTERS[master]):
                raise ValueError(f"{master} of {what} {found}")
            state[master] = _fit(state[master], param, MASTERS[master])
        by_device.setdefault(local.device, []).append(state)
        entries.append((number, index, group, name, param))
    for states in by_device.values():
        packed_steps(states)
    for number, index, group, name, param in entries:
        state, local = optimizer.state[param], local_tensor(param)
        moments = [local_tensor(state[moment]) for moment in moments_of(group)]
        moments += [None] * (len(MOMENTS) - len(moments))
        held = storage.master_of(param)
        master_local = local_tensor(state[held]) if held else None
        part = parts[local.device, norm_key(param)]
        place = places.get(param)
        if place is None:
            place = place_of(number, param) if needs_place else (number, 0, 0, 0)
        tensors = (local, *moments, master_local, state["step"])
        params.append((param, tensors, index, name, part, place))
    plan = OptimizerPlan(
        optimizer.param_groups,
        optimizer.state,
        params,
        [device for device, _ in parts],
        idle,
        functools.partial(local_gradients, written=options.write_back_gradients),
        **vars(options),
    )
    return plan, [key for _, key in parts]
