"""The algorithms, as their headers in csrc/kernels declare them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext._arguments import expect_bools, expect_numbers
from torchopt_ext._names import did_you_mean
from torchopt_ext.state.matrices import OPTIONAL, SETTINGS, check_settings


@dataclass(frozen=True)
class Hyper:
    """A hyperparameter of a param group.

    Attributes:
        name: the operator's argument.
        key: the key in a group.
        index: the position in the tuple at the key, or -1.
        default: the default value.
        may_lack: groups may lack the key, which then has the default.
        in_operator: it is an argument of the operator; otherwise it only decides about states.
    """

    name: str
    key: str
    index: int
    default: bool | float
    may_lack: bool
    in_operator: bool


@dataclass(frozen=True)
class State:
    """A state that has a value for each element of a parameter, or for each row.

    Attributes:
        name: the entry in a parameter's state.
        when: the key of a group that asks for the state, by a value that is true; None: always.
        is_moment: may be held in 8 bits: as ``codes``, with ``scale``.
        as_root: 8 bits hold the root, unsigned.
        by_row: a float32 for each row, as state/by_row.py has it.
    """

    name: str
    when: str | None
    is_moment: bool
    as_root: bool
    by_row: bool

    @property
    def excludes_codes(self) -> bool:
        """Whether the states before it cannot have 8 bits."""
        return not (self.is_moment or self.by_row)

    @property
    def codes(self) -> str:
        """The entry with 8-bit codes. Functions of torch do not find it, and so take no codes for
        values."""
        return f"{self.name}_codes"

    @property
    def scale(self) -> str:
        """The entry with the scales of the codes. The number is the version of the format."""
        return f"{self.name}_scale_v2"


@dataclass(frozen=True)
class Algorithm:
    """An algorithm.

    Attributes:
        steps_matrices: orthogonalizes matrices; groups have the keys of state/matrices.py, too.
    """

    name: str
    hypers: tuple[Hyper, ...]
    states: tuple[State, ...]
    steps_matrices: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each key of a group."""
        values: dict[str, Any] = {}
        for hyper in self.hypers:
            value = hyper.default
            values[hyper.key] = value if hyper.index < 0 else (*values.get(hyper.key, ()), value)
        return values | SETTINGS | OPTIONAL if self.steps_matrices else values

    @property
    def may_lack(self) -> set[str]:
        """The keys that groups need not have. A state dict without them changes none."""
        lacking = {hyper.key for hyper in self.hypers if hyper.may_lack}
        return lacking | OPTIONAL.keys() if self.steps_matrices else lacking

    @property
    def required(self) -> tuple[str, ...]:
        """The states that every parameter has."""
        return tuple(state.name for state in self.states if state.when is None)

    @property
    def moments(self) -> tuple[State, ...]:
        """The states that may have 8 bits."""
        return tuple(state for state in self.states if state.is_moment)

    def states_of(self, group: Mapping[str, Any]) -> Sequence[State]:
        """Returns the states that the parameters of a group have."""
        return [state for state in self.states if state.when is None or group.get(state.when)]


ALGORITHMS = {
    name: Algorithm(name, tuple(Hyper(*h) for h in hypers), tuple(State(*s) for s in states), whole)
    for name, (hypers, states, whole) in _C.algorithms().items()
}
ADAM = ALGORITHMS["adam"]
NAMES = {**{name: name for name in ALGORITHMS}, "adamw": "adam", "normuon": "muon"}
"""The algorithm of each value that a group may have under "algorithm"."""

STATES = {state.name: state for algorithm in ALGORITHMS.values() for state in algorithm.states}
"""The states of all algorithms by name. A name means the same in each."""

HYPERS = {"algorithm"}.union(*(algorithm.defaults for algorithm in ALGORITHMS.values()))
"""The keys that groups may have for one of the algorithms."""

SHARED = ("lr", "weight_decay", "maximize")
"""The keys whose defaults groups of all algorithms take from the optimizer."""


def defaults_of(name: str) -> dict[str, Any]:
    """Returns the default of each key that a group of an algorithm has, in torch's order of keys.

    Groups lack what torch's groups lack, and Adam's groups the key "algorithm".
    """
    algorithm = algorithm_of({"algorithm": name})
    values = {key: v for key, v in algorithm.defaults.items() if key not in algorithm.may_lack}
    if name == "normuon":  # dion's default
        values["beta2"] = 0.95
    if name == "adamw":
        return values | {"weight_decay": 1e-2, "decoupled_weight_decay": True}
    return values if algorithm is ADAM else values | {"algorithm": name}


def name_algorithm(group: Any) -> None:
    """Gives a new group the key "algorithm" if it has ``use_muon`` or ``kind`` instead.

    KellerJordan/Muon and DeepSpeed have the former, nanochat the latter.

    Raises:
        ValueError: the keys contradict each other.
    """
    if not isinstance(group, dict):
        return
    named = {group["kind"]} if isinstance(group.get("kind"), str) else set()
    if "use_muon" in group:
        named.add("muon" if group["use_muon"] else group.get("algorithm", "adamw"))
    if not named:
        return
    if "algorithm" in group:
        named.add(group["algorithm"])
    if len(named) > 1:
        raise ValueError(f"a param group names several algorithms: {', '.join(sorted(named))}")
    group["algorithm"] = named.pop()


def defaults_beside(own: dict[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default of each key of a group in an optimizer whose own defaults are given."""
    if "algorithm" not in group or group["algorithm"] == own.get("algorithm"):
        return own
    defaults = defaults_of(group["algorithm"])
    if algorithm_of(group) is algorithm_of(own):  # adam and adamw, muon and normuon
        differs = "beta2" if algorithm_of(group).steps_matrices else "decoupled_weight_decay"
        return own | {differs: defaults.get(differs, 0.0)}
    return defaults | {key: own[key] for key in SHARED if key in own}


def defaults_of_new(own: dict[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what :func:`defaults_beside` does, for a group that someone has written.

    Raises:
        TypeError: the group has a hyperparameter that its algorithm lacks.
    """
    defaults = defaults_beside(own, group)
    algorithm = algorithm_of({**defaults, **group}).name
    foreign = HYPERS.difference(keys_of(algorithm), defaults) & group.keys()
    reject_unknown(foreign, keys_of(algorithm), f"a param group of {algorithm!r}")
    return defaults


def keys_of(name: str) -> list[str]:
    """Returns every key that a group of an algorithm may have for it."""
    return ["algorithm", *algorithm_of({"algorithm": name}).defaults]


def reject_unknown(names: Iterable[str], valid: Collection[str], what: str) -> None:
    """Raises TypeError if a name is none of the valid names; the message has the nearest."""
    for name in names:
        if name not in valid:
            raise TypeError(f"{what} has no argument {name!r}{did_you_mean(name, valid)}")


def expect_keys(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a program has changed a group's algorithm, but not its other keys."""
    for number, group in enumerate(groups):
        name = group.get("algorithm", "adam")
        read = {hyper.key for hyper in algorithm_of(group).hypers}
        needed = {key: value for key, value in defaults_of(name).items() if key in read}
        if missing := {key: needed[key] for key in needed if key not in group}:
            raise ValueError(
                f"param group {number} is of {name!r}, whose groups have also "
                f"{', '.join(missing)}: set these with the algorithm, by default {missing}"
            )


def check_values(group: Mapping[str, Any]) -> None:
    """Rejects hyperparameters of a group that are of a wrong type or out of range."""
    numbers, lr = numbers_of(group), group.get("lr", 0.0)
    if not isinstance(lr, Tensor) and lr < 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    _C.check_hypers(algorithm_of(group).name, numbers)
    if algorithm_of(group).steps_matrices:
        check_settings(group)


def without_codes(group: Mapping[str, Any]) -> str | None:
    """Returns the key that asks for a state beside which moments cannot have 8 bits, or None."""
    states = algorithm_of(group).states_of(group)
    return next((state.when for state in states if state.excludes_codes), None)


def numbers_of(group: Mapping[str, Any]) -> list[float]:
    """Returns a group's hyperparameters in the order of the declaration; a tensor lr is 0.

    Raises:
        TypeError, ValueError: a value is not a number or bool.
    """
    algorithm = algorithm_of(group)
    values = {**algorithm.defaults, **group}
    lr = values["lr"]
    numbers = []
    for hyper in algorithm.hypers:
        value = values[hyper.key]
        if isinstance(hyper.default, bool):
            expect_bools(**{hyper.name: value})
        elif hyper.index < 0:
            expect_numbers(**{hyper.key: value})
        else:
            try:
                first, second = value
            except (TypeError, ValueError):
                raise TypeError(f"{hyper.key} is {value!r:.200}, expected two numbers") from None
            value = (first, second)[hyper.index]
            expect_numbers(**{f"{hyper.key}[{hyper.index}]": value})
        # The device has a learning rate that is a tensor: reading it would wait.
        numbers.append(0.0 if value is lr and isinstance(lr, Tensor) else float(value))
    if isinstance(lr, Tensor) and (lr.is_complex() or lr.dtype == torch.bool):
        raise ValueError(f"Tensor lr has dtype {lr.dtype}, expected a real number")
    return numbers


def algorithm_in(group: Mapping[str, Any]) -> Algorithm | None:
    """Returns the algorithm of a saved group, which may be torch's; None if nothing tells."""
    if "algorithm" in group:
        return algorithm_of(group)
    for algorithm in sorted(ALGORITHMS.values(), key=lambda of: -len(of.defaults)):
        needed = {hyper.key for hyper in algorithm.hypers if not hyper.may_lack}
        needed -= {"maximize", "amsgrad", "decoupled_weight_decay"}
        needed |= SETTINGS.keys() if algorithm.steps_matrices else set()
        if needed <= group.keys() and not group.keys() & HYPERS.difference(algorithm.defaults):
            return algorithm
    return None


def algorithm_of(group: Mapping[str, Any]) -> Algorithm:
    """Returns the algorithm that steps a group.

    Raises:
        ValueError: there is no algorithm of this name.
    """
    name = group.get("algorithm", "adam")
    if name not in NAMES:
        expected = ", ".join(map(repr, NAMES))
        raise ValueError(
            f"there is no algorithm {name!r}, expected one of {expected}"
            + did_you_mean(str(name), NAMES)
        )
    return ALGORITHMS[NAMES[name]]
