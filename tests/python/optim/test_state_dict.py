"""State dicts: exchange with torch's optimizers, independent copies, and refused loads."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer

from .subject import (
    OURS,
    TORCH,
    assert_close_to_torch,
    assert_same_bits,
    bits,
    copy_params,
    each_class,
    make_params,
    set_gradients,
    snapshot,
    train,
)

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
each_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def kwargs_of(configuration: str, implementation: str = "fused") -> dict[str, Any]:
    kwargs = dict(CONFIGURATIONS[configuration])
    if configuration == "tensor lr" and implementation != "foreach":
        kwargs["lr"] = torch.tensor(kwargs["lr"])
    return kwargs


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Asserts that parameters and state agree up to rounding, and step counts exactly."""
    for mine, reference in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(mine["params"], reference["params"], strict=True):
            assert_close_to_torch([p], [q])
            assert ours.state[p].keys() == theirs.state[q].keys()
            if not ours.state[p]:
                continue
            assert float(ours.state[p]["step"]) == float(theirs.state[q]["step"])
            for key in ours.state[p].keys() - {"step"}:
                assert_close_to_torch([ours.state[p][key]], [theirs.state[q][key]])


@each_class
@each_configuration
@each_implementation
@pytest.mark.parametrize("start_with", ["torch", "ours"])
def test_exchange_with_torch(
    name: str, configuration: str, implementation: str, start_with: str
) -> None:
    """After three steps the other optimizer loads the state, and both train alike for four more."""
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "torch": lambda params: TORCH[name](
            params, **kwargs_of(configuration, implementation), **IMPLEMENTATIONS[implementation]
        ),
        "ours": lambda params: OURS[name](params, **kwargs_of(configuration, implementation)),
    }
    continue_with = "ours" if start_with == "torch" else "torch"
    params = make_params()
    first = makers[start_with](params)
    params[2].requires_grad_(False)  # a parameter that never steps has no state
    trained = [p for p in params if p.requires_grad]
    train([first], [trained], 3)

    copies = copy_params(params)
    second = makers[continue_with](copies)
    second.load_state_dict(deepcopy(first.state_dict()))  # loading in torch shares memory
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()
    others = [c for p, c in zip(params, copies, strict=True) if p.requires_grad]
    assert_same_state(first, second)
    train([first, second], [trained, others], 4, first_seed=3)
    assert_same_state(first, second)
    assert second.state[copies[0]]["step"] == 7


def test_deepcopy_with_the_model() -> None:
    """If both are copied together, the copied optimizer holds the copied model's parameters."""
    model = nn.Linear(3, 2)
    optimizer = OURS["AdamW"](model.named_parameters())
    train([optimizer], [list(model.parameters())], 2)
    other_model, other = deepcopy((model, optimizer))
    assert other.param_groups[0]["params"][0] is other_model.weight
    train([optimizer], [list(model.parameters())], 2)
    train([other], [list(other_model.parameters())], 2)
    assert_same_bits(model.parameters(), other_model.parameters())


def test_a_shallow_copy_continues_the_same_state() -> None:
    params, expected = make_params(), make_params()
    optimizer, other = OURS["AdamW"](params), OURS["AdamW"](expected)
    for first_seed in range(3):
        shallow = copy(optimizer)
        train([shallow, other], [params, expected], 1, first_seed=2 * first_seed)
        train([optimizer, other], [params, expected], 1, first_seed=2 * first_seed + 1)
    assert_same_bits(params, expected)
    assert_same_state(optimizer, other)
    assert optimizer.state[params[0]]["step"] == 6
    assert shallow.state is optimizer.state
    assert shallow.param_groups is optimizer.param_groups


def test_copies_keep_numbers_and_names_of_a_container() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    container = OptimizersContainer(parts, OURS["AdamW"], {"lr": 0.1})
    second = container.optimizers[1]
    for other in (deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert other.first_parameter_number == second.first_parameter_number == 2
        assert other.parameter_names == second.parameter_names == [["weight", "bias"]]


def test_copies_keep_clipping() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params, max_grad_norm=0.1, skip_nonfinite=True)
    copies = [deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    optimizers = [optimizer, *copies]
    lists = [o.param_groups[0]["params"] for o in optimizers]
    train(optimizers, lists, 2)
    for other in lists[1:]:
        assert_same_bits(lists[0], other)
    assert all(0 < float(o.control.clip_factor) < 1 for o in optimizers)
    assert {repr(o) for o in copies} == {repr(optimizer)}
    before = [snapshot(o) for o in optimizers]
    set_gradients(*lists, scale=math.inf)
    for o in optimizers:
        o.step()
    assert [snapshot(o) for o in optimizers] == before


def test_state_dict_before_the_first_step() -> None:
    """A state dict from before the first step is empty and loads without effect."""
    params, reference = make_params(), make_params()
    optimizer, same = OURS["AdamW"](params), OURS["AdamW"](reference)
    state_dict = optimizer.state_dict()
    assert state_dict["state"] == {}
    optimizer.load_state_dict(state_dict)
    train([optimizer, same], [params, reference], 2)
    assert snapshot(optimizer) == snapshot(same)


def test_hyperparameters_come_with_the_state() -> None:
    params = make_params()
    source = OURS["AdamW"](params, lr=0.05, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    train([source], [params], 1)
    copies = copy_params(params)
    target = OURS["AdamW"](copies)
    target.load_state_dict(deepcopy(source.state_dict()))
    train([source, target], [params, copies], 2, first_seed=1)
    assert_same_bits(params, copies)


def test_dtype_follows_the_parameter() -> None:
    """A load casts moments to the parameter's dtype, as torch does, but not step counts."""
    params = make_params(dtype=torch.float64)
    source = OURS["AdamW"](params)
    train([source], [params], 2)
    narrow = make_params(dtype=torch.float32)
    target = OURS["AdamW"](narrow)
    target.load_state_dict(source.state_dict())
    for p, q in zip(narrow, params, strict=True):
        assert target.state[p]["step"].dtype == torch.float32
        expected = source.state[q]["exp_avg"].to(torch.float32)
        assert bits(target.state[p]["exp_avg"]) == bits(expected)
    train([target], [narrow], 1)


def test_the_default_device_does_not_matter() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = OURS["AdamW"](model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    with torch.device("meta"):
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()
    optimizer.step()
    assert again["state"][0]["step"] == 1


def test_step_counts_that_processes_share() -> None:
    """Shared state as in A3C's SharedAdam stays in shared memory, its step counts included."""
    model = torch.nn.Linear(4, 4)
    optimizer = OURS["AdamW"](model.parameters())
    for param in model.parameters():
        zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        shared = {"step": torch.zeros(1), **zeros}
        optimizer.state[param] = {name: value.share_memory_() for name, value in shared.items()}
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [1.0, 1.0]
    assert all(state["step"].is_shared() for state in optimizer.state.values())
    sent = ForkingPickler.loads(ForkingPickler.dumps(optimizer))
    for param in sent.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    sent.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0, 2.0]


def test_state_with_other_strides() -> None:
    """Moments saved in another memory order load right; torch's fused kernels misread them."""
    params = make_params([(4, 6)])
    source = OURS["AdamW"](params)
    train([source], [params], 2)
    state_dict = deepcopy(source.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        state_dict["state"][0][key] = state_dict["state"][0][key].t().contiguous().t()
    copies = copy_params(params)
    target = OURS["AdamW"](copies)
    target.load_state_dict(state_dict)
    train([source, target], [params, copies], 2, first_seed=2)
    assert_same_bits(params, copies)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def edit(state_dict: dict[str, Any]) -> None:
        del state_dict["state"][1][key]

    return edit


def replaced(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(state_dict: dict[str, Any]) -> None:
        state_dict["state"][1][key] = value

    return edit


def group_removed(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"].clear()


def parameter_removed(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


def one_name(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["param_names"] = ["p0"]


def flattened(state_dict: dict[str, Any]) -> None:
    del state_dict["state"], state_dict["param_groups"]
    state_dict["state.weight.step"] = torch.ones(())


BAD_DICTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no groups": (group_removed, "parameter groups.*build the groups that were saved"),
    "parameter missing": (parameter_removed, "size of the optimizer's group"),
    "wrong shape": (replaced("exp_avg", torch.zeros(3)), "exp_avg"),
    "wrong shape of the second moment": (replaced("exp_avg_sq", torch.zeros(3)), "exp_avg_sq"),
    "not a tensor": (replaced("exp_avg_sq", "text"), "exp_avg_sq"),
    "complex": (replaced("exp_avg", torch.zeros(7, dtype=torch.complex64)), "exp_avg"),
    "missing": (without("exp_avg_sq"), "exp_avg_sq"),
    "no step": (without("step"), "step"),
    "step with several elements": (replaced("step", torch.ones(2)), "step"),
    "infinite step": (replaced("step", math.inf), "step"),
    "half a step": (replaced("step", 2.5), "step"),
    "a step too large": (replaced("step", 10**400), "step"),
    "too few names": (one_name, r"param_names \['p0'\] for"),
    "flat": (flattened, "as containers have it"),
}


@pytest.mark.parametrize("kind", BAD_DICTS)
def test_bad_state_dict_changes_nothing(kind: str) -> None:
    """A bad dict is refused as a whole, by parameter and key; torch notices some only later."""
    edit, pattern = BAD_DICTS[kind]
    params, reference = make_params(), make_params()
    optimizer = OURS["AdamW"]([(f"p{i}", p) for i, p in enumerate(params)], lr=0.01)
    same = OURS["AdamW"](reference, lr=0.01)
    train([optimizer, same], [params, reference], 2)
    bad = deepcopy(optimizer.state_dict())
    for entry in bad["state"].values():
        entry["exp_avg"].fill_(7)
    bad["param_groups"][0]["lr"] = 99.0
    edit(bad)
    before = snapshot(optimizer)
    with pytest.raises((KeyError, TypeError, ValueError, RuntimeError), match=pattern) as error:
        optimizer.load_state_dict(bad)
    if "state" in pattern or "exp" in pattern or "step" in pattern:
        assert "p1" in str(error.value)
    assert snapshot(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.01
    train([optimizer, same], [params, reference], 2, first_seed=2)
    assert_same_bits(params, reference)


def test_a_loaded_group_has_options_of_its_own() -> None:
    """What happens to the dict afterwards changes nothing."""
    params = make_params()
    optimizer = FusedAdamW(params)
    saved = deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"betas": [0.5, 0.75], "lr": torch.tensor(0.25), "mine": [1]}
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["betas"][0] = 0.125
    saved["param_groups"][0]["lr"].fill_(7.0)
    saved["param_groups"][0]["mine"].append(2)
    group = optimizer.param_groups[0]
    assert list(group["betas"]) == [0.5, 0.75]
    assert group["lr"].item() == 0.25
    assert group["mine"] == [1]
