"""The flat state dict of a model's optimizers.

Keys are those of torch's `flatten_optimizer_state_dict`: `state.{fqn}.{name}` and
`param_groups.{fqn}.{name}`, where fqn is the parameter's name in its model part.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from torchopt_ext.optim.local import local_tensor
from torchopt_ext.optim.state import check_loaded_master
from torchopt_ext.optim.storage import MASTER, REMAINDER, with_own_steps

# What completes a 16-bit parameter: one is made from the other, or from the parameter, when the
# next step needs it (optim/state.py, fit_master), so a checkpoint may hold either or none.
_MASTERS = (MASTER, REMAINDER)

# A model part and the optimizers that share its parameters.
Part = tuple[nn.Module, Sequence[Optimizer]]

# How a step is computed, not what: a checkpoint does not decide that.
_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}
# What decides which state exists or which algorithm runs: a checkpoint must agree.
_FIXED = {"amsgrad", "decoupled_weight_decay"}
# Absent without a learning-rate scheduler, and from older versions of torch.
_OPTIONAL = {"initial_lr", "decoupled_weight_decay"}


def get_state_dict(parts: Sequence[Part]) -> dict[str, Any]:
    """The flat state dict of all parts; its tensors are the optimizers' own, as torch's are.

    Missing state is created first, with step 0, so the keys are complete before the first step.

    Raises:
        ValueError: two parts have a trained parameter of the same name.
        NotImplementedError: a part is wrapped by FullyShardedDataParallel.
    """
    flat: dict[str, Any] = {}
    for part, optimizers in _trained(parts):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        own: dict[str, Any] = get_optimizer_state_dict(part, _as_one(optimizers), options=options)
        if clash := own.keys() & flat.keys():
            raise _same_name(min(clash))
        flat.update(own)
    return flat


@torch.no_grad()
def load_state_dict(parts: Sequence[Part], state_dict: Mapping[str, Any]) -> None:
    """Copy `state_dict` into the optimizers' own tensors and param groups.

    Everything is checked before anything is written. The dict is neither changed nor kept.

    Raises:
        KeyError: a key is missing.
        ValueError: a value does not fit, or two parts have a parameter of the same name.
        NotImplementedError: a part is wrapped by FullyShardedDataParallel.
    """
    slots = [slot for part in _trained(parts) for slot in _slots(*part)]
    names: set[str] = set()
    for slot in slots:
        if slot.fqn in names:
            raise _same_name(slot.fqn)
        names.add(slot.fqn)

    missing = [key for slot in slots for key in slot.required() if key not in state_dict]
    if missing:
        raise KeyError(f"the state dict lacks {_first_of([repr(key) for key in missing])}")
    problems = [problem for slot in slots for problem in slot.problems(state_dict)]
    problems += _disagreements(slots, state_dict)
    if problems:
        raise ValueError(f"the state dict does not fit: {_first_of(problems)}")

    for slot in slots:
        slot.load(state_dict)


def init_state(optimizer: Optimizer) -> None:
    """Create the state that the first step would create, with step 0, where it is missing.

    Unlike torch's own way, a step with lr = 0, it advances no step count and touches no gradient.
    It knows torch's Adam and AdamW and optimizers with a method `init_state`; others are left.
    """
    own = getattr(optimizer, "init_state", None)
    if own is not None:
        own()
    elif type(optimizer) in (Adam, AdamW):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and not optimizer.state.get(param):
                    optimizer.state[param] = _adam_state(param, group)


def _adam_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """As torch/optim/adam.py, Adam._init_group: the step is on the CPU unless a kernel reads it."""
    on_device = group["capturable"] or group["fused"]
    double = torch.get_default_dtype() == torch.float64 and not group["fused"]
    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    state = {
        "step": torch.zeros(
            (),
            dtype=torch.float64 if double else torch.float32,
            device=param.device if on_device else "cpu",
        )
    }
    for name in moments:
        state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return state


def _trained(parts: Sequence[Part]) -> Iterator[Part]:
    """The parts that have something to train, with complete state."""
    for part, optimizers in parts:
        if any(isinstance(module, FullyShardedDataParallel) for module in part.modules()):
            raise NotImplementedError(
                f"{type(part).__name__} has flat parameters, each of which stands for several of "
                "the model's: shard it with torch.distributed.fsdp.fully_shard instead"
            )
        if any(group["params"] for optimizer in optimizers for group in optimizer.param_groups):
            for optimizer in optimizers:
                init_state(optimizer)
            yield part, optimizers


def _as_one(optimizers: Sequence[Optimizer]) -> Optimizer:
    return optimizers[0] if len(optimizers) == 1 else _View(optimizers)


class _View(Optimizer):
    """Several optimizers of one part seen as one, to be read only.

    get_optimizer_state_dict takes a list, too, but walks the whole model for each optimizer of it.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = [group for opt in optimizers for group in opt.param_groups]
        for optimizer in optimizers:
            self.state.update(with_own_steps(optimizer.state))


@dataclass
class _Slot:
    """One parameter's place: its name, its state, and the group it is in."""

    fqn: str
    param: Tensor
    frozen: bool
    state: dict[str, Any]
    group: dict[str, Any]

    def hypers(self) -> list[str]:
        return [key for key in self.group if key not in {"params", "param_names"} | _SWITCHES]

    def required(self) -> Iterator[str]:
        # torch saves no state for a parameter that was frozen before its first step.
        if not self.frozen:
            for name in self.state:
                if name not in _MASTERS:
                    yield f"state.{self.fqn}.{name}"
        for name in self.hypers():
            if name not in _OPTIONAL:
                yield f"param_groups.{self.fqn}.{name}"

    def problems(self, state_dict: Mapping[str, Any]) -> Iterator[str]:
        expected = self.state | dict.fromkeys(_MASTERS, self.param)
        for name, live in expected.items():
            key = f"state.{self.fqn}.{name}"
            problem = key in state_dict and _state_problem(live, state_dict[key])
            if not problem and key in state_dict and name in _MASTERS:
                try:
                    dtype = torch.int16 if name == REMAINDER else torch.float32
                    check_loaded_master(state_dict[key], self.param, "it", dtype)
                except ValueError as error:
                    problem = f"does not fit: {error}"
            if problem:
                yield f"'{key}' {problem}"
        for name in self.hypers():
            key = f"param_groups.{self.fqn}.{name}"
            if key not in state_dict:
                continue
            value, live = _plain(state_dict[key]), _plain(self.group[name])
            if not _same_kind(value, live):
                yield f"'{key}' is {value!r}, expected a value like {live!r}"
            elif name in _FIXED and value != live:
                yield f"'{key}' is {value!r}, this optimizer was built with {live!r}"

    def load(self, state_dict: Mapping[str, Any]) -> None:
        if any(name in self.state for name in _MASTERS):
            for name in _MASTERS:
                key = f"state.{self.fqn}.{name}"
                if key not in state_dict:
                    self.state.pop(name, None)
                elif name not in self.state:
                    self.state[name] = state_dict[key].to(
                        local_tensor(self.param).device, copy=True
                    )
        for name, live in self.state.items():
            key = f"state.{self.fqn}.{name}"
            if key not in state_dict:
                continue
            if isinstance(live, Tensor):
                value = state_dict[key]
                live.copy_(value if isinstance(value, Tensor) else torch.tensor(value))
            else:
                self.state[name] = copy.deepcopy(state_dict[key])
        for name in self.hypers():
            key = f"param_groups.{self.fqn}.{name}"
            if key not in state_dict:
                continue
            live = self.group[name]
            if isinstance(live, Tensor):  # a captured graph reads this very tensor
                live.fill_(_plain(state_dict[key]))
            else:
                self.group[name] = _plain(state_dict[key])


def _slots(part: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[_Slot]:
    named: dict[str, Any] = get_optimizer_state_dict(part, _as_one(optimizers))
    groups = [(opt, group) for opt in optimizers for group in opt.param_groups]
    for (optimizer, group), saved in zip(groups, named["param_groups"], strict=True):
        for fqn, param in zip(saved["params"], group["params"], strict=True):
            state = optimizer.state.get(param, {})
            yield _Slot(fqn, param, not param.requires_grad, state, group)


def _state_problem(live: Any, value: Any) -> str | None:
    if not isinstance(live, Tensor) or (live.dim() == 0 and isinstance(value, int | float)):
        return None
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, expected a tensor of shape {list(live.shape)}"
    if value.shape != live.shape:
        return f"has shape {list(value.shape)}, expected {list(live.shape)}"
    if _layout(value) != _layout(live):
        return f"is {_layout_text(value)}, expected {_layout_text(live)}"
    local = local_tensor(value)
    if local.layout is not torch.strided or local.is_meta or value.is_complex():
        return f"is {value.dtype}, {local.layout}, on {value.device}, expected a dense real one"
    return None


def _layout(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _layout_text(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor of placements {tensor.placements} on {tensor.device_mesh}"
    return "a plain tensor"


def _disagreements(slots: Sequence[_Slot], state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Parameters of one group here that were saved with different hyperparameters."""
    first: dict[tuple[int, str], str] = {}
    for slot in slots:
        for name in slot.hypers():
            key = f"param_groups.{slot.fqn}.{name}"
            if key not in state_dict:
                continue
            other = first.setdefault((id(slot.group), name), key)
            if _plain(state_dict[key]) != _plain(state_dict[other]):
                yield (
                    f"'{key}' is {state_dict[key]!r} but '{other}' is {state_dict[other]!r}, "
                    "and both parameters are in one group here"
                )


def _plain(value: Any) -> Any:
    """A copy that holds no tensor: hyperparameters may be tensors of one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return copy.deepcopy(value)


def _same_kind(value: Any, live: Any) -> bool:
    if isinstance(live, tuple):
        return (
            isinstance(value, tuple)
            and len(value) == len(live)
            and all(_same_kind(a, b) for a, b in zip(value, live, strict=True))
        )
    if isinstance(live, int | float):
        return isinstance(value, int | float)
    return type(value) is type(live)


def _same_name(key: str) -> ValueError:
    return ValueError(
        f"'{key}' is in more than one model part, so one state dict cannot hold both: "
        "give the parts' parameters different names, or wrap the parts in one module"
    )


def _first_of(items: Sequence[str]) -> str:
    rest = len(items) - 1
    return items[0] + (f" and {rest} more" if rest else "")
