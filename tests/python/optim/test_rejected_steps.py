"""Rejected parameters and steps raise by name, before any change, and a later step works."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from torchopt_ext import FusedAdamW
from torchopt_ext.optim import fused_step
from torchopt_ext.optim.context import StepContext

from ...support.compare import snapshot, unchanged
from ...support.problems import make_params, params_of, set_gradients, train
from ...support.ways import BF16, FP16, FP32, FP64

ERRORS = (TypeError, ValueError, RuntimeError)

# ---- parameters --------------------------------------------------------------------------------

PARAMETERS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "complex of 16 bits": (lambda: torch.ones(3, 2, dtype=torch.complex32), "(?i)complex"),
    "two inner tensors": (lambda: TwoTensor(torch.ones(3, 2), torch.ones(3, 2)), "TwoTensor"),
    "integer": (lambda: torch.ones(3, 2, dtype=torch.int32), "int"),
    "float8": (lambda: torch.ones(3, 2).to(torch.float8_e4m3fn), "(?i)float8"),
    "meta": (lambda: torch.ones(3, 2, device="meta"), "meta"),
    "expanded": (lambda: torch.ones(1, 2).expand(3, 2), "(?i)overlap|dense|share"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "(?i)sparse"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("unfrozen", [False, True], ids=["from the start", "frozen at first"])
def test_parameters(kind: str, unfrozen: bool) -> None:
    """The error names the parameter, at construction, when it joins, or when it gets a gradient."""
    make, message = PARAMETERS[kind]
    good, bad = nn.Parameter(torch.ones(4)), make()
    good.grad = torch.ones(4)
    named = [("first", good), ("second.weight", bad)]
    optimizer: Any = FusedAdamW([("first", good)])
    if unfrozen and kind == "expanded":
        pytest.skip("has state then, which names the parameter in every step")
    if unfrozen:
        optimizer = FusedAdamW(named)
        optimizer.step()
    if bad.is_floating_point() or bad.is_complex():
        bad.requires_grad_()
    bad.grad = bad.detach().clone()
    with unchanged(good), pytest.raises(ERRORS, match=message) as error:
        optimizer.step() if unfrozen else FusedAdamW(named).step()
    assert "second.weight" in str(error.value)
    if not unfrozen and bad.requires_grad and kind != "expanded":
        with unchanged(optimizer), pytest.raises(ERRORS, match=message):
            optimizer.add_param_group({"params": [("late", bad)]})
    bad.grad = None
    bad.requires_grad_(False)
    optimizer.step()


def test_parameters_without_names_are_numbered_over_all_groups() -> None:
    params = make_params()
    params[0].requires_grad_(False)  # has no state
    optimizer = FusedAdamW([{"params": params[:1]}, {"params": params[1:]}])
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    with unchanged(*params), pytest.raises(RuntimeError, match="gradient 1 has layout Sparse"):
        optimizer.step()
    late = nn.Parameter(torch.ones(2).to_sparse())
    with unchanged(optimizer), pytest.raises(TypeError, match=f"parameter {len(params)} of "):
        optimizer.add_param_group({"params": [late]})


def test_duplicates() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = FusedAdamW([p, p])
    p.grad = torch.ones(3)
    with unchanged(p), pytest.raises((ValueError, RuntimeError), match=r"parameter.*parameter"):
        optimizer.step()


View = Callable[[Tensor], Tensor]
SHARED: dict[str, tuple[View, View]] = {
    "ranges": (lambda m: m[:6], lambda m: m[4:]),
    "equal views": (lambda m: m[::2], lambda m: m[::2]),
    "one element": (lambda m: m[1::3], lambda m: m[4::6]),
    "columns": (lambda m: m.view(3, 4)[:, :3], lambda m: m.view(3, 4)[:, 2:]),
    "in a gap and beyond": (lambda m: m[::3], lambda m: m[2:4]),
}
APART: dict[str, tuple[View, View]] = {
    "in turns": (lambda m: m[::2], lambda m: m[1::2]),
    "columns": (lambda m: m.view(3, 4)[:, :2], lambda m: m.view(3, 4)[:, 2:]),
    "transposed columns": (lambda m: m.view(3, 4)[:, :2].t(), lambda m: m.view(3, 4)[:, 2:]),
    "in a gap": (lambda m: m[::3], lambda m: m[1:3]),
}


def views_of(memory: Tensor, views: tuple[View, View]) -> list[tuple[str, nn.Parameter]]:
    params = [(name, nn.Parameter(view(memory))) for name, view in zip("ab", views, strict=True)]
    for _, p in params:
        p.grad = torch.ones_like(p)
    return params


@pytest.mark.parametrize("views", SHARED)
def test_overlapping_parameters(views: str) -> None:
    memory = torch.ones(12)
    with unchanged(memory), pytest.raises(ERRORS, match=r"parameter . \('.'\) shares memory"):
        FusedAdamW(views_of(memory, SHARED[views])).step()


@pytest.mark.parametrize("views", APART)
def test_parameters_in_each_others_gaps_are_stepped(views: str) -> None:
    memory, reference = torch.ones(12), torch.ones(12)
    FusedAdamW(views_of(memory, APART[views]), lr=0.5).step()
    for _, p in views_of(reference, APART[views]):
        FusedAdamW([p], lr=0.5).step()
    assert torch.equal(memory, reference) and not torch.equal(memory, torch.ones(12))


# ---- steps -------------------------------------------------------------------------------------

MATRICES = ((4, 6), (3, 64), (2, 64), (3, 64))
Spoil = Callable[[list[nn.Parameter], Any], object]
WRITE_BACK: dict[str, Any] = {"max_grad_norm": 0.1, "write_back_gradients": True}
MASTER: dict[str, Any] = {"master_weights": "fp32"}
REMAINDER: dict[str, Any] = {"master_weights": "remainder"}
INT8: dict[str, Any] = {"state_dtype": "int8"}


def gradient(make: Callable[[nn.Parameter], Tensor]) -> Spoil:
    """Gives the second parameter another gradient."""

    def spoil(params: list[nn.Parameter], optimizer: Any) -> None:
        params[1].grad = None
        params[1].grad_dtype = None
        params[1].grad = make(params[1])

    return spoil


def entry(name: str, make: Callable[[Tensor], Any]) -> Spoil:
    """Replaces an entry of the second parameter's state."""

    def spoil(params: list[nn.Parameter], optimizer: Any) -> None:
        state = optimizer.state[params[1]]
        state[name] = make(state[name].clone())

    return spoil


def without(*names: str) -> Spoil:
    return lambda params, optimizer: [optimizer.state[params[1]].pop(name) for name in names]


def group(**values: Any) -> Spoil:
    return lambda params, optimizer: optimizer.param_groups[0].update(values)


def data(make: Callable[[Tensor], Tensor]) -> Spoil:
    """Replaces the second parameter's memory, and its gradient by one that fits."""

    def spoil(params: list[nn.Parameter], optimizer: Any) -> None:
        params[1].grad = None
        params[1].data = make(params[1].detach())
        params[1].grad = torch.ones_like(params[1])

    return spoil


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def memory(name: str, make: Callable[[Tensor], Tensor]) -> Spoil:
    """Replaces the memory of an entry of the second parameter, but not the entry."""

    def spoil(params: list[nn.Parameter], optimizer: Any) -> None:
        tensor = optimizer.state[params[1]][name]
        tensor.data = make(tensor)

    return spoil


def shared_entry(share: Callable[[dict[str, Any], Tensor], object]) -> Spoil:
    """Makes the moment of the second parameter share that of a parameter of the same shape."""
    return lambda params, optimizer: share(
        optimizer.state[params[3]], optimizer.state[params[1]]["exp_avg"]
    )


def shared_gradient(of: Callable[[list[nn.Parameter], Any], Tensor]) -> Spoil:
    return lambda params, optimizer: setattr(params[1], "grad", of(params, optimizer))


SCALES = ("exp_avg_scale_v2", "exp_avg_sq_scale_v2")
WRITTEN: dict[str, Callable[[list[nn.Parameter], Any], Tensor]] = {
    "another gradient": lambda params, optimizer: params[3].grad,  # would be clipped twice
    "another parameter": lambda params, optimizer: params[3].data,
    "the parameter": lambda params, optimizer: params[1].data,
    "a moment": lambda params, optimizer: optimizer.state[params[3]]["exp_avg"],
}


STEPS: dict[str, tuple[dict[str, Any], Spoil, str]] = {
    # gradients
    "sparse": ({}, gradient(lambda p: p.detach().to_sparse()), r"gradient 1 \('p1'\) has layout"),
    "freed": ({}, gradient(freed), r"gradient 1 \('p1'\).*freed"),
    "two tensors": (
        {}, gradient(lambda p: TwoTensor(p.detach(), p.detach())),
        r"gradient 1 \('p1'\) is a tensor subclass without memory of its own",
    ),
    "double": ({}, gradient(lambda p: p.double()), r"gradient 1 \('p1'\).*float64"),
    "integer": ({}, gradient(lambda p: p.long()), r"gradient 1 \('p1'\).*int64"),
    "complex": ({}, gradient(lambda p: p + 0j), r"gradient 1 \('p1'\).*complex64"),
    "transposed": (WRITE_BACK, gradient(lambda p: torch.randn(64, 3).t()), "gradient 1 .*strides"),
    "strided": (WRITE_BACK, gradient(lambda p: torch.ones(3, 128)[:, ::2]), "strides"),
    "expanded": (
        WRITE_BACK, gradient(lambda p: torch.ones(3, 1).expand(3, 64)), "gradient 1 .*strides",
    ),
    **{f"gradient that is {name}": (WRITE_BACK, shared_gradient(of), "shares memory with")
       for name, of in WRITTEN.items()},
    # state
    **{f"no {name}": ({}, without(name), f"'p1' has a step count and no {name}")
       for name in ("exp_avg", "exp_avg_sq")},
    "no scales": (INT8, without(*SCALES), "has a step count and no exp_avg_scale_v2"),
    "scales of another shape": (
        INT8, entry(SCALES[0], lambda t: t.new_zeros(4, 2)), r"exp_avg_scale_v2 of .*\(4, 2\)",
    ),
    "amsgrad beside 8 bits": (INT8, group(amsgrad=True), "8-bit moments, which amsgrad does not"),
    **{f"{name} of another shape": ({}, entry(name, lambda _: torch.ones(8)), name)
       for name in ("exp_avg", "exp_avg_sq", "step")},
    **{f"{layout} moment": ({}, entry("exp_avg", lambda t, to=layout: t.to_sparse(layout=to)),
                            r"exp_avg of 'p1' is .*sparse")
       for layout in (torch.sparse_coo, torch.sparse_csr)},
    "integer moment": ({}, entry("exp_avg", lambda t: t.int()), "exp_avg of 'p1' is"),
    "text": ({}, entry("exp_avg", lambda t: "text"), "exp_avg"),
    "step of NaN": ({}, entry("step", lambda t: t.fill_(math.nan)), "step"),
    "shared moments": ({}, shared_entry(lambda entry, t: entry.update(exp_avg=t)), "exp_avg"),
    "shared memory": (
        {}, shared_entry(lambda entry, t: setattr(entry["exp_avg"], "data", t)), "exp_avg",
    ),
    **{f"freed {name}": (REMAINDER, entry(name, freed), "storage|memory")
       for name in ("step", "remainder", "exp_avg")},
    **{f"master of {shape}": (MASTER, entry("master_weight", lambda t, s=shape: torch.ones(s)),
                              "master_weight of 'p1' has shape")
       for shape in ((3,), (4, 48), (192,))},
    "double master": (
        MASTER, entry("master_weight", lambda t: t.double()), "master_weight of 'p1' is"
    ),
    "memory of another shape in a master": (
        MASTER, memory("master_weight", lambda t: torch.ones(6, 32)), "master_weight of 'p1' has",
    ),
    # groups
    "eps": ({}, group(eps="small"), "eps is 'small', expected a number"),
    "lr of two elements": ({}, group(lr=torch.ones(2)), "lr"),
    "freed lr": ({}, group(lr=freed(torch.tensor(0.1))), "lr has no memory to be read"),
    "sparse lr": ({}, group(lr=torch.ones(1).to_sparse()), "lr has no memory to be read"),
    "decay_follows_lr": (  # it would be a learning rate of 1
        {}, group(decay_follows_lr=True), "decay_follows_lr is True, expected a learning rate",
    ),
    # parameters
    "another dtype": ({}, data(lambda t: t.double()), r"exp_avg 1 .*has dtype float32.* float64"),
    **{f"shape {shape}": ({}, data(lambda t, s=shape: torch.randn(s)),
                          "exp_avg of 'p1' has shape") for shape in ((2, 64), (7, 7), (192,))},
}  # fmt: skip


@pytest.mark.parametrize("joint", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("kind", STEPS)
def test_steps(kind: str, joint: bool) -> None:
    """No parameter of any optimizer of a joint step changes, and later steps are as if without."""
    options, spoil, message = STEPS[kind]
    dtype = BF16 if "master_weights" in options else FP32
    runs = []
    for _ in range(2):
        params = make_params(MATRICES, dtype)
        optimizer = FusedAdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=0.1, **options)
        other = FusedAdamW(make_params(dtype=dtype), lr=0.1, **options)
        for each in (optimizer, other):
            train(each, range(2))
            set_gradients(params_of(each), seed=9)
        runs.append((params, optimizer, other))
    (params, optimizer, other), (_, twin, other_twin) = runs
    stepped, twins = [other, optimizer][not joint :], [other_twin, twin][not joint :]
    restore = restoration(params, optimizer)
    spoil(params, optimizer)
    with unchanged(*stepped), pytest.raises(ERRORS, match=message):
        fused_step(stepped) if joint else optimizer.step()
    restore()
    fused_step(stepped)
    fused_step(twins)
    assert snapshot(optimizer) == snapshot(twin)


def restoration(params: list[nn.Parameter], optimizer: Any) -> Callable[[], None]:
    """Returns a function that puts back memory, gradients, state and groups as they are now."""
    held = [(p, p.data, p.grad, dict(optimizer.state[p])) for p in params]
    memory = [(t, t.data) for _, _, _, state in held for t in state.values()]
    values = dict(optimizer.param_groups[0])

    def restore() -> None:
        for tensor, kept in memory:
            tensor.data = kept
        for p, kept, grad, state in held:
            p.grad = None
            p.data, optimizer.state[p] = kept, state
            p.grad_dtype, p.grad = p.dtype, grad
        optimizer.param_groups[0].clear()
        optimizer.param_groups[0].update(values)

    return restore


@pytest.mark.parametrize(
    ("param", "gradient"),
    [(FP32, FP64), (FP64, FP32), (FP64, BF16), (BF16, FP16), (FP16, BF16), (BF16, FP64),
     (torch.complex64, FP32), (torch.complex64, torch.complex128)],
)  # fmt: skip
def test_gradients_of_another_dtype(param: torch.dtype, gradient: torch.dtype) -> None:
    params = make_params(dtype=param)
    optimizer = FusedAdamW(params, max_grad_norm=1.0)
    train(optimizer, [0])
    params[2].grad = None
    params[2].grad_dtype = None
    params[2].grad = torch.ones_like(params[2], dtype=gradient)
    with unchanged(optimizer), pytest.raises(RuntimeError, match=r"gradient 2 .*has dtype"):
        optimizer.step()
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()
    assert optimizer.state[params[2]]["step"] == 2


@pytest.mark.parametrize("context", [
    *({name: bad} for name in ("grad_scale", "found_inf")
      for bad in (torch.ones((), dtype=FP64), torch.ones(2), freed(torch.ones(())))),
])  # fmt: skip
def test_tensors_of_a_scaler(context: dict[str, Tensor]) -> None:
    optimizers = [FusedAdamW(make_params()) for _ in range(2)]
    for optimizer in optimizers:
        train(optimizer, [0])
    with unchanged(*optimizers), pytest.raises(RuntimeError, match=next(iter(context))):
        fused_step(optimizers, StepContext(**context))
    fused_step(optimizers)


def test_joint_steps() -> None:
    first, second = (FusedAdamW(make_params(), max_grad_norm=1.0) for _ in range(2))
    set_gradients(params_of(first), params_of(second))
    with unchanged(first, second), pytest.raises(ValueError, match="optimizer 2 is listed twice"):
        fused_step([second, first, first])
    second.max_grad_norm = 2.0
    with unchanged(first, second), pytest.raises(ValueError, match="differ"):
        fused_step([first, second])
    second.max_grad_norm = 1.0
    fused_step([second, first])  # not still held by the failed call


def test_blocks_of_another_device() -> None:
    def elsewhere(like: Tensor) -> Any:
        arguments = {"dtype": like.dtype, "device": "xpu:0"}
        return Tensor._make_wrapper_subclass(TwoTensor, like.shape, **arguments)  # type: ignore[attr-defined]

    optimizer = FusedAdamW(make_params())
    train(optimizer, [0])
    control, accumulator = optimizer._block(torch.device("cpu"))
    plan = optimizer.collect().plan
    groups = optimizer.param_groups, optimizer.state
    with unchanged(optimizer):
        for call in (
            lambda: plan.accumulate(0, elsewhere(accumulator)),
            lambda: plan.step(*groups, control, elsewhere(accumulator), True, None, None),
            lambda: plan.step(*groups, elsewhere(control), accumulator, True, None, None),
            lambda: plan.update([elsewhere(control)]),
        ):
            plan.collect(*groups)
            with pytest.raises(RuntimeError, match="is on xpu:0, expected cpu"):
                call()
    optimizer.step()
    for call in (lambda: plan.accumulate(0, accumulator), lambda: plan.update([control])):
        with pytest.raises(RuntimeError, match="have not been collected"):
            call()
