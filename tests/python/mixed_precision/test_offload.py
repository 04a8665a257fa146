"""Offloading on a machine without a GPU: the same calls, which change nothing there.

Rows are those of shared/reference/mixed_precision.md, section 2.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    load_fsdp_optimizer,
    offload_fsdp_optimizer,
    optimizer_on_device,
)

from ..optim.subject import assert_same_bits, bits
from .training import (
    BF16,
    DYNAMIC,
    FP32,
    KINDS,
    backward,
    coefficients,
    content,
    everything,
    ours_of,
    parameters,
    train,
    weights_of,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shows machines without a GPU")

SHORT = ((3, 4), (7,), (2, 70), (), (0,))
every_kind = pytest.mark.parametrize("kind", KINDS)

RAW: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD without state": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "FusedAdamW": lambda params: FusedAdamW(params, max_grad_norm=1.0),
}
every_raw = pytest.mark.parametrize("kind", RAW)


def raw(kind: str, steps: int = 2) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = parameters(FP32, SHORT)
    optimizer = RAW[kind](params)
    step_raw(optimizer, params, range(steps))
    return params, optimizer


def step_raw(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, c in zip(params[:-2], coefficients(params, step), strict=False):
            p.grad = c  # the last two have no gradient, so no state
        optimizer.step()


def wrapped(kind: str, steps: int = 3, **kwargs: Any) -> tuple[list[nn.Parameter], Any]:
    params = parameters(BF16, SHORT)
    ours = ours_of(kind, params, grad_scal_cfg=DYNAMIC, **kwargs)
    train(ours, params, range(steps))
    return params, ours


def held(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keys, identity, place and bytes of everything in the state."""
    return [
        (id(p), name, id(value), value.data_ptr(), value.device, bits(value))
        if isinstance(value, Tensor)
        else (id(p), name, value)
        for p, entry in optimizer.state.items()
        for name, value in entry.items()
    ]


# ---- nothing changes -----------------------------------------------------------------------------


@every_raw
def test_any_optimizer_stays_as_it_is(kind: str) -> None:
    """However often and in whatever order: the same tensors at the same place, and it goes on."""
    params, optimizer = raw(kind)
    others, other = raw(kind)
    before = held(optimizer)
    weights = [bits(p) for p in params]
    load_fsdp_optimizer(optimizer)
    for _ in range(2):
        offload_fsdp_optimizer(optimizer)
        assert held(optimizer) == before
        offload_fsdp_optimizer(optimizer, include={"masters"}, empty_cache=False)
        load_fsdp_optimizer(optimizer)
        load_fsdp_optimizer(optimizer, device_id=None)
        assert held(optimizer) == before
    assert [bits(p) for p in params] == weights
    offload_fsdp_optimizer(optimizer)
    for mine, each in ((params, optimizer), (others, other)):
        step_raw(each, mine, range(7, 9))
    assert_same_bits(params, others)
    assert [entry[-1] for entry in held(optimizer)] == [entry[-1] for entry in held(other)]


@every_kind
def test_ours_stays_as_it_is(kind: str) -> None:
    params, ours = wrapped(kind)
    before, places = everything(ours, params), held(ours)
    masters = [w.data_ptr() for w in weights_of(ours)]
    for _ in range(2):
        load_fsdp_optimizer(ours)
        offload_fsdp_optimizer(ours)
        assert everything(ours, params) == before
        offload_fsdp_optimizer(ours)
    load_fsdp_optimizer(ours)
    assert everything(ours, params) == before
    assert held(ours) == places
    assert [w.data_ptr() for w in weights_of(ours)] == masters


@every_raw
def test_row_16_no_entries_for_parameters_without_state(kind: str) -> None:
    """Walking the state does not make any for those that had no gradient."""
    params, optimizer = raw(kind)
    known = list(optimizer.state)
    with optimizer_on_device(optimizer):
        offload_fsdp_optimizer(optimizer)
    load_fsdp_optimizer(optimizer)
    assert [id(p) for p in optimizer.state] == [id(p) for p in known]
    if kind not in ("Adagrad", "FusedAdamW", "SGD without state"):
        assert params[-1] not in optimizer.state


@every_kind
def test_row_15_host_reads_right_after(kind: str) -> None:
    """What is read without waiting for anything is what was there."""
    params, ours = wrapped(kind)
    expected = content(ours, params)
    for _ in range(3):
        offload_fsdp_optimizer(ours)
        assert content(ours, params) == expected
        load_fsdp_optimizer(ours)
        assert content(ours, params) == expected


def test_row_13_the_device_is_found_when_asked_for() -> None:
    """No default that was computed at import, which fails without a GPU."""
    calls: list[Callable[..., Any]] = [load_fsdp_optimizer, optimizer_on_device]
    for call in calls:
        parameter = inspect.signature(call).parameters["device_id"]
        assert parameter.default is None
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    calls[0] = offload_fsdp_optimizer
    for call in calls:
        parameter = inspect.signature(call).parameters["include"]
        assert tuple(parameter.default) == ("states", "masters")
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert not torch.cuda.is_initialized()


# ---- training between ----------------------------------------------------------------------------


@every_kind
def test_training_between_is_training_without(kind: str) -> None:
    """Offload after every step, load or not before the next: the same bits."""
    params, ours = wrapped(kind, 0)
    others, other = wrapped(kind, 0)
    for step in range(6):
        offload_fsdp_optimizer(ours)
        if step % 2:
            load_fsdp_optimizer(ours)
        given = coefficients(params, step)
        if step == 3:
            given[0][0, 0] = float("nan")
        backward(ours, params, given)
        backward(other, others, given)
        assert bool(ours.step()) == bool(other.step()) == (step != 3)
    assert content(ours, params) == content(other, others)


@every_kind
def test_state_dicts_while_offloaded(kind: str) -> None:
    """Saving and loading there are what they are elsewhere."""
    params, ours = wrapped(kind)
    others, other = wrapped(kind, 1)
    saved = ours.state_dict(snapshot=True)
    offload_fsdp_optimizer(ours)
    offload_fsdp_optimizer(other)
    for snapshot in (False, True):
        found = ours.state_dict(snapshot=snapshot)
        assert found["grad_scaler"] == saved["grad_scaler"]
        assert_same_bits(found["flat_fp32_weights"][0], saved["flat_fp32_weights"][0])
        states = [each["base_optim_states"]["state"] for each in (found, saved)]
        assert states[0].keys() == states[1].keys() != set()
        for key, entry in states[1].items():
            assert_same_bits([states[0][key][name] for name in entry], list(entry.values()))
    other.load_state_dict(saved)
    assert_same_bits(others, params)
    load_fsdp_optimizer(other)
    for mine, each in ((params, ours), (others, other)):
        train(each, mine, range(8, 10))
    assert_same_bits(others, params)
    assert_same_bits(weights_of(other), weights_of(ours))


@every_kind
def test_other_calls_while_offloaded(kind: str) -> None:
    """Refreshed masters, a new group, copies: as without."""
    params, ours = wrapped(kind)
    others, other = wrapped(kind)
    extra = [parameters(BF16, ((5,),), seed=3) for _ in range(2)]
    for mine, each, more in ((params, ours, extra[0]), (others, other, extra[1])):
        if each is ours:
            offload_fsdp_optimizer(each)
        with torch.no_grad():
            for p in mine:
                p.mul_(1.5)
        each.refresh_masters()
        each.add_param_group({"params": more, "lr": 0.02})
        train(each, mine + more, range(4, 6))
        if each is ours:
            offload_fsdp_optimizer(each)
    assert content(ours, params + extra[0]) == content(other, others + extra[1])
    for how in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        copied, copies = how((ours, params + extra[0]))
        train(copied, copies, range(6, 7))
        twin, twins = copy.deepcopy((other, others + extra[1]))
        train(twin, twins, range(6, 7))
        assert content(copied, copies) == content(twin, twins)


@every_raw
def test_copies_and_the_end(kind: str) -> None:
    """Copies of an offloaded optimizer are as before; when it goes, nothing holds it back."""
    params, optimizer = raw(kind)
    offload_fsdp_optimizer(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [entry[-1] for entry in held(other)] == [entry[-1] for entry in held(optimizer)]
        mine = other.param_groups[0]["params"]
        offload_fsdp_optimizer(other)
        step_raw(other, mine, range(5, 6))
        assert bits(mine[0]) != bits(params[0])
        load_fsdp_optimizer(other)
    watched = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watched() is None


# ---- the context manager -------------------------------------------------------------------------


@every_kind
def test_context_manager(kind: str) -> None:
    """Steps inside are steps; the state is as after an offload outside, and can be used again."""
    params, ours = wrapped(kind, 0)
    others, other = wrapped(kind, 0)
    for step in range(4):
        with optimizer_on_device(ours, include=("states", "masters")[: 1 + step % 2]):
            train(ours, params, [step])
        train(other, others, [step])
        assert content(ours, params) == content(other, others)


@every_kind
def test_an_error_inside_comes_out(kind: str) -> None:
    params, ours = wrapped(kind)
    before = everything(ours, params)
    with pytest.raises(KeyError, match="mine"), optimizer_on_device(ours):
        raise KeyError("mine")
    assert everything(ours, params) == before
    with optimizer_on_device(ours):
        train(ours, params, [5])
    assert everything(ours, params) != before


# ---- what is refused -----------------------------------------------------------------------------

entered: list[torch.optim.Optimizer] = []


def in_context(optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
    entered.clear()
    with optimizer_on_device(optimizer, **kwargs):
        entered.append(optimizer)


CALLS: dict[str, Callable[..., Any]] = {"offload": offload_fsdp_optimizer, "context": in_context}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["SGD", "FusedAdamW", "raw"])
@pytest.mark.parametrize(
    "include", [("moments",), ("states", "master"), ["states", 3], (None,)], ids=str
)
def test_what_include_does_not_know(call: str, kind: str, include: Any) -> None:
    """Named, also where there is nothing to move, and before the body of a context runs."""
    _, optimizer = raw("AdamW") if kind == "raw" else wrapped(kind)
    before = held(optimizer)
    with pytest.raises((TypeError, ValueError), match="include"):
        CALLS[call](optimizer, include=include)
    assert held(optimizer) == before
    assert call == "offload" or not entered


@pytest.mark.parametrize("call", [*CALLS.values(), load_fsdp_optimizer])
@pytest.mark.parametrize("wrong", [None, 3, nn.Linear(2, 2), torch.optim.SGD])
def test_what_is_no_optimizer(call: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        call(wrong)


@every_kind
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_offload_during_a_step(kind: str, when: str, call: str) -> None:
    """From a step hook: an error that says so, whereupon everything goes on."""
    params, ours = wrapped(kind)
    others, other = wrapped(kind)

    def hook(optimizer: FSDPadaptOptimizer, args: Any, kwargs: Any) -> None:
        CALLS[call](optimizer)

    register = ours.register_step_pre_hook if when == "before" else ours.register_step_post_hook
    handle = register(hook)
    backward(ours, params, coefficients(params, 5))
    before = everything(ours, params)
    with pytest.raises(RuntimeError, match="step"):
        ours.step()
    assert (everything(ours, params) == before) == (when == "before")
    handle.remove()
    ours.zero_grad()
    if when == "after":
        train(other, others, [5])
    for mine, each in ((params, ours), (others, other)):
        train(each, mine, [6])
    assert content(ours, params) == content(other, others)


@every_kind
def test_offload_after_a_refused_step(kind: str) -> None:
    """A step that failed is over: offloading afterwards is no longer during it."""
    params, ours = wrapped(kind)

    def refuse(*_: Any) -> None:
        raise KeyError("mine")

    handle = ours.register_step_pre_hook(refuse)
    with pytest.raises(KeyError, match="mine"):
        ours.step()
    handle.remove()
    before = everything(ours, params)
    offload_fsdp_optimizer(ours)
    load_fsdp_optimizer(ours)
    assert everything(ours, params) == before
