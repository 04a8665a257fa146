"""Entries of a parameter's state: what each kind must be, and how it is kept."""

import copy
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.algorithms import ADAM, STATES, State
from torchopt_ext.state.by_row import BY_ROW, has_rows_of, row_problem
from torchopt_ext.state.host_memory import Need
from torchopt_ext.state.local import (
    PLAIN,
    inner_tensors,
    local_tensor,
    on_mesh_of,
    placed,
    same_placement,
    shard_of,
)
from torchopt_ext.state.matrices import OPTIONAL, SETTINGS
from torchopt_ext.state.quantized import CODES, CONVERT, SCALES, can_quantize, scale_shape
from torchopt_ext.state.storage import EMA, MASTER, REMAINDER, REMAINDER8, Storage

MOMENTS = tuple(STATES)
# Options for how a step is computed, not what: a state dict does not decide them.
_CHECKED_TOGETHER = {*SETTINGS, *OPTIONAL} - {"eps"}
"""Options of Muon's groups, of which values of several types are valid (check_values)."""
SWITCHES = {"foreach", "fused", "capturable", "differentiable"}
REMAINDERS = {REMAINDER: torch.int16, REMAINDER8: torch.int8}
MASTERS = {MASTER: torch.float32, **REMAINDERS}
"""The entries that complete a 16-bit parameter, with dtypes. A state dict may hold any or none."""

BESIDE = {*MASTERS, *SCALES, EMA}
"""Entries that a state dict may have or lack, whatever the optimizer keeps."""


def forms_of(states: Sequence[State]) -> tuple[str, ...]:
    """Returns the entries in which states and weights can be held; a parameter has some."""
    coded = [state for state in states if state.is_moment]
    names = [state.name for state in states]
    return (*names, *(s.codes for s in coded), *(s.scale for s in coded), *MASTERS, EMA)


ABSENT = "not in the state dict"
"""Stands for an entry that there is not, where torch fills only entries that there are. The entry
of a sharded parameter is the parameter itself, which says how to cut: not its scales."""

_BY_ELEMENT = {"exp_inf", "square_avg", "grad_avg", "acc_delta", "sum", "ax", "prev", "step_size"}
SHAPED_LIKE_PARAM = _BY_ELEMENT.union(MOMENTS, [EMA]) - BY_ROW
"""Entries of torch.optim's classes that have one value for each element of the parameter."""

_ADAM = ("step", *ADAM.required)
REQUIRED: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adam: _ADAM,
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.AdamW: _ADAM,
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
    torch.optim.NAdam: (*_ADAM, "mu_product"),
    torch.optim.RAdam: _ADAM,
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.SGD: (),
}
"""The entries that a parameter's state always has, by class."""


BY_INDEX = "nested, as torch's optimizers and get_optimizer_state_dict() have it"
BY_NAME = "flat, as containers and torch's flatten_optimizer_state_dict=True have it"
WITH_BASE = "FSDPadaptOptimizer's"
"""Layouts of optimizers' state dicts, worded to follow "the state dict is"."""

MISSING = "is missing (a flat dict drops other kinds of masters and moments: load the nested dict)"

CONTROL_KEY = "torchopt_ext.control"
"""The entry of the first parameter's state for a control block's counts and loss scale.

torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` drop top-level keys, and fail
on a key of a parameter group that the dict lacks. They keep this entry, and torch's optimizers load
and ignore it. Containers have ``torchopt_ext.control.{field}`` keys.
"""

WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
"""The parts that activation checkpointing, FSDP1 and torch.compile add to names of parameters."""


def unwrapped(name: str) -> str:
    """Returns a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def control_entry(fields: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns the fields as an entry of a state: dcp.load loads no numbers at integer keys."""
    return {name: torch.tensor(v, dtype=torch.float64, device="cpu") for name, v in fields.items()}


def control_fields(entry: Any) -> Any:
    """Returns the fields of an entry as numbers; any other value unchanged."""
    return {k: plain(v) for k, v in entry.items()} if isinstance(entry, Mapping) else entry


def control_problem(fields: Any) -> str | None:
    """Returns what is wrong with a control block's fields, given as plain values, or None."""
    if not isinstance(fields, Mapping):
        return f"'{CONTROL_KEY}' is {fields!r}, expected a dict of numbers"
    for name, value in fields.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            return f"'{CONTROL_KEY}' has {name} = {value!r}, expected a number of 0 or more"
    return None


def required_of(optimizer_class: Any) -> tuple[str, ...] | None:
    """Returns the entries that a parameter's state always has; None for an unknown class."""
    if hasattr(optimizer_class, "_defaults_for"):  # FusedOptimizer: a group decides about more
        return ("step",)
    return REQUIRED.get(optimizer_class)


def problem(optimizer_class: Any, name: str, value: Any, param: Tensor, held: Any) -> str | None:
    """Returns what is wrong with an entry of a parameter's state, to follow its name, or None.

    Args:
        held: the optimizer's own entry of this name, if any. It tells what is expected if name and
            class do not.
    """
    if name in SCALES or name in CODES:
        return f"belongs to 8-bit moments, which this optimizer cannot read{CONVERT}"
    if required_of(optimizer_class) is not None:
        if name == "step":
            return step_problem(value)
        if name in MASTERS:
            if isinstance(value, Mapping):
                return MISSING
            return tensor_problem(value, param, MASTERS[name])
        if name in BY_ROW:
            return row_problem(value, param)
        if name in SHAPED_LIKE_PARAM and not (name == "momentum_buffer" and value is None):
            return tensor_problem(value, param)
    if not isinstance(held, Tensor):
        return shape_problem(value, param) if is_dtensor(value) else None
    if isinstance(value, Tensor | int | float) and held.numel() == 1:
        return None if not isinstance(value, Tensor) or value.numel() == 1 else "is not a number"
    return None if value is None else shape_problem(value, held)


def step_problem(step: Any) -> str | None:
    """Returns a problem unless ``step`` is a count: a number, or a tensor of one element."""
    meta = isinstance(step, Tensor) and local_tensor(step).is_meta
    value = step if meta else plain(step)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    counts = number and 0 <= value < 2**53 and value == int(value)
    return None if counts else f"is {step!r}, expected a count of steps"


def as_step(step: Any, device: torch.device) -> Tensor:
    """Returns a step count that was checked, in whatever form, as a 0-dim float32 tensor."""
    count = torch.as_tensor(local_tensor(step), dtype=torch.float32, device=device).detach()
    return count.reshape(()) if count.dim() else count


def shape_problem(value: Any, like: Tensor) -> str | None:
    """Returns a problem unless a tensor has the shape and the placement of ``like``."""
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, expected a tensor of shape {tuple(like.shape)}"
    if value.shape != like.shape:
        return f"has shape {tuple(value.shape)}, expected {tuple(like.shape)}"
    if not same_placement(value, like):
        return (
            f"is {placed(value)}, its parameter {placed(like)}: "
            f"torch.distributed.checkpoint can redistribute it"
        )
    return None


def tensor_problem(value: Any, param: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Returns a problem unless a tensor is dense, has memory and is floating-point or ``dtype``."""
    if problem := shape_problem(value, param):
        return problem
    local = local_tensor(value)
    fits = local.is_complex() if param.is_complex() else local.is_floating_point()
    if dtype is not None:
        fits = local.dtype == dtype
    if inner_tensors(local):
        return f"is of type {type(local).__name__}, expected a plain tensor"
    if not fits or local.layout is not torch.strided or local.is_meta:
        return (
            f"is {local.dtype}, {local.layout}, on {local.device}; expected a dense "
            f"{dtype or 'real'} tensor with memory"
        )
    if dtype in REMAINDERS.values() and param.dtype == torch.float16:
        return "completes a bfloat16 parameter, not a float16 one"
    return None


def is_whole(name: str, value: Any, param: Tensor) -> bool:
    """Returns whether an entry is a whole tensor although the parameter is sharded."""
    if name == "step" or type(value) not in PLAIN or not is_dtensor(param):
        return False
    if name in SCALES:  # where a rank's columns end inside a group, scales stay whole
        return can_quantize(param) and value.shape == scale_shape(param)
    return bool(value.shape == param.shape) or (name in BY_ROW and has_rows_of(value, param))


def as_held(name: str, value: Any, param: Tensor) -> Any:
    """Returns an entry on the parameter's mesh, cut to this rank's shard if it is whole, and a
    remainder that was gathered as int32 (optim/gathered.py) as int16."""
    value = shard_of(value, param) if is_whole(name, value, param) else on_mesh_of(value, param)
    if name == REMAINDER and isinstance(value, Tensor) and value.dtype == torch.int32:
        narrow = value.to(torch.int16)
        return narrow if torch.equal(*map(local_tensor, (narrow.int(), value))) else value
    return plain(value) if type(value).__module__ == "numpy" else value


def was_cast(master: Any, param: Tensor) -> bool:
    """Returns whether torch's load_state_dict has cast a master or remainder to 16-bit floats."""
    return (
        isinstance(master, Tensor)
        and master.dtype == param.dtype
        and param.dtype in (torch.bfloat16, torch.float16)
    )


def was_rounded(name: str, value: Any, param: Tensor) -> bool:
    """Returns whether torch's load_state_dict has made a control block's field useless: infinite,
    or a count of steps that 16 bits do not hold, and that the parameters' steps tell."""
    if not was_cast(value, param) or value.numel() != 1:
        return False
    number = value.item()
    return number == math.inf or (name == "steps" and number >= 2 / torch.finfo(param.dtype).eps)


def option_problem(name: str, value: Any, live: Any) -> str | None:
    """Returns what is wrong with an option of a group; ``live`` is the optimizer's own value."""
    value, live = plain(value), plain(live)
    if name in SWITCHES:
        return None if isinstance(value, bool | None) else f"is {value!r}, expected a bool or None"
    if live is None or name in _CHECKED_TOGETHER or _same_kind(value, live):
        return None
    return f"is {value!r}, expected a value like {live!r}"


def plain(value: Any, nested: bool = True) -> Any:
    """Returns a value without tensors: options may be tensors of one element, or lists of them.

    numpy's numbers, and arrays of one element, become Python's numbers.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    if isinstance(value, list | tuple) and nested:
        return tuple(plain(item, nested=False) for item in value)
    return value


def _same_kind(value: Any, live: Any) -> bool:
    if isinstance(live, tuple) and isinstance(value, tuple) and len(value) == len(live):
        return all(map(_same_kind, value, live))
    both = isinstance(value, Real) and isinstance(live, Real)  # numpy's scalars, too
    return both or (type(value) is type(live) and not isinstance(live, tuple))


def converted(name: str, value: Any, param: Tensor, storage: Storage, held: Any = None) -> Any:
    """Returns a checked entry in memory of its own, on the parameter's device.

    An entry that lies on the host gets the memory that was reserved for it, or stays in that of
    ``held``, the optimizer's own, if it was read into that. Otherwise a step places it.

    torch casts every floating-point entry to the parameter's dtype, float32 moments of a bfloat16
    parameter included. Here moments get the dtype of ``storage``, and masters keep their own dtype.
    """
    device = local_tensor(param).device
    if name == "step":
        return as_step(value, device).clone()
    if not isinstance(value, Tensor):
        if isinstance(value, Mapping):
            return {k: converted(k, v, param, storage) for k, v in value.items()}
        return copy.deepcopy(value)
    dtype = value.dtype
    if name in BY_ROW or name in SCALES:
        dtype = torch.float32
    elif name in MOMENTS:
        dtype = storage.float_dtype(param)
    elif name == EMA:
        dtype = storage.average_dtype(param) or dtype
    elif name not in MASTERS and value.is_floating_point() and not param.is_complex():
        dtype = param.dtype
    if storage.on_host(param) and storage.by_element([name]):
        if isinstance(held, Tensor) and local_tensor(held) is local_tensor(value):
            return held
        device = torch.device("cpu")
        target = storage.host.take_reserved(Need(param, name, dtype)) if held is None else None
        if target is not None:
            local_tensor(target).copy_(local_tensor(value))
            return target
    same = value.dtype == dtype and value.device == device
    return value.detach().clone() if same else value.detach().to(device, dtype, copy=True)
