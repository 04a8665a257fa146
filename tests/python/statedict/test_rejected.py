"""Rejected state dicts: every reader reports all problems at once, before the first write."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchopt_ext import (
    FSDPadaptOptimizer,
    FusedAdamW,
    FusedLion,
    FusedSGD,
    ZeroRedundancyOptimizer,
)
from torchopt_ext.containers import OptimizersContainer

from ...support import problems
from ...support.compare import assert_same, snapshot, unchanged
from ...support.problems import make_params
from ...support.ways import BF16, FP16, FP32
from .jobs import job, model_of, optimizer_of, train

BASES = {"ours": FusedAdamW, "torch's": torch.optim.AdamW}
KINDS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, _: FusedAdamW(model.named_parameters()),
    "container": lambda model, cls: OptimizersContainer([model], cls, {}),
    "wrapper": lambda model, cls: FSDPadaptOptimizer(cls(model.named_parameters())),
    "sharded": lambda model, cls: ZeroRedundancyOptimizer(model.named_parameters(), cls),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_wrong_is_reported_at_once(one_rank: Any, kind: str, base: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 5))
    optimizer = KINDS[kind](model, BASES[base])
    train(model, optimizer, [0])
    if kind == "sharded":
        optimizer.consolidate_state_dict()
    saved = copy.deepcopy(optimizer.state_dict())
    if kind == "container":
        names = [f"state.{name}." for name, _ in model.named_parameters()]
        wrong = {names[0] + "exp_avg": torch.ones(2), names[1] + "exp_avg_sq": 1.0}
        wrong |= {name + "step": -1.0 for name in names[2:]} | {"param_groups.0.weight.lr": "fast"}
        saved |= wrong
        shown = list(wrong)[:5]
    else:
        indexed = saved.get("base_optim_states", saved)
        indexed["state"][0]["exp_avg"] = torch.ones(2)
        indexed["state"][1]["exp_avg_sq"] = 1.0
        for index in range(2, 6):
            indexed["state"][index]["step"] = -1.0
        indexed["param_groups"][0]["lr"] = "fast"
        shown = ["exp_avg of parameter 0", "exp_avg_sq of parameter 1"]
        shown += [f"step of parameter {index}" for index in range(2, 5)]
    with unchanged(optimizer, model):
        with pytest.raises(ValueError, match=r"and \d more") as caught:
            optimizer.load_state_dict(saved)
        assert all(each in str(caught.value) for each in shown)
        if kind == "container":
            del saved[names[2] + "step"]  # a missing key raises KeyError, which lists the others
            with pytest.raises(KeyError, match=r"step' is missing; .*and \d more"):
                optimizer.load_state_dict(saved)


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    return lambda entry: entry.update({new: entry.pop(old)})


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], object]:
    return lambda entry: entry.update({name: change(entry[name])})


SCALE, SQ = "exp_avg_scale_v2", "exp_avg_sq_codes"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no scale": (lambda entry: entry.pop(SCALE), f"{SCALE} of .* is missing beside"),
    "shape of scales": (changed(SCALE, lambda t: t[:, :1]), rf"{SCALE} of .* has shape \(30, 1\)"),
    "layout of scales": (changed(SCALE, lambda t: t.to_sparse()), f"{SCALE} of .* has .*sparse"),
    "other format": (
        renamed(SCALE, "exp_avg_scale_v3"), "scale_v3 of .* is of another format",
    ),
    "signed codes": (changed(SQ, lambda t: t.to(torch.int8)), f"{SQ} of .* is torch.int8"),
    "float codes": (changed("exp_avg_codes", lambda t: t.float()), "codes of .* is torch.float32"),
    "codes as moments": (renamed("exp_avg_codes", "exp_avg"), "exp_avg of .* is torch.int8"),
    **{
        f"step {step!r}": (changed("step", lambda _, to=step: to), "step of .*, expected a count")
        for step in (np.bool_(True), np.array([1, 2]), np.float32("nan"), np.float32(0.5), "3", -1,
                     torch.ones(2), math.inf, 2.5, 10**400)
    },
}  # fmt: skip


@pytest.mark.parametrize("held", ["fp32 moments", "int8", "torch"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_entry(held: str, wrong: str) -> None:
    """A wrapper checks torch's classes, which check less."""
    _, source = job("optimizer", "int8", 1, 1, torch.float32)
    target = optimizer_of(other := model_of(2, torch.float32), held)
    train(other, target, [1])
    saved = copy.deepcopy(source.state_dict())
    change, message = WRONG[wrong]
    change(saved["state"][0])
    if held == "torch":
        target = FSDPadaptOptimizer(target)
        saved = {**target.state_dict(), "base_optim_states": saved}
        message = message if "step" in wrong else "belongs to 8-bit moments, which this optimizer"
    with unchanged(target, other), pytest.raises(ValueError, match=message):
        target.load_state_dict(saved)


# ---- of plain optimizers -------------------------------------------------------------------------

MATRICES = ((4, 6), (3, 64), (2, 64), (3, 64))
MASTER: dict[str, Any] = {"master_weights": "fp32"}
REMAINDER: dict[str, Any] = {"master_weights": "remainder"}
REMAINDER8: dict[str, Any] = {"master_weights": "remainder8"}
INT8: dict[str, Any] = {"state_dtype": "int8"}


def second(name: str, value: Any = None) -> Callable[[dict[str, Any]], object]:
    """Replaces an entry of the second parameter by the value, or by what it makes of the entry."""

    def edit(state_dict: dict[str, Any]) -> None:
        state = state_dict["state"][1]
        state[name] = value(state[name]) if callable(value) else value

    return edit


def flatten(state_dict: dict[str, Any]) -> None:
    state_dict.clear()
    state_dict["state.weight.step"] = torch.ones(())


def of(optimizer: Any) -> Callable[[dict[str, Any]], object]:
    """Replaces the dict by one that another optimizer has after a step."""

    def edit(state_dict: dict[str, Any]) -> None:
        params = make_params(MATRICES)
        one = optimizer(params)
        problems.train(one, [0], params)
        state_dict |= one.state_dict()

    return edit


DICTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], object], str]] = {
    "no groups": (
        {}, lambda d: d["param_groups"].clear(), "groups.*build the groups that were saved"
    ),
    "parameter missing": (
        {}, lambda d: d["param_groups"][0]["params"].pop(), "size of the optimizer's group"
    ),
    "too few names": (
        {}, lambda d: d["param_groups"][0].update(param_names=["p0"]), r"param_names \['p0'\] for"
    ),
    "flat": ({}, flatten, "as containers have it"),
    "no step": ({}, lambda d: d["state"][1].pop("step"), "step of .*'p1'"),
    "no moment": ({}, lambda d: d["state"][1].pop("exp_avg_sq"), "exp_avg_sq of .*'p1'"),
    **{f"{name} {value}": ({}, second(name, value), f"{name} of .*'p1'")
       for name, value in (
        ("exp_avg", torch.zeros(3)), ("exp_avg_sq", torch.zeros(3)), ("exp_avg_sq", "text"),
        ("exp_avg", torch.zeros(3, 64, dtype=torch.complex64)),
    )},
    **{f"master {i}": (MASTER, second("master_weight", change), "master_weight of parameter 1")
       for i, change in enumerate(
           (lambda t: t[:1], lambda t: t.double(), lambda t: t.to(FP16), lambda _: 1.0))},
    **{f"remainder {i}": (REMAINDER, second("remainder", change), "remainder of parameter 1")
       for i, change in enumerate((lambda t: t.flatten(), lambda t: t.int() + 2**16,
                                   lambda t: t.float(), lambda _: None))},
    **{f"remainder8 {i}": (REMAINDER8, second("remainder8", change), "remainder8 of parameter 1")
       for i, change in enumerate((lambda t: t.to(torch.int16), lambda t: t.to(torch.uint8)))},
    **{f"control {wrong}": (
        {}, lambda d, wrong=wrong: d["state"][0].update({"torchopt_ext.control": wrong}),
        rf"torchopt_ext\.control.*{expected}",
    ) for wrong, expected in (
        ({"steps": "many"}, "of 0 or more"), ({"steps": None}, "of 0 or more"),
        ({"loss_scale": -1.0}, "of 0 or more"), ([1.0], "a dict"), (3.0, "a dict"),
    )},
    "torch's SGD": (
        {}, of(lambda p: torch.optim.SGD(p, momentum=0.9)), "is of sgd, expected adam$"
    ),
    "amsgrad beside 8 bits": (
        INT8, of(lambda p: torch.optim.AdamW(p, amsgrad=True)),
        "group 0 has amsgrad, which 8-bit moments do not support",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DICTS)
def test_state_dicts(kind: str) -> None:
    """A bad dict is rejected as a whole; torch notices some of these only later."""
    options, edit, message = DICTS[kind]
    dtype = BF16 if "master_weights" in options else FP32
    optimizer, same = (
        FusedAdamW([(f"p{i}", p) for i, p in enumerate(make_params(MATRICES, dtype))], lr=0.01,
                   **options)
        for _ in range(2)
    )  # fmt: skip
    for each in (optimizer, same):
        problems.train(each, range(2))
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 99.0
    for state in bad["state"].values():
        state["step"].fill_(7)
    edit(bad)
    with (
        unchanged(optimizer),
        pytest.raises((KeyError, RuntimeError, TypeError, ValueError), match=message),
    ):
        optimizer.load_state_dict(bad)
    for each in (optimizer, same):
        problems.train(each, [2])
    assert snapshot(optimizer) == snapshot(same)


def test_state_dicts_that_do_not_fit_the_parameters() -> None:
    rmsprop = torch.optim.RMSprop(make_params(), momentum=0.9)
    problems.train(rmsprop, [0])
    optimizer = FusedSGD(make_params(), momentum=0.9)
    with unchanged(optimizer), pytest.raises(ValueError, match="lacks dampening, nesterov"):
        optimizer.load_state_dict(rmsprop.state_dict())
    remainders = FusedAdamW(make_params([(4,)], BF16), master_weights="remainder")
    problems.train(remainders, [0])
    halves = FusedAdamW(make_params([(4,)], FP16), master_weights="fp32")
    with unchanged(halves), pytest.raises(ValueError, match="float16"):
        halves.load_state_dict(remainders.state_dict())
    codes = FusedAdamW(make_params([(3, 70)]), state_dtype="int8")
    problems.train(codes, [0])
    numbers = FusedAdamW([nn.Parameter(torch.ones(3, 70, dtype=torch.complex64))])
    message = "which the parameter cannot have here; `python -m torchopt_ext convert`"
    with unchanged(numbers), pytest.raises(ValueError, match=message):
        numbers.load_state_dict(codes.state_dict())


# ---- of others -----------------------------------------------------------------------------------


def test_entries_of_no_known_meaning_are_checked_by_those_held() -> None:
    model = nn.Linear(3, 4)
    container = OptimizersContainer([model], torch.optim.NAdam, {})
    train(model, container, [0])
    wrong = copy.deepcopy(container.state_dict()) | {"state.bias.mu_product": torch.ones(3)}
    wrong["state.weight.exp_avg"] += 1
    message = r"'state\.bias\.mu_product' has shape|is not a number"
    with unchanged(container, model), pytest.raises(ValueError, match=message):
        container.load_state_dict(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_another_algorithms_groups_are_named(one_rank: Any, kind: str) -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    source, target = (KINDS[kind](m, cls) for m, cls in ((model, FusedLion), (other, FusedAdamW)))
    if kind == "optimizer":
        source = FusedLion(model.named_parameters())
    train(model, source, [0])
    train(other, target, [0])
    if kind == "sharded":
        source.consolidate_state_dict()
    with unchanged(target, other), pytest.raises(ValueError, match="is of lion, expected adam"):
        target.load_state_dict(source.state_dict())


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def test_regrouped_state_is_not_another_optimizers(one_rank: Any) -> None:
    """torch's set_optimizer_state_dict drops the options of parameters that were regrouped."""
    model = nn.Linear(3, 4)
    optimizer = FusedAdamW(model.parameters())
    train(model, optimizer, [0])
    regrouped = FusedAdamW([{"params": [p]} for p in model.parameters()])
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"group 0 has no options.*build the groups that were"):
        set_optimizer_state_dict(model, regrouped, saved)
    regrouped.init_state()
    saved = get_optimizer_state_dict(model, optimizer, options=FLAT)
    set_optimizer_state_dict(model, regrouped, saved, options=FLAT)
    for p in model.parameters():
        assert_same(regrouped.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


MOMENTUM = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(("saved", "held"), [("int8", None), (None, "int8")])
@pytest.mark.parametrize(
    ("cls", "options"), [(FusedAdamW, {}), (FusedLion, {}), (FusedSGD, MOMENTUM)]
)
def test_a_flat_dict_without_the_moments_says_the_way(
    one_rank: None, cls: Any, options: dict[str, Any], saved: Any, held: Any
) -> None:
    """torch drops entries that the optimizer does not have."""
    model = nn.Linear(64, 4)
    saving, loading = (cls(model.parameters(), state_dtype=of, **options) for of in (saved, held))
    for optimizer in (saving, loading):
        train(model, optimizer, range(2))
    flat = get_optimizer_state_dict(model, saving, options=FLAT)
    problem = r"is missing \(a flat dict .* the nested dict"
    with unchanged(loading), pytest.raises(ValueError, match=problem):
        set_optimizer_state_dict(model, loading, flat, options=FLAT)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_flat_dict_has_no_momentum_where_none_was_used(one_rank: None, momentum: float) -> None:
    """A program may also use momentum from some step on: a buffer that is not there begins then."""
    model = nn.Linear(64, 4)
    saving, loading = FusedSGD(model.parameters()), FusedSGD(model.parameters(), **MOMENTUM)
    for optimizer in (saving, loading):
        train(model, optimizer, range(2))
    saving.param_groups[0]["momentum"] = momentum
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    assert all(state.keys() == {"step"} for state in loading.state.values())
    train(model, loading, range(1))
    assert all(("momentum_buffer" in s) == bool(momentum) for s in loading.state.values())
    if not momentum:
        loading.param_groups[0]["momentum"] = 0.9
        train(model, loading, range(1))
        flat = get_optimizer_state_dict(model, saving, options=FLAT)
        set_optimizer_state_dict(model, loading, flat, options=FLAT)
        assert loading.param_groups[0]["momentum"] == 0.0
