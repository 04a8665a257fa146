"""FSDPadaptOptimizer: what is refused, by name and before anything is changed."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ..optim.subject import assert_same_bits, bits
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
    """Trained, its parameters known by name."""
    params = parameters(dtype, SHORT)
    ours = ours_of(kind, list(zip(NAMES, params, strict=True)), **kwargs)
    train(ours, params, range(steps))
    return params, ours


def assert_goes_on(params: list[nn.Parameter], ours: FSDPadaptOptimizer, kind: str) -> None:
    """As one of the same history that nothing was asked of that is refused."""
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


@pytest.fixture
def one_rank() -> Iterator[None]:
    timeout = datetime.timedelta(seconds=20)
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


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
    """Named at once; the base's groups are left as they were."""
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
    "config",
    [
        {"growth_fcator": 2.0},
        {"fp16": {"initial_scal": 2.0}},
        {"dtype": FP16, "growth_factor": 1.0},
    ],
    ids=str,
)
def test_configurations_of_the_scaler(kind: str, config: Any) -> None:
    """A name that means nothing is an error; the base stays what it was."""
    params = parameters(BF16, SHORT)
    base = BASES[kind][0](params)
    with pytest.raises((TypeError, ValueError, AssertionError)):
        FSDPadaptOptimizer(base, grad_scal_cfg=config)
    assert [id(p) for p in base.param_groups[0]["params"]] == [id(p) for p in params]
    assert_same_bits(params, parameters(BF16, SHORT))
    train(FSDPadaptOptimizer(base), params, [0])


# ---- steps ---------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_that_were_not_scaled(kind: str, dtype: torch.dtype) -> None:
    """loss.backward() while the scale is not one: explained, and the gradients are still there."""
    params, ours = named(kind, dtype=dtype, grad_scal_cfg=DYNAMIC)
    loss_of(params, coefficients(params, 3)).backward()
    before = everything(ours, params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="backward"):
            ours.step()
        assert everything(ours, params) == before
    ours.zero_grad()
    backward(ours, params, coefficients(params, 3))
    assert ours.step()


@every_kind
def test_gradients_that_were_not_scaled_after_a_skip(kind: str) -> None:
    """A skipped step uses up its backward, as any step does."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    given = coefficients(params, 3)
    given[0][0, 0] = math.inf
    backward(ours, params, given)
    assert not ours.step()
    loss_of(params, coefficients(params, 3)).backward()
    before = everything(ours, params)
    with pytest.raises(RuntimeError, match="backward"):
        ours.step()
    assert everything(ours, params) == before


def other_dtype(p: nn.Parameter, dtype: torch.dtype) -> None:
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch ties a gradient's dtype to its parameter's")
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
    """The error has the parameter's name, nothing else was touched; once mended, all goes on."""
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
    """As reduced in float32: what they have beyond 16 bits counts."""
    params, ours = named(kind, 0, dtype, clip_grad_norm=0, grad_scal_cfg={"initial_scale": 1.0})
    wide = parameters(dtype, SHORT)
    for p in params:
        if not hasattr(p, "grad_dtype"):
            pytest.skip("this torch ties a gradient's dtype to its parameter's")
        p.grad_dtype = FP32
    twins = [nn.Parameter(p.detach().float()) for p in wide]
    base = BASES[kind][0](twins)
    for step in range(3):
        for p, t, c in zip(params, twins, coefficients(params, step), strict=True):
            p.grad, t.grad = c, c
        assert ours.step()
        base.step()
    assert_same_bits(weights_of(ours), twins)


@every_kind
def test_a_step_of_the_base_that_fails(kind: str) -> None:
    """A hook of the caller's that raises: gradients may be made anew and everything goes on."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)

    def refuse(*_: Any) -> None:
        raise KeyError("not now")

    handle = ours.register_step_pre_hook(refuse)
    backward(ours, params, coefficients(params, 3))
    before = everything(ours, params)
    with pytest.raises(KeyError, match="not now"):
        ours.step()
    assert everything(ours, params) == before
    handle.remove()
    assert_goes_on(params, ours, kind)


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


# ---- state dicts ---------------------------------------------------------------------------------


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


def another_shape(index: int) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        saved["flat_fp32_weights"][0][index] = torch.ones(1)  # which would broadcast

    return change


def another_moment(saved: dict[str, Any]) -> None:
    entry = saved["base_optim_states"]["state"][1]
    entry["exp_avg" if "exp_avg" in entry else "momentum_buffer"] = torch.ones(3, 3)


MISSING: dict[str, tuple[Callable[[dict[str, Any]], None], str | None]] = {
    "scaler": (without("grad_scaler"), "Not found grad_scaler state!"),
    "base": (without("base_optim_states"), "base_optim_states"),
    "masters": (without("flat_fp32_weights"), "flat_fp32_weights"),
    "group": (without("flat_fp32_weights", 0), None),
    "tensor": (without("flat_fp32_weights", 0, 2), "3 != 2"),
    "further group": (lambda saved: saved["flat_fp32_weights"].update({1: []}), None),
    "further tensor": (lambda saved: saved["flat_fp32_weights"][0].append(torch.ones(3)), "3 != 4"),
}


def saved_by_another(kind: str) -> dict[str, Any]:
    params = parameters(BF16, SHORT, seed=7)
    other = ours_of(kind, params, grad_scal_cfg=DYNAMIC | {"initial_scale": 64.0})
    train(other, params, range(3))
    saved = other.state_dict(snapshot=True)
    saved["flat_fp32_weights"] = {k: list(v) for k, v in saved["flat_fp32_weights"].items()}
    return saved


@every_kind
@pytest.mark.parametrize("part", MISSING)
def test_row_18_a_state_dict_without_a_part(kind: str, part: str) -> None:
    """AssertionErrors, as of old; scaler, moments, masters and model stay as they are."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    change, pattern = MISSING[part]
    saved = saved_by_another(kind)
    change(saved)
    before = everything(ours, params)
    with pytest.raises(AssertionError, match=pattern):
        ours.load_state_dict(saved)
    assert everything(ours, params) == before
    assert_goes_on(params, ours, kind)


@every_kind
@pytest.mark.parametrize("index", [0, 1, 2])
def test_row_18_masters_of_other_shapes(kind: str, index: int) -> None:
    """Named, also where the saved one would broadcast; the tensors before it are not loaded."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    saved = saved_by_another(kind)
    another_shape(index)(saved)
    before = everything(ours, params)
    with pytest.raises(ValueError, match=NAMES[index]):
        ours.load_state_dict(saved)
    assert everything(ours, params) == before
    assert_goes_on(params, ours, kind)


UNUSABLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "no scale": without("grad_scaler", "_scale"),
    "no growth step": without("grad_scaler", "_growth_step"),
    "no groups of the base": without("base_optim_states", "param_groups"),
    "no state of the base": without("base_optim_states", "state"),
    "another number of groups in the base": lambda saved: saved["base_optim_states"][
        "param_groups"
    ].append(saved["base_optim_states"]["param_groups"][0]),
    "fewer parameters in the base": lambda saved: saved["base_optim_states"]["param_groups"][0][
        "params"
    ].pop(),
    "a master that is none": lambda saved: saved["flat_fp32_weights"][0].__setitem__(1, "weights"),
    "masters that are none": lambda saved: saved.update(flat_fp32_weights=None),
    "a scaler that is none": lambda saved: saved.update(grad_scaler=7),
    "a base that is none": lambda saved: saved.update(base_optim_states=7),
}


@every_kind
@pytest.mark.parametrize("how", UNUSABLE)
def test_row_18_parts_that_cannot_be_used(kind: str, how: str) -> None:
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    saved = saved_by_another(kind)
    UNUSABLE[how](saved)
    before = everything(ours, params)
    with pytest.raises((AssertionError, KeyError, AttributeError, *ERRORS)):
        ours.load_state_dict(saved)
    assert everything(ours, params) == before
    assert_goes_on(params, ours, kind)


@pytest.mark.parametrize("kind", BASES)
def test_row_18_moments_of_other_shapes(kind: str) -> None:
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    saved = saved_by_another(kind)
    another_moment(saved)
    before = everything(ours, params)
    with pytest.raises(ValueError, match=NAMES[1]):
        ours.load_state_dict(saved)
    assert everything(ours, params) == before
    assert_goes_on(params, ours, kind)


@every_kind
def test_row_18_state_dicts_of_something_else(kind: str) -> None:
    """Nothing, a base's own state dict, a model's: none has a grad_scaler state."""
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    before = everything(ours, params)
    for wrong in ({}, ours.optim.state_dict(), nn.Linear(2, 2).state_dict()):
        with pytest.raises(AssertionError, match="Not found grad_scaler state!"):
            ours.load_state_dict(wrong)
    assert everything(ours, params) == before


@every_kind
def test_loading_leaves_what_was_given_alone(kind: str) -> None:
    params, ours = named(kind, grad_scal_cfg=DYNAMIC)
    saved = saved_by_another(kind)
    kept = [bits(w) for w in saved["flat_fp32_weights"][0]]
    text = repr(saved)
    ours.load_state_dict(saved)
    train(ours, params, range(2))
    assert [bits(w) for w in saved["flat_fp32_weights"][0]] == kept
    assert repr(saved) == text
