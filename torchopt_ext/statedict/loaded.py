"""A state dict as it was read: what it has for each parameter, whatever its layout."""

import copy
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._torch import is_dtensor, tree_map_only
from torchopt_ext.state.algorithms import (
    ALGORITHMS,
    HYPERS,
    algorithm_in,
    algorithm_of,
    check_values,
)
from torchopt_ext.state.entries import (
    ABSENT,
    CONTROL_KEY,
    MASTERS,
    MISSING,
    as_held,
    control_fields,
    control_problem,
    option_problem,
    plain,
    problem,
    required_of,
    was_cast,
    was_rounded,
)
from torchopt_ext.state.local import PLAIN, local_tensor, on_mesh_of
from torchopt_ext.state.matrices import FUNCTIONS, matrices_of
from torchopt_ext.state.quantized import CODES, OTHER_FORM, SCALES, code_problems, has_codes
from torchopt_ext.state.storage import Storage

# Options of a group in any version of torch.
_NEEDED = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"}
_WIDE = {of.when for each in ALGORITHMS.values() for of in each.states if of.excludes_codes}
_REGROUPED = "build the groups that were saved, or save with flatten_optimizer_state_dict=True"

SHOWN = 5
"""How many problems a message has in full."""


@dataclass(frozen=True)
class Slot:
    """A parameter, and what a state dict has for it.

    Attributes:
        label: the name of an entry in messages, with {} for the entry's key.
        entry: the state; empty if there is no state.
        fillers: entries that a flat dict lacked, for which torch's set_optimizer_state_dict makes
            {}.
    """

    param: Tensor
    label: str
    entry: Mapping[str, Any]
    fillers: frozenset[str] = frozenset()

    def called(self, name: str) -> str:
        return self.label.replace("{}", name)

    def problems(self, optimizer: Optimizer) -> Iterator[str]:
        """Yields a message for each entry that does not fit."""
        held = optimizer.state.get(self.param, {})
        coded = hasattr(optimizer, "_storage") and has_codes(self.entry)
        for name, text in code_problems(self.entry, self.param) if coded else ():
            yield f"{self.called(name)} {text}"
        for name, value in self.entry.items():
            if coded and name in (*CODES, *SCALES):
                continue
            if wrong := problem(type(optimizer), name, value, self.param, held.get(name)):
                yield f"{self.called(name)} {wrong}"


@dataclass
class Loaded:
    """A state dict by parameter.

    Attributes:
        slots: one for each parameter, in order.
        groups: hyperparameters by group, with the optimizer's own parameters.
        foreign: state that belongs to no parameter, unchanged.
        control: fields of a control block; empty if there are none.
        extra: further top-level entries.
    """

    slots: list[Slot]
    groups: list[dict[str, Any]]
    foreign: dict[Any, Any] = field(default_factory=dict)
    control: Mapping[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def counted(self) -> float:
        """The largest step count of a parameter."""
        return largest_step(slot.entry for slot in self.slots)

    def problems(self, optimizer: Any, *, parts: bool = False) -> Iterator[str]:
        """Yields all that does not fit the optimizer that is to load it.

        Args:
            parts: tensors may have memory for this rank's part only.
        """
        if wrong := control_problem(self.control):
            yield wrong
        required = required_of(type(optimizer))
        fused = hasattr(optimizer, "_defaults_for")
        storage = getattr(optimizer, "_storage", Storage())  # torch's classes have none
        pairs = [*enumerate(zip(self.groups, optimizer.param_groups, strict=True))]
        merged = [({**live, **group}, len(group["params"])) for _, (group, live) in pairs]
        groups = [group for group, count in merged for _ in range(count)]
        pairs = pairs if required is not None else []
        for number, (group, live) in pairs:
            kind = algorithm_in(group) if fused else None
            if kind is not None and kind is not algorithm_of(live):
                yield f"group {number} is of {kind.name}, expected {algorithm_of(live).name}"
                return
            if lacking := (_NEEDED & live.keys()) - group.keys():
                yield f"group {number} {_lacks(lacking, group, optimizer)}"
        for slot, group in zip(self.slots, groups, strict=True):
            if fused:
                states = algorithm_of(group).states_of(group) if slot.fillers else ()
                lacked = {of.name for of in states if {of.name, of.codes} & slot.fillers}
                required = ("step", *{*algorithm_of(group).required, *lacked})
            for name in required or () if slot.entry else ():
                held = [slot.entry.get(form) for form in (name, OTHER_FORM.get(name, name))]
                if all(value is None for value in held):
                    yield f"{slot.called(name)} {MISSING}"
            yield from slot.problems(optimizer)
            for name, value in slot.entry.items() if not parts else ():
                if hasattr(value, "__create_chunk_list__") and not is_dtensor(value):
                    yield (
                        f"{slot.called(name)} is one rank's part: call consolidate_state_dict() on "
                        "all ranks before state_dict(), or save with dcp.save"
                    )
        for number, (group, live) in pairs:
            names = sorted(live.keys() & group.keys() - {"params", "param_names"})
            wrongs = {name: option_problem(name, group[name], live[name]) for name in names}
            if fused and not any(wrongs.values()) and (wrong := invalid({**live, **group})):
                yield f"group {number}: {wrong}"
            elif fused and not any(wrongs.values()) and algorithm_of(live).steps_matrices:
                for index, param in enumerate(live["params"]):
                    try:
                        matrices_of({**live, **group}, param, index)
                    except ValueError as error:
                        yield f"group {number}: {error}"
            for name, wrong in wrongs.items():
                if wrong:
                    yield f"{name} of group {number} {wrong}"
                elif name in _WIDE and group[name] and storage.state_dtype == torch.int8:
                    yield f"group {number} has {name}, which 8-bit moments do not support"


def invalid(group: Mapping[str, Any]) -> str | None:
    """Returns why a step could not have a group's hyperparameters."""
    if group.get("decay_follows_lr") is True:
        return "decay_follows_lr is True, expected a learning rate"
    try:
        check_values({name: plain(v) for name, v in group.items() if name in HYPERS})
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _lacks(names: Iterable[str], group: Mapping[str, Any], optimizer: Any) -> str:
    if group.keys() <= {"params", "param_names"}:  # torch's set_optimizer_state_dict left it so
        return f"has no options, since its parameters were saved in other groups: {_REGROUPED}"
    kind, lacking = type(optimizer).__name__, ", ".join(sorted(names))
    return f"lacks {lacking}, which {kind} needs: it is another optimizer's"


def largest_step(entries: Iterable[Any]) -> float:
    """Returns the largest step count of parameters' checked states; 0 without any.

    Entries may hold what a user has put there, under keys that are no parameters.
    """
    states = [entry for entry in entries if isinstance(entry, Mapping)]
    steps = [local_tensor(state["step"]) for state in states if "step" in state]
    return max(map(float, steps), default=0.0)


def raise_problems(
    texts: Iterable[str], kind: type[Exception] = ValueError, what: str = "the state dict"
) -> None:
    """Raises ``kind`` with all problems, the first of them in full; does nothing without any."""
    if problems := list(texts):
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise kind(f"{what} does not fit: {'; '.join(problems[:SHOWN])}{more}")


def _is_same_memory(value: Any, local: Tensor) -> bool:
    """Returns whether a value is the parameter, which stood for an entry not in the dict."""
    if type(value) not in PLAIN or value.layout is not torch.strided or value.numel() == 0:
        return False
    return bool(value.layout == local.layout and value.data_ptr() == local.data_ptr() != 0)


def read_indexed(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> Loaded:
    """Reads a state dict in torch's layout: ``state`` by index, and ``param_groups``.

    Args:
        groups: groups of the optimizer that loads it, which hold the parameters.

    Raises:
        ValueError: the state dict has another layout, or its groups have other sizes.
    """
    raise_problems(_structure_problems(state_dict, groups))
    others = dict(state_dict)
    state, saved_groups = others.pop("state"), others.pop("param_groups")
    control = others.pop(CONTROL_KEY, {})
    slots, loaded_groups, cast = [], [], list[Tensor]()
    memo: dict[int, Any] = {}  # groups share a learning rate, as in torch
    for group, saved in zip(groups, saved_groups, strict=True):
        names = group.get("param_names") or [""] * len(group["params"])
        for index, param, name in zip(saved["params"], group["params"], names, strict=True):
            label = f"{{}} of parameter {index}" + (f" ({name!r})" if name else "")
            local = local_tensor(param)
            read = state.get(index, {})
            fillers = {k for k, v in read.items() if isinstance(v, Mapping) and not v}
            entry = {
                key: as_held(key, value, param)
                for key, value in read.items()
                if (key in MASTERS or key not in fillers)
                and not (value is ABSENT or getattr(value, "source", 0) is local)
                and not (key != "step" and _is_same_memory(value, local))
            }
            cast += [entry.pop(name) for name in MASTERS if was_cast(entry.get(name), param)]
            control = entry.pop(CONTROL_KEY, control)
            if isinstance(control, Mapping):
                control = {k: v for k, v in control.items() if not was_rounded(k, v, param)}
            slots.append(Slot(param, label, entry, frozenset(fillers)))
        saved = {k: v for k, v in saved.items() if v is not None or not callable(group.get(k))}
        # refresh_masters() finds weights by param_names, so the model's names stay.
        may_lack = algorithm_of(group).may_lack if saved.keys() - {"params"} else set()
        if algorithm_in(saved) in (None, algorithm_of(group)):
            may_lack |= {"algorithm", *FUNCTIONS}
        live_keys = {"params", "param_names"} | (may_lack - saved.keys())
        kept = {key: group[key] for key in live_keys & group.keys()}
        loaded = {k: kept[k] if k in kept else copy.deepcopy(v, memo) for k, v in saved.items()}
        loaded_groups.append(loaded | kept)
    if cast:
        warnings.warn(
            f"this state was stepped by one of torch's optimizers, which rounds master weights to "
            f"16 bits and does not update them: those of {len(cast)} parameters are made from the "
            "weights instead",
            stacklevel=3,
        )
    indices = {index for saved in saved_groups for index in saved["params"]}
    foreign = {key: value for key, value in state.items() if key not in indices}
    return Loaded(slots, loaded_groups, foreign, control_fields(control), others)


def expect_dict(state_dict: Any) -> None:
    """Rejects what is no dict, such as the path of a file."""
    if not isinstance(state_dict, Mapping):
        is_path = isinstance(state_dict, str | os.PathLike)
        hint = ": load the file first, such as by torch.load" if is_path else ""
        raise TypeError(f"state_dict is {state_dict!r:.200}, expected a dict{hint}")


def names_params(state_dict: Any) -> bool:
    """Returns whether a state dict names its parameters, as torch's set_optimizer_state_dict does
    (all ranks call that)."""
    if not isinstance(state_dict, Mapping):
        return False
    lists, groups = [state_dict.get("state")], state_dict.get("param_groups")
    if isinstance(groups, list | tuple):
        lists += [group.get("params") for group in groups if isinstance(group, Mapping)]
    return any(isinstance(key, str) for ids in lists if isinstance(ids, Iterable) for key in ids)


def _structure_problems(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    entries = state_dict if isinstance(state_dict, Mapping) else {}
    state, saved = entries.get("state"), entries.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(saved, list | tuple):
        if any(str(key).startswith("state.") for key in entries):
            yield "it is flat, as containers have it: load it into a container"
        else:
            tensors = [isinstance(value, Tensor) for value in entries.values()]
            models = "; it looks like a model's" if tensors and all(tensors) else ""
            found = f"a dict with the keys {[*entries]}" if entries else f"{state_dict!r}"
            yield f"expected a dict 'state' and a list 'param_groups' in {found:.200}{models}"
        return
    if len(saved) != len(groups):
        yield f"it has {len(saved)} parameter groups, expected {len(groups)}: {_REGROUPED}"
    for number, (group, live) in enumerate(zip(saved, groups, strict=False)):
        ids = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(ids, list | tuple) or not all(isinstance(i, Integral | str) for i in ids):
            yield f"group {number} has no list 'params' of indices or names"
            continue
        if len(ids) != (size := len(live["params"])):
            yield (
                f"group {number} has {len(ids)} parameters, expected {size}, the size of the "
                f"optimizer's group"
            )
        names = ids if group.get("param_names") is None else group["param_names"]
        if not isinstance(names, list | tuple) or len(names) != len(ids):
            yield f"group {number} has param_names {names!r:.200} for {len(ids)} parameters"
        for index in ids:
            if not isinstance(entry := state.get(index, {}), Mapping):
                yield f"the state of parameter {index} is {entry!r:.200}, expected a dict"


@contextmanager
def undone_if_raised(optim: Any) -> Iterator[None]:
    """Undoes what a load has changed in an optimizer, if an error follows.

    That is what a load binds anew, groups, and control blocks; not tensors that it writes into.
    """
    state, groups, blocks = optim.state, optim.param_groups, getattr(optim, "_blocks", {})
    dicts = [(held, held.copy()) for held in (vars(optim), state, blocks, *groups)]
    controls = [(control, control.clone()) for control, _ in blocks.values()]
    try:
        yield
    except BaseException:
        for held, content in dicts:
            held.clear()
            held.update(content)
        optim.state, optim.param_groups = state, groups  # of a wrapper that forwards them
        for control, values in controls:
            control.copy_(values)
        raise


def load_whole(optim: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads a copy into any optimizer; if this raises, the optimizer is as before.

    torch's classes may raise after they have loaded part of a dict, and share tensors with it.

    Raises:
        ValueError: the groups lack options that the optimizer needs.
    """
    before = [{*group} for group in optim.param_groups]
    with undone_if_raised(optim):
        # As dicts: tree_map_only does not look into other mappings.
        state = state_dict["state"].items()
        dicts = {k: dict(v) if isinstance(v, Mapping) else v for k, v in state}
        copies = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), dicts)
        optim.load_state_dict({**state_dict, "state": copies})
        for param, entry in optim.state.items():
            if isinstance(entry, dict):
                entry.update({k: on_mesh_of(v, param) for k, v in entry.items()})
        for number, (group, names) in enumerate(zip(optim.param_groups, before, strict=True)):
            if lacking := (optim.defaults.keys() & names) - group.keys():
                raise ValueError(
                    f"group {number} of the state dict {_lacks(lacking, group, optim)}"
                )
