"""The cost of a FSDPadaptOptimizer step on top of its base: operators, memory, waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .training import (
    BASES,
    BF16,
    DYNAMIC,
    FP16,
    FP32,
    KINDS,
    backward,
    coefficients,
    ours_of,
    parameters,
    reference_of,
    train,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


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


def scaled(kind: str, params: Any) -> Any:
    return ours_of(kind, params, grad_scal_cfg=DYNAMIC)


@every_kind
def test_the_host_waits_at_most_once(kind: str) -> None:
    """With any number of groups, a step reads at most one number from a tensor."""
    params = parameters(BF16, [(5,)] * 12)
    ours = scaled(kind, [{"params": [p]} for p in params])
    train(ours, params, range(2))
    backward(ours, params, coefficients(params, 2))
    with Operators() as seen:
        bool(ours.step())
    assert sum("_local_scalar_dense" in name for name in seen.names) <= 1


def allocated(run: Any) -> int:
    """Returns the bytes that operators allocated, whether freed since or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_no_temporaries_with_a_fused_base(dtype: torch.dtype) -> None:
    """A step of FusedAdamW allocates no float32 gradients and no other copies."""
    params = parameters(dtype, ((300, 400), (70_001,)))
    elements = sum(p.numel() for p in params)
    ours = scaled("FusedAdamW", params)
    train(ours, params, range(2))
    backward(ours, params, coefficients(params, 2))
    assert allocated(lambda: ours.step()) < elements // 20
    other = reference_of("FusedAdamW", parameters(dtype, ((300, 400), (70_001,))))
    train(other, other.model_groups[0], range(2))
    backward(other, other.model_groups[0], coefficients(params, 2))
    assert allocated(other.step) > 4 * elements  # shows that the measurement sees them


def test_one_float32_gradient_with_another_base() -> None:
    """The generic path allocates float32 gradients once, and nothing else of that size."""
    params = parameters(BF16, ((300, 400), (70_001,)))
    elements = sum(p.numel() for p in params)
    ours = scaled("SGD", params)
    train(ours, params, range(2))
    backward(ours, params, coefficients(params, 2))
    assert allocated(lambda: ours.step()) < 4.5 * elements + 8 * 120_000  # SGD's own decay term


# ---- operators -----------------------------------------------------------------------------------


def operators_of(kind: str, tensors: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the operator counts of a step of ours and of its base on float32 parameters."""
    params = parameters(dtype, [(5,)] * tensors)
    ours = scaled(kind, params)
    train(ours, params, range(2))
    backward(ours, params, coefficients(params, 2))
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


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_at_most_six_operators_beside_the_base(kind: str, dtype: torch.dtype) -> None:
    """The count does not depend on the number of tensors (replaced class: six per tensor)."""
    few, base_of_few = operators_of(kind, 3, dtype)
    many, base_of_many = operators_of(kind, 60, dtype)
    assert few - base_of_few <= 6
    assert many - base_of_many == few - base_of_few
