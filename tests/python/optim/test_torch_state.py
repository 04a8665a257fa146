"""torch's own checks of state dicts, hooks and copies; test_torch_conformance.py maps them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .subject import (
    OURS,
    TORCH,
    assert_equal_nested,
    bits,
    copy_params,
    each_class,
    inputs,
    make_params,
    optimizer_info,
    set_gradients,
    snapshot,
    train,
)


def named(params: list[nn.Parameter], with_names: bool) -> list[Any]:
    return [(f"name{i}", p) for i, p in enumerate(params)] if with_names else params


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    copy = deepcopy(state_dict)
    for group in copy["param_groups"]:
        group.pop("param_names", None)
    return copy


@each_class
def test_groups_share_a_learning_rate_after_loading(name: str) -> None:
    for classes in (OURS, TORCH):
        params = [{"params": [param]} for param in make_params()]
        optimizer = classes[name](params, lr=torch.tensor(0.1))
        optimizer.load_state_dict(optimizer.state_dict())
        first, *others = [group["lr"] for group in optimizer.param_groups]
        assert all(other is first for other in others)


@inputs()
@pytest.mark.parametrize(("first_named", "second_named"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_state_dict_deterministic(
    name: str, kwargs: dict[str, Any], first_named: bool, second_named: bool
) -> None:
    """An optimizer on copies that loads the state continues with the same bits."""
    params = make_params()
    first = OURS[name](named(params, first_named), **deepcopy(kwargs))
    train([first], [params], 10)
    copies = copy_params(params)
    second = OURS[name](named(copies, second_named), **deepcopy(kwargs))
    second.load_state_dict(deepcopy(first.state_dict()))
    names = [f"name{i}" for i in range(len(params))] if first_named or second_named else None
    assert second.state_dict()["param_groups"][0].get("param_names") == names
    train([first, second], [params, copies], 10, first_seed=10)
    assert all(bits(p) == bits(q) for p, q in zip(params, copies, strict=True))
    assert_equal_nested(without_names(first.state_dict()), without_names(second.state_dict()))
    # A group that is listed twice has the same representation.
    second.param_groups.extend(second.param_groups)
    assert_equal_nested(
        without_names(first.state_dict())["param_groups"][-1],
        without_names(second.state_dict())["param_groups"][-1],
    )


@inputs()
def test_older_state_dict(name: str, kwargs: dict[str, Any]) -> None:
    """Dicts from before the newer flags, with numbers as steps, load and continue the same."""
    params, reference = make_params(), make_params()
    optimizer = OURS[name](params, **deepcopy(kwargs))
    untouched = OURS[name](reference, **deepcopy(kwargs))
    train([optimizer, untouched], [params, reference], 3)
    older = deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for flag in optimizer_info(name).not_og_supported_flags:
            if flag == "maximize" and group.get("maximize"):
                continue  # otherwise the direction would be lost
            group.pop(flag, None)
        group.pop("decoupled_weight_decay", None)
    for entry in older["state"].values():
        entry["step"] = entry["step"].item()
    optimizer.load_state_dict(older)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] == (name == "AdamW")
    train([optimizer, untouched], [params, reference], 2, first_seed=3)
    assert snapshot(optimizer) == snapshot(untouched)
    assert all(optimizer.state[p]["step"].dtype == torch.float32 for p in params)


@each_class
def test_state_dict_hooks(name: str) -> None:
    def before(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state["test"] = 1  # type: ignore[index, assignment]

    def after(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "seen": state_dict["state"].pop("test", None)}

    params = make_params()
    optimizer = OURS[name](params)
    handle = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] is None
    handle.remove()
    optimizer.register_state_dict_pre_hook(before)
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] == 1
    train([optimizer], [params], 1)  # an unknown entry in the state does not affect a step
    assert optimizer.state[params[0]]["step"] == 1


@each_class
def test_load_state_dict_hooks(name: str) -> None:
    def set_lr(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002

    def copy_with_lr(
        optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        copy = deepcopy(state_dict)
        copy["param_groups"][0]["lr"] = 0.003
        return copy

    def after(optimizer: torch.optim.Optimizer) -> None:
        seen.append(optimizer.param_groups[0]["lr"])

    seen: list[float] = []
    params = make_params()
    optimizer = OURS[name](params)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(optimizer.state_dict())
    handle = optimizer.register_load_state_dict_pre_hook(copy_with_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(set_lr)
    optimizer.register_load_state_dict_pre_hook(copy_with_lr, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [1e-3, 0.003, 0.002]
    train([optimizer], [params], 1)


@each_class
def test_step_hooks(name: str) -> None:
    params = make_params()
    optimizer = OURS[name](params)
    calls: list[str] = []

    def before(
        opt: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append("before")
        return (opt, lambda: 7), kwargs  # arguments that the hook returns are used

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    set_gradients(params)
    assert optimizer.step() == 7
    optimizer.step()
    assert calls == ["before", "after"] * 2
    for handle in handles:
        handle.remove()
    assert optimizer.step() is None
    assert len(calls) == 4
    assert optimizer.state[params[0]]["step"] == 3


@each_class
def test_step_hooks_order(name: str) -> None:
    calls: list[str] = []
    params = make_params()
    ours, sgd = OURS[name](params), torch.optim.SGD(params)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    for optimizer in (ours, sgd):
        handles.append(optimizer.register_step_pre_hook(lambda *_: calls.append("own pre")))
        handles.append(optimizer.register_step_post_hook(lambda *_: calls.append("own post")))
    try:
        for optimizer in (ours, sgd, ours):
            optimizer.step()
            assert calls == ["pre", "own pre", "own post", "post"]
            calls.clear()
    finally:
        for handle in handles:
            handle.remove()
    ours.step()
    assert calls == []


@inputs()
def test_state_after_a_step(name: str, kwargs: dict[str, Any]) -> None:
    """State looks like torch's: keys in order, shapes, dtypes, strides, devices."""
    params, reference = make_params(), make_params()
    flags = {k: v for k, v in kwargs.items() if k != "fused"}
    ours, theirs = OURS[name](params, **flags), TORCH[name](reference, **flags, fused=True)
    train([ours, theirs], [params, reference], 1)
    for p, q in zip(params, reference, strict=True):
        assert list(ours.state[p]) == list(theirs.state[q])
        for key, value in theirs.state[q].items():
            mine = ours.state[p][key]
            assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device)
            assert key == "step" or mine.stride() == value.stride() == p.stride()
            assert not mine.requires_grad


@each_class
def test_param_group_keys(name: str) -> None:
    ours, theirs = OURS[name](make_params()), TORCH[name](make_params())
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    assert ours.defaults.keys() == theirs.defaults.keys()
    different = {"params", "fused"}
    for key in theirs.param_groups[0].keys() - different:
        assert ours.param_groups[0][key] == theirs.param_groups[0][key], key


def test_decoupled_weight_decay_key() -> None:
    """FusedAdam follows this key of its arguments and of a loaded AdamW state; FusedAdamW always
    decouples."""
    params, others = make_params(), make_params()
    adamw = OURS["AdamW"](params, weight_decay=0.1)
    decoupled = OURS["Adam"](others, weight_decay=0.1, decoupled_weight_decay=True)
    train([adamw, decoupled], [params, others], 2)
    assert all(bits(p) == bits(q) for p, q in zip(params, others, strict=True))
    copies = copy_params(params)
    adam = OURS["Adam"](copies)
    adam.load_state_dict(deepcopy(adamw.state_dict()))
    assert adam.param_groups[0]["decoupled_weight_decay"] is True
    train([adamw, adam], [params, copies], 2, first_seed=2)
    assert all(bits(p) == bits(q) for p, q in zip(params, copies, strict=True))

    state_dict = OURS["Adam"](make_params()).state_dict()
    assert state_dict["param_groups"][0]["decoupled_weight_decay"] is False
    loaded = OURS["AdamW"](make_params())
    loaded.load_state_dict(state_dict)
    assert loaded.param_groups[0]["decoupled_weight_decay"] is True
    del state_dict["param_groups"][0]["decoupled_weight_decay"]
    loaded.load_state_dict(state_dict)
    assert loaded.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("kept", ["fp32", "remainder", "remainder8"])
def test_masters_do_not_survive_torchs_optimizer(kept: str) -> None:
    """torch's optimizer casts and does not update masters, so they are rebuilt from the weights."""
    params = [nn.Parameter(torch.linspace(-2, 2, 300).reshape(3, 100).bfloat16())]
    optimizer = OURS["AdamW"](params, lr=0.1, master_weights=kept)
    train([optimizer], [params], 3)
    theirs = torch.optim.AdamW(params, lr=0.1)
    theirs.load_state_dict(optimizer.state_dict())
    train([theirs], [params], 3)
    resumed = OURS["AdamW"](params, lr=0.1, master_weights=kept)
    with pytest.warns(UserWarning, match="those of 1 parameters are made from the weights"):
        resumed.load_state_dict(theirs.state_dict())
    fresh = copy_params(params)
    expected = OURS["AdamW"](fresh, lr=0.1, master_weights=kept)
    state = {
        k: v for k, v in theirs.state_dict()["state"][0].items() if "exp_avg" in k or k == "step"
    }
    expected.load_state_dict({**theirs.state_dict(), "state": {0: state}})
    train([resumed, expected], [params, fresh], 2)
    assert bits(params[0]) == bits(fresh[0])


def test_another_optimizers_state_dict_is_rejected() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params, lr=0.25)
    other = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    train([other], [params], 1)  # now it has state that does not fit, either
    with pytest.raises(ValueError, match=r"fit: group 0 is of sgd, expected adam$"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("betas", (1.0, 0.99), "Invalid beta parameter at index 0: 1"),
        ("eps", -1.0, "Invalid epsilon"),
        ("lr", float("nan"), "Invalid learning rate: nan"),
    ],
)
def test_options_are_checked_when_they_change(option: str, value: Any, message: str) -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params)
    train([optimizer], [params], 1)
    before = copy_params(params)
    usual, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], value
    set_gradients(params, seed=1)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(bits(p) == bits(q) for p, q in zip(params, before, strict=True))
    optimizer.param_groups[0][option] = usual
    optimizer.step()
