"""FSDPadaptOptimizer refuses wrong inputs by name and before any change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.optim import param_states

from ..optim.subject import assert_same_bits
from .training import (
    BASES,
    BF16,
    DYNAMIC,
    FP16,
    FP32,
    FP64,
    KINDS,
    SHORT,
    backward,
    coefficients,
    content,
    everything,
    loss_of,
    ours_of,
    parameters,
    train,
    weights_of,
)

NAMES = ("embedding.weight", "norm.weight", "head.weight")
ERRORS = (RuntimeError, ValueError, TypeError)
every_kind = pytest.mark.parametrize("kind", KINDS)


def named(
    kind: str, steps: int = 2, dtype: torch.dtype = BF16, **kwargs: Any
) -> tuple[list[nn.Parameter], Any]:
    """Returns trained parameters with names, and their optimizer."""
    params = parameters(dtype, SHORT)
    ours = ours_of(kind, list(zip(NAMES, params, strict=True)), **kwargs)
    train(ours, params, range(steps))
    return params, ours


def assert_goes_on(params: list[nn.Parameter], ours: FSDPadaptOptimizer, kind: str) -> None:
    """Asserts that training continues as in an optimizer that refused nothing."""
    others, other = named(kind, grad_scal_cfg=DYNAMIC)
    ours.zero_grad()
    for mine, optimizer in ((params, ours), (others, other)):
        train(optimizer, mine, range(5, 7))
    assert content(ours, params) == content(other, others)


# ---- what can be wrapped -------------------------------------------------------------------------


@every_kind
def test_nested_wrapping(kind: str) -> None:
    params, ours = named(kind)
    before = everything(ours, params)
    with pytest.raises(TypeError, match="FSDPadaptOptimizer"):
        FSDPadaptOptimizer(ours)
    assert everything(ours, params) == before


def test_optimizers_that_evaluate_the_model_themselves() -> None:
    params = parameters(FP32, SHORT)
    base = torch.optim.LBFGS(params)
    held = [id(p) for p in base.param_groups[0]["params"]]
    with pytest.raises(TypeError, match="LBFGS"):
        FSDPadaptOptimizer(base)
    assert [id(p) for p in base.param_groups[0]["params"]] == held


def test_optimizers_with_a_loss_scale_of_their_own() -> None:
    base = FusedAdamW(parameters(FP32, SHORT))
    base.set_loss_scale(1024.0)
    with pytest.raises(ValueError, match=r"keeps a loss scale of its own \(set_loss_scale\)"):
        FSDPadaptOptimizer(base)


@pytest.mark.parametrize("whose", ["torch", "torchopt_ext"])
def test_optimizers_that_shard_by_themselves(whose: str, one_rank: None) -> None:
    if whose == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer
    else:
        from torchopt_ext.zero import ZeroRedundancyOptimizer  # type: ignore[assignment]
    params = parameters(FP32, SHORT)
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer"):
        FSDPadaptOptimizer(zero)
    assert [id(p) for p in zero.param_groups[0]["params"]] == [id(p) for p in params]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_parameters_that_cannot_be_stepped(dtype: torch.dtype) -> None:
    """The error names the parameter, and the base's groups do not change."""
    good, bad = parameters(BF16, ((3,), (4,)))
    bad = nn.Parameter(torch.ones(4).to(dtype))
    base = torch.optim.SGD([("good", good), ("bad", bad)])
    with pytest.raises(TypeError, match="'bad'"):
        FSDPadaptOptimizer(base)
    assert [id(p) for p in base.param_groups[0]["params"]] == [id(good), id(bad)]


@pytest.mark.parametrize("wrong", [None, 3, "SGD", nn.Linear(2, 2), torch.optim.SGD])
def test_what_is_no_optimizer(wrong: Any) -> None:
    with pytest.raises(TypeError):
        FSDPadaptOptimizer(wrong)


@every_kind
@pytest.mark.parametrize(
    ("given", "problem"),
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
def test_arguments(kind: str, given: dict[str, Any], problem: str) -> None:
    """An unknown name or a wrong type raises, and the base stays usable."""
    params = parameters(BF16, SHORT)
    base = BASES[kind][0](params)
    with pytest.raises((AssertionError, *ERRORS), match=problem):
        FSDPadaptOptimizer(base, **given)
    assert [id(p) for p in base.param_groups[0]["params"]] == [id(p) for p in params]
    assert_same_bits(params, parameters(BF16, SHORT))
    train(FSDPadaptOptimizer(base), params, [0])


# ---- steps ---------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("skipped", [False, True])
def test_gradients_that_were_not_scaled(kind: str, dtype: torch.dtype, skipped: bool) -> None:
    """loss.backward() with a scale other than 1 raises with the reason and keeps the gradients.

    A skipped step uses up its backward, like any step.
    """
    params, ours = named(kind, dtype=dtype, grad_scal_cfg=DYNAMIC)
    if skipped:
        given = coefficients(params, 3)
        given[0][0, 0] = math.inf
        backward(ours, params, given)
        assert not ours.step()
    loss_of(params, coefficients(params, 3)).backward()
    before = everything(ours, params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="backward"):
            ours.step()
        assert everything(ours, params) == before
    ours.zero_grad()
    backward(ours, params, coefficients(params, 3))
    assert ours.step()


def other_dtype(p: nn.Parameter, dtype: torch.dtype) -> None:
    grad = torch.ones(p.shape, dtype=dtype)
    p.grad = None
    p.grad_dtype = None
    p.grad = grad


def freed(p: nn.Parameter) -> None:
    p.data = torch.empty(0, dtype=p.dtype)


def storage_freed(p: nn.Parameter) -> None:
    p.untyped_storage().resize_(0)


def reshaped(p: nn.Parameter) -> None:
    p.data = torch.ones(p.numel() + 1, dtype=p.dtype)


def sparse(p: nn.Parameter) -> None:
    p.grad = torch.ones(p.shape, dtype=p.dtype).to_sparse()


SPOILED: dict[str, Callable[[nn.Parameter], None]] = {
    "gradient in double": lambda p: other_dtype(p, FP64),
    "gradient in the other 16 bits": lambda p: other_dtype(p, FP16),
    "gradient of integers": lambda p: other_dtype(p, torch.int32),
    "gradient is sparse": sparse,
    "parameter freed": freed,
    "parameter's storage freed": storage_freed,
    "parameter of another shape": reshaped,
}


@every_kind
@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_spoiled_tensor_is_named(kind: str, how: str, which: int) -> None:
    """The error names the parameter and nothing else changes; after a repair training continues."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    good = params[which].detach().clone()
    backward(ours, params, coefficients(params, 3))
    SPOILED[how](params[which])
    rest = [p for i, p in enumerate(params) if i != which]
    before = everything(ours, rest)
    with pytest.raises(ERRORS, match=NAMES[which]):
        ours.step()
    assert everything(ours, rest) == before
    params[which].grad = None
    if "storage" in how:
        params[which].untyped_storage().resize_(good.untyped_storage().nbytes())
        params[which].data.copy_(good)
    else:
        params[which].data = good
    assert_goes_on(params, ours, kind)


@every_kind
def test_an_unnamed_tensor_is_numbered(kind: str) -> None:
    params = parameters(BF16, SHORT)
    ours = ours_of(kind, [{"params": params[:2]}, {"params": params[2:]}])
    train(ours, params, range(1))
    backward(ours, params, coefficients(params, 3))
    other_dtype(params[2], FP64)
    with pytest.raises(ERRORS, match=r"gradient 2 |parameter 0 of group 1"):
        ours.step()


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_float32_gradients_of_16_bit_parameters_are_welcome(kind: str, dtype: torch.dtype) -> None:
    """Gradients reduced in float32 keep their precision beyond 16 bits."""
    params, ours = named(kind, 0, dtype, clip_grad_norm=0, grad_scal_cfg={"initial_scale": 1.0})
    wide = parameters(dtype, SHORT)
    for p in params:
        p.grad_dtype = FP32
    twins = [nn.Parameter(p.detach().float()) for p in wide]
    base = BASES[kind][0](twins)
    for step in range(3):
        for p, t, c in zip(params, twins, coefficients(params, step), strict=True):
            p.grad, t.grad = c, c
        assert ours.step()
        base.step()
    assert_same_bits(weights_of(ours), twins)


# ---- groups --------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("wrong", ["known", "no tensor", "no leaf"])
def test_groups_that_cannot_be_added(kind: str, wrong: str) -> None:
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    extra = nn.Parameter(torch.ones(3, dtype=BF16))
    groups: dict[str, list[Any]] = {
        "known": [("fresh", extra), ("known", params[1])],
        "no tensor": [("fresh", extra), ("number", 3.0)],
        "no leaf": [("fresh", extra), ("result", extra * 2)],
    }
    before = everything(ours, params)
    with pytest.raises(ERRORS):
        ours.add_param_group({"params": groups[wrong]})
    assert everything(ours, params) == before
    assert_goes_on(params, ours, kind)


@pytest.mark.parametrize("added", [False, True])
def test_memory_that_is_short_for_masters(added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters of a call get masters or none, so the call can be made again."""
    params = parameters(BF16, SHORT)
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

    made = param_states.fit_master

    def short(param: torch.Tensor, *args: Any) -> None:
        if param is params[-1]:
            raise torch.OutOfMemoryError
        made(param, *args)

    before = contents()
    monkeypatch.setattr(param_states, "fit_master", short)
    with pytest.raises(torch.OutOfMemoryError):
        call()
    monkeypatch.undo()
    assert contents() == before
    ours = call() or ours
    train(ours, params, range(2))
    assert [len(own) for own in ours.params_by_group] == [1, 2]
    assert len(base.state) == 3


@pytest.mark.parametrize("how", ["replaced", "removed", "added"])
def test_groups_changed_from_outside(how: str) -> None:
    params, ours = named("SGD", grad_scal_cfg=DYNAMIC)
    backward(ours, params, coefficients(params, 2))
    before = everything(ours, params)
    held = ours.param_groups[0]["params"]
    kept = list(held)
    extra = nn.Parameter(torch.ones(3))
    if how == "added":
        ours.optim.add_param_group({"params": [("extra", extra)]})
    else:
        held[1:2] = [extra] if how == "replaced" else []
    with pytest.raises(RuntimeError, match="base's groups"):
        ours.step()
    held[:] = kept
    del ours.param_groups[1:]
    assert everything(ours, params) == before
    assert_goes_on(params, ours, "SGD")


# ---- state dicts ---------------------------------------------------------------------------------


def saved_by_another(kind: str) -> dict[str, Any]:
    params = parameters(BF16, SHORT, seed=7)
    other = ours_of(kind, params, grad_scal_cfg=DYNAMIC | {"initial_scale": 64.0})
    train(other, params, range(3))
    saved = other.state_dict(snapshot=True)
    saved["flat_fp32_weights"] = {k: list(v) for k, v in saved["flat_fp32_weights"].items()}
    return saved


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


def another_group(saved: dict[str, Any]) -> None:
    saved["base_optim_states"]["param_groups"] *= 2


MASTERS, BASE = "flat_fp32_weights", "base_optim_states"
ONE = torch.ones(1)  # would broadcast
UNUSABLE: dict[str, tuple[Callable[[dict[str, Any]], object], Any, str | None]] = {
    "scaler": (changed("grad_scaler"), AssertionError, "Not found grad_scaler state!"),
    "base": (changed(BASE), AssertionError, BASE),
    "masters": (changed(MASTERS), AssertionError, MASTERS),
    "group": (changed(MASTERS, 0), AssertionError, None),
    "tensor": (changed(MASTERS, 0, 2), AssertionError, "3 != 2"),
    "further group": (changed(MASTERS, 1, to=[]), AssertionError, None),
    "further tensor": (lambda saved: saved[MASTERS][0].append(ONE), AssertionError, "3 != 4"),
    "nothing": (dict.clear, AssertionError, "Not found grad_scaler state!"),
    "first shape": (changed(MASTERS, 0, 0, to=ONE), ValueError, NAMES[0]),
    "last shape": (changed(MASTERS, 0, 2, to=ONE), ValueError, NAMES[2]),
    "moment's shape": (another_moment, ValueError, NAMES[1]),
    "scale": (changed("grad_scaler", "_scale"), (KeyError, *ERRORS), "_scale"),
    "growth step": (changed("grad_scaler", "_growth_step"), (KeyError, *ERRORS), "_growth_step"),
    "base's groups": (changed(BASE, "param_groups"), (KeyError, *ERRORS), "param_groups"),
    "base's state": (changed(BASE, "state"), (KeyError, *ERRORS), "state"),
    "base's further group": (another_group, ERRORS, "group"),
    "base's parameter": (changed(BASE, "param_groups", 0, "params", 0), ERRORS, None),
    "no master": (changed(MASTERS, 0, 1, to="weights"), ERRORS, None),
    "no masters": (lambda saved: saved.update({MASTERS: None}), (AttributeError, *ERRORS), None),
    "no scaler": (changed("grad_scaler", to=7), (AssertionError, *ERRORS), None),
    "no base": (changed(BASE, to=7), (AssertionError, *ERRORS), None),
}


@every_kind
@pytest.mark.parametrize("how", UNUSABLE)
def test_a_state_dict_that_does_not_fit(kind: str, how: str) -> None:
    """Missing parts raise AssertionError, as in the replaced class, and nothing changes."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    change, error, pattern = UNUSABLE[how]
    saved = saved_by_another(kind)
    change(saved)
    before = everything(ours, params)
    with pytest.raises(error, match=pattern):
        ours.load_state_dict(saved)
    assert everything(ours, params) == before
    assert_goes_on(params, ours, kind)
