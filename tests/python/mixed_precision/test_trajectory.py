"""FSDPadaptOptimizer and the plain reference take the same 50 steps, overflows included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..optim.subject import assert_same_bits
from .training import (
    BASES,
    BF16,
    FP16,
    FP32,
    FP64,
    SHORT,
    Coefficients,
    backward,
    coefficients,
    gradients,
    ours_of,
    overflows,
    parameters,
    plant,
    reference_of,
    weights_of,
)

STEPS = 50
CLIP = 8.0  # clips gradients of norm 25, but not of norm 0.25
DYNAMIC: dict[str, Any] = {
    "initial_scale": 2.0**16,  # overflows float16 without planting
    "growth_interval": 5,
    "hysteresis": 2,
    "dtype": FP16,
}
RTOL, ATOL = 2e-6, 2e-7  # the rounding difference of the engine and torch after 50 steps

every_base = pytest.mark.parametrize("kind", BASES)


class Twins:
    """Ours and the reference over equal parameters. ``step`` checks that both agree."""

    def __init__(
        self,
        kind: str,
        make: Callable[[], list[nn.Parameter]],
        scaler: dict[str, Any] | None = None,
        clip: float = 1.0,
        grouped: Callable[[list[nn.Parameter]], Any] = lambda params: params,
    ) -> None:
        # Other bases run the same code on both sides. The engine rounds less often than torch does.
        self.exact = not kind.startswith("Fused")
        self.params, self.others = make(), make()
        self.ours = ours_of(kind, grouped(self.params), grad_scal_cfg=scaler, clip_grad_norm=clip)
        self.plain = reference_of(kind, grouped(self.others), scaler, clip)
        self.steps = self.clipped = 0

    def backward(self, given: Coefficients) -> None:
        backward(self.ours, self.params, given)
        backward(self.plain, self.others, given)

    def step(self) -> bool:
        assert_same_bits(gradients(self.params), gradients(self.others))
        result, expected = self.ours.step(), self.plain.step()
        self.steps += 1
        assert result is expected
        assert all(p.grad is None for p in self.params)
        assert self.ours.grad_scaler.state_dict() == self.plain.grad_scaler.state_dict()
        assert float(self.ours.loss_scale) == self.plain.grad_scaler.scale
        assert int(self.ours.skipped_steps) == self.plain.skipped_steps
        norm = float(self.ours.grad_norm)
        if expected:
            assert norm == pytest.approx(self.plain.grad_norm, rel=1e-6, abs=0)
            self.clipped += norm > self.plain.clip_grad_norm > 0
        else:
            assert not math.isfinite(norm)
        self.compare()
        return expected

    def run(self, pattern: Sequence[bool]) -> None:
        """Runs one step per item; items that are true overflow."""
        for step, overflow in enumerate(pattern):
            given = coefficients(self.params, step)
            if overflow:
                plant(given, step)
            self.backward(given)
            self.step()

    def compare(self) -> None:
        mine, theirs = weights_of(self.ours), [w for _, w in self.plain.pairs()]
        if self.exact:  # except float64, where the norms' last bits show
            narrow = [i for i, w in enumerate(theirs) if w.dtype != FP64]
            for ours, plain in ((mine, theirs), (self.params, self.others)):
                assert_same_bits([ours[i] for i in narrow], [plain[i] for i in narrow])
                torch.testing.assert_close(list(ours), list(plain), rtol=1e-12, atol=1e-14)
            return
        assert_rounded_alike(mine, theirs, self.params, self.others)


def assert_rounded_alike(
    mine: Sequence[Tensor], theirs: Sequence[Tensor], params: Sequence[Tensor],
    others: Sequence[Tensor],
) -> None:  # fmt: skip
    """Asserts weights equal to a few float32 ulps, and parameters equal except at borders."""
    borders = total = 0
    for w, v, p, q in zip(mine, theirs, params, others, strict=True):
        torch.testing.assert_close(w, v, rtol=RTOL, atol=ATOL)
        assert_same_bits([p], [w.to(p.dtype)])
        assert_same_bits([q], [v.to(q.dtype)])
        if p.dtype in (BF16, FP16):
            near = v.abs() * RTOL + ATOL
            border = (v - near).to(p.dtype) != (v + near).to(p.dtype)
            assert_same_bits([p[~border]], [q[~border]])
            borders, total = borders + int(border.sum()), total + border.numel()
    assert borders <= 0.05 * total


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.002}]


# ---- the 50 steps --------------------------------------------------------------------------------


@every_base
@pytest.mark.parametrize(("dtype", "clip"), [(BF16, CLIP), (FP16, 0.0)], ids=str)
def test_fifty_steps(kind: str, dtype: torch.dtype, clip: float) -> None:
    """Steps agree for two groups with odd, empty, 0-d, frozen and gradient-less tensors."""

    def make() -> list[nn.Parameter]:
        params = parameters(dtype)
        params[1].requires_grad_(False)
        return params

    scaler = DYNAMIC if dtype == FP16 else None
    twins = Twins(kind, make, scaler, clip, two_groups)
    results, scales = [], set()
    for step, overflow in enumerate(overflows(STEPS)):
        given = coefficients(twins.params, step, size=1.0 if step % 3 else 0.01)
        if overflow:
            plant(given, step)
        if step % 4 == 1:
            given[4] = None
        twins.backward(given)
        results.append(twins.step())
        scales.add(float(twins.ours.loss_scale))
        assert not overflow or not results[-1]
    assert 10 < sum(results) < STEPS - 5
    assert (len(scales) > 4) == (dtype == FP16)
    assert (twins.clipped > 5) == (clip > 0)
    assert_same_bits([twins.params[1]], [parameters(dtype)[1]])


@every_base
@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
def test_full_precision_passes_through(kind: str, clip: float) -> None:
    """Steps agree for float32 parameters with a scale of 1, which step themselves."""
    twins = Twins(kind, lambda: parameters(FP32), None, clip, two_groups)
    twins.run(overflows(20))
    assert 0 < twins.plain.skipped_steps < 10
    assert_same_bits(twins.params, weights_of(twins.ours))


@every_base
def test_dtypes_side_by_side(kind: str) -> None:
    """Steps agree with float16, bfloat16, float32 and float64 parameters in one group."""

    def make() -> list[nn.Parameter]:
        dtypes = (BF16, FP32, FP16, FP64)
        return [parameters(dtype, ((4, 5),), seed)[0] for seed, dtype in enumerate(dtypes)]

    twins = Twins(kind, make, DYNAMIC | {"initial_scale": 2.0**10}, 2.0)
    twins.run(overflows(20))
    assert 0 < twins.plain.skipped_steps < 10


@every_base
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradients_accumulate(kind: str, dtype: torch.dtype) -> None:
    """Steps agree for three backward calls per step, with an overflow in one of them."""
    scaler = DYNAMIC | {"initial_scale": 2.0**9}
    twins = Twins(kind, lambda: parameters(dtype, SHORT), scaler, CLIP)
    for step, overflow in enumerate(overflows(15)):
        for micro in range(3):
            given = coefficients(twins.params, 3 * step + micro)
            if overflow and micro == step % 3:
                plant(given, step)
            twins.backward(given)
        assert twins.step() == (not overflow)
    assert twins.clipped > 5


@every_base
def test_schedule_and_threshold_change_on_the_way(kind: str) -> None:
    """A step uses the current learning rates and threshold."""
    scaler = DYNAMIC | {"initial_scale": 8.0}
    twins = Twins(kind, lambda: parameters(BF16), scaler, CLIP, two_groups)
    for step in range(12):
        for optimizer in (twins.ours, twins.plain):
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.01 / (1 + step + 3 * index)
        clip = (CLIP, 0.5, 0.0)[step % 3]
        assert twins.ours.clip_grad_norm(None, clip) is None
        twins.plain.clip_grad_norm = clip
        twins.backward(coefficients(twins.params, step))
        assert twins.step()


@every_base
def test_a_state_dict_of_the_other_continues(kind: str) -> None:
    """After ten steps each loads the other's state dict, and ten more steps agree."""
    scaler = DYNAMIC | {"initial_scale": 2.0**9, "dtype": BF16}
    twins = Twins(kind, lambda: parameters(BF16), scaler, CLIP, two_groups)
    twins.run([False, True, *[False] * 8])
    crossed = Twins(kind, lambda: parameters(BF16, seed=5), scaler, CLIP, two_groups)
    crossed.ours.load_state_dict(twins.plain.state_dict())
    crossed.plain.load_state_dict(twins.ours.state_dict())
    assert_same_bits(crossed.params, twins.others)
    assert_same_bits(crossed.others, twins.params)
    crossed.plain.skipped_steps = int(crossed.ours.skipped_steps)
    crossed.compare()
    for step in range(10, 20):
        crossed.backward(coefficients(crossed.params, step))
        assert crossed.step()
