"""FSDPadaptOptimizer as a torch optimizer: schedulers, hooks, copies, state, backward."""

from __future__ import annotations

import copy
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
)

import torchopt_ext
from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import BaseOptimizer, FSDPadaptOptimizer

from ...support.compare import assert_same_bits
from .training import (
    BF16,
    FP16,
    FP32,
    coefficients,
    content,
    every_base,
    every_kind,
    loss_of,
    parameters,
    state_of,
    train,
    trained,
    unchanged,
    weights_of,
)

COPY: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "deepcopy": copy.deepcopy,
}


@every_base
def test_what_the_base_has_is_its_own(kind: str) -> None:
    params, ours = trained(kind)
    base = ours.optim
    assert isinstance(ours, BaseOptimizer) and isinstance(ours, torch.optim.Optimizer)
    for name in ("param_groups", "state", "defaults"):
        assert getattr(ours, name) is getattr(base, name)
    assert not {"grad_scale", "found_inf"} & vars(base).keys()  # set only during a step
    assert repr(ours).startswith("FSDPadaptOptimizer") and "lr: 0.003" in repr(ours)
    held = [p for group in ours.param_groups for p in group["params"]]
    masters = held
    if kind.startswith("Fused"):
        assert [id(p) for p in held] == [id(p) for p in params]
        masters = [ours.state[p]["master_weight"] for p in params]
    assert {master.dtype for master in masters} == {FP32}
    assert_same_bits(params, [master.to(BF16) for master in masters])
    assert {id(p) for p in ours.state} == {id(p) for p in held}
    assert [w.data_ptr() for w in weights_of(ours)] == [w.data_ptr() for w in masters]
    for name in ("FSDPadaptOptimizer", "DynamicGradScaler", "offload_fsdp_optimizer"):
        assert getattr(torchopt_ext, name) is getattr(torchopt_ext.mixed_precision, name)


@every_kind
def test_schedulers(kind: str) -> None:
    """Schedulers drive the base's groups without warnings, and the steps follow."""
    params, ours = trained(kind, 0)
    others, other = trained(kind, 0)
    with warnings.catch_warnings(action="error"):
        scheduler = lr_scheduler.OneCycleLR(ours, max_lr=0.1, total_steps=10)
        rates = set()
        for step in range(5):
            for group, driven in zip(other.param_groups, ours.param_groups, strict=True):
                group.update({key: value for key, value in driven.items() if key != "params"})
            rates.add(scheduler.get_last_lr()[0])
            train(ours, params, [step])
            train(other, others, [step])
            scheduler.step()
    assert len(rates) == 5 and scheduler.get_last_lr() == [g["lr"] for g in ours.param_groups]
    assert_same_bits(params, others)


@every_kind
def test_state_dict_hooks_run_once(kind: str) -> None:
    params, ours = trained(kind)
    others, other = trained(kind, 1, seed=5)
    seen: list[str] = []
    ours.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    ours.register_state_dict_post_hook(lambda _, saved: saved | {"extra": 1})
    other.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    other.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = ours.state_dict()
    assert saved.keys() == {"grad_scaler", "base_optim_states", "flat_fp32_weights", "extra"}
    other.load_state_dict(saved)
    assert seen == ["saving", "loading", "loaded"]
    assert_same_bits(others, params)


@every_kind
@pytest.mark.parametrize("how", COPY)
@pytest.mark.parametrize("steps", [0, 3])
def test_copies_live_on_their_own(kind: str, how: str, steps: int) -> None:
    """A copy, with its parameters, continues like the original, and both are independent.

    Scheduler and hooks stay with the original, as in torch: a lambda cannot be pickled.
    """
    params, ours = trained(kind, steps, clip_grad_norm=0.7)
    seen: list[str] = []
    ours.register_step_post_hook(lambda *_: seen.append("post"))
    ours.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    scheduler = lr_scheduler.LambdaLR(ours, lambda step: 0.5**step)
    train(ours, params, [5])
    scheduler.step()
    others, other = COPY[how]((params, ours))
    assert type(other) is FSDPadaptOptimizer
    with unchanged(ours, params):
        seen.clear()
        train(other, others, range(2))
        other.add_param_group({"params": [("late", *parameters(BF16, ((3,),)))]})
        assert seen == []
    others, other = COPY[how]((params, ours))
    seen.clear()
    for each, optimizer in ((params, ours), (others, other)):
        train(optimizer, each, range(50, 53))
    assert seen == ["post"] * 3
    assert content(ours, params) == content(other, others)
    other.register_step_post_hook(lambda *_: seen.append("copy"))
    train(other, others, [7])
    assert seen[3:] == ["saving", "copy"]


@every_kind
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(kind: str, set_to_none: bool) -> None:
    """zero_grad() clears the model's gradients, whatever the groups hold."""
    params, ours = trained(kind)
    ours.backward(loss_of(params, coefficients(params, 0)))
    ours.zero_grad(set_to_none=set_to_none)
    for p in params:
        assert (p.grad is None) == set_to_none
        assert p.grad is None or not p.grad.any()


@every_kind
@pytest.mark.parametrize("how", ["closure", "backward_by_grad", "loss.backward"])
def test_where_gradients_come_from(kind: str, how: str) -> None:
    """A closure may make them, a pipeline scale them itself, or nobody while the scale is 1."""
    config = {"grad_scal_cfg": None} if how == "loss.backward" else {}
    params, ours = trained(kind, **config)
    others, other = trained(kind, **config)
    for step in range(5, 8):
        calls: list[Tensor] = []

        def closure(step: int = step, calls: list[Tensor] = calls) -> Tensor:
            assert torch.is_grad_enabled()
            ours.zero_grad()
            loss = loss_of(params, coefficients(params, step))
            ours.backward(loss)
            calls.append(loss)
            return loss

        loss = loss_of(params, coefficients(params, step))
        if how == "backward_by_grad":
            ours.backward_by_grad(loss, ours.loss_scale.reshape(()))
        elif how == "loss.backward":
            loss.backward()
        assert ours.step(closure) if how == "closure" else ours.step()
        assert len(calls) == (how == "closure")
        train(other, others, [step])
    assert content(ours, params) == content(other, others)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_backward_scales_in_float32(dtype: torch.dtype) -> None:
    params, ours = trained("SGD", 0, dtype)
    loss = (params[1] * 2.0).sum()
    assert loss.dtype == dtype
    for backward in range(2):
        assert ours.backward(loss, retain_graph=backward == 0) is None
        assert params[1].grad is not None
        assert_same_bits([params[1].grad], [torch.full((7,), 2.0 ** (9 + backward), dtype=dtype)])
    with pytest.raises(RuntimeError, match="second time"):
        ours.backward(loss)


@every_kind
def test_two_of_them_know_nothing_of_each_other(kind: str) -> None:
    """Two optimizers stepped in turn, as of actor and critic, do not affect each other."""
    pairs = [trained(kind, 0, seed=seed) for seed in (0, 1)]
    alone = [trained(kind, 0, seed=seed) for seed in (0, 1)]
    for step in range(4):
        for index, (params, ours) in enumerate(pairs):
            train(ours, params, [step], overflow=index + 1)
    for index, (params, ours) in enumerate(alone):
        train(ours, params, range(4), overflow=index + 1)
        assert content(ours, params) == content(pairs[index][1], pairs[index][0])
    pairs[0][1].backward((pairs[0][0][0] * 1.0).sum())
    (pairs[1][0][0] * 1.0).sum().backward()  # not through its optimizer
    with pytest.raises(RuntimeError, match="backward"):
        pairs[1][1].step()
    assert pairs[0][1].step()


# ---- masters -------------------------------------------------------------------------------------


@every_base
@pytest.mark.parametrize(("dtype", "steps"), [(BF16, 3), (FP16, 3), (BF16, 0)], ids=str)
def test_refresh_masters(kind: str, dtype: torch.dtype, steps: int) -> None:
    """Weights written through ``.data``, which no step notices, stay after the call."""
    params, ours = trained(kind, steps, dtype)
    state, written = state_of(ours), parameters(dtype, seed=8)
    for p, value in zip(params, written, strict=True):
        p.data.copy_(value.detach())
    assert ours.refresh_masters() is None
    assert_same_bits([*params, *weights_of(ours)], [*written, *[p.float() for p in written]])
    assert state_of(ours) == state
    train(ours, params, [4])
    for p, value in zip(params, written, strict=True):
        torch.testing.assert_close(p, value, rtol=0.05, atol=0.3)
        p.data.fill_(1000.0)
    train(ours, params, [5])
    assert all(float(p.detach().abs().max()) < 10 for p in params)


def test_a_model_that_becomes_bf16_later() -> None:
    """A model that becomes bf16 gets masters from then on."""
    model = nn.Linear(4, 3)
    ours = FSDPadaptOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    for step in range(41):  # each step is below half of a weight's last bit
        if step == 1:
            model.bfloat16()
            start = model.weight.detach().clone()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        assert ours.step()
    assert not model.weight.detach().equal(start)
    assert {weight.dtype for weight in weights_of(ours)} == {FP32}


def test_a_base_that_keeps_its_gradients() -> None:
    """The next step does not reuse the memory of gradients that the base keeps."""

    class Keeps(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("seen", []).append(p.grad)

    params = parameters()
    ours = FSDPadaptOptimizer(Keeps(params), clip_grad_norm=0.0)
    for value in (0.25, 0.5):
        for param in params:
            param.grad = torch.full_like(param, value)
        ours.step()
    for entry in ours.state.values():
        assert [grad.unique().tolist() for grad in entry["seen"]] == [[0.25], [0.5]]


# ---- BaseOptimizer -------------------------------------------------------------------------------


def test_base_optimizer_hands_everything_on() -> None:
    params, others = parameters(FP32), parameters(FP32)
    inner = FusedAdamW(params[:2], lr=0.01)
    ours: Any = BaseOptimizer(inner)
    plain: Any = FusedAdamW(others[:2], lr=0.01)
    plain.backward = torch.Tensor.backward
    seen: list[str] = []
    ours.register_step_post_hook(lambda *_: seen.append("post"))
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append("global") if optimizer in (ours, inner) else None
    )
    for optimizer, each in ((ours, params), (plain, others)):
        optimizer.add_param_group({"params": each[2:], "lr": 0.1})
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(loss_of(each, coefficients(each, step)), retain_graph=False)
            optimizer.step()
            scheduler.step()
    handle.remove()
    assert sorted(seen) == ["global"] * 3 + ["post"] * 3
    assert_same_bits(params, others)
    saved = ours.state_dict()
    assert saved.keys() == inner.state_dict().keys()
    fresh = BaseOptimizer(FusedAdamW(parameters(FP32)[:2]))
    fresh.add_param_group({"params": parameters(FP32)[2:]})
    fresh.load_state_dict(saved)
    assert [float(e["step"]) for e in fresh.state.values()] == [3.0] * 3
    assert ours.clip_grad_norm(None, 1.0) is None
    ours.zero_grad()
    ours.backward_by_grad(params[0].sum() * 2, torch.tensor(3.0))
    assert torch.equal(params[0].grad, torch.full((3, 4), 6.0))  # type: ignore[arg-type]
    for copied in COPY.values():
        assert type(copied(ours)) is BaseOptimizer
