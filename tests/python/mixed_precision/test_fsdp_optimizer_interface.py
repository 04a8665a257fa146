"""FSDPadaptOptimizer as a torch optimizer: schedulers, hooks, copies, state, backward."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import torchopt_ext
from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import BaseOptimizer, DynamicGradScaler, FSDPadaptOptimizer

from ..optim.subject import assert_same_bits
from .training import (
    BASES,
    BF16,
    FP16,
    FP32,
    KINDS,
    SHORT,
    backward,
    coefficients,
    content,
    everything,
    gradients,
    loss_of,
    parameters,
    state_of,
    train,
    trained,
    weights_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
every_base = pytest.mark.parametrize("kind", BASES)


def step_both(first: Any, second: Any, seeds: range = range(50, 53)) -> None:
    """Asserts that two pairs of parameters and optimizer stay equal over three more steps."""
    for params, ours in (first, second):
        train(ours, params, seeds)
    assert content(first[1], first[0]) == content(second[1], second[0])


# ---- the interface of an optimizer ---------------------------------------------------------------


def test_names() -> None:
    for name in ("FSDPadaptOptimizer", "DynamicGradScaler"):
        assert getattr(torchopt_ext, name) is getattr(torchopt_ext.mixed_precision, name)
    for name in ("offload_fsdp_optimizer", "load_fsdp_optimizer"):
        assert getattr(torchopt_ext, name) is getattr(torchopt_ext.mixed_precision, name)
    assert issubclass(FSDPadaptOptimizer, BaseOptimizer)
    assert issubclass(BaseOptimizer, torch.optim.Optimizer)


@every_base
def test_what_the_base_has_is_its_own(kind: str) -> None:
    params = parameters(BF16, SHORT)
    base = BASES[kind][0](params)
    ours = FSDPadaptOptimizer(base)
    assert isinstance(ours, torch.optim.Optimizer)
    assert ours.optim is base
    assert isinstance(ours.grad_scaler, DynamicGradScaler)
    train(ours, params, range(2))
    assert ours.param_groups is base.param_groups
    assert ours.state is base.state
    assert ours.defaults is base.defaults
    assert not {"grad_scale", "found_inf"} & vars(base).keys()  # set only during a step
    held = ours.param_groups[0]["params"]
    if kind.startswith("Fused"):
        assert [id(p) for p in held] == [id(p) for p in params]
        masters = [ours.state[p]["master_weight"] for p in params]
    else:
        masters = held
    for p, master in zip(params, masters, strict=True):
        assert master.dtype == FP32
        assert_same_bits([p], [master.to(BF16)])
    assert {id(p) for p in ours.state} == {id(p) for p in held}
    assert [w.data_ptr() for w in weights_of(ours)] == [w.data_ptr() for w in masters]


@every_kind
def test_repr(kind: str) -> None:
    _, ours = trained(kind)
    text = repr(ours)
    assert text.startswith("FSDPadaptOptimizer")
    assert "lr: 0.003" in text


@every_kind
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
    ],
    ids=["lambda", "cosine", "one cycle", "sequential"],
)
def test_schedulers(kind: str, make: Callable[[Any], Any]) -> None:
    """Schedulers drive the base's groups without warnings, and the steps follow."""
    params, ours = trained(kind, 0)
    others, other = trained(kind, 0)
    plain = BASES[kind][1]([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)])
    plain.param_groups[1]["lr"] = 0.003
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(ours), make(plain)]
        rates = []
        for step in range(5):
            rates.append([group["lr"] for group in ours.param_groups])
            assert rates[-1] == [group["lr"] for group in plain.param_groups]
            for mine, theirs in zip(other.param_groups, ours.param_groups, strict=True):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
            train(ours, params, [step])
            train(other, others, [step])
            plain.step()
            for scheduler in schedulers:
                scheduler.step()
    assert len({tuple(lrs) for lrs in rates}) > 1
    assert_same_bits(params, others)


@every_kind
@pytest.mark.parametrize("overflow", [False, True])
def test_step_hooks_run_once(kind: str, overflow: bool) -> None:
    """Own and global step hooks run once a step, before and after."""
    params, ours = trained(kind)
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            seen.append(name)

        return hook

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        ours.register_step_pre_hook(note("pre")),
        ours.register_step_post_hook(note("post")),
    ]
    given = coefficients(params, 9)
    if overflow:
        given[0][0, 0] = math.nan
    try:
        backward(ours, params, given)
        assert bool(ours.step()) != overflow
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(seen) == ["global post", "global pre", "post", "pre"]
    assert seen.index("pre") < seen.index("post")
    assert seen.index("global pre") < seen.index("global post")
    train(ours, params, [10])
    assert len(seen) == 4


@every_kind
def test_state_dict_hooks_run_once(kind: str) -> None:
    params, ours = trained(kind)
    others, other = trained(kind, 1, seed=5)
    seen: list[str] = []
    ours.register_state_dict_pre_hook(lambda optimizer: seen.append("saving"))
    ours.register_state_dict_post_hook(lambda optimizer, found: found | {"extra": 1})
    other.register_load_state_dict_pre_hook(lambda optimizer, given: seen.append("loading"))
    other.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))
    saved = ours.state_dict()
    assert saved.keys() == {"grad_scaler", "base_optim_states", "flat_fp32_weights", "extra"}
    other.load_state_dict(saved)
    assert seen == ["saving", "loading", "loaded"]
    assert_same_bits(others, params)


@every_kind
def test_a_closure_makes_the_gradients(kind: str) -> None:
    params, ours = trained(kind)
    others, other = trained(kind)
    calls: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        ours.zero_grad()
        loss = loss_of(params, coefficients(params, 7))
        ours.backward(loss)
        calls.append(loss)
        return loss

    assert ours.step(closure)
    assert len(calls) == 1
    train(other, others, [7])
    assert content(ours, params) == content(other, others)


@every_kind
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("steps", [0, 3])
def test_copies_live_on_their_own(kind: str, how: str, steps: int) -> None:
    """A copy, with its parameters, continues like the original, and both are independent."""
    params, ours = trained(kind, steps, clip_grad_norm=0.7)
    before = everything(ours, params)
    pair = (params, ours)
    others, other = pickle.loads(pickle.dumps(pair)) if how == "pickle" else copy.deepcopy(pair)
    assert type(other) is FSDPadaptOptimizer
    assert other._clip_grad_norm == 0.7
    train(other, others, range(2))
    assert everything(ours, params) == before
    others, other = pickle.loads(pickle.dumps(pair)) if how == "pickle" else copy.deepcopy(pair)
    step_both((params, ours), (others, other))
    other.add_param_group({"params": parameters(BF16, ((3,),))})
    assert len(ours.param_groups) == 2


@every_kind
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_of_one_with_scheduler_and_hooks(kind: str, how: str) -> None:
    """Scheduler and hooks stay with the original, as in torch: a lambda cannot be pickled."""
    params, ours = trained(kind)
    seen: list[str] = []
    ours.register_step_post_hook(lambda *_: seen.append("post"))
    ours.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    scheduler = lr_scheduler.LambdaLR(ours, lambda step: 0.5**step)
    train(ours, params, [5])
    scheduler.step()
    pair = (params, ours)
    others, other = pickle.loads(pickle.dumps(pair)) if how == "pickle" else copy.deepcopy(pair)
    seen.clear()
    train(other, others, [6])
    assert seen == []
    train(ours, params, [6])
    assert seen == ["post"]
    assert_same_bits(params, others)
    other.register_step_post_hook(lambda *_: seen.append("copy"))
    train(other, others, [7])
    assert seen == ["post", "copy"]


@every_kind
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(kind: str, set_to_none: bool) -> None:
    """zero_grad() clears the model's gradients, whatever the groups hold."""
    params, ours = trained(kind)
    backward(ours, params, coefficients(params, 0))
    ours.zero_grad(set_to_none=set_to_none)
    for p in params:
        assert (p.grad is None) == set_to_none
        assert p.grad is None or not p.grad.any()
    backward(ours, params, coefficients(params, 0))
    ours.zero_grad()
    assert all(p.grad is None for p in params)


# ---- backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_backward_scales_in_float32(dtype: torch.dtype) -> None:
    params, ours = trained("SGD", 0, dtype)
    loss = (params[1] * 2.0).sum()
    assert loss.dtype == dtype
    assert ours.backward(loss, retain_graph=True) is None
    assert_same_bits(gradients(params[1:2]), [torch.full((7,), 2.0**9, dtype=dtype)])
    ours.backward(loss)
    assert_same_bits(gradients(params[1:2]), [torch.full((7,), 2.0**10, dtype=dtype)])
    with pytest.raises(RuntimeError, match="second time"):
        ours.backward(loss)


@every_kind
def test_backward_by_grad_takes_scaled_gradients(kind: str) -> None:
    """backward_by_grad() does not scale, so that the caller must; the step is the same."""
    params, ours = trained(kind)
    others, other = trained(kind)
    for step in range(5, 8):
        given = coefficients(params, step)
        loss = loss_of(params, given)
        ours.backward_by_grad(loss, ours.loss_scale.reshape(()))
        assert_same_bits(gradients(params[:1]), [(given[0] * float(ours.loss_scale)).to(BF16)])
        assert ours.step()
        train(other, others, [step])
    assert content(ours, params) == content(other, others)


@every_kind
def test_gradients_of_elsewhere_while_the_scale_is_one(kind: str) -> None:
    """loss.backward() works like optimizer.backward()."""
    params, ours = trained(kind, 0, grad_scal_cfg=None)
    others, other = trained(kind, 0, grad_scal_cfg=None)
    for step in range(3):
        loss_of(params, coefficients(params, step)).backward()
        assert ours.step()
        train(other, others, [step])
    assert content(ours, params) == content(other, others)


# ---- masters -------------------------------------------------------------------------------------


@every_base
@pytest.mark.parametrize(("dtype", "steps"), [(BF16, 3), (FP16, 3), (BF16, 0)], ids=str)
def test_refresh_masters(kind: str, dtype: torch.dtype, steps: int) -> None:
    """Weights written from outside stay, also through ``.data``, which no step notices."""
    params, ours = trained(kind, steps, dtype)
    state = [entry for entry in state_of(ours) if entry[0] != "master_weight"]
    new = parameters(dtype, SHORT, seed=8)
    with torch.no_grad():
        for p, value in zip(params, new, strict=True):
            p.data.copy_(value)
    assert ours.refresh_masters() is None
    assert_same_bits(params, new)
    assert_same_bits(weights_of(ours), [p.float() for p in new])
    assert [entry for entry in state_of(ours) if entry[0] != "master_weight"] == state
    train(ours, params, [4])
    for p, value in zip(params, new, strict=True):
        torch.testing.assert_close(p, value, rtol=0.05, atol=0.3)
    with torch.no_grad():
        for p in params:
            p.data.fill_(1000.0)
    train(ours, params, [5])
    assert all(float(p.detach().abs().max()) < 10 for p in params)


# ---- BaseOptimizer -------------------------------------------------------------------------------


def test_base_optimizer_hands_everything_on() -> None:
    params, others = parameters(FP32, SHORT), parameters(FP32, SHORT)
    inner = FusedAdamW(params[:2], lr=0.01)
    ours: Any = BaseOptimizer(inner)
    plain = FusedAdamW(others[:2], lr=0.01)
    seen: list[str] = []
    ours.register_step_post_hook(lambda *_: seen.append("post"))
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append("global") if optimizer in (ours, inner) else None
    )
    ours.add_param_group({"params": params[2:], "lr": 0.1})
    plain.add_param_group({"params": others[2:], "lr": 0.1})
    scheduler = lr_scheduler.ExponentialLR(ours, 0.5)
    for step in range(3):
        ours.zero_grad()
        given = coefficients(params, step)
        ours.backward(loss_of(params, given), retain_graph=False)
        assert ours.clip_grad_norm(None, 1.0) is None
        for p, c in zip(others, given, strict=True):
            p.grad = c
        ours.step()
        plain.step()
        scheduler.step()
        for group in plain.param_groups:
            group["lr"] *= 0.5
    handle.remove()
    assert sorted(seen) == ["global"] * 3 + ["post"] * 3
    assert_same_bits(params, others)
    saved = ours.state_dict()
    assert saved.keys() == inner.state_dict().keys()
    assert ours.state is inner.state and ours.param_groups is inner.param_groups
    fresh = BaseOptimizer(FusedAdamW(parameters(FP32, SHORT)[:2]))
    fresh.add_param_group({"params": parameters(FP32, SHORT)[2:]})
    fresh.load_state_dict(saved)
    assert [float(e["step"]) for e in fresh.state.values()] == [3.0] * 3
    total = params[0].sum() * 2
    ours.zero_grad()
    ours.backward_by_grad(total, torch.tensor(3.0))
    assert_same_bits(gradients(params[:1]), [torch.full((3, 4), 6.0)])
    pickle.loads(pickle.dumps(ours))
    copy.deepcopy(ours)


def test_the_threshold_has_one_value() -> None:
    optimizer = FSDPadaptOptimizer(FusedAdamW(parameters(BF16)), clip_grad_norm=2.0)
    assert optimizer.max_grad_norm == 2.0
    optimizer.max_grad_norm = 0.5
    optimizer.step()
    assert optimizer.optim.max_grad_norm == 0.5
    with pytest.raises(TypeError, match=r"clip_grad_norm\(max_norm=0\.25\)"):
        optimizer.clip_grad_norm(0.25)
    optimizer.max_grad_norm = None
    assert optimizer.max_grad_norm is None
