"""Loading and construction happen as a whole or not at all, whatever fails and wherever."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.containers import LRSchedulersContainer, OptimizersContainer
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import assert_same, contents, difference
from .jobs import train

EIGHT_BITS: dict[str, Any] = {"master_weights": "remainder8", "state_dtype": "int8"}
Make = Callable[[nn.Module], Any]


WRITES = {"flat.py:_load", "fused_optimizer.py:_set_weights", "master_optimizer.py:_set_weights"}
"""Functions that write into live tensors, as the last part of a load: no check comes after them."""


class Injected(Exception):
    pass


class Interrupted(KeyboardInterrupt):
    pass


@contextmanager
def failing_at(call: int, error: type[BaseException] = Injected) -> Iterator[list[str]]:
    """Raises an error in the package's function call of this number; yields the calls made.

    Calls are counted until one of WRITES is called.
    """
    calls: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        # Comprehensions and context managers' functions belong to the functions that use them.
        code = frame.f_code
        belongs = code.co_name[0] == "<" or code.co_flags & inspect.CO_GENERATOR
        if event == "call" and "torchopt_ext/" in code.co_filename and not belongs:
            name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
            if name in WRITES:
                sys.settrace(None)
                return
            calls.append(name)
            if len(calls) == call:
                raise error(name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield calls
    finally:
        sys.settrace(before)


def ends_of_functions(run: Callable[[], object]) -> list[int]:
    """Returns the numbers of the first and the last call of each function that a run calls."""
    with failing_at(0) as calls:
        run()
    last = {name: number for number, name in enumerate(calls, 1)}
    first = {name: len(calls) - i for i, name in enumerate(reversed(calls))}
    return sorted({*first.values(), *last.values()})


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(3, 2, bias=False)).bfloat16()


def scheduled(optimizer: FusedAdamW) -> FusedAdamW:
    optimizer.set_schedule(warmup_steps=2, stable_steps=2, decay_steps=2)
    return optimizer


def state_of(optimizer: Any) -> Any:
    """Returns a copy of all that a load may change."""
    return contents([saved_by(optimizer), optimizer])


def fused(model: nn.Module, **options: Any) -> FusedAdamW:
    return scheduled(FusedAdamW(model.parameters(), lr=0.1, **options))


def container(model: nn.Module, **options: Any) -> OptimizersContainer[Any]:
    optimizers = OptimizersContainer([model], FusedAdamW, {"lr": 0.1, **options})
    scheduled(optimizers.optimizers[0])
    return optimizers


def sharded(model: nn.Module, **options: Any) -> Any:
    zero: Any = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1, **options)
    scheduled(zero.optim)
    return zero


def adapted(model: nn.Module, **options: Any) -> Any:
    return FSDPadaptOptimizer(fused(model, **options))


def sharded_by_torchs_class(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def adapted_with_a_late_master(model: nn.Module) -> Any:
    next(model.parameters()).requires_grad_(False)
    return FSDPadaptOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def saved_by(optimizer: Any) -> Any:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict()
    return copy.deepcopy(optimizer.state_dict())


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("make", "saved", "kept", "steps"),
    [
        (fused, {}, EIGHT_BITS, 1),
        (fused, EIGHT_BITS, {}, 0),
        (container, EIGHT_BITS, {}, 1),
        (sharded, EIGHT_BITS, {}, 1),
        (sharded_by_torchs_class, {}, {}, 0),
        (adapted, EIGHT_BITS, {}, 0),
        (adapted_with_a_late_master, {}, {}, 1),
    ],
)
def test_a_load_that_fails_anywhere_changes_nothing(
    make: Any, saved: Any, kept: Any, steps: int
) -> None:
    model, other = model_of(1), model_of(2)
    source, target = make(model, **saved), make(other, **kept)
    model.requires_grad_(True)
    train(model, source, range(3))
    train(other, target, range(steps))
    given, before = saved_by(source), state_of(target)
    for call in range(1, 10_000):
        try:
            with failing_at(call) as calls:
                target.load_state_dict(given)
        except Injected as injected:
            assert_same(state_of(target), before)
            where = injected
            continue
        assert call > 50, where
        assert len(calls) == call - 1
        break
    loaded = state_of(target)
    target.load_state_dict(given)
    assert_same(state_of(target), loaded)
    train(other, target, [0])


@pytest.mark.parametrize("make", [fused, container, sharded, adapted])
def test_a_hook_that_raises_leaves_no_half_load(make: Any) -> None:
    model, other = model_of(1), model_of(2)
    source, target = make(model), make(other)
    train(model, source, range(3))
    train(other, target, [0])

    def hook(*_: Any) -> None:
        raise Injected("hook")

    handle = target.register_load_state_dict_post_hook(hook)
    given, before = saved_by(source), state_of(target)
    with pytest.raises(Injected):
        target.load_state_dict(given)
    left = state_of(target)
    if make in (container, adapted):  # they write into live tensors, and have written all
        handle.remove()
        target.load_state_dict(given)
        before = state_of(target)
    assert_same(left, before)


@pytest.mark.parametrize("make", [fused, container, sharded, adapted])
def test_warnings_as_errors_leave_no_half_load(make: Any) -> None:
    """A dict without counts makes the schedule begin at the parameters' steps, with a warning."""
    model, other = model_of(1), model_of(2)
    source, target = (make(m, master_weights="fp32") for m in (model, other))
    train(model, source, range(5))
    train(other, target, [0])
    saved = saved_by(source)
    flat = saved.get("base_optim_states", saved)
    for entry in (flat, flat.get("state", {}).get(0, {})):
        for key in [key for key in entry if "torchopt_ext.control" in str(key)]:
            del entry[key]
    before = state_of(target)
    for action in ("error", "always"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            expect: Any = pytest.raises if action == "error" else pytest.warns
            with expect(UserWarning, match="continue from step 5"):
                target.load_state_dict(saved)
        assert bool(difference(state_of(target), before)) == (action == "always")


CLASSES: dict[str, Callable[[nn.Module, list[dict[str, Any]]], Any]] = {
    "FusedAdamW": lambda _, groups: FusedAdamW(groups, **EIGHT_BITS),
    "container": lambda model, _: OptimizersContainer([model], FusedAdamW, dict(EIGHT_BITS)),
    "adapted": lambda model, _: FSDPadaptOptimizer(FusedAdamW(model.parameters())),
    "ZeRO": lambda _, groups: ZeroRedundancyOptimizer(groups[:1], FusedAdamW, lr=0.1),
    "schedules": lambda model, _: LRSchedulersContainer(
        OptimizersContainer([model], FusedAdamW, {}), lambda step: 1.0
    ),
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    return [{"params": [*model[0].parameters()]}, {"params": model[1].parameters(), "lr": 0.5}]


def listed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": [*map(id, group["params"])]} for group in groups]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_constructor_that_fails_anywhere_changes_nothing(kind: str) -> None:
    chosen = ends_of_functions(lambda: CLASSES[kind](other := model_of(1), groups_of(other)))
    assert len(chosen) > 10
    model = model_of(1)
    params = [*model.parameters()]
    before = [(vars(p).copy(), p.detach().clone(), p.requires_grad) for p in params]
    for call in chosen:
        groups = groups_of(model)
        with pytest.raises(Injected), failing_at(call):
            CLASSES[kind](model, groups)
        assert listed(groups) == listed(groups_of(model))
        for p, (attributes, value, requires_grad) in zip(params, before, strict=True):
            assert vars(p) == attributes and torch.equal(p, value)
            assert p.requires_grad == requires_grad and not p._backward_hooks


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"state_dtype": "int8"}, Injected),
        ({"parameters_as_bucket_view": True}, Interrupted),
        ({"partition": "balanced", "sharded_gradients": True}, Interrupted),
    ],
)
def test_a_group_that_fails_to_be_added_anywhere_is_not_added(
    options: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "get_objects", list)  # the search for embeddings takes 0.1 s

    def built() -> tuple[Any, Any, dict[str, Any]]:
        model: Any = model_of(1)
        zero: Any = ZeroRedundancyOptimizer(model[0].parameters(), FusedAdamW, lr=0.1, **options)
        train(model[0], zero, [0])
        return model, zero, {"params": [*model[1].parameters()], "lr": 0.3}

    _, other, added = built()
    chosen = ends_of_functions(lambda: other.add_param_group(added))
    assert len(chosen) > 50
    for call in chosen:
        model, zero, group = built()
        before = state_of(zero)
        with pytest.raises(error), failing_at(call, error):
            zero.add_param_group(group)
        assert_same(state_of(zero), before)
        assert [*group] == ["params", "lr"]
        assert not any(p._post_accumulate_grad_hooks for p in model[1].parameters())
        zero.step()
        zero.add_param_group(group)
        former = contents([*model.parameters()])
        train(model, zero, [1])
        assert all(map(difference, contents([*model.parameters()]), former))


@pytest.mark.parametrize("number", [np.float32, np.int64, np.array, torch.tensor])
def test_numbers_of_numpy(number: Any) -> None:
    """What RLlib makes of a state dict: its counts, options and indices are numpy's (ray#61937)."""
    model, other, flat = model_of(1), model_of(2), model_of(2)
    source, target = fused(model), fused(other)
    train(model, source, range(3))
    given = copy.deepcopy(source.state_dict())
    for entry in given["state"].values():
        entry["step"] = number(3)
    for group in given["param_groups"]:
        group["lr"] = number(2)
        group["params"] = [np.int64(index) for index in group["params"]]
    given["state"] = {np.int64(index): entry for index, entry in given["state"].items()}
    target.load_state_dict(given)
    assert all(state["step"] == 3 for state in target.state.values())
    assert float(target.param_groups[0]["lr"]) == 2
    train(other, target, [0])
    named, one = container(flat), container(model_of(1))
    train(one.model_parts[0], one, range(3))
    given = copy.deepcopy(one.state_dict())
    given |= {key: number(3) for key in given if key.endswith(".step")}
    named.load_state_dict(given)
    assert all(isinstance(s["step"], torch.Tensor) for s in named.optimizers[0].state.values())
    train(flat, named, [0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_a_learning_rate_in_a_tensor_of_any_real_dtype(dtype: torch.dtype) -> None:
    weights = []
    for lr in (torch.tensor(2, dtype=dtype), 2.0):
        model = model_of(1)
        optimizer = FusedAdamW(model.parameters(), lr=lr)
        train(model, optimizer, range(2))
        weights.append([*model.parameters()])
    assert all(map(torch.equal, *weights))
