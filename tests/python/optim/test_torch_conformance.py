"""torch's own optimizer checks (test/test_optim.py, class TestOptimRenewed) on our classes.

The inputs come from torch.testing. The test bodies do not ship with torch and are rewritten here.
test_every_way.py and test_step_inputs.py have those of steps and schedulers, test_state_dict.py and
test_versions_and_hooks.py those of state dicts and hooks.
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
)

from ...support.compare import bits, snapshot, unchanged
from ...support.problems import make_params, params_of, train
from ...support.ways import OURS, TORCH, each_class
from .subject import NAMES, Regression, assert_close_to_torch, inputs, optimizer_info, params_for


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


@inputs()
def test_noop_without_gradients(name: str, kwargs: dict[str, Any]) -> None:
    params = [torch.ones(2, 3), nn.Parameter(torch.ones(4, 2))]
    optimizer = OURS[name](params, **kwargs)
    with unchanged(*params):
        assert [optimizer.step(lambda: torch.tensor([1.0])) for _ in range(2)] == [1.0, 1.0]
    assert not any(optimizer.state[p] for p in params)


@inputs()
def test_printing(name: str, kwargs: dict[str, Any]) -> None:
    text = repr(OURS[name](params_for(name), **kwargs))
    assert text.startswith(f"Fused{name} (\nParameter Group 0\n")
    assert ("nesterov: True" if name == "Muon" else "betas: (0.9, 0.999)") in text
    optimizer = OURS[name](params_for(name), **kwargs, max_grad_norm=0.5, track=("norms",))
    settings = "max_grad_norm: 0.5\ntrack: ('norms',)\n"
    assert repr(optimizer) == text.replace("(\n", f"(\n{settings}", 1)


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
