"""torch's own optimizer checks (test/test_optim.py, class TestOptimRenewed) on our classes.

The inputs come from torch.testing. The test bodies do not ship with torch and are rewritten here.
``COVERAGE`` names, for each of torch's checks, the test that covers it or why it does not apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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

from .subject import (
    CASE,
    NAMES,
    OURS,
    TORCH,
    Regression,
    assert_close_to_torch,
    bits,
    copy_params,
    each_class,
    inputs,
    make_params,
    optimizer_info,
    set_gradients,
    small_model,
    train,
)

CUDA = "needs CUDA; tests/python/ops runs the bodies of the CUDA kernels"
FOREACH = "tests torch's foreach implementation, which foreach=True would ask for: test_flags"
SPARSE = "refused, as by torch's Adam: test_refused_inputs.py::test_refused_gradients"
SECOND_ORDER = "only for LBFGS"

COVERAGE = {
    "test_optim_infos_do_not_specify_global_cliquey_kwargs": "checks torch.testing, not optimizers",
    "test_errors": "test_errors",
    "test_forloop_goes_right_direction": "test_matches_forloop",
    "test_forloop_goes_right_direction_multigpu": CUDA,
    "test_param_group_with_lrscheduler_goes_right_direction": (
        "test_step_inputs.py::test_schedulers"
    ),
    "test_tensor_lr": "test_tensor_lr",
    "test_rosenbrock_sparse": SPARSE,
    "test_complex": "test_parameter_kinds.py::test_complex",
    "test_complex_2d": "test_parameter_kinds.py::test_complex",
    "test_foreach_matches_forloop": FOREACH,
    "test_mixed_device_dtype": "test_step_inputs.py::test_mixed_dtypes",
    "test_set_default_dtype_works_with_foreach": "test_default_dtype",
    "test_foreach_large_tensor": FOREACH,
    "test_peak_memory_foreach": FOREACH,
    "test_fused_matches_forloop": "test_matches_forloop",
    "test_fused_error_on_params_on_meta": "test_meta_parameters",
    "test_fused_large_tensor": "tests/python/ops: an element count above 2**31 at operator level",
    "test_fused_does_not_step_if_foundinf": "test_clipping.py::test_found_inf_skips_the_step",
    "test_cpu_load_state_dict": CUDA,
    "test_param_groups_weight_decay": "test_clipping.py::test_one_norm_for_all_groups",
    "test_param_groups_lr": "test_clipping.py::test_one_norm_for_all_groups",
    "test_step_is_noop_when_params_have_no_grad": "test_noop_without_gradients",
    "test_step_is_noop_for_zero_grads": "test_noop_for_zero_gradients",
    "test_optimizer_can_be_printed": "test_printing",
    "test_state_dict_deterministic": "test_torch_state.py::test_state_dict_deterministic",
    "test_can_load_older_state_dict": "test_torch_state.py::test_older_state_dict",
    "test_can_load_from_to_named_state_dict": "test_torch_state.py::test_state_dict_deterministic",
    "test_save_load_equality_with_weights_only": "test_master_weights_state.py::test_save_and_load",
    "test_load_nontensor_step": "test_torch_state.py::test_older_state_dict",
    "test_state_dict_with_cuda_params": "test_master_weights_state.py::test_save_and_load",
    "test_state_dict_cross_device": CUDA,
    "test_state_dict_pre_hook": "test_torch_state.py::test_state_dict_hooks",
    "test_state_dict_post_hook": "test_torch_state.py::test_state_dict_hooks",
    "test_state_dict_pre_post_hook": "test_torch_state.py::test_state_dict_hooks",
    "test_load_state_dict_pre_hook_and_prepend": "test_torch_state.py::test_load_state_dict_hooks",
    "test_load_state_dict_post_hook": "test_torch_state.py::test_load_state_dict_hooks",
    "test_load_state_dict_pre_post_hook": "test_torch_state.py::test_load_state_dict_hooks",
    "test_step_post_hook": "test_torch_state.py::test_step_hooks",
    "test_step_pre_hook": "test_torch_state.py::test_step_hooks",
    "test_step_all_hooks": "test_torch_state.py::test_step_hooks_order",
    "test_deepcopy_copies_all_public_attrs": (
        "test_master_weights_state.py::test_copied_optimizer_continues_bitwise"
    ),
    "test_second_order_optims_return_consistent_types": SECOND_ORDER,
    "test_fused_cpu_matches_cuda": CUDA,
    "test_defaults_changed_to_foreach": FOREACH,
    "test_non_empty_state": "test_torch_state.py::test_state_after_a_step",
    "test_adamw_serialization": "test_torch_state.py::test_decoupled_weight_decay_key",
    "test_grads_are_never_inplaced_into": "test_gradients_are_not_written",
    "test_step_iteration": "test_step_counts",
    "test_fused_mixed_precision_numerics": "test_moments_that_a_step_hook_makes",
    "test_fused_mixed_precision_state_init": "test_moments_that_a_step_hook_makes",
    "test_fused_mixed_precision_hook_skips_existing_state": "test_moments_that_a_step_hook_makes",
    "test_fused_mixed_precision_rejects_unsupported_dtypes": "test_moments_that_a_step_hook_makes",
}


def test_coverage_table() -> None:
    """Every test that the table names exists."""
    here = Path(__file__)
    for check, where in COVERAGE.items():
        file, separator, function = where.rpartition("::")
        if not where.startswith("test_") or " " in where:
            assert len(where) > 10, f"{check} has no reason"
            continue
        source = (here.with_name(file) if separator else here).read_text()
        assert f"def {function}(" in source, f"{check}: no {where}"


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

    params, others = make_params(), make_params()
    hooked = OURS[name](params, amsgrad=amsgrad)
    hooked.register_step_pre_hook(lambda optimizer, *_: make_states(optimizer, torch.bfloat16))
    train(
        [hooked, OURS[name](others, amsgrad=amsgrad, state_dtype=torch.bfloat16)],
        [params, others],
        3,
    )
    assert all(map(torch.equal, params, others))
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in hooked.state.values())
    wrong = OURS[name](others, amsgrad=amsgrad)
    wrong.register_step_pre_hook(lambda optimizer, *_: make_states(optimizer, torch.int32))
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is torch.int32"):
        wrong.step()
    assert all(map(torch.equal, params, others))


def error_cases() -> list[Any]:
    return [
        pytest.param(name, index, id=f"{name}-{error.optimizer_error_input.desc}")
        for name in NAMES
        for index, error in enumerate(errors_of(name))
    ]


def errors_of(name: str) -> list[ErrorOptimizerInput]:
    return optimizer_info(name).optim_error_inputs_func("cpu", torch.float32)


@pytest.mark.parametrize(("name", "index"), error_cases())
def test_errors(name: str, index: int) -> None:
    error = errors_of(name)[index]
    given: OptimizerInput = error.optimizer_error_input
    params = make_params() if given.params is None else given.params
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            OURS[name](params, **given.kwargs)
        return
    # foreach=True is refused, whatever else is given.
    refused = given.kwargs.get("foreach")
    with pytest.raises(
        (ValueError, RuntimeError) if refused else error.error_type,
        match="foreach" if refused else error.error_regex,
    ):
        OURS[name](params, **given.kwargs)


@each_class
def test_flags(name: str) -> None:
    """Unsupported flags raise and name the argument; all other flags are accepted and step."""
    accepted = [{}, {"foreach": None}, {"fused": None}, {"fused": True}, {"differentiable": False}]
    accepted += [{"foreach": False}, {"capturable": True}, {"capturable": False}]
    for refused in ({"foreach": True}, {"fused": False}, {"differentiable": True}):
        with pytest.raises((ValueError, RuntimeError), match=next(iter(refused))):
            OURS[name](make_params(), **refused)
    for flags in accepted:
        params = make_params()
        before = copy_params(params)
        train([OURS[name](params, **flags)], [params], 1)
        assert all(bits(p) != bits(q) for p, q in zip(params, before, strict=True)), flags


@each_class
def test_tensor_betas(name: str) -> None:
    """Tensor betas are read again at each step."""
    mine, theirs = make_params(), make_params()
    betas = torch.tensor(0.9), torch.tensor(0.99)
    optimizers = [OURS[name](mine, betas=betas), TORCH[name](theirs, betas=(0.9, 0.99))]
    train(optimizers, [mine, theirs], 3)
    betas[0].fill_(0.7)
    optimizers[1].param_groups[0]["betas"] = (0.7, 0.99)
    train(optimizers, [mine, theirs], 3)
    assert_close_to_torch(mine, theirs)


@inputs()
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr(name: str, kwargs: dict[str, Any], shape: tuple[int, ...]) -> None:
    """A tensor learning rate gives the bits of a float and is read again at each step."""
    lr = torch.full(shape, 2.0**-10)
    with_float, with_tensor = Regression(), Regression()
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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
@pytest.mark.parametrize("default", [torch.float64, torch.float16], ids=str)
def test_default_dtype(name: str, default: torch.dtype) -> None:
    """Step counts are float32 under any default dtype, as in torch's fused optimizers."""
    with default_dtype(default):
        params = make_params(dtype=torch.float32)
        reference = copy_params(params)
        ours, theirs = OURS[name](params), TORCH[name](reference, fused=True)
        train([ours, theirs], [params, reference], 3)
        assert_close_to_torch(params, reference)
        for p, q in zip(params, reference, strict=True):
            assert ours.state[p]["step"].dtype == theirs.state[q]["step"].dtype == torch.float32
        ours.state.clear()
        ours.init_state()
        assert all(ours.state[p]["step"].dtype == torch.float32 for p in params)


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
    params = [torch.randn(2, 3), nn.Parameter(torch.randn(4))]
    before = [p.detach().clone() for p in params]
    optimizer = OURS[name](params, **kwargs)
    for _ in range(2):
        assert optimizer.step(lambda: torch.tensor([1.0])) == 1.0
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert not any(optimizer.state[p] for p in params)


@inputs()
def test_noop_for_zero_gradients(name: str, kwargs: dict[str, Any]) -> None:
    kwargs["weight_decay"] = 0.0  # decay alone changes parameters
    params = make_params()
    before = copy_params(params)
    optimizer = OURS[name](params, **kwargs)
    for p in params:
        p.grad = torch.zeros_like(p)
    assert optimizer.step(lambda: 5) == 5
    assert all(bits(p) == bits(q) for p, q in zip(params, before, strict=True))
    assert all(optimizer.state[p]["step"] == 1 for p in params)


@inputs()
def test_printing(name: str, kwargs: dict[str, Any]) -> None:
    text = repr(OURS[name](make_params(), **kwargs))
    assert text.startswith(f"Fused{name} (\nParameter Group 0\n")
    assert "betas: (0.9, 0.999)" in text
    optimizer = OURS[name](make_params(), **kwargs, max_grad_norm=0.5, track=("norms",))
    own = "max_grad_norm: 0.5\ntrack: ['norms']\n"
    assert repr(optimizer) == text.replace("(\n", f"(\n{own}", 1)


@inputs()
@pytest.mark.parametrize("extra", [{}, {"max_grad_norm": 0.5}], ids=["", "clipped"])
def test_gradients_are_not_written(
    name: str, kwargs: dict[str, Any], extra: dict[str, Any]
) -> None:
    params = make_params()
    optimizer = OURS[name](params, **kwargs, **extra)
    set_gradients(params)
    gradients = [p.grad for p in params]
    before = [(bits(g), g._version) for g in gradients]
    optimizer.step()
    assert [(bits(g), g._version) for g in gradients] == before
    assert all(p.grad is g for p, g in zip(params, gradients, strict=True))


@inputs()
def test_step_counts(name: str, kwargs: dict[str, Any]) -> None:
    """Each parameter counts only the steps in which it has a gradient."""
    params = make_params()
    optimizer = OURS[name](params, **kwargs)
    for step in range(4):
        set_gradients(params)
        params[1].grad = None
        if step % 2:
            params[2].grad = None
        optimizer.step()
    counts = [float(optimizer.state[p]["step"]) if optimizer.state[p] else None for p in params]
    assert counts == [4, None, 2, 4]


@each_class
def test_is_an_optimizer(name: str) -> None:
    """The classes subclass torch.optim.Optimizer, and their signatures extend torch's."""
    assert issubclass(OURS[name], torch.optim.Optimizer)
    import inspect

    ours = inspect.signature(OURS[name].__init__).parameters
    theirs = inspect.signature(TORCH[name].__init__).parameters
    for key, parameter in theirs.items():
        if key == "decoupled_weight_decay":
            continue
        assert ours[key].default == parameter.default, key
        assert ours[key].kind == parameter.kind, key
