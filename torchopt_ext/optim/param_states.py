"""Per-parameter state in torch's form, and the plan that is built from it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext._C import OptimizerPlan, carve
from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.exchange import Exchangers
from torchopt_ext.optim.gradients import local_gradients
from torchopt_ext.optim.host_step import HostStep
from torchopt_ext.optim.norm import NormGroup, norm_key, part_of
from torchopt_ext.optim.options import StepOptions
from torchopt_ext.optim.owners import groups_of_shared, number_of, shared_params
from torchopt_ext.state.algorithms import STATES, algorithm_of, without_codes
from torchopt_ext.state.averages import begin_average, fit_average
from torchopt_ext.state.by_row import BY_ROW, fit_rows, row_problem, rows_like
from torchopt_ext.state.entries import MASTERS, MOMENTS, as_step, step_problem, tensor_problem
from torchopt_ext.state.host_memory import Need, is_on_host, place_states
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.masters import fit_master, refresh_master
from torchopt_ext.state.matrices import (
    SETTINGS,
    check_settings,
    coefficients_of,
    matrices_of,
    replacement_of,
)
from torchopt_ext.state.params import named_group_params, params_of
from torchopt_ext.state.quantized import (
    CODES,
    CODES_OF,
    OTHER_FORM,
    SCALES,
    code_problems,
    fit_moments,
    has_codes,
    quantized_problem,
    scales_like,
)
from torchopt_ext.state.storage import EMA, Storage, packed_steps, place_of


class Apart(NamedTuple):
    """What has a part of a plan to itself: a module, or a bucket that is stepped on the host."""

    on_host: bool
    number: int


SMALL = 1 << 16  # elements; larger tensors give the prefetcher time to start


def moments_of(
    group: Mapping[str, Any], param: Tensor, storage: Storage
) -> Mapping[str, torch.dtype]:
    """Returns the entries that hold a parameter's moments, with dtypes."""
    return storage.entries(param, algorithm_of(group).states_of(group))


def reject_incomplete(what: str | int, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Rejects a state that has a step count and lacks a moment, or has codes and lacks scales."""
    if "step" in state:
        required = [STATES[name] for name in algorithm_of(group).required]
        coded = [entry for of in required for entry in (of.codes, of.scale)]
        for name in coded if has_codes(state) else [of.name for of in required]:
            _entry(name, state, what)


def _entry(name: str, state: Mapping[str, Any], what: str | int) -> Any:
    """Returns an entry of a state that has a step count; raises ValueError if it is missing."""
    if name not in state:
        raise ValueError(f"{_called(what)} has a step count and no {name} in the optimizer's state")
    return state[name]


def init_param_states(
    entries: Sequence[tuple[dict[str, Any], Tensor, dict[str, Any]]], storage: Storage
) -> None:
    """Adds what states lack, given with group and parameter: step 0, zero moments, scales, master.

    If this raises, for example because memory is short, no state has changed.

    Moments of small parameters on the host lie one after the other, so the processor's prefetcher
    goes on to the next. This saves a seventh of the step over 2,000 tensors of 1,000 elements.
    """
    originals = [state for _, _, state in entries]
    entries = [(group, param, state.copy()) for group, param, state in entries]
    new: dict[torch.device, list[dict[str, Any]]] = {}
    for _, param, state in entries:
        if "step" not in state:
            new.setdefault(local_tensor(param).device, []).append(state)
    for device, states in new.items():
        steps = torch.zeros(len(states), dtype=torch.float32, device=device)
        for state, step in zip(states, steps.unbind(), strict=True):
            state["step"] = step
    hosted: list[tuple[dict[str, Any], Need]] = []
    small: dict[tuple[str, torch.dtype], list[tuple[Tensor, dict[str, Any]]]] = {}
    for group, param, state in entries:
        lies_with_others = _lies_with_others(param)
        for moment, dtype in moments_of(group, param, storage).items():
            if moment in BY_ROW or moment in state or OTHER_FORM.get(moment) in state:
                continue
            if storage.on_host(param):
                hosted.append((state, Need(param, moment, dtype)))
            elif lies_with_others:
                small.setdefault((moment, dtype), []).append((local_tensor(param), state))
            else:
                state[moment] = torch.zeros_like(param, dtype=dtype)
    for (moment, dtype), members in small.items():
        # A step changes all of them, so with one version counter it counts the change once.
        carved = carve([like for like, _ in members], dtype, one_version=True)
        torch._foreach_zero_(carved)
        for (_, state), tensor in zip(members, carved, strict=True):
            state[moment] = tensor
    if hosted:  # masters, too, in one allocation
        for _, param, state in entries:
            kept = storage.master_of(param)
            if kept and storage.on_host(param) and MASTERS.keys().isdisjoint(state):
                hosted.append((state, Need(param, kept, MASTERS[kept])))
        for _, param, state in entries:
            average = storage.average_dtype(param)
            if average and storage.on_host(param) and EMA not in state:
                hosted.append((state, Need(param, EMA, average)))
        needs = [need for _, need in hosted]
        for (state, need), memory in zip(hosted, storage.host.take(needs), strict=True):
            state[need.name] = memory
            if need.name in MASTERS:
                refresh_master(need.param, state)
            elif need.name == EMA:
                begin_average(need.param, state)
    for group, param, state in entries:
        for moment in BY_ROW.intersection(moments_of(group, param, storage)) - state.keys():
            state[moment] = rows_like(group, param)
        if storage.quantizes(param) and SCALES.keys().isdisjoint(state):
            coded = [scale for scale, name in SCALES.items() if CODES_OF[name] in state]
            state.update({scale: scales_like(param) for scale in coded})
        if MASTERS.keys().isdisjoint(state):
            fit_master(param, state, storage)
        fit_average(param, state, storage)
    for state, (_, _, complete) in zip(originals, entries, strict=True):
        state.update(complete)


def _called(what: str | int) -> str:
    return repr(what) if isinstance(what, str) else f"parameter {what}"


def _lies_with_others(param: Tensor) -> bool:
    if not param.is_cpu or is_dtensor(param) or not 0 < param.numel() <= SMALL:
        return False
    return param.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(param)


def _fit_step(step: Any, device: torch.device, what: str | int) -> Tensor:
    """Returns a step count, in whatever form, as a 0-dim float32 tensor on ``device``."""
    if isinstance(step, Tensor):
        step = local_tensor(step)
        if step.dtype == torch.float32 and step.device == device and step.numel() == 1:
            # Not read: reading would wait for the device.
            return step.reshape(()) if step.dim() else step
    if problem := step_problem(step):
        raise ValueError(f"step of {_called(what)} {problem}")
    return as_step(step, device)


def _fit(name: str, value: Any, param: Tensor, storage: Storage, what: str | int) -> Tensor:
    """Fits an entry to the parameter's device and storage order, and to ``storage``; may copy it.

    Raises:
        ValueError: the entry does not fit; the message names it.
    """
    if name in (*CODES, *SCALES) and storage.quantizes(param):
        problem = quantized_problem(name, value, param)
    else:
        problem = tensor_problem(value, param, MASTERS.get(name))
    if problem:
        raise ValueError(f"{name} of {_called(what)} {problem}")
    local, like = local_tensor(value), local_tensor(param)
    # Moments of an optimizer without these arguments keep the dtype that they have.
    chosen = name in MOMENTS and (storage.master_weights or storage.state_dtype)
    dtype = storage.float_dtype(param) if chosen else local.dtype
    if name == EMA:
        dtype = storage.average_dtype(param) or dtype
    dense = torch.empty_like(like, memory_format=torch.preserve_format)  # `like` may have gaps
    placed = local.is_contiguous() if name in SCALES else local.stride() == dense.stride()
    on_host = name not in SCALES and storage.on_host(param)
    there = on_host or local.device == like.device
    if placed and there and is_on_host(value) == on_host and local.dtype == dtype:
        return value
    fitted = scales_like(param) if name in SCALES else storage.zeros(param, name, dtype)
    local_tensor(fitted).copy_(local)
    return fitted


def _fit_kind(param: Tensor, state: dict[str, Any], storage: Storage) -> None:
    """Converts codes to floats, or floats to codes, if the parameter's layout has changed.

    Entries that do not fit stay, so that a later check names them.
    """
    quantizes = storage.quantizes(param)
    if has_codes(state) == quantizes:
        return
    moments = {name: state[name] for name in CODES_OF if name in state}
    if quantizes:
        fits = not any(tensor_problem(value, param) for value in moments.values())
    else:
        fits = not storage.problem(param) and not [*code_problems(state, param)]
    if fits:
        fitted = fit_moments(state, param, quantizes)
        state.clear()
        state.update(fitted)


def _fit_state(
    group: dict[str, Any], param: Tensor, state: dict[str, Any], storage: Storage, what: str | int
) -> list[Tensor | None]:
    """Replaces entries that the plan cannot use as they are.

    Returns:
        The parameter and its state in the order of csrc/kernels/tensor_work.h, with None for no
        tensor.

    Raises:
        ValueError: an entry does not fit; the message names it.
    """
    fit_master(param, state, storage)
    fit_average(param, state, storage)
    like = local_tensor(param)
    placing = like.device, like.shape, like.stride()
    on_host = storage.on_host(param)
    dtypes = {**moments_of(group, param, storage), **MASTERS, EMA: storage.average_dtype(param)}
    held: list[Tensor | None] = [param]
    for name in _slots(group, param, storage):
        if name is None:
            held.append(None)
            continue
        value = _entry(name, state, what)
        if name in BY_ROW:
            if problem := row_problem(value, param, group):
                raise ValueError(f"{name} of {_called(what)} {problem}")
            value = state[name] = fit_rows(value, group, param)
        elif (
            type(value) is not Tensor
            or like is not param
            or value.layout is not torch.strided
            or value.dtype != dtypes.get(name)
            or (value.device, value.shape, value.stride()) != placing
            or is_on_host(value) != (on_host and name not in SCALES)
        ):
            value = state[name] = _fit(name, value, param, storage, what)
        held.append(value)
    held.append(state["step"])
    return held


def _slots(group: Mapping[str, Any], param: Tensor, storage: Storage) -> list[str | None]:
    """Returns the entries between parameter and step in csrc/kernels/tensor_work.h's order."""
    algorithm = algorithm_of(group)
    present, quantizes = algorithm.states_of(group), storage.quantizes(param)
    states: list[str | None] = [None] * _C.STATES
    scales: list[str | None] = [None] * _C.SCALES
    for k, state in enumerate(algorithm.states):
        coded = quantizes and state.is_moment
        if state in present:
            states[k] = state.codes if coded else state.name
            if coded:
                scales[k] = state.scale
    average = EMA if storage.average_dtype(param) else None
    return [*states, storage.master_of(param), average, *scales]


def _settings(group: Mapping[str, Any]) -> tuple[str, Sequence[Any], float, Any, Any]:
    """Returns a group's algorithm and how it orthogonalizes, as OptimizerPlan takes them."""
    algorithm = algorithm_of(group)
    if not algorithm.steps_matrices:
        return algorithm.name, (), 0.0, None, None
    check_settings(group)  # a program may have changed it
    values = {**SETTINGS, **group}
    coefficients, eps = coefficients_of(values), float(values["eps"])
    more = group.get("orthogonalize_dtype"), replacement_of(group)
    return algorithm.name, coefficients, eps, *more


def norm_parts(optimizer: Any) -> dict[NormGroup, int]:
    """Returns the number of each part of a plan: the parameters of one device and norm key.

    Ranks that share a norm must find the same parts, although a parameter's gradient and state may
    be on some ranks only. So trainable parameters count without either, and the parts of the plan
    before remain when their parameters are frozen.
    """
    parts: dict[NormGroup, int] = {}
    before = optimizer._last_parts
    for param in params_of(optimizer):
        counts = optimizer.state.get(param) or (param.requires_grad and not param.is_meta)
        if counts or (before and part_of(param) in before):
            parts.setdefault(part_of(param), len(parts))
    return parts


def build_plan(
    optimizer: Any, storage: Storage, options: StepOptions
) -> tuple[
    OptimizerPlan,
    list[NormGroup],
    list[tuple[str, Tensor]],
    Exchangers,
    list[Apart],
    Mapping[int, HostStep],
]:
    """Builds a plan for every parameter that has state.

    State entries that do not fit (other device, strides or dtype, a step that is a number) are
    replaced in ``optimizer.state`` by entries that do.

    Returns:
        The plan, device and norm key of each of its parts, each parameter with its name or number,
        the plan's exchanges, what the last parts are for, in ascending order, and those that the
        CPU back end steps, by part.

    Raises:
        ValueError: a state entry is missing or does not fit its parameter.
        RuntimeError: csrc/plan/step_plan.h rejects a tensor.
    """
    stepped, idle, lacking = [], [], []
    for position, (index, group, name, param) in enumerate(named_group_params(optimizer)):
        state = optimizer.state.get(param)
        if not state:
            idle.append(param)
            continue
        stepped.append((position, index, group, name, param, state))
        if storage.state_dtype == torch.int8:
            if (wide := without_codes(group)) and storage.quantizes(param):
                what = _called(name or position)
                raise ValueError(f"{what} has 8-bit moments, which {wide} does not support")
            _fit_kind(param, state, storage)
        optional = [of for of in algorithm_of(group).states_of(group) if of.when is not None]
        if "step" not in state or any(state.keys().isdisjoint((o.name, o.codes)) for o in optional):
            reject_incomplete(name or position, state, group)
            lacking.append((group, param, state))
    init_param_states(lacking, storage)
    place_states(((param, state) for *_, param, state in stepped), storage)
    by_device: dict[torch.device, list[dict[str, Any]]] = {}
    for position, _, _, name, param, state in stepped:
        device = local_tensor(param).device
        state["step"] = _fit_step(state["step"], device, name or position)
        by_device.setdefault(device, []).append(state)
    for states in by_device.values():
        packed_steps(states)
    parts = norm_parts(optimizer)
    first = optimizer._first_parameter_number
    counted = optimizer._draws_bits
    groups = groups_of_shared(optimizer)
    shared = shared_params(optimizer, groups, lambda param: parts.get(part_of(param)))
    planned = {position for position, *_ in stepped}
    devices, turn = [device for device, _ in parts], optimizer._first_matrix_number
    exchangers = Exchangers(shared, groups, devices, planned, turn)
    those = optimizer._parts_apart()
    keys = {
        id(param): (those[id(param)], parts[part_of(param)])
        for *_, param, _ in stepped
        if id(param) in those
    }
    apart = {key: len(parts) + k for k, key in enumerate(sorted({*keys.values()}))}
    every_part = [*parts, *(list(parts)[part] for _, part in apart)]
    numbers = exchangers.numbers
    rows: list[tuple[Any, ...]] = []
    for position, index, group, name, param, state in stepped:
        held = _fit_state(group, param, state, storage, name or position)
        local = local_tensor(param)
        copy = getattr(local, "low_precision_copy", None)  # torchopt_ext/fsdp.py
        if copy is not None:
            held[1 + _C.STATES] = param
        tensors = [None if value is None else local_tensor(value) for value in held]
        if copy is not None:
            tensors[0] = copy
        place = optimizer._parameter_places.get(param)
        if place is None:
            number = first + position
            place = place_of(number, param) if counted else (number, 0, 0, 0, 0, 0)
        key = keys.get(id(param))
        part = parts[local.device, norm_key(param)] if key is None else apart[key]
        matrices = []
        if algorithm_of(group).steps_matrices:
            matrices = matrices_of(group, param, name or number_of(param, position))
        more = place, copy is not None, matrices, numbers.get(position, -1)
        rows.append((held, tensors, index, name, position, part, *more))
    settings = [_settings(group) for group in optimizer.param_groups]
    plan = OptimizerPlan(
        optimizer.param_groups,
        optimizer.state,
        rows,
        settings,
        [device for device, _ in every_part],
        idle,
        functools.partial(local_gradients, written=options.write_back_gradients),
        exchangers,
        **options.of_plan,
        staging_bytes=optimizer._staging_bytes(),
    )
    named = [(name or str(position), param) for position, _, _, name, param, _ in stepped]
    host_steps = {
        part: HostStep(
            {
                number: (row, _slots(group, param, storage))
                for number, (row, (_, _, group, _, param, _)) in enumerate(
                    zip(rows, stepped, strict=True)
                )
                if row[5] == part
            },
            optimizer.param_groups,
            settings,
            every_part[part][0],
            options.of_plan,
        )
        for (key, _), part in apart.items()
        if key.on_host
    }
    return plan, every_part, named, exchangers, [key for key, _ in apart], host_steps
