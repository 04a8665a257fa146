"""Counts and loss scale of the control block in every state dict form, and loads without them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchopt_ext import FusedAdamW, ops
from torchopt_ext.containers import OptimizersContainer

SCHEDULE: dict[str, int] = {"warmup_steps": 10, "stable_steps": 4, "decay_steps": 6}
FORMS = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
}
each_form = pytest.mark.parametrize("form", ["indexed", *FORMS])
WARNING = "does not count all steps"


def job(cls: Any = FusedAdamW, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    optimizer: Any = cls(model.parameters(), lr=0.1, fused=True)
    if cls is FusedAdamW:
        scheduled(optimizer)
    return model, optimizer


def scheduled(optimizer: Any) -> Any:
    optimizer.set_schedule(**SCHEDULE)
    optimizer.set_loss_scale(256.0, growth_interval=3)
    return optimizer


def train(model: nn.Module, optimizer: Any, steps: int, overflow: int | None = None) -> None:
    for step in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.inf if step == overflow else 1.0)
        optimizer.step()


def saved(model: nn.Module, optimizer: Any, form: str) -> Any:
    if form == "indexed":
        return copy.deepcopy(optimizer.state_dict())
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FORMS[form]))


def load(model: nn.Module, optimizer: Any, state_dict: Any, form: str) -> None:
    if form == "indexed":
        optimizer.load_state_dict(state_dict)
    else:
        set_optimizer_state_dict(model, optimizer, state_dict, options=FORMS[form])


def fields(optimizer: Any) -> dict[str, float]:
    names = ("steps", "skipped_steps", "loss_scale", "growth_tracker")
    return {name: float(getattr(optimizer.control, name)) for name in names}


@pytest.mark.filterwarnings("error:.*does not count all steps")
@pytest.mark.parametrize("late", [(), (0,), (0, 1), (1,)], ids=str)
@pytest.mark.parametrize(
    ("form", "used", "stored"),
    [
        *((form, used, False) for form in ("indexed", *FORMS) for used in (0, 20)),
        *((form, 1, True) for form in ("indexed", "nested", "flattened")),
    ],
)
def test_counts_and_scale_travel_in_every_form(
    form: str, used: int, stored: bool, late: tuple[int, ...], tmp_path: Path
) -> None:
    """Also through dcp, and if the first parameter, which holds the fields, is stepped late."""
    (model, optimizer), (other, resumed) = job(), job()
    for step in range(9):
        for i, param in enumerate(model.parameters()):
            bad = torch.inf if step == 6 else 1.0
            param.grad = None if i in late and step < 5 else torch.full_like(param, bad)
        optimizer.step()
    states = [optimizer.state[p] for p in model.parameters()]
    assert [i for i, state in enumerate(states) if "torchopt_ext.control" in state] == [0]
    train(other, resumed, used)
    state_dict = saved(model, optimizer, form)
    if stored:
        dcp.save({"optimizer": state_dict}, checkpoint_id=tmp_path)
        state_dict = saved(other, resumed, form)
        dcp.load({"optimizer": state_dict}, checkpoint_id=tmp_path)
    load(other, resumed, state_dict, form)
    assert fields(resumed) == fields(optimizer)
    assert fields(resumed) == {
        "steps": 9, "skipped_steps": 1, "loss_scale": 512, "growth_tracker": 2,
    }  # fmt: skip
    for each in ((model, optimizer), (other, resumed)):
        train(*each, 1)
    assert float(resumed.control.lr_factor) == float(optimizer.control.lr_factor) < 1


@each_form
@pytest.mark.parametrize("used", [0, 20])
@pytest.mark.parametrize("when", ["before loading", "after loading"])
def test_without_counts_they_are_derived_from_the_steps(form: str, used: int, when: str) -> None:
    """State from torch continues the warmup and restarts the loss scale, with one warning."""
    model, theirs = job(torch.optim.AdamW)
    train(model, theirs, 7)
    other, optimizer = job()
    if when == "after loading":
        optimizer = FusedAdamW(other.parameters(), lr=0.1)
    train(other, optimizer, used)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(other, optimizer, saved(model, theirs, form), form)
    found = [str(each.message) for each in caught if WARNING in str(each.message)]
    assert len(found) == (when == "before loading")
    if when == "after loading":
        scheduled(optimizer)
    assert fields(optimizer) == {
        "steps": 7, "skipped_steps": 0, "loss_scale": 256, "growth_tracker": 0,
    }  # fmt: skip
    train(other, optimizer, 1)
    assert float(optimizer.control.lr_factor) == ops.lr_factor(7, **SCHEDULE)


@pytest.mark.parametrize("form", ["indexed", "nested"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_optimizer_takes_the_fields_and_its_steps_count(
    form: str, dtype: torch.dtype
) -> None:
    """torch's optimizer keeps the fields unchanged, so they are older than its step counts."""
    model, optimizer = job(dtype=dtype)
    train(model, optimizer, 6, overflow=0)
    other, theirs = job(torch.optim.AdamW, dtype)
    load(other, theirs, saved(model, optimizer, form), form)
    train(other, theirs, 3)
    back_model, back = job(dtype=dtype)
    with pytest.warns(UserWarning, match=WARNING):
        load(back_model, back, saved(other, theirs, form), form)
    assert fields(back) == fields(optimizer) | {"steps": 9}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fields_that_16_bits_do_not_hold_are_left_out(dtype: torch.dtype) -> None:
    """torch's optimizers round fields to the parameter's dtype: 3003 to 3004, 65536 to infinity."""
    model, optimizer = job(dtype=dtype)
    optimizer.set_loss_scale(2.0**17, growth_interval=10**6)
    train(model, optimizer, 3, overflow=1)
    given = copy.deepcopy(optimizer.state_dict())
    for entry in given["state"].values():
        entry["step"].fill_(3002)
    given["state"][0]["torchopt_ext.control"]["steps"].fill_(3003)
    given["state"][0]["torchopt_ext.control"]["growth_tracker"].fill_(300)
    _, theirs = job(torch.optim.AdamW, dtype)
    theirs.load_state_dict(given)
    _, back = job(dtype=dtype)
    back.set_loss_scale(2.0**17, growth_interval=10**6)
    with pytest.warns(UserWarning, match=WARNING):
        back.load_state_dict(theirs.state_dict())
    scale = 2.0**17 if dtype == torch.float16 else 2.0**16  # restarted, or kept
    assert fields(back) == {
        "steps": 3003, "skipped_steps": 1, "loss_scale": scale, "growth_tracker": 300,
    }  # fmt: skip
    corrupt = theirs.state_dict()
    corrupt["state"][0]["torchopt_ext.control"]["steps"] = torch.ones(2, dtype=dtype)
    with pytest.raises(ValueError, match=r"'torchopt_ext\.control' has steps = tensor"):
        back.load_state_dict(corrupt)


@pytest.mark.parametrize("containers", [False, True])
def test_a_roll_back_restores_counts_that_no_parameter_has(containers: bool) -> None:
    """Parameters that take turns each have fewer steps than the optimizer counts."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    container: Any = OptimizersContainer([model], FusedAdamW, {"lr": 0.1})
    optimizer = scheduled(container.optimizers[0])
    saving = container if containers else optimizer
    for step in range(8):
        for i, param in enumerate(model.parameters()):
            param.grad = torch.ones_like(param) if i % 2 == step % 2 else None
        saving.step()
    before = fields(optimizer)
    assert before["steps"] == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saving.load_state_dict(copy.deepcopy(saving.state_dict()))
    assert fields(optimizer) == before


@pytest.mark.parametrize("source", [FusedAdamW, torch.optim.AdamW], ids=["ours", "torch's"])
@pytest.mark.parametrize("layout", ["container's", "flattened"])
def test_a_containers_optimizers_all_get_the_counts(source: Any, layout: str) -> None:
    """The counts are on top of a container's flat dict, or in a parameter's state otherwise."""
    model, optimizer = job(source)
    train(model, optimizer, 7)
    if layout == "flattened":
        given = saved(model, optimizer, layout)
    else:
        container = OptimizersContainer([model], source, {"lr": 0.1, "fused": True})
        container.optimizers[0] = optimizer
        given = copy.deepcopy(container.state_dict())
    parts = [nn.Sequential(copy.deepcopy(model[0])), nn.ModuleDict({"1": copy.deepcopy(model[1])})]  # type: ignore[index]
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 0.1})
    for each in container:
        scheduled(each)
    expect: Callable[[], Any] = warnings.catch_warnings
    if source is torch.optim.AdamW:
        expect = lambda: pytest.warns(UserWarning, match=WARNING)  # noqa: E731
    with expect():
        container.load_state_dict(given)
    expected = fields(optimizer) if source is FusedAdamW else None
    for each in container:
        assert fields(each)["steps"] == 7
        assert expected is None or fields(each) == expected


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    """Shares what is no tensor, as checkpoints in memory that programs make by hand do."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def moments(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")}


MOVES: dict[str, Callable[..., Any]] = {
    "whole": lambda state, into, packed: copy.deepcopy(state),
    "cloned": lambda state, into, packed: cloned(state),
    "from a state dict": lambda state, into, packed: copy.deepcopy(packed),
    "moments alone": lambda state, into, packed: moments(state),
    # as torchrec's KeyedOptimizer and population-based training do
    "in place": lambda state, into, packed: {k: v.copy_(state[k]) for k, v in into.items()},
}


@pytest.mark.parametrize("move", MOVES)
def test_state_that_a_program_moves_by_hand_continues_the_schedule(move: str) -> None:
    model, optimizer = job()
    train(model, optimizer, 9, overflow=4)
    other, resumed = job()
    resumed.init_state()
    other.load_state_dict(model.state_dict())
    packed = optimizer.state_dict()["state"].values()
    rows = zip(other.parameters(), model.parameters(), packed, strict=True)
    for mine, theirs, saved_state in rows:
        resumed.state[mine] = MOVES[move](optimizer.state[theirs], resumed.state[mine], saved_state)
    done = optimizer.control.steps - optimizer.control.skipped_steps
    assert resumed.control.steps - resumed.control.skipped_steps == done  # before a step
    assert move == "moments alone" or fields(resumed) == fields(optimizer)
    if move == "moments alone":  # they have no loss scale
        for name in ("loss_scale", "growth_tracker"):
            resumed.control.live(name).copy_(optimizer.control.live(name))
    for _ in range(4):
        train(model, optimizer, 1)
        train(other, resumed, 1)
        assert torch.equal(resumed.control.lr_factor, optimizer.control.lr_factor)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    if move != "moments alone":
        assert fields(resumed) == fields(optimizer)


@pytest.mark.parametrize("how", ["put back", "in place"])
@pytest.mark.parametrize("loss_scale", [True, False])
def test_state_that_a_program_puts_back_rolls_back_the_schedule(how: str, loss_scale: bool) -> None:
    model, _ = job()
    optimizer = FusedAdamW(model.parameters(), lr=0.1)
    optimizer.set_schedule(**SCHEDULE)
    train(model, optimizer, 1)
    if loss_scale:
        optimizer.set_loss_scale(256.0, growth_interval=3)
    train(model, optimizer, 4)
    kept = {param: cloned(state) for param, state in optimizer.state.items()}
    weights = copy.deepcopy(model.state_dict())
    runs = []
    for _ in range(2):
        train(model, optimizer, 5)
        runs.append((fields(optimizer), copy.deepcopy(model.state_dict())))
        for param, state in kept.items():
            if how == "put back":
                optimizer.state[param] = cloned(state)
            else:
                for name, value in state.items():
                    optimizer.state[param][name].copy_(value)
        model.load_state_dict(weights)
    assert runs[0][0]["steps"] == 10
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "not finite": lambda value: value / 0,
    "halved": lambda value: value * 0.5,
    "rows added": lambda value: torch.cat([value, torch.zeros_like(value)]),
    "cast": lambda value: value.bfloat16(),
}


@pytest.mark.parametrize("edit", EDITS)
def test_counts_that_a_program_edits_with_all_state_are_no_nonsense(edit: str) -> None:
    """As densification does, which knows of `step` alone. A halved loss scale is one, too."""
    model, optimizer = job()
    train(model, optimizer, 5)
    before, scale = fields(optimizer), float(optimizer.control.loss_scale)
    state = optimizer.state[next(model.parameters())]
    counts = EDITS[edit](state["torchopt_ext.control"])
    state.update({**cloned(state), "torchopt_ext.control": counts})
    if edit == "halved":
        before["loss_scale"], scale = scale / 2, scale / 2
    assert {k: fields(optimizer)[k] for k in ("steps", "loss_scale")} == {
        k: before[k] for k in ("steps", "loss_scale")
    }
    train(model, optimizer, 1)
    assert optimizer.control.steps == before["steps"] + 1 and optimizer.control.skip == 0
