"""Master weights: conversion and loading, copies, refusals, and steps skipped for overflow."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .independent import floats, join, words
from .subject import (
    OURS,
    TORCH,
    assert_same_bits,
    bits,
    copy_params,
    each_class,
    make_params,
    set_gradients,
    snapshot,
    through_file,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = ((3, 4), (7,), (2, 1030))

# Dtype of parameters, and keyword arguments: every way to store a weight and its moments.
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "fp32 bf16 moments": (FP32, {"state_dtype": BF16}),
    "fp64": (FP64, {}),
    "bf16": (BF16, {}),
    "bf16 fp32 moments": (BF16, {"state_dtype": FP32}),
    "bf16 stochastic": (BF16, {"stochastic_rounding": True}),
    "bf16 master": (BF16, {"master_weights": "fp32"}),
    "bf16 master bf16 moments": (BF16, {"master_weights": "fp32", "state_dtype": BF16}),
    "bf16 remainder": (BF16, {"master_weights": "remainder"}),
    "bf16 remainder stochastic": (
        BF16,
        {"master_weights": "remainder", "state_dtype": BF16, "stochastic_rounding": True},
    ),
    "bf16 remainder8": (BF16, {"master_weights": "remainder8"}),
    "bf16 remainder8 stochastic": (
        BF16,
        {"master_weights": "remainder8", "stochastic_rounding": True, "amsgrad": True},
    ),
    "fp16": (FP16, {}),
    "fp16 master": (FP16, {"master_weights": "fp32"}),
    "fp16 master amsgrad": (FP16, {"master_weights": "fp32", "amsgrad": True}),
    "bf16 remainder amsgrad": (BF16, {"master_weights": "remainder", "amsgrad": True}),
}
each_way = pytest.mark.parametrize("way", WAYS)

ENTRY = {"fp32": "master_weight", "remainder": "remainder", "remainder8": "remainder8"}


def build(way: str, params: list[nn.Parameter] | None = None, **more: Any) -> tuple[Any, Any]:
    dtype, kwargs = WAYS[way]
    params = make_params(SHAPES, dtype) if params is None else params
    return params, OURS["AdamW"](params, **{"lr": 0.02, "max_grad_norm": 3.0, **kwargs, **more})


def train(params: Any, optimizer: Any, first: int, count: int = 1) -> None:
    for step in range(first, first + count):
        set_gradients(params, seed=step)
        optimizer.step()


def everything(value: Any) -> Any:
    """Replaces the tensors of a state dict by their bytes, to compare dicts with ==."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), bits(value))
    if isinstance(value, dict):
        return {k: everything(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [everything(v) for v in value]
    return value


# ---- save, load, copy ----------------------------------------------------------------------------


@each_way
def test_save_and_load(way: str) -> None:
    """A load keeps every dtype, shares no memory with the dict, and does not change the dict."""
    params, optimizer = build(way)
    train(params, optimizer, 0, 3)
    loaded = through_file(optimizer.state_dict())
    dtypes = {k: v.dtype for k, v in loaded["state"][0].items()}
    before = everything(loaded)
    others, other = build(way, copy_params(params))
    other.load_state_dict(loaded)
    memory = {t.untyped_storage().data_ptr() for e in loaded["state"].values() for t in e.values()}
    for q in others:
        assert {k: v.dtype for k, v in other.state[q].items()} == dtypes
        mine = {t.untyped_storage().data_ptr() for t in other.state[q].values()}
        assert not mine & memory
    assert snapshot(other) == snapshot(optimizer)
    train(params, optimizer, 3, 2)
    train(others, other, 3, 2)
    assert snapshot(other) == snapshot(optimizer)
    assert everything(loaded) == before


@each_way
@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_copied_optimizer_continues_bitwise(way: str, copier: str) -> None:
    params, optimizer = build(way)
    train(params, optimizer, 0, 2)
    optimizer.state["another library's"] = 3
    if copier == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = pickle.loads(pickle.dumps(optimizer))
    others = other.param_groups[0]["params"]
    unmoved = snapshot(optimizer)
    assert snapshot(other) == unmoved
    train(others, other, 2)
    assert snapshot(optimizer) == unmoved  # the copy has its own state
    train(params, optimizer, 2)
    assert snapshot(other) == snapshot(optimizer) != unmoved


@pytest.mark.newest_torch
def test_a_spawned_process_takes_an_optimizer_that_has_stepped() -> None:
    """torch.multiprocessing's process opens shared tensors after they were pickled."""
    params, optimizer = build(next(iter(WAYS)))
    train(params, optimizer, 0, 2)
    process = torch.multiprocessing.get_context("spawn").Process(target=len, args=([optimizer],))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@each_way
@pytest.mark.parametrize("model", ["before", "after", "after a step"])
def test_model_may_be_loaded_before_or_after_the_optimizer(way: str, model: str) -> None:
    """A remainder refers to the parameter as it is when the next step begins."""
    params, optimizer = build(way)
    train(params, optimizer, 0, 3)
    saved, weights = through_file(optimizer.state_dict()), copy_params(params)
    others, other = build(way, make_params(SHAPES, WAYS[way][0], seed=99))
    if model == "after a step":
        train(others, other, 5)

    def load_model() -> None:
        with torch.no_grad():
            for q, w in zip(others, weights, strict=True):
                q.copy_(w)

    if model == "before":
        load_model()
    other.load_state_dict(saved)
    if model != "before":
        load_model()
    train(others, other, 3, 2)
    train(params, optimizer, 3, 2)
    assert snapshot(other) == snapshot(optimizer)


# ---- conversions ---------------------------------------------------------------------------------


def carried(
    params: Any, optimizer: Any, kind: str | None, **kwargs: Any
) -> tuple[list[nn.Parameter], Any]:
    """Returns an optimizer of another kind that has loaded this optimizer's state."""
    others = copy_params(params)
    other = OURS["AdamW"](others, lr=0.02, master_weights=kind, **kwargs)
    other.load_state_dict(through_file(optimizer.state_dict()))
    return others, other


@pytest.mark.parametrize("kind", ENTRY)
@pytest.mark.parametrize("source", ["ours", "torch", "torch fused"])
@pytest.mark.parametrize("model", ["before", "after"])
def test_from_no_master(kind: str, source: str, model: str) -> None:
    """The parameter becomes the master, moments are widened, and steps match float32's."""
    start = make_params(SHAPES, BF16)
    if source == "ours":
        plain = OURS["AdamW"](start, lr=0.02)
    else:
        plain = TORCH["AdamW"](start, lr=0.02, fused=True if source == "torch fused" else None)
    train(start, plain, 0, 3)
    saved, weights = through_file(plain.state_dict()), copy_params(start)
    before = everything(saved)

    params = make_params(SHAPES, BF16, seed=99)
    ours = OURS["AdamW"](params, lr=0.02, master_weights=kind)
    wide = [nn.Parameter(w.detach().float()) for w in weights]
    twin = OURS["AdamW"](wide, lr=0.02)
    twin.load_state_dict(saved)
    if model == "after":
        ours.load_state_dict(saved)
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    if model == "before":
        ours.load_state_dict(saved)
    for step in range(3, 5):
        set_gradients(params, seed=step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        ours.step()
        twin.step()
    for p, w, start in zip(params, wide, weights, strict=True):
        state = ours.state[p]
        held = words(state["master_weight"]) if kind == "fp32" else join(p, state[kind])
        unit = 2.0**-15 if kind == "remainder8" else 0.0  # relative loss per step, at most
        lost = (floats(held).view_as(w) - w).abs()
        assert (lost <= 2 * unit * torch.maximum(start.float().abs(), w.abs())).all()
        assert state["exp_avg"].dtype == FP32
        assert_same_bits([state["exp_avg"]], [twin.state[w]["exp_avg"]])
        assert float(state["step"]) == 5
    assert everything(saved) == before


@pytest.mark.parametrize("kind", ENTRY)
def test_to_no_master(kind: str) -> None:
    """A load into an optimizer without masters drops the master or remainder entry."""
    params, optimizer = build(f"bf16 {'master' if kind == 'fp32' else kind}")
    train(params, optimizer, 0, 2)
    others, other = carried(params, optimizer, None)
    set_gradients(others, seed=5)
    other.step()
    for q in others:
        assert other.state[q].keys() == {"step", "exp_avg", "exp_avg_sq"}
    # torch's class also loads the state dict: the extra entry does not matter.
    theirs = copy_params(params)
    torchs = TORCH["AdamW"](theirs, lr=0.02)
    torchs.load_state_dict(through_file(optimizer.state_dict()))
    train(theirs, torchs, 5)
    assert float(torchs.state[theirs[0]]["step"]) == 3


def test_moments_keep_the_dtype_they_are_held_in() -> None:
    """A load keeps float32 moments of a bfloat16 parameter exact, where torch would cast them."""
    params, optimizer = build("bf16 master")
    train(params, optimizer, 0, 2)
    # Some value has no bfloat16 form, so that a cast through bfloat16 would show.
    assert any(
        not torch.equal(
            optimizer.state[p]["exp_avg"].to(BF16).float(), optimizer.state[p]["exp_avg"]
        )
        for p in params
    )
    others, other = carried(params, optimizer, "fp32")
    for p, q in zip(params, others, strict=True):
        assert other.state[q]["exp_avg_sq"].dtype == FP32
        assert_same_bits([other.state[q]["exp_avg"]], [optimizer.state[p]["exp_avg"]])
    others, other = carried(params, optimizer, "fp32", state_dtype=BF16)
    for p, q in zip(params, others, strict=True):
        assert other.state[q]["exp_avg"].dtype == BF16
        assert_same_bits([other.state[q]["exp_avg"]], [optimizer.state[p]["exp_avg"].to(BF16)])


# ---- refused -------------------------------------------------------------------------------------


@each_class
def test_refused_arguments(name: str) -> None:
    cls = OURS[name]
    params = make_params(SHAPES, BF16)
    for wrong in ("fp16", True, "float32", ""):
        with pytest.raises(ValueError, match="master_weights"):
            cls(params, master_weights=wrong)
    for wrong in (FP16, FP64, torch.int16, "bf16"):
        with pytest.raises(ValueError, match="state_dtype"):
            cls(params, state_dtype=wrong)
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="rounding_seed"):
            cls(params, stochastic_rounding=True, rounding_seed=wrong)


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    params = make_params(SHAPES, BF16)
    optimizer = OURS["AdamW"](params, master_weights="remainder")
    with pytest.raises(TypeError, match="meta device"):
        optimizer.add_param_group({"params": nn.Parameter(torch.empty(2, device="meta"))})
    assert len(optimizer.param_groups) == 1
    train(params, optimizer, 0)


@pytest.mark.parametrize(
    ("way", "entry", "change"),
    [
        ("bf16 master", "master_weight", lambda t: t[:1]),
        ("bf16 master", "master_weight", lambda t: t.double()),
        ("bf16 master", "master_weight", lambda t: t.to(FP16)),
        ("bf16 master", "master_weight", lambda _: 1.0),
        ("bf16 remainder", "remainder", lambda t: t.flatten()),
        ("bf16 remainder", "remainder", lambda t: t.int() + 2**16),
        ("bf16 remainder", "remainder", lambda t: t.float()),
        ("bf16 remainder", "remainder", lambda _: None),
        ("bf16 remainder8", "remainder8", lambda t: t.to(torch.int16)),
        ("bf16 remainder8", "remainder8", lambda t: t.to(torch.uint8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "change",
)
def test_a_wrong_master_is_refused_before_anything_changes(
    way: str, entry: str, change: Callable[[Tensor], Any]
) -> None:
    params, optimizer = build(way)
    train(params, optimizer, 0, 2)
    saved = through_file(optimizer.state_dict())
    train(params, optimizer, 2)
    saved["state"][2][entry] = change(saved["state"][2][entry])
    saved["param_groups"][0]["lr"] = 5.0
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"{entry} of parameter 2"):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.02
    others, other = build(way)
    train(others, other, 0, 4)
    train(params, optimizer, 3)
    assert snapshot(optimizer) == snapshot(other)


# ---- overflow ------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize(
    ("special", "max_norm"), [(math.nan, None), (math.inf, None), (-math.inf, 3.0)]
)
def test_an_overflow_leaves_every_byte(way: str, special: float, max_norm: float | None) -> None:
    """An overflow in any element changes no byte, and later steps are as without the overflow."""
    params, optimizer = build(way, skip_nonfinite=True, max_grad_norm=max_norm)
    others, other = build(way, skip_nonfinite=True, max_grad_norm=max_norm)
    train(params, optimizer, 0, 2)
    train(others, other, 0, 2)
    before = snapshot(optimizer)
    skipped = 0
    for i, p in enumerate(params):
        for at in (0, p.numel() // 2, p.numel() - 1):
            set_gradients(params, seed=50 + i)
            params[i].grad.view(-1)[at] = special
            optimizer.step()
            skipped += 1
            assert snapshot(optimizer) == before, (i, at)
    assert float(optimizer.control.skipped_steps) == skipped
    train(params, optimizer, 2)
    train(others, other, 2)
    assert snapshot(optimizer) == snapshot(other) != before


@each_way
def test_an_overflow_in_the_first_step(way: str) -> None:
    params, optimizer = build(way, skip_nonfinite=True)
    weights = copy_params(params)
    set_gradients(params)
    params[-1].grad.view(-1)[-1] = math.nan
    optimizer.step()
    assert_same_bits(params, weights)
    for p in params:
        state = dict(optimizer.state[p])
        master = state.pop("master_weight", None)
        assert all(not value.any() for value in state.values())
        if master is not None:
            assert torch.equal(master, p.detach().float())
    others, other = build(way, skip_nonfinite=True)
    train(params, optimizer, 1)
    train(others, other, 1)
    assert snapshot(optimizer) == snapshot(other)
