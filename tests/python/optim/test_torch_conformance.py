"""torch's own optimizer checks (test/test_optim.py, class TestOptimRenewed) on our classes.

The inputs come from torch.testing. The test bodies do not ship with torch and are rewritten here.
test_state_dict.py, test_step_inputs.py and test_versions_and_hooks.py have the checks of state
dicts, schedulers and hooks.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    TensorTracker,
)

from ...support.compare import bits, snapshot, unchanged
from ...support.problems import make_params, params_of, set_gradients, small_model, train
from ...support.ways import OURS, TORCH, each_class
from .subject import (
    CASE,
    NAMES,
    Regression,
    assert_close_to_torch,
    inputs,
    optimizer_info,
    params_for,
)


@each_class
@pytest.mark.parametrize("amsgrad", [False, True])
def test_moments_that_a_step_hook_makes(name: str, amsgrad: bool) -> None:
    """torch's users have bf16 moments by such a hook, where ours have ``state_dtype``."""

    def make_states(optimizer: Any, dtype: torch.dtype) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if not (state := optimizer.state[param]):
                state["step"] = torch.zeros(())
                keys = ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad)
                state |= {key: torch.zeros_like(param, dtype=dtype) for key in keys}

    hooked = OURS[name](make_params(), amsgrad=amsgrad)
    hooked.register_step_pre_hook(lambda optimizer, *_: make_states(optimizer, torch.bfloat16))
    expected = OURS[name](make_params(), amsgrad=amsgrad, state_dtype=torch.bfloat16)
    for optimizer in (hooked, expected):
        train(optimizer, range(3))
    assert snapshot(hooked) == snapshot(expected)
    wrong = OURS[name](make_params(), amsgrad=amsgrad)
    wrong.register_step_pre_hook(lambda optimizer, *_: make_states(optimizer, torch.int32))
    with unchanged(*params_of(wrong)), pytest.raises(ValueError, match=r"exp_avg of parameter 0"):
        train(wrong, [0])


STACKS = "only support 2D parameters"
"""The description of torch's error for what is no error here: a batch of matrices."""


def error_cases() -> list[Any]:
    return [
        pytest.param(name, index, id=f"{name}-{error.optimizer_error_input.desc}")
        for name in NAMES
        for index, error in enumerate(errors_of(name))
        if error.optimizer_error_input.desc != STACKS
    ]


def errors_of(name: str) -> list[ErrorOptimizerInput]:
    return optimizer_info(name).optim_error_inputs_func("cpu", torch.float32)


@pytest.mark.parametrize(("name", "index"), error_cases())
def test_errors(name: str, index: int) -> None:
    error = errors_of(name)[index]
    arguments: OptimizerInput = error.optimizer_error_input
    params = params_for(name) if arguments.params is None else arguments.params
    if error.error_on is OptimizerErrorEnum.STEP_ERROR:
        optimizer = OURS[name](params, **arguments.kwargs)
        with pytest.raises(ValueError, match=r"complex\w+; Muon does not support complex"):
            optimizer.step()
        return
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            OURS[name](params, **arguments.kwargs)
        return
    # foreach=True is rejected, whatever the rest.
    rejected = arguments.kwargs.get("foreach")
    with pytest.raises(
        (ValueError, RuntimeError) if rejected else error.error_type,
        match="foreach" if rejected else error.error_regex,
    ):
        OURS[name](params, **arguments.kwargs)


@each_class
def test_flags(name: str) -> None:
    """test_rejected_arguments.py has the flags that raise."""
    accepted = [{}, {"foreach": None}, {"fused": None}, {"fused": True}, {"differentiable": False}]
    accepted += [{"foreach": False}, {"capturable": True}, {"capturable": False}]
    runs = []
    for flags in accepted:
        optimizer = OURS[name](make_params(), **flags)
        train(optimizer, [0])
        runs.append(snapshot(optimizer))
    assert runs == [runs[0]] * len(runs)


@each_class
def test_tensor_betas(name: str) -> None:
    """Tensor betas are read again at each step."""
    betas = torch.tensor(0.9), torch.tensor(0.99)
    ours = OURS[name](make_params(), betas=betas)
    theirs = TORCH[name](make_params(), betas=(0.9, 0.99))
    for beta in (0.9, 0.7):
        betas[0].fill_(beta)
        theirs.param_groups[0]["betas"] = (beta, 0.99)
        for optimizer in (ours, theirs):
            train(optimizer, range(3))
    assert_close_to_torch(params_of(ours), params_of(theirs))


@inputs()
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr(name: str, kwargs: dict[str, Any], shape: tuple[int, ...]) -> None:
    """A tensor learning rate gives the bits of a float and is read again at each step."""
    lr = torch.full(shape, 2.0**-10)
    with_float, with_tensor = Regression(name), Regression(name)
    reference = OURS[name](with_float.params, **{**kwargs, "lr": 2.0**-10})
    optimizer = OURS[name](with_tensor.params, **{**kwargs, "lr": lr})
    for step in range(5):
        if step == 3:
            lr.mul_(0.5)
            reference.param_groups[0]["lr"] *= 0.5
        for problem, opt in ((with_float, reference), (with_tensor, optimizer)):
            problem.backward(opt)
            opt.step()
        assert bits(with_float.weight) == bits(with_tensor.weight)
        assert bits(with_float.bias) == bits(with_tensor.bias)


def compare_with_forloop(name: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    """Runs seven iterations, the third without gradients, one layer frozen in the fourth and fifth.

    After each comparison our values are set to torch's, so that differences do not accumulate.
    """
    data = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=dtype).reshape(3, 2)
    models, params, optimizers = [], [], []
    for cls, flags in ((TORCH[name], {"fused": False, "foreach": False}), (OURS[name], {})):
        model = small_model(dtype)
        torch.manual_seed(2)
        extra = torch.empty((), dtype=dtype).uniform_().requires_grad_()
        extra.grad = torch.rand_like(extra)
        params.append([*model.parameters(), extra])
        models.append(model)
        optimizers.append(cls(params[-1], **{**kwargs, **flags}))

    low_precision = dtype in (torch.bfloat16, torch.float16)
    tracker = TensorTracker({"atol": 5e-3, "rtol": 5e-3} if low_precision else {})
    for iteration in range(7):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if iteration in (3, 5):
                model[2].requires_grad_(iteration == 5)
            if iteration != 2:
                model(data).sum().backward()
            optimizer.step()
        for reference, mine in zip(*params, strict=True):
            tracker.add(reference)
            tracker.pop_check_set(mine, CASE)
            theirs, ours = optimizers[0].state[reference], optimizers[1].state[mine]
            assert theirs.keys() == ours.keys()
            for key in theirs:
                tracker.add(theirs[key])
                tracker.pop_check_set(ours[key], CASE)
    assert tracker.all_popped()


FORLOOP_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@each_class
@pytest.mark.parametrize("dtype", FORLOOP_DTYPES, ids=str)
def test_matches_forloop(name: str, dtype: torch.dtype) -> None:
    for optim_input in optimizer_info(name).optim_inputs_func(device="cpu", dtype=dtype):
        compare_with_forloop(name, dtype, optim_input.kwargs)


@each_class
def test_meta_parameters(name: str) -> None:
    """Parameters on the meta device are refused; once they have memory, a step works."""
    with torch.device("meta"):
        model = small_model()
    for p in model.parameters():
        p.grad = torch.rand_like(p)

    def construct_and_step() -> None:
        OURS[name](model.parameters()).step()

    with pytest.raises((RuntimeError, TypeError), match="meta"):
        construct_and_step()

    model.to_empty(device="cpu")  # replaces the parameters
    optimizer = OURS[name](model.parameters())
    for p in model.parameters():
        nn.init.ones_(p)
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all((p < 1).all() for p in model.parameters())


@inputs()
def test_noop_without_gradients(name: str, kwargs: dict[str, Any]) -> None:
    params = [torch.ones(2, 3), nn.Parameter(torch.ones(4, 2))]
    optimizer = OURS[name](params, **kwargs)
    with unchanged(*params):
        assert [optimizer.step(lambda: torch.tensor([1.0])) for _ in range(2)] == [1.0, 1.0]
    assert not any(optimizer.state[p] for p in params)


@inputs()
def test_noop_for_zero_gradients(name: str, kwargs: dict[str, Any]) -> None:
    optimizer = OURS[name](params_for(name), **kwargs | {"weight_decay": 0.0})  # which moves, too
    with unchanged(*params_of(optimizer)):
        train(optimizer, [0], scale=0.0)
    assert all(state["step"] == 1 for state in optimizer.state.values())


@inputs()
def test_printing(name: str, kwargs: dict[str, Any]) -> None:
    text = repr(OURS[name](params_for(name), **kwargs))
    assert text.startswith(f"Fused{name} (\nParameter Group 0\n")
    assert ("nesterov: True" if name == "Muon" else "betas: (0.9, 0.999)") in text
    optimizer = OURS[name](params_for(name), **kwargs, max_grad_norm=0.5, track=("norms",))
    settings = "max_grad_norm: 0.5\ntrack: ('norms',)\n"
    assert repr(optimizer) == text.replace("(\n", f"(\n{settings}", 1)


@inputs()
@pytest.mark.parametrize("extra", [{}, {"max_grad_norm": 0.5}], ids=["", "clipped"])
def test_gradients_are_not_written(
    name: str, kwargs: dict[str, Any], extra: dict[str, Any]
) -> None:
    optimizer = OURS[name](params_for(name), **kwargs, **extra)
    set_gradients(params_of(optimizer))
    gradients = [p.grad for p in params_of(optimizer)]
    versions = [g._version for g in gradients]
    with unchanged(*gradients):
        optimizer.step()
    assert [g._version for g in gradients] == versions
    assert all(p.grad is g for p, g in zip(params_of(optimizer), gradients, strict=True))


@inputs()
def test_step_counts(name: str, kwargs: dict[str, Any]) -> None:
    """Each parameter counts only the steps in which it has a gradient."""
    params = params_for(name)
    optimizer = OURS[name](params, **kwargs)
    for step in range(4):
        train(
            optimizer, [step], [p for i, p in enumerate(params) if i not in (1, 2)[: 1 + step % 2]]
        )
        optimizer.zero_grad()
    counts = [float(optimizer.state[p]["step"]) if optimizer.state[p] else None for p in params]
    assert counts == [4, None, 2, 4]


@pytest.mark.parametrize("name", NAMES)
def test_is_an_optimizer(name: str) -> None:
    """The classes subclass torch.optim.Optimizer, and their signatures extend torch's."""
    assert issubclass(OURS[name], torch.optim.Optimizer)
    ours = inspect.signature(OURS[name].__init__).parameters
    theirs = inspect.signature(TORCH[name].__init__).parameters
    positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [*ours][: len(positional)] == positional
    for key, parameter in theirs.items():
        if key == "decoupled_weight_decay":
            continue
        assert ours[key].default == parameter.default, key
        assert ours[key].kind == parameter.kind, key
