"""FSDPadaptOptimizer rejects wrong inputs by name and before any change, and then goes on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZero

from torchopt_ext import FusedAdamW, ZeroRedundancyOptimizer
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.mixed_precision.master_optimizer import skips_on_device
from torchopt_ext.optim import param_states

from ...support.compare import assert_same_bits
from .training import (
    ALL,
    BF16,
    FP16,
    FP32,
    FP64,
    coefficients,
    content,
    every_kind,
    loss_of,
    ours_of,
    parameters,
    train,
    trained,
    unchanged,
)

ERRORS = (RuntimeError, ValueError, TypeError)


def assert_goes_on(kind: str, params: list[nn.Parameter], ours: FSDPadaptOptimizer) -> None:
    """Asserts that training continues as in an optimizer that rejected nothing."""
    others, other = trained(kind)
    ours.zero_grad()
    for each, optimizer in ((params, ours), (others, other)):
        train(optimizer, each, range(5, 7))
    assert content(ours, params) == content(other, others)


# ---- what can be wrapped -------------------------------------------------------------------------


def scaled(params: Any) -> FusedAdamW:
    base = FusedAdamW(params)
    base.set_loss_scale(1024.0)
    return base


def with_bad(value: torch.Tensor) -> Callable[[Any], Any]:
    return lambda params: torch.optim.SGD([("good", params[0]), ("bad", nn.Parameter(value))])


ONES = torch.ones(4)
BAD_BASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda params: None, "expected a torch.optim.Optimizer, got NoneType"),
    "a module": (lambda params: nn.Linear(2, 2), "got Linear"),
    "a class": (lambda params: torch.optim.SGD, "got type"),
    "wrapped": (lambda params: ours_of("SGD", params), "FSDPadaptOptimizer"),
    "LBFGS": (torch.optim.LBFGS, "LBFGS"),
    "scaled": (scaled, r"keeps a loss scale of its own \(set_loss_scale\)"),
    "torch's ZeRO": (
        lambda params: TorchsZero(params, torch.optim.SGD), "ZeroRedundancyOptimizer shards",
    ),
    "ZeRO": (
        lambda params: ZeroRedundancyOptimizer(params, torch.optim.SGD),
        "ZeroRedundancyOptimizer shards parameters by itself",
    ),
    "complex": (with_bad(ONES * 1j), "'bad' is complex"),
    "float8": (with_bad(ONES.to(torch.float8_e4m3fn)), "'bad' of MasterOptimizer has dtype"),
    "no shape": (lambda _: torch.optim.SGD(nn.LazyLinear(3).parameters()), "run the model once"),
    "twice": (lambda params: torch.optim.SGD([params[0], params[0]]), "a parameter twice"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("what", BAD_BASES)
def test_a_base_that_cannot_be_wrapped(what: str, one_rank: None) -> None:
    make, message = BAD_BASES[what]
    base = make(parameters(FP32))
    groups = getattr(base, "param_groups", [])
    held = [[id(p) for p in group["params"]] for group in groups]
    with pytest.raises((TypeError, ValueError), match=message):
        FSDPadaptOptimizer(base)
    assert [[id(p) for p in group["params"]] for group in groups] == held


@every_kind
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad_scal_cfg": {"growth_fcator": 2.0}}, "growth_fcator"),
        ({"grad_scal_cfg": {"fp16": {"initial_scal": 2.0}}}, "initial_scal"),
        ({"grad_scal_cfg": {"dtype": FP16, "growth_factor": 1.0}}, "growth_factor is 1.0"),
        ({"grad_scal_cfg": 3}, "grad_scal_cfg is 3, expected a mapping"),
        ({"clip_grad_norm": "1.0"}, "max_norm is '1.0', expected a number"),
        ({"clip_grad_norm": math.nan}, "Invalid max_norm: nan"),
    ],
    ids=str,
)
def test_arguments(kind: str, arguments: dict[str, Any], message: str) -> None:
    """An unknown name or a wrong type raises, and the base stays usable."""
    params = parameters()
    base = ALL[kind][0](params)
    with pytest.raises((AssertionError, *ERRORS), match=message):
        FSDPadaptOptimizer(base, **arguments)
    assert [id(p) for p in base.param_groups[0]["params"]] == [id(p) for p in params]
    assert_same_bits(params, parameters())
    ours = FSDPadaptOptimizer(base)
    train(ours, params, [0])
    with pytest.raises(TypeError, match=r"clip_grad_norm\(max_norm=0\.25\)"):
        ours.clip_grad_norm(0.25)


@pytest.mark.parametrize("kind", ["AdamW-foreach", "FusedAdamW"])
def test_a_base_outlives_its_wrapper(kind: str) -> None:
    """A fused base still has the model's parameters; others have masters of no wrapper."""
    params, wrapper = trained(kind)
    base, copied = wrapper.optim, copy.deepcopy(wrapper)
    for inner in (base, copied.optim):
        with pytest.raises(TypeError, match="another FSDPadaptOptimizer"):
            FSDPadaptOptimizer(inner)
    train(wrapper, params, [3])
    del wrapper
    if kind == "FusedAdamW":
        FSDPadaptOptimizer(base)
    else:
        with pytest.raises(TypeError, match="masters of another"):
            FSDPadaptOptimizer(base)


# ---- steps ---------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("before", ["a step", "a skipped step", "a failed step"])
def test_gradients_that_were_not_scaled(kind: str, dtype: torch.dtype, before: str) -> None:
    """loss.backward() with a scale other than 1 raises with the reason and keeps the gradients.

    A step uses up its backward, also if it is skipped, or fails after it has cleared gradients.
    """
    params, ours = trained(kind, dtype=dtype)
    if before == "a failed step":
        ours.backward(loss_of(params, coefficients(params, 3)))
        with pytest.raises(ZeroDivisionError):
            ours.step(lambda: ours.zero_grad() or 1 / 0)
    elif before == "a skipped step":
        assert train(ours, params, [3], overflow=3) == [False]
    loss_of(params, coefficients(params, 3)).backward()
    with unchanged(ours, params):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\) instead"):
                ours.step()
    ours.zero_grad()
    assert train(ours, params, [4]) == [True]


def other_dtype(p: nn.Parameter, dtype: torch.dtype) -> None:
    grad = torch.ones(p.shape, dtype=dtype)
    p.grad = None
    p.grad_dtype = None
    p.grad = grad


SPOILED: dict[str, Callable[[nn.Parameter], object]] = {
    "gradient in double": lambda p: other_dtype(p, FP64),
    "gradient in the other 16 bits": lambda p: other_dtype(p, FP16),
    "gradient of integers": lambda p: other_dtype(p, torch.int32),
    "gradient is sparse": lambda p: setattr(p, "grad", torch.ones_like(p).to_sparse()),
    "parameter freed": lambda p: setattr(p, "data", torch.empty(0, dtype=p.dtype)),
    "storage freed": lambda p: p.untyped_storage().resize_(0),
    "parameter of another shape": lambda p: setattr(p, "data", p.new_ones(p.numel() + 1)),
}


@every_kind
@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_spoiled_tensor_is_named(kind: str, how: str, which: int) -> None:
    """The error names the parameter and nothing else changes; after a repair training continues."""
    params, ours = trained(kind)
    good = params[which].detach().clone()
    ours.backward(loss_of(params, coefficients(params, 3)))
    SPOILED[how](params[which])
    rest = [p for i, p in enumerate(params) if i != which]
    with unchanged(ours, rest), pytest.raises(ERRORS, match=rf"layer{which}\.weight"):
        ours.step()
    params[which].grad = None
    if "storage" in how:
        params[which].untyped_storage().resize_(good.untyped_storage().nbytes())
        params[which].data.copy_(good)
    else:
        params[which].data = good
    assert_goes_on(kind, params, ours)


@every_kind
def test_an_unnamed_tensor_is_numbered(kind: str) -> None:
    params = parameters()
    ours = ours_of(kind, [{"params": params[:2]}, {"params": params[2:]}])
    train(ours, params, range(1))
    other_dtype(params[2], FP64)
    with pytest.raises(ERRORS, match=r"gradient 2 |parameter 0 of group 1"):
        ours.step()


class Failing(torch.optim.SGD):
    """SGD whose step fails on request, before any change."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("failed")
        return super().step(closure)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_base_that_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and state do not change, no gradient stays half divided, and training continues."""
    monkeypatch.setitem(ALL, "SGD", (lambda groups: Failing(groups, lr=0.1, momentum=0.9),))
    params, ours = trained("SGD", dtype=dtype)
    ours.optim.fails = True
    ours.backward(loss_of(params, coefficients(params, 2)))
    with unchanged(ours, params, "gradients", "norm"), pytest.raises(ArithmeticError, match="fail"):
        ours.step()
    assert all(p.grad is None for p in params + ours.param_groups[0]["params"])
    loss_of(params, coefficients(params, 2)).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward"):  # the failed step's were used
        ours.step()
    ours.optim.fails = False
    ours.zero_grad()
    assert train(ours, params, [5]) == [True]


@every_kind
@pytest.mark.parametrize("place", ["pre", "post"])
def test_a_hook_of_the_base_that_raises(kind: str, place: str) -> None:
    """Weights are those of the masters: before the update, or after it."""
    params, ours = trained(kind)
    before = [p.detach().clone() for p in params]
    getattr(ours.optim, f"register_step_{place}_hook")(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(ours, params, [3])
    weights = [w for own in ours.state_dict()["flat_fp32_weights"].values() for w in own]
    assert_same_bits(params, [weight.to(BF16) for weight in weights])
    assert torch.equal(params[0], before[0]) == (place == "pre")


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), True),
        (lambda p: torch.optim.Adam(p, fused=True), True),
        (torch.optim.AdamW, False),
        (lambda p: torch.optim.SGD(p, momentum=0.9, fused=True), False),
    ],
)
def test_whose_steps_skip_without_the_host(optimizer: Any, expected: bool) -> None:
    assert skips_on_device(optimizer(parameters())) == expected


# ---- groups --------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("wrong", ["in a group", "no tensor", "no leaf"])
def test_groups_that_cannot_be_added(kind: str, wrong: str) -> None:
    params, ours = trained(kind)
    extra = nn.Parameter(torch.ones(3, dtype=BF16))
    bad: Any = {"in a group": params[1], "no tensor": 3.0, "no leaf": extra * 2}[wrong]
    with unchanged(ours, params), pytest.raises(ERRORS):
        ours.add_param_group({"params": [("fresh", extra), ("bad", bad)]})
    assert_goes_on(kind, params, ours)


@pytest.mark.parametrize("added", [False, True])
def test_memory_that_is_short_for_masters(added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters of a call get masters or none, so the call can be made again."""
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:]}]
    base = torch.optim.SGD(groups[: 2 - added], lr=0.1, momentum=0.9)
    for param in params:
        param.grad = torch.ones_like(param)
    base.step()
    ours: Any = FSDPadaptOptimizer(base) if added else None

    def contents() -> Any:
        return [list(group["params"]) for group in base.param_groups], dict(base.state)

    def call() -> Any:
        return ours.add_param_group(groups[1]) if added else FSDPadaptOptimizer(base)

    fit_master = param_states.fit_master

    def short(param: torch.Tensor, *args: Any) -> None:
        if param is params[-1]:
            raise torch.OutOfMemoryError
        fit_master(param, *args)

    before = contents()
    with monkeypatch.context() as patched:
        patched.setattr(param_states, "fit_master", short)
        with pytest.raises(torch.OutOfMemoryError):
            call()
    assert contents() == before
    ours = call() or ours
    train(ours, params, range(2))
    assert [len(own) for own in ours.params_by_group] == [1, 2]
    assert len(base.state) == 3


@pytest.mark.parametrize("how", ["replaced", "removed", "added"])
def test_groups_changed_from_outside(how: str) -> None:
    params, ours = trained("SGD")
    ours.backward(loss_of(params, coefficients(params, 2)))
    held = ours.param_groups[1]["params"]
    kept, extra = list(held), nn.Parameter(torch.ones(3))
    with unchanged(ours, params):
        if how == "added":
            ours.optim.add_param_group({"params": [("extra", extra)]})
        else:
            held[1:2] = [extra] if how == "replaced" else []
        with pytest.raises(RuntimeError, match="base's groups"):
            ours.step()
        held[:] = kept
        del ours.param_groups[2:]
    assert_goes_on("SGD", params, ours)


# ---- state dicts ---------------------------------------------------------------------------------


def changed(*path: Any, to: Any = None) -> Callable[[dict[str, Any]], None]:
    """Returns a function that sets the item at the path, or deletes it if `to` is None."""

    def change(saved: Any) -> None:
        for key in path[:-1]:
            saved = saved[key]
        if to is None:
            del saved[path[-1]]
        else:
            saved[path[-1]] = to

    return change


def another_moment(saved: dict[str, Any]) -> None:
    entry = saved["base_optim_states"]["state"][1]
    entry["exp_avg" if "exp_avg" in entry else "momentum_buffer"] = torch.ones(3, 3)


def other_options(saved: dict[str, Any]) -> None:
    group = saved["base_optim_states"]["param_groups"][1]
    del group["betas" if "betas" in group else "momentum"]


MASTERS, BASE = "flat_fp32_weights", "base_optim_states"
ONE = torch.ones(1)  # would broadcast
UNUSABLE: dict[str, tuple[Callable[[dict[str, Any]], object], Any, str]] = {
    "scaler": (changed("grad_scaler"), AssertionError, "Not found grad_scaler state!"),
    "base": (changed(BASE), AssertionError, BASE),
    "masters": (changed(MASTERS), AssertionError, MASTERS),
    "group": (changed(MASTERS, 0), AssertionError, "groups of the saved weights are"),
    "tensor": (changed(MASTERS, 1, 1), AssertionError, "2 != 1"),
    "further group": (changed(MASTERS, 2, to=[]), AssertionError, "expected 0 to 1"),
    "further tensor": (lambda saved: saved[MASTERS][1].append(ONE), AssertionError, "2 != 3"),
    "nothing": (dict.clear, AssertionError, "Not found grad_scaler state!"),
    "first shape": (changed(MASTERS, 0, 0, to=ONE), ValueError, r"layer0\.weight"),
    "last shape": (changed(MASTERS, 1, 1, to=ONE), ValueError, r"layer2\.weight"),
    "moment's shape": (another_moment, ValueError, r"layer1\.weight"),
    "scale": (changed("grad_scaler", "_scale"), ValueError, "_scale"),
    "growth step": (changed("grad_scaler", "_growth_step"), ValueError, "_growth_step"),
    "base's groups": (changed(BASE, "param_groups"), ValueError, "param_groups"),
    "base's state": (changed(BASE, "state"), ValueError, "state"),
    "base's further group": (
        lambda saved: saved[BASE]["param_groups"].extend(saved[BASE]["param_groups"][:1]),
        ValueError, "group",
    ),
    "base's parameter": (changed(BASE, "param_groups", 0, "params", 0), ERRORS, "parameter"),
    "base's option": (other_options, ValueError, "betas|momentum"),
    "no master": (changed(MASTERS, 1, 1, to="weights"), ERRORS, r"layer2\.weight"),
    "no masters": (lambda saved: saved.update({MASTERS: None}), (AttributeError, *ERRORS), ""),
    "no scaler": (changed("grad_scaler", to=7), ERRORS, "_scale"),
    "no base": (changed(BASE, to=7), ERRORS, ""),
}  # fmt: skip


@every_kind
@pytest.mark.parametrize("how", UNUSABLE)
def test_a_state_dict_that_does_not_fit(kind: str, how: str) -> None:
    """Missing parts raise AssertionError, as in LightRFT's class, and nothing changes."""
    params, ours = trained(kind)
    change, error, message = UNUSABLE[how]
    saved = trained(kind, seed=7)[1].state_dict(snapshot=True)
    change(saved)
    with unchanged(ours, params), pytest.raises(error, match=message):
        ours.load_state_dict(saved)
    assert_goes_on(kind, params, ours)
