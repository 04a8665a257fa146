"""FSDPadaptOptimizer around other bases, tensor layouts, and with its parts set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ..optim.subject import assert_same_bits, bits
from .plain_reference import PlainFSDPOptimizer, ReferenceScaler
from .training import (
    BASES,
    BF16,
    DYNAMIC,
    FP32,
    KINDS,
    SHORT,
    backward,
    coefficients,
    content,
    everything,
    ours_of,
    parameters,
    plant,
    reference_of,
    trained,
    weights_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


class Signs(torch.optim.Optimizer):
    """A user's own optimizer, with state of its own kinds."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("kept", [torch.zeros(2)])[0][0] += 1
                p.sub_(p.grad.sign() + p.grad, alpha=group["lr"] / state["count"])


class LowRank(torch.optim.Optimizer):
    """Keeps a moment with fewer columns than the parameter, under a common name."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad.reshape(p.shape[0], -1).mean(1, keepdim=True)
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(rows))
                    moment.lerp_(rows, 0.5)
                    p.sub_(moment.reshape(-1, *[1] * (p.dim() - 1)) + p.grad, alpha=group["lr"])


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=False),
    "ASGD": lambda params: torch.optim.ASGD(params),
    "NAdam": lambda params: torch.optim.NAdam(params, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD maximize": lambda params: torch.optim.SGD(params, lr=0.1, maximize=True, nesterov=True,
                                                   momentum=0.5),
    "a user's": lambda params: Signs(params),
    "of low rank": lambda params: LowRank(params),
}  # fmt: skip


def drive(
    optimizer: Any, params: list[nn.Parameter], steps: range, overflow: int | None = None
) -> list[bool]:
    results = []
    for step in steps:
        given = coefficients(params, step)
        if step == overflow:
            plant(given, step)
        backward(optimizer, params, given)
        results.append(bool(optimizer.step()))
    return results


# ---- bases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_any_base_takes_the_steps_of_the_reference(name: str, dtype: torch.dtype) -> None:
    params, others = parameters(dtype, SHORT), parameters(dtype, SHORT)
    ours = FSDPadaptOptimizer(OTHERS[name](params), grad_scal_cfg=DYNAMIC, clip_grad_norm=2.0)
    plain = PlainFSDPOptimizer(OTHERS[name](others), ReferenceScaler(**DYNAMIC), 2.0)
    expected = drive(plain, others, range(6), overflow=2)
    assert drive(ours, params, range(6), overflow=2) == expected
    assert expected == [True, True, False, True, True, True]
    assert_same_bits(params, others)
    assert_same_bits(weights_of(ours), [w for _, w in plain.pairs()])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("snapshot", [False, True])
def test_any_base_loads_what_it_saved(name: str, used: bool, snapshot: bool) -> None:
    """Any state loads into fresh and used optimizers, and snapshots share no memory."""
    pairs = []
    for seed in (0, 5):
        params = parameters(BF16, SHORT, seed)
        pairs.append((FSDPadaptOptimizer(OTHERS[name](params), grad_scal_cfg=DYNAMIC), params))
    (ours, params), (other, others) = pairs
    drive(ours, params, range(4), overflow=2)
    if used:
        drive(other, others, range(2))
    saved = ours.state_dict(snapshot=snapshot)
    text = repr(saved)
    other.load_state_dict(saved)
    assert_same_bits(others, params)
    drive(other, others, range(6, 9))
    assert repr(saved) == text
    drive(ours, params, range(6, 9))
    assert (repr(saved) == text) == snapshot
    assert_same_bits(others, params)
    assert_same_bits(weights_of(other), weights_of(ours))


def test_muon() -> None:
    """torch's Muon takes only matrices and orthogonalizes in bfloat16."""
    params, others = parameters(BF16, ((6, 4), (3, 5))), parameters(BF16, ((6, 4), (3, 5)))
    ours = FSDPadaptOptimizer(torch.optim.Muon(params, lr=0.1), grad_scal_cfg=DYNAMIC)
    plain = PlainFSDPOptimizer(torch.optim.Muon(others, lr=0.1), ReferenceScaler(**DYNAMIC))
    drive(ours, params, range(4), overflow=1)
    drive(plain, others, range(4), overflow=1)
    assert_same_bits(params, others)


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
def test_fused_bases_with_options(fused: Any, torchs: Any, options: dict[str, Any]) -> None:
    """The base's options apply, and its threshold becomes the wrapper's."""
    clip = options.get("max_grad_norm", 1.0)
    theirs = {
        key: options[key] for key in ("amsgrad", "maximize", "weight_decay") if key in options
    }
    params, others = parameters(BF16, SHORT), parameters(BF16, SHORT)
    ours = FSDPadaptOptimizer(fused(params, lr=0.01, **options), grad_scal_cfg=DYNAMIC)
    base = torchs(others, lr=0.01, **theirs)
    plain = PlainFSDPOptimizer(base, ReferenceScaler(**DYNAMIC), clip)
    drive(ours, params, range(6), overflow=2)
    drive(plain, others, range(6), overflow=2)
    for w, (_, v) in zip(weights_of(ours), plain.pairs(), strict=True):
        torch.testing.assert_close(w, v, rtol=2e-6, atol=2e-6)
    assert all(ours.state[p]["master_weight"].dtype == FP32 for p in params)
    assert all(ours.state[p]["exp_avg"].dtype == FP32 for p in params)


def test_groups_keep_their_keys_in_a_load() -> None:
    first, second = (
        FSDPadaptOptimizer(FusedLion(parameters(BF16, SHORT), lr=0.01)) for _ in range(2)
    )
    drive(first, first.param_groups[0]["params"], range(2))
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0].keys() == first.param_groups[0].keys()


class Refusing(torch.optim.SGD):
    """SGD whose step fails on request, before any change."""

    refuses = False

    def step(self, closure: Any = None) -> Any:
        if self.refuses:
            raise ArithmeticError("refused")
        return super().step(closure)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_base_that_fails(dtype: torch.dtype) -> None:
    """Weights and state do not change, no gradient stays half divided, and training continues."""
    params, others = parameters(dtype, SHORT), parameters(dtype, SHORT)
    bases = [Refusing(mine, lr=0.1, momentum=0.9) for mine in (params, others)]
    ours, other = (FSDPadaptOptimizer(base, grad_scal_cfg=DYNAMIC) for base in bases)
    for mine, each in ((params, ours), (others, other)):
        drive(each, mine, range(2))
    bases[0].refuses = True
    backward(ours, params, coefficients(params, 2))
    before = everything(ours, params)
    with pytest.raises(ArithmeticError, match="refused"):
        ours.step()
    after = everything(ours, params)
    for part in ("parameters", "weights", "state", "groups"):
        assert after[part] == before[part], part
    assert all(w.grad is None for p, w in zip(params, weights_of(ours), strict=True) if p is not w)
    found = [None if p.grad is None else bits(p.grad) for p in params]
    whole = [held for _, held in before["gradients"]]
    assert found in (whole, [None] * len(params))
    bases[0].refuses = False
    ours.zero_grad()
    for mine, each in ((params, ours), (others, other)):
        drive(each, mine, range(3, 5))
    assert_same_bits(params, others)


# ---- tensors -------------------------------------------------------------------------------------


def strided(dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns a transposed, a channels-last and a plain parameter."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        nn.Parameter(drawn(5, 70).t()),
        nn.Parameter(drawn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(drawn(9)),
    ]


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_strides(kind: str, dtype: torch.dtype) -> None:
    """Parameters and gradients may have any strides, broadcast gradients included."""
    params, others = strided(dtype), strided(dtype)
    ours = ours_of(kind, params, clip_grad_norm=1.0)
    plain = reference_of("AdamW-foreach" if "AdamW" in kind else kind, others)  # reads strides
    for step in range(4):
        for mine in (params, others):
            given = [c.to(dtype) for c in coefficients(mine, step)]
            if step % 2:
                given[0] = given[0].t().contiguous().t()
                given[1] = given[1].contiguous()
                given[2] = torch.ones((), dtype=dtype).expand(9)
            for p, g in zip(mine, given, strict=True):
                p.grad = g
        assert ours.step() and plain.step()
        assert float(ours.grad_norm) == pytest.approx(plain.grad_norm, rel=1e-6)
    for w, (_, v) in zip(weights_of(ours), plain.pairs(), strict=True):
        torch.testing.assert_close(w, v, rtol=2e-6, atol=2e-7)
    assert [p.stride() for p in params] == [q.stride() for q in others]


@every_kind
def test_no_gradients_at_all(kind: str) -> None:
    """A step without gradients has norm 0, changes nothing, and counts for the scale."""
    params, ours = trained(kind)
    before = everything(ours, params)
    assert ours.step()
    after = everything(ours, params)
    assert float(ours.grad_norm) == 0.0
    for part in ("parameters", "weights", "state", "skipped"):
        assert after[part] == before[part], part
    expected = before["scaler"] | {"_growth_step": before["scaler"]["_growth_step"] + 1}
    assert after["scaler"] == expected


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_thawed_and_frozen_on_the_way(kind: str, dtype: torch.dtype) -> None:
    """A parameter may start frozen, train for a while, and be frozen again."""
    params, others = parameters(dtype, SHORT), parameters(dtype, SHORT)
    for mine in (params, others):
        mine[1].requires_grad_(False)
    ours = ours_of(kind, params, grad_scal_cfg=DYNAMIC)
    plain = reference_of(kind, others, DYNAMIC)
    for step in range(6):
        frozen = bits(params[1])
        for optimizer, mine in ((ours, params), (plain, others)):
            mine[1].requires_grad_(step in (2, 3))
            backward(optimizer, mine, coefficients(mine, step))
            assert optimizer.step()
        assert (bits(params[1]) == frozen) == (step not in (2, 3))
    for w, (_, v) in zip(weights_of(ours), plain.pairs(), strict=True):
        torch.testing.assert_close(w, v, rtol=2e-6, atol=2e-7)


# ---- parts set by hand ---------------------------------------------------------------------------


@every_kind
def test_the_attribute_sets_the_threshold(kind: str) -> None:
    """Setting the attribute has the effect of clip_grad_norm()."""
    params, ours = trained(kind, 1)
    others, other = trained(kind, 1)
    for clip in (0.3, 0.0, 5.0):
        ours._clip_grad_norm = clip
        other.clip_grad_norm(None, clip)
        for mine, each in ((params, ours), (others, other)):
            drive(each, mine, range(4, 6))
    assert content(ours, params) == content(other, others)
    third_params, third = trained(kind, 1)
    drive(third, third_params, range(4, 6))
    assert content(third, third_params)["weights"] != content(ours, params)["weights"]


@every_kind
@pytest.mark.parametrize("how", ["state dict", "in place"])
def test_a_scale_set_by_hand(kind: str, how: str) -> None:
    """The step divides by the scale that backward multiplied with."""
    params, ours = trained(kind)
    others, other = trained(kind)
    for scale in (2.0**3, 2.0**12, 1.0):
        if how == "in place":
            ours.loss_scale.fill_(scale)
        else:
            ours.grad_scaler.load_state_dict(ours.grad_scaler.state_dict() | {"_scale": scale})
        assert float(ours.loss_scale) == scale
        for mine, each in ((params, ours), (others, other)):
            drive(each, mine, range(4, 6))
        norms = float(ours.grad_norm), float(other.grad_norm)
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    for w, v in zip(weights_of(ours), weights_of(other), strict=True):
        torch.testing.assert_close(w, v, rtol=2e-6, atol=2e-7)


@every_kind
def test_two_of_them_know_nothing_of_each_other(kind: str) -> None:
    """Two optimizers stepped in turn, as of actor and critic, do not affect each other."""
    pairs = [trained(kind, 0, seed=seed) for seed in (0, 1)]
    alone = [trained(kind, 0, seed=seed) for seed in (0, 1)]
    for step in range(4):
        for index, (params, ours) in enumerate(pairs):
            drive(ours, params, range(step, step + 1), overflow=index + 1)
    for index, (params, ours) in enumerate(alone):
        drive(ours, params, range(4), overflow=index + 1)
        assert content(ours, params) == content(pairs[index][1], pairs[index][0])
    losses = [(pairs[i][0][0] * 1.0).sum() for i in (0, 1)]
    pairs[0][1].backward(losses[0])
    losses[1].backward()  # not through its optimizer, and the other's backward does not count
    with pytest.raises(RuntimeError, match="backward"):
        pairs[1][1].step()
    assert pairs[0][1].step()


@pytest.mark.parametrize("base", [FusedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("place", ["pre", "post"])
def test_a_hook_of_the_base_that_raises(base: Any, place: str) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FSDPadaptOptimizer(base([param], lr=0.1))
    getattr(optimizer.optim, f"register_step_{place}_hook")(lambda *_: 1 / 0)
    param.grad = torch.ones_like(param)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    ((weight,),) = optimizer.state_dict()["flat_fp32_weights"].values()
    assert torch.equal(param, weight.bfloat16())
    assert (param[0] == 1.0) == (place == "pre")
