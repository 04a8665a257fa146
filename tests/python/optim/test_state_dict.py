"""State dicts and copies: exchange with torch's optimizers, independent memory, hooks.

test_every_way.py has every way to hold weights and state, and ../statedict the other containers.
"""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchopt_ext import FusedAdam, FusedAdamW
from torchopt_ext.containers import OptimizersContainer

from ...support.compare import assert_same, assert_same_bits, bits, snapshot
from ...support.problems import copy_params, make_params, params_of, set_gradients, train
from ...support.ways import OURS, TORCH, each_class, hybrid
from .subject import NAMES, assert_close_to_torch, inputs, optimizer_info, params_for

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "betas": (0.8, 0.95), "eps": 1e-6},
    "tensor lr": {"lr": 0.01},
}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}

# ---- with torch ----------------------------------------------------------------------------------


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Asserts that parameters and state agree up to rounding, and step counts exactly."""
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        mine, other = ours.state[p], theirs.state[q]
        assert mine.keys() == other.keys()
        names = [key for key in mine if key != "step"]
        assert_close_to_torch([p, *map(mine.get, names)], [q, *map(other.get, names)])
        assert not mine or float(mine["step"]) == float(other["step"])


@each_class
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("start_with", ["torch", "ours"])
def test_exchange_with_torch(
    name: str, configuration: str, implementation: str, start_with: str
) -> None:
    """After three steps the other optimizer loads the state, and both train alike for four more."""

    def build(which: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        kwargs = dict(CONFIGURATIONS[configuration])
        if configuration == "tensor lr" and implementation != "foreach":
            kwargs["lr"] = torch.tensor(kwargs["lr"])
        if which == "ours":
            return OURS[name](params, **kwargs)
        return TORCH[name](params, **kwargs, **IMPLEMENTATIONS[implementation])

    params = make_params()
    params[2].requires_grad_(False)  # a parameter that never steps has no state
    copies = copy_params(params)
    first = build(start_with, params)
    train(first, range(3), [p for p in params if p.requires_grad])
    second = build("ours" if start_with == "torch" else "torch", copies)
    with torch.no_grad():
        for p, q in zip(params, copies, strict=True):
            q.copy_(p)
    second.load_state_dict(deepcopy(first.state_dict()))  # loading in torch shares memory
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()
    assert_same_state(first, second)
    for each in (first, second):
        train(each, range(3, 7), [p for i, p in enumerate(params_of(each)) if i != 2])
    assert_same_state(first, second)
    assert second.state[copies[0]]["step"] == 7


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_groups(name: str) -> None:
    ours, theirs = OURS[name](params_for(name)), TORCH[name](params_for(name))
    more = {"algorithm"} if name == "Muon" else set()
    assert ours.param_groups[0].keys() - more == theirs.param_groups[0].keys()
    assert ours.defaults.keys() - more == theirs.defaults.keys()
    for key in theirs.param_groups[0].keys() - {"params", "fused"}:
        assert ours.param_groups[0][key] == theirs.param_groups[0][key], key


def test_decoupled_weight_decay_key() -> None:
    """FusedAdam follows this key of its arguments and of a loaded AdamW state; FusedAdamW always
    decouples."""
    adamw = FusedAdamW(make_params(), weight_decay=0.1)
    adam = FusedAdam(make_params(), weight_decay=0.1, decoupled_weight_decay=True)
    for each in (adamw, adam):
        train(each, range(2))
    assert_same_bits(params_of(adamw), params_of(adam))
    loaded = FusedAdam(copy_params(params_of(adamw)))
    loaded.load_state_dict(deepcopy(adamw.state_dict()))
    assert loaded.param_groups[0]["decoupled_weight_decay"] is True
    for each in (adamw, loaded):
        train(each, range(2, 4))
    assert_same_bits(params_of(adamw), params_of(loaded))
    state_dict = FusedAdam(make_params()).state_dict()
    assert state_dict["param_groups"][0]["decoupled_weight_decay"] is False
    for _ in range(2):
        adamw.load_state_dict(deepcopy(state_dict))
        assert adamw.param_groups[0]["decoupled_weight_decay"] is True
        state_dict["param_groups"][0].pop("decoupled_weight_decay", None)


@pytest.mark.parametrize("kept", ["fp32", "remainder", "remainder8"])
def test_masters_do_not_survive_torchs_optimizer(kept: str) -> None:
    """torch's optimizer casts and does not update masters, so they are rebuilt from the weights."""
    params = [nn.Parameter(torch.linspace(-2, 2, 300).reshape(3, 100).bfloat16())]
    optimizer = FusedAdamW(params, lr=0.1, master_weights=kept)
    train(optimizer, range(3))
    theirs = torch.optim.AdamW(params, lr=0.1)
    theirs.load_state_dict(optimizer.state_dict())
    train(theirs, range(3))
    resumed = FusedAdamW(params, lr=0.1, master_weights=kept)
    with pytest.warns(UserWarning, match="those of 1 parameters are made from the weights"):
        resumed.load_state_dict(theirs.state_dict())
    expected = FusedAdamW(copy_params(params), lr=0.1, master_weights=kept)
    saved = theirs.state_dict()["state"][0]
    state = {key: value for key, value in saved.items() if "exp_avg" in key or key == "step"}
    expected.load_state_dict({**theirs.state_dict(), "state": {0: state}})
    for each in (resumed, expected):
        train(each, range(2))
    assert_same_bits(params, params_of(expected))


# ---- dicts ---------------------------------------------------------------------------------------


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"}
              for group in state_dict["param_groups"]]  # fmt: skip
    return {**state_dict, "param_groups": groups}


@inputs()
@pytest.mark.parametrize("names", ["", "first", "second", "both"])
def test_state_dict_deterministic(name: str, kwargs: dict[str, Any], names: str) -> None:
    """An optimizer on copies that loads the state continues with the same bits."""

    def build(params: list[nn.Parameter], named: bool) -> Any:
        listed: Any = [(f"name{i}", p) for i, p in enumerate(params)] if named else params
        return OURS[name](listed, **deepcopy(kwargs))

    first = build(params_for(name), names in ("first", "both"))
    train(first, range(10))
    second = build(copy_params(params_of(first)), names in ("second", "both"))
    second.load_state_dict(deepcopy(first.state_dict()))
    expected = [f"name{i}" for i in range(4)] if names else None
    assert second.state_dict()["param_groups"][0].get("param_names") == expected
    for each in (first, second):
        train(each, range(10, 20))
    assert_same_bits(params_of(first), params_of(second))
    saved = without_names(first.state_dict())
    assert_same(without_names(second.state_dict()), saved)
    second.param_groups.extend(second.param_groups)  # a group that is listed twice
    assert_same(without_names(second.state_dict())["param_groups"][-1], saved["param_groups"][-1])


@inputs()
def test_older_state_dict(name: str, kwargs: dict[str, Any]) -> None:
    """Dicts from before the newer flags, with numbers as steps, load and continue the same."""
    optimizer, untouched = (OURS[name](params_for(name), **deepcopy(kwargs)) for _ in range(2))
    for each in (optimizer, untouched):
        train(each, range(3))
    older = deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for flag in (*optimizer_info(name).not_og_supported_flags, "decoupled_weight_decay"):
            if flag != "maximize" or not group.get("maximize"):  # the direction would be lost
                group.pop(flag, None)
    for entry in older["state"].values():
        entry["step"] = entry["step"].item()
    optimizer.load_state_dict(older)
    assert optimizer.param_groups[0].get("decoupled_weight_decay", False) == (name == "AdamW")
    for each in (optimizer, untouched):
        train(each, range(3, 5))
    assert snapshot(optimizer) == snapshot(untouched)
    assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values())


def test_before_the_first_step() -> None:
    """A state dict is empty then and loads without effect, also under another default device."""
    optimizer, same = FusedAdamW(make_params()), FusedAdamW(make_params())
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, same):
        train(each, range(2))
    with torch.device("meta"):
        optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, same):
        train(each, [2])
    assert snapshot(optimizer) == snapshot(same)


@each_class
def test_what_a_load_takes_from_a_dict(name: str) -> None:
    """Hyperparameters come with the state, and what happens to the dict afterwards changes nothing.

    Groups share a learning rate as in the dict, and in torch.
    """
    for cls in (OURS[name], TORCH[name]):
        optimizer = cls([{"params": [param]} for param in make_params()], lr=torch.tensor(0.1))
        optimizer.load_state_dict(optimizer.state_dict())
        first, *others = [group["lr"] for group in optimizer.param_groups]
        assert all(other is first for other in others)
    optimizer = OURS[name](make_params(dtype=torch.float64))
    train(optimizer, range(2))
    saved = deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"betas": [0.5, 0.75], "lr": torch.tensor(0.25), "mine": [1]}
    for key in ("exp_avg", "exp_avg_sq"):  # in another memory order, which torch's kernels misread
        saved["state"][0][key] = saved["state"][0][key].t().contiguous().t()
    narrow = OURS[name](make_params())
    narrow.load_state_dict(saved)
    saved["param_groups"][0]["betas"][0] = 0.125
    saved["param_groups"][0]["lr"].fill_(7.0)
    saved["param_groups"][0]["mine"].append(2)
    group = narrow.param_groups[0]
    assert ([*group["betas"]], group["lr"].item(), group["mine"]) == ([0.5, 0.75], 0.25, [1])
    for p, q in zip(params_of(narrow), params_of(optimizer), strict=True):
        state = narrow.state[p]  # cast to the parameter's dtype, as in torch, but not the counts
        assert state["step"].dtype == torch.float32
        assert bits(state["exp_avg"]) == bits(optimizer.state[q]["exp_avg"].float())
    train(narrow, [2])
    assert all(narrow.state[p]["exp_avg"].stride() == p.stride() for p in params_of(narrow))


# ---- copies --------------------------------------------------------------------------------------


def test_a_shallow_copy_continues_the_same_state() -> None:
    optimizer, other = FusedAdamW(make_params()), FusedAdamW(make_params())
    for seed in range(0, 6, 2):
        shallow = copy(optimizer)
        train(shallow, [seed])
        train(optimizer, [seed + 1])
    train(other, range(6))
    assert snapshot(optimizer) == snapshot(other)
    assert shallow.state is optimizer.state
    assert shallow.param_groups is optimizer.param_groups


def test_copies_keep_settings_numbers_and_names() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    options = {"lr": 0.1, "max_grad_norm": 0.1, "skip_nonfinite": True}
    optimizer = OptimizersContainer(parts, FusedAdamW, options).optimizers[1]
    optimizer.set_schedule(warmup_steps=1, stable_steps=1, decay_steps=6)
    train(optimizer, range(4))
    copies = [deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for each in (optimizer, *copies):
        assert each._first_parameter_number == 2
        assert each.parameter_names == [["weight", "bias"]]
        train(each, range(2))
        assert 0 < float(each.control.clip_factor) < 1
        train(each, [2], scale=float("inf"))
        assert (float(each.control.steps), float(each.control.skipped_steps)) == (7, 1)
        assert float(each.control.lr_factor) == float(optimizer.control.lr_factor) < 1
    assert {repr(o) for o in copies} == {repr(optimizer)}
    assert [snapshot(o) for o in copies] == [snapshot(optimizer)] * 2


def test_step_counts_that_processes_share() -> None:
    """Shared state as in A3C's SharedAdam stays in shared memory, its step counts included."""
    optimizer = FusedAdamW(make_params([(4, 4), (4,)]))
    for param in params_of(optimizer):
        zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        shared = {"step": torch.zeros(1), **zeros}
        optimizer.state[param] = {name: value.share_memory_() for name, value in shared.items()}
    train(optimizer, [0])
    assert [float(state["step"]) for state in optimizer.state.values()] == [1.0, 1.0]
    assert all(state["step"].is_shared() for state in optimizer.state.values())
    train(ForkingPickler.loads(ForkingPickler.dumps(optimizer)), [1])
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0, 2.0]


# ---- hooks ---------------------------------------------------------------------------------------

each_class_and_hybrid = pytest.mark.parametrize("name", ["Adam", "AdamW", "hybrid"])


def built(name: str) -> Any:
    """Returns an optimizer of a class, or Muon with others in one object."""
    return hybrid()[1] if name == "hybrid" else OURS[name](make_params())


@each_class_and_hybrid
def test_state_dict_hooks(name: str) -> None:
    def before(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state["test"] = 1  # type: ignore[index, assignment]

    def after(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {"wrapped": state_dict, "seen": state_dict["state"].pop("test", None)}

    optimizer = built(name)
    handle = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] is None
    handle.remove()
    handle = optimizer.register_state_dict_post_hook(lambda _, saved: {"state": saved["state"]})
    assert optimizer.state_dict().keys() == {"state"}
    handle.remove()
    optimizer.register_state_dict_pre_hook(before)
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] == 1
    train(optimizer, [0])  # an unknown entry in the state does not affect a step
    assert optimizer.state_dict()["wrapped"]["state"][0]["step"] == 1


@each_class
def test_load_state_dict_hooks(name: str) -> None:
    """Hooks see each other's results, and may mend what does not fit."""
    seen: list[float] = []
    optimizer = OURS[name](make_params([(2, 3)]))
    train(optimizer, [0])
    saved = optimizer.state_dict()

    def transposed(state_dict: dict[str, Any], lr: float) -> dict[str, Any]:
        moved = deepcopy(state_dict)
        moved["param_groups"][0]["lr"] = lr
        for key in ("exp_avg", "exp_avg_sq"):
            moved["state"][0][key] = moved["state"][0][key].t()
        return moved

    def set_lr(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002

    def mend(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return transposed(state_dict, 0.003)

    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(deepcopy(saved))
    handle = optimizer.register_load_state_dict_pre_hook(mend)
    optimizer.load_state_dict(transposed(saved, 1.0))
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(set_lr)
    optimizer.register_load_state_dict_pre_hook(mend, prepend=True)
    optimizer.load_state_dict(transposed(saved, 1.0))
    assert seen == [1e-3, 0.003, 0.002]
    train(optimizer, [1])


@each_class_and_hybrid
def test_step_hooks(name: str) -> None:
    optimizer = built(name)
    calls: list[str] = []

    def before(
        opt: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append("before")
        return (opt, lambda: 7), kwargs  # arguments that the hook returns are used

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("global before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global after")),
    ]
    try:
        set_gradients(params_of(optimizer))
        assert [optimizer.step(), optimizer.step()] == [7, 7]
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global before", "before", "after", "global after"] * 2
    assert optimizer.step() is None
    assert len(calls) == 8
