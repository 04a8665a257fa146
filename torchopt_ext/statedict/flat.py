"""The flat state dict of a model's optimizers.

The keys are torch's of `flatten_optimizer_state_dict`: `state.{fqn}.{name}` and
`param_groups.{fqn}.{name}`, where fqn is the parameter's name in its model part.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Adam, AdamW, Optimizer

from torchopt_ext import _C
from torchopt_ext.state import entries
from torchopt_ext.state.algorithms import ADAM, ALGORITHMS, HYPERS, algorithm_in
from torchopt_ext.state.entries import BESIDE, CONTROL_KEY, MASTERS, plain
from torchopt_ext.state.matrices import FUNCTIONS
from torchopt_ext.state.params import drop_replaced, params_of
from torchopt_ext.state.quantized import OTHER_FORM, fit_moments, has_codes
from torchopt_ext.state.storage import EMA, Storage, is_steppable
from torchopt_ext.statedict.loaded import Slot, invalid, largest_step, raise_problems

ModelPart: TypeAlias = tuple[nn.Module, Sequence[Optimizer]]
"""A module and the optimizers that share its parameters."""
Names: TypeAlias = Mapping[Tensor, str]
"""The names of optimizers' parameters in their model parts (:func:`complete`)."""


class _Writes(NamedTuple):
    """What a load writes into a parameter's state; a captured graph may read the live tensors."""

    state: dict[str, Any]
    gone: list[str]
    copied: list[tuple[Tensor, Tensor]]  # live, new
    new: dict[str, Any]


# Options that decide which state exists or which algorithm runs: a checkpoint must agree.
_FIXED = {"algorithm", "amsgrad", "decoupled_weight_decay", "bias_correction"}
_ASK_FOR_STATE = {state.when for each in ALGORITHMS.values() for state in each.states}
# Options that are absent without a learning-rate scheduler, in older versions of torch, and in its
# groups.
_OPTIONAL = {"initial_lr", "algorithm", *FUNCTIONS}.union(
    *(each.may_lack for each in ALGORITHMS.values())
)
_NOT_LOADED = {"params", "param_names"} | entries.SWITCHES


def get_state_dict(optimizers: Sequence[Any], names: Names) -> dict[str, Any]:
    """Returns the flat state dict of all optimizers (:meth:`OptimizersContainer.state_dict`).

    The control block's fields, which are the same in all parts, are `torchopt_ext.control.*`.

    Args:
        names: the result of :func:`complete`. The modules are not read.
    """
    flat: dict[str, Any] = {}
    for optimizer in optimizers:
        packed = optimizer.state_dict()
        for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            # torchtitan has no param_names.
            options = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
            for param, index in zip(group["params"], saved["params"], strict=True):
                fqn, entry = names[param], packed["state"].get(index, {})
                flat |= {f"state.{fqn}.{k}": v for k, v in entry.items() if k != CONTROL_KEY}
                flat |= {f"param_groups.{fqn}.{name}": value for name, value in options.items()}
    counting = [o for o in optimizers if getattr(o, "_keeps_counts", False) and o.state]
    fields = counting[0]._saved_control() if counting else {}  # all step together
    return flat | {f"{CONTROL_KEY}.{name}": value for name, value in fields.items()}


@torch.no_grad()
def prepare_load(
    optimizers: Sequence[Optimizer], state_dict: Mapping[str, Any], names: Names
) -> Callable[[], None]:
    """Checks a flat state dict, and returns the function that loads it
    (:meth:`OptimizersContainer.load_state_dict`)."""
    for optimizer in optimizers:  # also state of parameters that were frozen after some steps
        init_state(optimizer, lambda p: is_steppable(p) and f"state.{names[p]}.step" in state_dict)
    missing: list[str] = []
    problems: list[str] = []
    slots: list[tuple[Slot, dict[str, Any]]] = []
    options: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for optimizer, group in [(o, group) for o in optimizers for group in o.param_groups]:
        fqns = [names[param] for param in group["params"]]
        for fqn, param in zip(fqns, group["params"], strict=True):
            state = optimizer.state.get(param, {})
            others = [OTHER_FORM[name] for name in state if name in OTHER_FORM]
            keys = {k: f"state.{fqn}.{k}" for k in (*state, *others, *BESIDE) if state}
            entry = {
                name: entries.as_held(name, state_dict[key], param)
                for name, key in keys.items()
                if key in state_dict
            }
            is_torchs = f"param_groups.{fqn}.algorithm" not in state_dict
            counts_none = group.get("algorithm") in ("sgd", "muon")  # in torch
            if counts_none and "step" in state and is_torchs:
                entry.setdefault("step", torch.full((), float("momentum_buffer" in entry)))
            slots.append((Slot(param, f"'state.{fqn}.{{}}'", entry), state))
            problems += slots[-1][0].problems(optimizer)
            # torch saves no state for a parameter that was frozen before its first step.
            may_lack = {*entry, *BESIDE, CONTROL_KEY} if param.requires_grad or entry else {*keys}
            may_lack.update(others, [OTHER_FORM[name] for name in entry if name in OTHER_FORM])
            missing += [key for name, key in keys.items() if name not in may_lack]
        options.append((group, read_options(group, fqns, state_dict, missing, problems)))
    control = read_control(state_dict)
    problems += filter(None, [entries.control_problem(control)])
    raise_missing(missing, problems)
    steps = largest_step(slot.entry for slot, _ in slots), largest_step(state for _, state in slots)
    fused: list[Any] = [each for each in optimizers if hasattr(each, "_control_to_load")]
    for optimizer in fused:
        optimizer._wait_for_states()
    controls = [(optimizer, optimizer._control_to_load(control, *steps)) for optimizer in fused]
    return partial(_load, [_writes(*each) for each in slots], options, controls)


@torch.no_grad()
def _load(
    states: Sequence[_Writes],
    options: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    controls: Sequence[tuple[Any, Mapping[str, float]]],
) -> None:
    for writes in states:
        for tensor, value in writes.copied:
            tensor.copy_(value)
        for name in writes.gone:
            del writes.state[name]
        writes.state.update(writes.new)
    for group, loaded in options:
        for name, value in loaded.items():
            live = group.get(name)
            if isinstance(live, Tensor):
                live.fill_(value)
            elif isinstance(live, tuple) and isinstance(live[0], Tensor):
                for beta, new in zip(live, value, strict=True):
                    beta.fill_(new)
            else:
                group[name] = value
    for optimizer, fields in controls:
        optimizer._load_control(fields)
        _C.increment_versions(params_of(optimizer))  # the next step compares masters and weights


def read_options(
    group: Mapping[str, Any],
    names: Sequence[str],
    state_dict: Mapping[str, Any],
    missing: list[str],
    problems: list[str],
) -> dict[str, Any]:
    """Returns a group's options in a flat state dict, of those that the group has.

    Args:
        names: the names of the group's parameters.
        missing, problems: the keys that the dict lacks and what is wrong are appended.

    Raises:
        ValueError: the options are another algorithm's.
    """
    expected = algorithm_in(group)
    for fqn in names:
        keys = {key: f"param_groups.{fqn}.{key}" for key in HYPERS}
        kind = algorithm_in({k: state_dict[key] for k, key in keys.items() if key in state_dict})
        if kind and expected and kind is not expected:
            raise_problems([f"'param_groups.{fqn}' is of {kind.name}, expected {expected.name}"])
    options: dict[str, Any] = {}
    lacked = {} if expected is None else {k: expected.defaults[k] for k in expected.may_lack}
    # A schedule that is built later reads initial_lr.
    held = {**lacked, "initial_lr": group.get("lr"), **group}
    for name in [name for name in held if name not in _NOT_LOADED]:
        every = [f"param_groups.{fqn}.{name}" for fqn in names]
        values = {key: plain(state_dict[key]) for key in every if key in state_dict}
        if callable(held[name]):
            values = {key: value for key, value in values.items() if value is not None}
        if values:
            options[name] = copy.deepcopy(next(iter(values.values())))
        if name in _FIXED & lacked.keys():
            values = dict.fromkeys(every, lacked[name]) | values
        missing += [key for key in every if key not in values and name not in _OPTIONAL]
        problems += _option_problems(name, values, plain(held[name]))
    if expected and not problems and (wrong := invalid({**group, **options})):
        problems.append(f"'param_groups.{names[0]}': {wrong}")
    return options


def read_control(state_dict: Mapping[str, Any]) -> Any:
    """Returns the control block's fields in a flat state dict."""
    # A container's own keys, or keys that torch's functions made of the first parameter's entry.
    split = ((key.rpartition(f"{CONTROL_KEY}."), value) for key, value in state_dict.items())
    return entries.control_fields({name: value for (_, key, name), value in split if key})


def raise_missing(missing: Sequence[str], problems: Sequence[str]) -> None:
    """Raises KeyError if keys are missing, or ValueError if there are only problems."""
    lacking = [f"'{key}' is missing" for key in missing]
    raise_problems([*lacking, *problems], KeyError if missing else ValueError)


def _option_problems(name: str, values: Mapping[str, Any], live: Any) -> Iterator[str]:
    """Yields what is wrong with an option's values, by key, for the parameters of a group."""
    for key, value in values.items():
        other, first = next(iter(values.items()))
        if wrong := entries.option_problem(name, value, live):
            yield f"'{key}' {wrong}"
        elif (name in _FIXED and value != live) or (
            name in _ASK_FOR_STATE and bool(value) != bool(live)
        ):
            yield f"'{key}' is {value!r}, this optimizer was built with {live!r}"
        elif value != first and (value == value or first == first):  # two NaNs count as equal
            yield (
                f"'{key}' is {value!r} but '{other}' is {first!r}, and both parameters are in one "
                f"group here: build the groups that were saved, such as by no_decay"
            )


def _writes(slot: Slot, state: dict[str, Any]) -> _Writes:
    """Returns what to write for a checked entry."""
    # As the state is: the next step converts it if the parameter's layout has changed.
    entry = fit_moments(slot.entry, slot.param, has_codes(state))
    keeps_master = bool(MASTERS.keys() & state.keys())
    # The next step makes a missing master from the other entries (fit_master), and begins a missing
    # average as the loaded weight, not as the one from before.
    gone = [name for name in (*MASTERS, EMA) if name in state and name not in entry]
    writes = _Writes(state, gone, [], {})
    for name, value in entry.items():
        live = state.get(name)
        if isinstance(live, Tensor) and isinstance(value, Tensor | int | float):
            dtype = value.dtype if isinstance(value, Tensor) else live.dtype
            tensor = torch.as_tensor(value, dtype=dtype)
            one = tensor.numel() == 1
            writes.copied.append((live, tensor.reshape(live.shape) if one else tensor))
        elif not isinstance(value, Tensor):
            writes.new[name] = copy.deepcopy(value)  # a number, where the optimizer keeps one
        elif name not in MASTERS or keeps_master:
            writes.new[name] = entries.converted(name, value, slot.param, Storage())
    return writes


@torch.no_grad()
def init_state(
    optimizer: Optimizer, needs: Callable[[Tensor], bool] = attrgetter("requires_grad")
) -> None:
    """Creates the state that the first step would create, with step 0, where it is missing.

    Unlike torch's way, a step with lr = 0, this advances no step count and touches no gradient. It
    knows FusedAdam, FusedAdamW and torch's Adam and AdamW; others stay unchanged.
    """
    if init_states := getattr(optimizer, "_init_states", None):
        init_states(needs)
        return
    drop_replaced(optimizer)
    if type(optimizer) in (Adam, AdamW):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if needs(param) and not optimizer.state.get(param):
                    optimizer.state[param] = _adam_state(param, group)


def init_state_by_step(parts: Sequence[ModelPart]) -> None:
    """Lets torch create missing state by a step with lr = 0, which the step counts include.

    Like torch, it does nothing while there are gradients.
    """
    for part, optimizers in parts:
        for optimizer in optimizers:
            if not optimizer.state and any(group["params"] for group in optimizer.param_groups):
                get_optimizer_state_dict(part, optimizer)


def _adam_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Makes torch's Adam._init_group state, with steps on the CPU unless a kernel reads them."""
    device = param.device if group["capturable"] or group["fused"] else "cpu"
    dtype = torch.float32 if group["fused"] else torch.get_default_dtype()
    step = torch.zeros((), dtype=dtype if dtype == torch.float64 else torch.float32, device=device)
    moments = ADAM.states_of(group)
    return {"step": step} | {state.name: torch.zeros_like(param) for state in moments}


def complete(parts: Sequence[ModelPart]) -> dict[Tensor, str]:
    """Completes the state of every optimizer; returns the parameters' names, group by group."""
    names: dict[Tensor, str] = {}
    for part, optimizers in parts:
        if any(isinstance(module, FullyShardedDataParallel) for module in part.modules()):
            raise NotImplementedError(
                f"{type(part).__name__} has flat parameters, each of which stands for several of "
                "the model's: shard it with torch.distributed.fsdp.fully_shard instead"
            )
        params = params_of(*optimizers)
        if not params:
            continue
        of_part = {*part.parameters()}
        if foreign := [tuple(param.shape) for param in params if param not in of_part]:
            raise ValueError(f"parameters of shapes {foreign} are not in {type(part).__name__}")
        for optimizer in optimizers:
            init_state(optimizer)
            if not optimizer.state:
                with _without_gradients(params_of(optimizer)):
                    get_optimizer_state_dict(part, optimizer)  # torch creates the state
        named: dict[str, Any] = get_optimizer_state_dict(part, _NamingOptimizer(params))
        (group,) = named["param_groups"]
        before = {*names.values()}
        for param, fqn in zip(params, group["params"], strict=True):
            if fqn in before:
                raise ValueError(
                    f"'{fqn}' is in more than one model part, so one state dict cannot hold both: "
                    "give the parts' parameters different names, or wrap the parts in one module"
                )
            names[param] = fqn
    return names


@contextmanager
def _without_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Puts gradients aside: torch creates no state while there are any."""
    gradients = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


class Completion:
    """A :func:`complete` that asks for names again only after a module or an optimizer has changed:
    torch takes 40 us to find a parameter's name, which a save would add to each training step."""

    def __init__(self) -> None:
        # By id: references would keep parameters alive that a framework replaces.
        self._seen: list[tuple[str, int]] = []
        self._names: list[str] = []

    def __call__(self, parts: Sequence[ModelPart]) -> Names:
        seen = [
            (name, id(param))
            for part, _ in parts
            for name, param in part.named_parameters(remove_duplicate=False)
        ]
        every = [optimizer for _, optimizers in parts for optimizer in optimizers]
        params = params_of(*every)
        seen += [("", id(param)) for param in params]
        if seen == self._seen:
            for optimizer in every:
                init_state(optimizer)
        if seen != self._seen or not all(optimizer.state for optimizer in every):
            names = complete(parts)
            self._names, self._seen = [names[param] for param in params], seen
        return dict(zip(params, self._names, strict=True))


class _NamingOptimizer(Optimizer):
    """An optimizer whose parameters torch names; its entry of state keeps torch from a step."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__([{"params": params}], {})
        self.state[params[0]] = {}
