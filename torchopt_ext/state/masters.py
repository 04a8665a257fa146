"""Conversions between master weights, remainders and the weights that they stand for."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._C import followed, take_weight
from torchopt_ext._torch import is_dtensor, local_shape_and_offset
from torchopt_ext.state.entries import MASTERS, REMAINDERS, tensor_problem
from torchopt_ext.state.local import as_placed, local_tensor
from torchopt_ext.state.storage import (
    MASTER,
    SIXTEEN_BIT,
    Storage,
    is_steppable,
    join_master,
    param_problem,
    split_master,
)

_ELEMENTS = 1 << 22
"""Elements that are in memory as float32 at once while a weight is scaled."""


def fit_master(param: Tensor, state: dict[str, Any], storage: Storage) -> None:
    """Leaves in ``state`` the one master entry that ``storage`` asks for, made from what is there.

    A remainder belongs to the parameter's present values. So a checkpoint's master is converted
    only here, shortly before a step, and not when it is loaded: the model may be loaded later.
    """
    kept = storage.master_of(param)
    if kept is not None and kept not in state:
        if MASTERS.keys() & state.keys():
            if remainder_of(state) is not None and param.dtype != torch.bfloat16:
                raise ValueError(f"a remainder completes a bfloat16 parameter, not {param.dtype}")
            set_weight(param, state, weight_of(param, state), storage)
        else:
            state[kept] = storage.zeros(param, kept, MASTERS[kept])
            refresh_master(param, state)
    for other in MASTERS.keys() - {kept}:
        state.pop(other, None)


def remainder_of(state: Mapping[str, Any]) -> Tensor | None:
    """Returns a state's remainder, the remainder with more bits if there are two, or None."""
    return next((state[name] for name in REMAINDERS if name in state), None)


def has_low_bits(param: Tensor, state: Mapping[str, Any]) -> bool:
    """Returns whether a master weight or remainder holds bits that its parameter's dtype cannot."""
    if (remainder := remainder_of(state)) is not None:
        return bool(local_tensor(remainder).any())
    if MASTER not in state:
        return False
    master = local_tensor(state[MASTER])
    return not master.to(param.dtype).float().equal(master)


def refresh_master(param: Tensor, state: dict[str, Any]) -> None:
    """Sets the master weight or remainder to the parameter's values."""
    if MASTER in state:
        local_tensor(state[MASTER]).copy_(local_tensor(param))
    for name in REMAINDERS.keys() & state.keys():
        local_tensor(state[name]).zero_()


def refresh_stale_elements(param: Tensor, state: dict[str, Any]) -> None:
    """Sets elements of an fp32 master weight that do not round to the parameter to its values."""
    if MASTER in state and not tensor_problem(state[MASTER], param, MASTERS[MASTER]):
        take_weight(local_tensor(state[MASTER]), local_tensor(param))


def weight_of(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns what a 16-bit parameter is rounded from, as float32; for others, their values.

    If there is a master weight, returns the master weight itself, or a copy with the elements that
    were written to the parameter since the last step. Returns an empty tensor for a
    frozen parameter that no step could update: only the model's checkpoint holds it.
    """
    if not is_steppable(param):
        return torch.empty(0)
    weight: Tensor
    if MASTER in state:
        weight = state[MASTER]
        now = followed(local_tensor(weight), local_tensor(param))
        if not now.equal(local_tensor(weight)):
            weight = as_placed(now, weight)
    elif (remainder := remainder_of(state)) is not None:
        local, rest = local_tensor(param), local_tensor(remainder)
        joined = join_master(local.to(rest.device), rest)
        if rest.device != local.device:  # on the host, where its weight has room
            return as_placed(joined, param)
        weight = torch.zeros_like(param, dtype=torch.float32)
        local_tensor(weight).copy_(joined)
    else:
        local = local_tensor(param).detach()
        weight = as_placed(local.float() if local.dtype in SIXTEEN_BIT else local, param)
    return weight


def copy_local_(to: Tensor, values: Tensor) -> None:
    """Copies this rank's part of a tensor, unless both are the same memory, as in a state dict.

    Strides of dimensions of size 1 may then differ, for which torch rejects the copy.
    """
    target, source = local_tensor(to), local_tensor(values)
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def set_weight(param: Tensor, state: dict[str, Any], weight: Tensor, storage: Storage) -> None:
    """Sets a parameter and its master to ``weight``, which has its shape and placements.

    A parameter that no step could update stays unchanged.
    """
    if not is_steppable(param):
        return
    local, exact = local_tensor(param), local_tensor(weight)
    copy_local_(local, exact)
    kept = storage.master_of(param)
    for other in MASTERS.keys() - {kept}:
        state.pop(other, None)
    if kept is None:
        return
    if kept not in state:
        state[kept] = storage.zeros(param, kept, MASTERS[kept])
    if kept == MASTER:
        copy_local_(state[MASTER], exact)
    else:
        rounded, rest = split_master(exact.to(local.device, torch.float32), MASTERS[kept])
        local.copy_(rounded)
        local_tensor(state[kept]).copy_(rest)


def row_factors(param: Tensor, factors: Any) -> Tensor:
    """Returns the factor of each row that this rank has, from those of equal blocks of rows.

    Raises:
        TypeError, ValueError: the factors do not fit, or no step could update the parameter.
    """
    if not isinstance(factors, Tensor):
        raise TypeError(f"factors are {factors!r:.200}, expected a tensor")
    plain = factors.layout is torch.strided and not (is_dtensor(factors) or factors.is_complex())
    if not plain or factors.is_meta:
        raise TypeError(
            f"factors are {factors.dtype} of layout {factors.layout} on {factors.device}, in a "
            f"{type(factors).__name__}: expected a dense tensor of real numbers, with memory"
        )
    fits = factors.dim() == 1 and len(factors) > 0 and param.dim() > 0
    if not fits or param.shape[0] % len(factors):
        raise ValueError(
            f"factors have shape {tuple(factors.shape)}, expected a vector whose length divides "
            f"the {param.shape[0] if param.dim() else 1} rows of the weight"
        )
    if problem := param_problem(param):
        raise ValueError(f"the weight {problem}")
    rows = factors.repeat_interleave(param.shape[0] // len(factors))
    if is_dtensor(param):
        shape, offset = local_shape_and_offset(param)
        rows = rows[offset[0] : offset[0] + shape[0]]
    return rows


def scale_weight(param: Tensor, state: dict[str, Any], factors: Tensor, storage: Storage) -> None:
    """Multiplies each row of a weight, with what completes it, by a factor.

    Goes through the rows in one pass, and holds at most :data:`_ELEMENTS` elements in float32, or a
    row, beside the weight.

    Args:
        factors: one for each row or, of a contiguous weight, for each element.
    """
    if not state:  # before the first step nothing completes a weight
        storage = Storage()
    kept = storage.master_of(param)
    if kept is not None:
        fit_master(param, state, storage)
    local = local_tensor(param)
    held = {name: local_tensor(state[name]) for name in MASTERS.keys() & state.keys()}
    if len(factors) != local.shape[0]:
        local, held = local.view(-1), {name: value.view(-1) for name, value in held.items()}
    count = max(1, _ELEMENTS // max(1, math.prod(local.shape[1:])))
    for first in range(0, local.shape[0], count):
        block = slice(first, first + count)
        completes = {name: value[block] for name, value in held.items()}
        weight = weight_of(local[block], completes)
        scale = factors[block].to(weight.device, weight.dtype)
        scaled = weight * scale.view(-1, *[1] * (local.dim() - 1))
        set_weight(local[block], completes, scaled, storage)
    for other in MASTERS.keys() - {kept}:
        state.pop(other, None)
