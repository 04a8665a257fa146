"""FSDPadaptOptimizer and the plain reference take the same steps, overflows included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedMuon, muon_groups
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ...support.compare import assert_same_bits
from .reference import Reference
from .training import (
    ALL,
    BASES,
    BF16,
    FP16,
    FP32,
    FP64,
    KINDS,
    OTHERS,
    SHAPES,
    SHORT,
    coefficients,
    every_base,
    every_kind,
    loss_of,
    overflows,
    parameters,
    plant,
    train,
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
LOWER = DYNAMIC | {"initial_scale": 2.0**9}
RTOL, ATOL = 2e-6, 2e-7  # the rounding difference of the engine and torch after 50 steps


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
        base, expected = ALL[kind][0](grouped(self.params)), ALL[kind][-1](grouped(self.others))
        self.ours = FSDPadaptOptimizer(base, grad_scal_cfg=scaler, clip_grad_norm=clip)
        self.plain = Reference(expected, scaler, clip)
        self.both: Any = (self.ours, self.params), (self.plain, self.others)
        self.clipped = 0

    def backward(self, gradients: Sequence[Any]) -> None:
        for optimizer, params in self.both:
            optimizer.backward(loss_of(params, gradients))
        grads = [[p.grad for p in params if p.grad is not None] for _, params in self.both]
        assert_same_bits(*grads)

    def step(self) -> bool:
        result, expected = self.ours.step(), self.plain.step()
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
            assert not math.isfinite(norm) and not norm < 0
        self.compare()
        return expected

    def run(self, pattern: Sequence[bool], seed: int = 0) -> None:
        """Makes one step per item; items that are true overflow."""
        for step, overflow in enumerate(pattern, seed):
            gradients = coefficients(self.params, step)
            if overflow:
                plant(gradients, step)
            self.backward(gradients)
            assert not self.step() or not overflow

    def compare(self) -> None:
        mine, theirs = weights_of(self.ours), [w for _, w in self.plain.pairs]
        if self.exact:  # except float64, where the norms' last bits show
            narrow = [i for i, w in enumerate(theirs) if w.dtype != FP64]
            for ours, plain in ((mine, theirs), (self.params, self.others)):
                assert_same_bits([ours[i] for i in narrow], [plain[i] for i in narrow])
                torch.testing.assert_close(list(ours), list(plain), rtol=1e-12, atol=1e-14)
            return
        borders = total = 0  # parameters differ only where weights lie at a border of rounding
        for w, v, p, q in zip(mine, theirs, self.params, self.others, strict=True):
            torch.testing.assert_close(w, v, rtol=RTOL, atol=ATOL)
            assert_same_bits([p, q], [w.to(p.dtype), v.to(q.dtype)])
            if p.dtype in (BF16, FP16):
                near = v.abs() * RTOL + ATOL
                border = (v - near).to(p.dtype) != (v + near).to(p.dtype)
                assert_same_bits([p[~border]], [q[~border]])
                borders, total = borders + int(border.sum()), total + border.numel()
        assert borders <= 0.05 * total


def groups_of_one(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """A group may have no elements, be frozen, or get no gradient."""
    return [{"params": [p], "lr": 0.002 * (1 + i)} for i, p in enumerate(params)]


@every_base
@pytest.mark.parametrize(("dtype", "clip"), [(BF16, CLIP), (FP16, 0.0)], ids=str)
def test_fifty_steps(kind: str, dtype: torch.dtype, clip: float) -> None:
    """Steps agree for groups with odd, empty, 0-d, frozen and gradient-less tensors."""

    def make() -> list[nn.Parameter]:
        params = parameters(dtype, SHAPES)
        params[1].requires_grad_(False)
        return params

    twins = Twins(kind, make, DYNAMIC if dtype == FP16 else None, clip, groups_of_one)
    results, scales = [], set()
    for step, overflow in enumerate(overflows(STEPS)):
        gradients = coefficients(twins.params, step, size=1.0 if step % 3 else 0.01)
        if overflow:
            plant(gradients, step)
        if step % 4 == 1:
            gradients[4] = None
        twins.backward(gradients)
        results.append(twins.step())
        scales.add(float(twins.ours.loss_scale))
        assert not overflow or not results[-1]
    assert 10 < sum(results) < STEPS - 5
    assert (len(scales) > 4) == (dtype == FP16)
    assert (twins.clipped > 5) == (clip > 0)
    assert_same_bits([twins.params[1]], [parameters(dtype, SHAPES)[1]])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_any_base(name: str, dtype: torch.dtype) -> None:
    shapes = ((6, 4), (3, 5)) if name == "Muon" else SHORT  # Muon takes only matrices
    twins = Twins(name, lambda: parameters(dtype, shapes), LOWER, 2.0)
    twins.run([False, False, True, False, False, False])
    assert twins.plain.skipped_steps == 1


@every_base
@pytest.mark.parametrize("dtypes", [(FP32,), (BF16, FP32, FP16, FP64)], ids=str)
@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_wide_parameters_step_themselves(
    kind: str, dtypes: Sequence[torch.dtype], clip: float
) -> None:
    """Parameters of all dtypes may be in one group. Wide ones have no second copy."""

    def make() -> list[nn.Parameter]:
        return [p for i, dtype in enumerate(dtypes) for p in parameters(dtype, seed=i)]

    twins = Twins(kind, make, LOWER if FP16 in dtypes else None, clip)
    twins.run(overflows(12))
    assert 0 < twins.plain.skipped_steps < 6
    held = {id(p) for p in twins.ours.param_groups[0]["params"]}
    for p, weight in zip(twins.params, weights_of(twins.ours), strict=True):
        if p.dtype == FP32:
            assert id(p) in held and weight.data_ptr() == p.data_ptr()
        assert p.dtype in (BF16, FP16) or "master_weight" not in twins.ours.state[p]


@every_base
def test_what_user_code_sets_on_the_way(kind: str) -> None:
    """A step uses the current learning rates, threshold and loss scale."""
    twins = Twins(kind, lambda: parameters(BF16, SHAPES), LOWER, CLIP, groups_of_one)
    for step in range(16):
        for optimizer, _ in twins.both:
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.01 / (1 + step + 3 * index)
        clip, scale = (CLIP, 0.5, 0.0, -1.0)[step % 4], (8.0, 2.0**12, 1.0)[step % 3]
        if step % 3 == 0:
            assert twins.ours.clip_grad_norm(nn.Linear(1, 1), clip) is None
        elif step % 3 == 1:
            twins.ours.max_grad_norm = clip
        else:
            twins.ours._clip_grad_norm = clip  # as scripts around LightRFT's class do
        assert twins.ours.max_grad_norm == (clip if clip > 0 else None)
        if step % 2:
            twins.ours.loss_scale.fill_(scale)
        else:
            saved = twins.ours.grad_scaler.state_dict()
            twins.ours.grad_scaler.load_state_dict(saved | {"_scale": scale})
        twins.plain.clip_grad_norm, twins.plain.grad_scaler.scale = clip, scale
        twins.backward(coefficients(twins.params, step))
        assert twins.step()


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_parameters_that_come_and_go(kind: str, dtype: torch.dtype) -> None:
    """Parameters may be frozen at first or later, and groups added; no gradient is a step, too."""
    twins = Twins(kind, lambda: parameters(dtype), LOWER, CLIP)
    for step in range(9):
        if step == 4:
            late = [
                (optimizer, parameters(dtype, ((9,), (2, 3)), 3)) for optimizer, _ in twins.both
            ]
            for (optimizer, added), (_, params) in zip(late, twins.both, strict=True):
                optimizer.add_param_group({"params": added, "lr": 0.3})
                params += added
            assert_same_bits(weights_of(twins.ours)[3:], [p.float() for p in twins.params[3:]])
        for _, params in twins.both:
            params[1].requires_grad_(step in (2, 3, 5, 6))
        before = twins.params[1].detach().clone()
        if step != 7:
            twins.backward(coefficients(twins.params, step))
        assert twins.step()
        assert torch.equal(twins.params[1], before) == (step not in (2, 3, 5, 6))
    assert [len(params) for params in twins.ours.params_by_group] == [3, 2]


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind != "AdamW-fused"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_strides(kind: str, dtype: torch.dtype) -> None:
    """Parameters and gradients may have any strides, broadcast gradients included.

    torch's fused AdamW, as the reference's base, would mix up elements.
    """

    def make() -> list[nn.Parameter]:
        plain: list[Tensor] = [*parameters(dtype, ((5, 70), (4, 3, 2, 2), (9,)))]
        plain = [plain[0].t(), plain[1].to(memory_format=torch.channels_last), plain[2]]
        return [nn.Parameter(value.detach()) for value in plain]

    twins = Twins(kind, make)
    for step in range(4):
        for _, params in twins.both:
            gradients = [c.to(dtype) for c in coefficients(params, step)]
            if step % 2:
                gradients[0] = gradients[0].t().contiguous().t()
                gradients[1] = gradients[1].contiguous()
                gradients[2] = torch.ones((), dtype=dtype).expand(9)
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
        assert twins.step()
    assert [p.stride() for p in twins.params] == [q.stride() for q in twins.others]


@pytest.mark.parametrize("kind", BASES)
def test_state_from_before(kind: str) -> None:
    """State that the base has before wrapping applies to the masters from the first step."""
    params, others = parameters(), parameters()
    base, twin = (ALL[kind][0](each) for each in (params, others))
    for step in range(3):
        for optimizer, each in ((base, params), (twin, others)):
            for p, c in zip(each, coefficients(each, step), strict=True):
                p.grad = c.to(BF16)
            optimizer.step()
    ours = FSDPadaptOptimizer(base)
    ours.zero_grad()
    held = [p for group in ours.param_groups for p in group["params"]]
    assert set(ours.state) == set(held)
    for p, q in zip(held, others, strict=True):
        for name, value in twin.state[q].items():
            assert torch.equal(ours.state[p][name].float(), value.float())
    assert train(ours, params, [3]) == [True]
    assert "Adam" not in kind or [float(ours.state[p]["step"]) for p in held] == [4.0] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"master_weights": "fp32"},
        {"amsgrad": True},
        {"maximize": True, "weight_decay": 0.0},
        {"skip_nonfinite": True},
        {"max_grad_norm": 0.25},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("fused", "torchs"), [(FusedAdamW, torch.optim.AdamW), (FusedAdam, torch.optim.Adam)]
)
def test_options_of_a_fused_base(
    fused: Any, torchs: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base's options apply, and its threshold becomes the wrapper's."""
    plain = {k: v for k, v in options.items() if k in ("amsgrad", "maximize", "weight_decay")}
    makes = (lambda p: fused(p, lr=0.01, **options), lambda p: torchs(p, lr=0.01, **plain))
    monkeypatch.setitem(ALL, "Fused", makes)
    twins = Twins("Fused", parameters, LOWER, None)  # type: ignore[arg-type]
    twins.plain.clip_grad_norm = options.get("max_grad_norm", 1.0)
    twins.run([False, False, True, False, False, False])
    for name in ("master_weight", "exp_avg"):
        assert all(twins.ours.state[p][name].dtype == FP32 for p in twins.params)


@every_base
def test_a_state_dict_of_the_other_continues(kind: str) -> None:
    """After ten steps each loads the other's state dict, and ten more steps agree."""
    scaler = LOWER | {"dtype": BF16}
    twins = Twins(kind, lambda: parameters(BF16, SHAPES), scaler, CLIP, groups_of_one)
    twins.run([False, True, *[False] * 8])
    crossed = Twins(kind, lambda: parameters(BF16, SHAPES, 5), scaler, CLIP, groups_of_one)
    crossed.ours.load_state_dict(twins.plain.state_dict())
    crossed.plain.load_state_dict(twins.ours.state_dict())
    assert_same_bits(crossed.params, twins.others)
    assert_same_bits(crossed.others, twins.params)
    crossed.plain.skipped_steps = int(crossed.ours.skipped_steps)
    crossed.compare()
    crossed.run([False] * 10, seed=10)


@every_kind
def test_the_norm_survives_the_range_of_bfloat16(kind: str) -> None:
    """Gradients of 3e38, whose squares overflow float32, have a finite norm."""
    twins = Twins(kind, lambda: parameters(BF16, ((4, 4),)))
    for params in (twins.params, twins.others):
        params[0].grad = torch.full((4, 4), 3e38, dtype=BF16)
    assert twins.step()
    assert twins.ours.grad_norm > torch.finfo(FP32).max


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_float32_gradients_of_16_bit_parameters(kind: str, dtype: torch.dtype) -> None:
    """Gradients reduced in float32 keep their precision beyond 16 bits."""
    twins = Twins(kind, lambda: parameters(dtype), {"initial_scale": 1.0}, 0.0)
    for p in (*twins.params, *twins.others):
        p.grad_dtype = FP32
    for step in range(3):
        for _, params in twins.both:
            for p, c in zip(params, coefficients(params, step), strict=True):
                p.grad = c
        assert twins.step()


def test_muon_has_the_bits_of_its_own_masters() -> None:
    def trained(*, adapted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()).to(BF16)
        groups, options = muon_groups(model, quiet=True), {"lr": 0.01}
        own: dict[str, Any] = {"master_weights": "fp32", "max_grad_norm": 0.05}
        inner = FusedMuon(groups, **options, **({} if adapted else own))
        optimizer: Any = FSDPadaptOptimizer(inner, clip_grad_norm=0.05) if adapted else inner
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, dtype=BF16)).float().square().mean()
            optimizer.backward(loss) if adapted else loss.backward()
            optimizer.step()
        assert float(inner.control.clip_factor) < 1 and inner.control.orthogonalized == 1
        return [param.detach() for param in model.parameters()]

    assert_same_bits(trained(adapted=True), trained(adapted=False))
