"""Rejected state dicts raise by parameter and key, and change nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedSGD

from ...support.compare import snapshot, unchanged
from ...support.problems import make_params, train
from ...support.ways import BF16, FP16, FP32

ERRORS = (TypeError, ValueError, RuntimeError)

MATRICES = ((4, 6), (3, 64), (2, 64), (3, 64))
MASTER: dict[str, Any] = {"master_weights": "fp32"}
REMAINDER: dict[str, Any] = {"master_weights": "remainder"}
INT8: dict[str, Any] = {"state_dtype": "int8"}


def saved(name: str, value: Any = None) -> Callable[[dict[str, Any]], object]:
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
        train(one, [0], params)
        state_dict |= one.state_dict()

    return edit


REMAINDER8: dict[str, Any] = {"master_weights": "remainder8"}
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
    **{f"{name} {value}": ({}, saved(name, value), f"{name} of .*'p1'")
       for name, value in (
        ("exp_avg", torch.zeros(3)), ("exp_avg_sq", torch.zeros(3)), ("exp_avg_sq", "text"),
        ("exp_avg", torch.zeros(3, 64, dtype=torch.complex64)), ("step", torch.ones(2)),
        ("step", math.inf), ("step", 2.5), ("step", 10**400),
    )},
    **{f"master {i}": (MASTER, saved("master_weight", change), "master_weight of parameter 1")
       for i, change in enumerate(
           (lambda t: t[:1], lambda t: t.double(), lambda t: t.to(FP16), lambda _: 1.0))},
    **{f"remainder {i}": (REMAINDER, saved("remainder", change), "remainder of parameter 1")
       for i, change in enumerate((lambda t: t.flatten(), lambda t: t.int() + 2**16,
                                   lambda t: t.float(), lambda _: None))},
    **{f"remainder8 {i}": (REMAINDER8, saved("remainder8", change), "remainder8 of parameter 1")
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
        train(each, range(2))
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 99.0
    for state in bad["state"].values():
        state["step"].fill_(7)
    edit(bad)
    with unchanged(optimizer), pytest.raises((KeyError, *ERRORS), match=message):
        optimizer.load_state_dict(bad)
    for each in (optimizer, same):
        train(each, [2])
    assert snapshot(optimizer) == snapshot(same)


def test_state_dicts_that_do_not_fit_the_parameters() -> None:
    rmsprop = torch.optim.RMSprop(make_params(), momentum=0.9)
    train(rmsprop, [0])
    optimizer = FusedSGD(make_params(), momentum=0.9)
    with unchanged(optimizer), pytest.raises(ValueError, match="lacks dampening, nesterov"):
        optimizer.load_state_dict(rmsprop.state_dict())
    remainders = FusedAdamW(make_params([(4,)], BF16), master_weights="remainder")
    train(remainders, [0])
    halves = FusedAdamW(make_params([(4,)], FP16), master_weights="fp32")
    with unchanged(halves), pytest.raises(ValueError, match="float16"):
        halves.load_state_dict(remainders.state_dict())
    codes = FusedAdamW(make_params([(3, 70)]), state_dtype="int8")
    train(codes, [0])
    numbers = FusedAdamW([nn.Parameter(torch.ones(3, 70, dtype=torch.complex64))])
    message = "which the parameter cannot have here; `python -m torchopt_ext convert`"
    with unchanged(numbers), pytest.raises(ValueError, match=message):
        numbers.load_state_dict(codes.state_dict())
