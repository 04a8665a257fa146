"""What a step of FSDPadaptOptimizer decides (skip, scale, threshold), and what it costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ...support.compare import bits
from .reference import Reference
from .training import (
    BASES,
    BF16,
    DYNAMIC,
    FP16,
    FP32,
    FP64,
    SPECIALS,
    coefficients,
    every_base,
    every_kind,
    loss_of,
    ours_of,
    parameters,
    train,
    unchanged,
)


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("special", SPECIALS)
def test_an_overflow_changes_nothing(
    kind: str,
    dtype: torch.dtype,
    special: float,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At any element: gradients clear, the scale backs off, the norm tells, a line is logged."""
    params = parameters(dtype)
    ours = ours_of(kind, params, grad_scal_cfg=DYNAMIC | {"hysteresis": 1})
    train(ours, params, range(2))
    assert not caplog.records
    places = [(p, at) for p in range(3) for at in (0, params[p].numel() // 2, -1)]
    for count, (tensor, at) in enumerate(places, 1):
        gradients = coefficients(params, 9)
        gradients[tensor].view(-1)[at] = special
        with unchanged(ours, params, "scaler", "norm", "skipped"):
            ours.backward(loss_of(params, gradients))
            assert not ours.step()
        assert ours.skipped_steps == count
        scale = max(2.0 ** (8 - count), 1.0)
        counts = {"_scale": scale, "_growth_step": 0, "_hysteresis_step": count}
        assert ours.grad_scaler.state_dict() == counts
        assert ours.grad_norm.shape == () and ours.grad_norm.dtype == FP64
        assert math.isnan(ours.grad_norm) if math.isnan(special) else math.isinf(ours.grad_norm)
        assert not ours.grad_norm < 0
    assert capfd.readouterr() == ("", "")
    assert {record.getMessage() for record in caplog.records} == {
        "a gradient was not finite: the step was skipped"
    }
    before = bits(params[0])
    assert train(ours, params, [3]) == [True]
    assert bits(params[0]) != before


@pytest.mark.parametrize(
    ("base", "argument", "expected"),
    [(None, None, 1.0), (2.5, None, 2.5), (2.5, 7.0, 7.0), (2.5, 0.0, None), (0.0, None, 1.0)],
)
def test_the_threshold(base: float | None, argument: float | None, expected: float | None) -> None:
    """The base's threshold applies unless an argument overrides it, and then there is one."""
    params = parameters()
    inner = FusedAdamW(params, max_grad_norm=base)
    ours = FSDPadaptOptimizer(inner, clip_grad_norm=argument)
    assert ours.max_grad_norm == expected
    for threshold in (0.25, None):
        ours.max_grad_norm = threshold
        train(ours, params, [0])
        assert inner.max_grad_norm == ours.max_grad_norm == threshold


@every_kind
def test_the_default_scale(kind: str) -> None:
    """The scale is static for bfloat16 and float32, over any steps, and dynamic for float16."""
    frozen = [p.requires_grad_(False) for p in parameters(FP16, ((3,),))]
    for params in (parameters(FP32, ((3,),)), frozen + parameters(BF16, ((3,),))):
        ours = ours_of(kind, params)
        assert ours.loss_scale is ours.grad_scaler.scale
        for gradient in [1.0] * 1003 + [math.nan]:
            params[-1].grad = torch.full_like(params[-1], gradient)
            ours.step()
        assert ours.skipped_steps == 1 and ours.loss_scale == 1.0
    params = parameters(FP16, ((3,),)) + parameters(BF16, ((3,),), seed=1)
    ours = ours_of(kind, params)
    assert ours.loss_scale == 2.0**16
    for step in range(3):
        assert train(ours, params, [step], overflow=step) == [False]
    assert ours.loss_scale == 2.0**14


def test_configurations() -> None:
    """The scaler's arguments may be flat, or nested as in InternEvo."""
    limits = {"growth_factor": 4.0, "backoff_factor": 0.25, "max_scale": 2.0**13, "hysteresis": 1}
    inner = {"initial_scale": 2.0**10, "min_scale": 2.0**9, "growth_interval": 3}
    for config in (inner | limits, limits | {"fp16": inner}):
        text, params = repr(config), parameters()
        ours = ours_of("SGD", params, grad_scal_cfg=config)
        scales = []
        for step in range(8):
            train(ours, params, [step], overflow=step if step in (3, 4) else None)
            scales.append(math.log2(ours.loss_scale))
        assert scales == [10, 10, 12, 10, 9, 9, 9, 11]
        assert repr(config) == text


# ---- cost ----------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Records operator calls, except profiler marks and aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not str(func).startswith(("profiler.", "aten.detach.")):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ready(kind: str, params: Any, groups: int = 1) -> Any:
    """Returns an optimizer that has made two steps and got the gradients of a third."""
    split = [{"params": params[i::groups]} for i in range(groups)]
    ours = ours_of(kind, split, grad_scal_cfg=DYNAMIC)
    train(ours, params, range(2))
    ours.backward(loss_of(params, coefficients(params, 2)))
    return ours


@every_kind
def test_the_host_waits_at_most_once(kind: str) -> None:
    """With any number of groups, a step reads at most one number from a tensor."""
    ours = ready(kind, parameters(BF16, [(5,)] * 12), groups=12)
    with Operators() as seen:
        bool(ours.step())
    assert sum("_local_scalar_dense" in name for name in seen.names) <= 1


def allocated(run: Any) -> int:
    """Returns the bytes that operators allocated, whether freed since or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_memory_of_a_step(dtype: torch.dtype) -> None:
    """A fused base needs no float32 gradients and no copies, another base float32 gradients."""
    sizes = ((300, 400), (70_001,))
    elements = 300 * 400 + 70_001
    assert allocated(ready("FusedAdamW", parameters(dtype, sizes)).step) < elements // 20
    decay = 4 * 300 * 400  # SGD's own term
    assert allocated(ready("SGD", parameters(dtype, sizes)).step) < 4.5 * elements + 2 * decay
    params = parameters(dtype, sizes)
    plain = Reference(BASES["FusedAdamW"][-1](params))
    train(plain, params, range(2))
    plain.backward(loss_of(params, coefficients(params, 2)))
    assert allocated(plain.step) > 4 * elements  # shows that the measurement sees them


def operators_of(kind: str, tensors: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the operator counts of a step of ours and of its base on float32 parameters."""
    ours = ready(kind, parameters(dtype, [(5,)] * tensors))
    with Operators() as seen:
        ours.step()
    wide = parameters(FP32, [(5,)] * tensors)
    base = BASES[kind][0](wide)
    for _ in range(3):
        for p in wide:
            p.grad = torch.ones_like(p)
        with Operators() as alone:
            base.step()
    return len(seen.names), len(alone.names)


@every_base
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_at_most_six_operators_beside_the_base(kind: str, dtype: torch.dtype) -> None:
    """The count does not depend on the number of tensors."""
    few, base_of_few = operators_of(kind, 3, dtype)
    many, base_of_many = operators_of(kind, 60, dtype)
    assert few - base_of_few <= 6
    assert many - base_of_many == few - base_of_few
