"""Muon: matrices and blocks, settings, torch's class.

test_every_way.py has the bits in every way to hold weights and state, test_muon_hybrid.py the other
algorithms in one object.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInput

from torchopt_ext import FusedAdamW, FusedMuon, FusedOptimizer, ops, orthogonalize
from torchopt_ext.state import masters
from torchopt_ext.state.algorithms import defaults_of
from torchopt_ext.state.masters import weight_of
from torchopt_ext.state.matrices import matrices_of
from torchopt_ext.state.newton_schulz import JORDAN, PRESETS

from ...support.compare import assert_same_bits, snapshot, unchanged
from ...support.problems import copy_params, make_params, params_of, set_gradients, train
from ...support.ways import WAYS, each_way
from .subject import optimizer_inputs

SHAPES = ((24, 40), (40, 24), (16, 16), (1, 9), (9, 1))


def iterated(x: Tensor, coefficients: Any = JORDAN, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz iterations as torch/optim/_muon.py has them, in float64."""
    x = x.double()
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        a, b, c = coefficients
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


class Reference:
    """Muon on one matrix in float64: Jordan's definition, one operation at a time."""

    def __init__(self, weight: Tensor, **group: Any) -> None:
        self.weight, self.group = weight.detach().double(), group
        self.momentum = torch.zeros_like(self.weight)

    def step(self, gradient: Tensor, factor: float = 1.0) -> None:
        lr, mu = self.group["lr"], self.group.get("momentum", 0.95)
        g = gradient.double() * factor
        self.momentum = mu * self.momentum + (1 - mu) * g
        u = (1 - mu) * g + mu * self.momentum if self.group.get("nesterov", True) else self.momentum
        rows, cols = u.shape
        scale = {
            "original": math.sqrt(max(1, rows / cols)),
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
            "spectral_unclamped": math.sqrt(rows / cols),
        }[self.group.get("adjust_lr_fn") or "original"]
        self.weight *= 1 - lr * self.group.get("weight_decay", 0.1)
        self.weight -= lr * scale * iterated(u)


def assert_near(params: list[nn.Parameter], expected: list[Tensor], atol: float = 2e-5) -> None:
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), e, rtol=0, atol=atol)


# ---- the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_the_reference(adjust: str | None, nesterov: bool) -> None:
    """kozistr/pytorch_optimizer#408: another package's Muon was not what its name said."""
    params = make_params(SHAPES)
    group: dict[str, Any] = {"lr": 0.05, "adjust_lr_fn": adjust, "nesterov": nesterov}
    references = [Reference(p, **group) for p in params]
    optimizer = FusedMuon(params, **group, max_grad_norm=3.0)
    for seed in range(4):
        set_gradients(params, seed=seed)
        optimizer.step()
        for reference, p in zip(references, params, strict=True):
            reference.step(p.grad, float(optimizer.control.clip_factor))
    assert float(optimizer.control.clip_factor) < 1
    assert_near(params, [reference.weight for reference in references])


@pytest.mark.parametrize("arguments", optimizer_inputs("Muon"), ids=lambda given: given.desc)
def test_torchs_class_differs_by_its_bf16_only(arguments: OptimizerInput) -> None:
    """In all configurations in which torch tests it.

    The momentum has no more than two roundings of difference, and updates have those of products.
    """
    ours, theirs, before = (make_params(SHAPES) for _ in range(3))
    optimizers = FusedMuon(ours, **arguments.kwargs), torch.optim.Muon(theirs, **arguments.kwargs)
    for optimizer in optimizers:
        train(optimizer, range(3))
    for p, q, was in zip(ours, theirs, before, strict=True):
        buffers = [o.state[x]["momentum_buffer"] for o, x in zip(optimizers, (p, q), strict=True)]
        torch.testing.assert_close(*buffers, rtol=1e-6, atol=1e-7)
        assert float((p - q).detach().norm()) < 0.02 * float((q - was).detach().norm())


@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [(preset, None) for preset in PRESETS]
    + [("polar_express", 3), ((2.0, -1.5, 0.5), 4), ([JORDAN, JORDAN, (2.0, -1.5, 0.5)], None)],
)
def test_coefficients(coefficients: Any, steps: int | None) -> None:
    """Each preset has its own number of steps, as a list has; others have ns_steps."""
    (param,) = make_params([(12, 20)])
    before = param.detach().clone()
    more = {} if steps is None else {"ns_steps": steps}
    optimizer = FusedMuon([param], lr=1.0, weight_decay=0.0, momentum=0.0,
                          ns_coefficients=coefficients, **more)  # fmt: skip
    train(optimizer, [0])
    assert_same_bits([param], [before - orthogonalize(param.grad, coefficients, steps=steps)])


def test_the_operator() -> None:
    """One call has the bits of the class; each matrix has its own factor of the learning rate."""
    params = make_params([(12, 20), (20, 12)])
    others = [p.detach().clone() for p in params]
    optimizer = FusedMuon(params, lr=0.05)
    momentum, steps = [torch.zeros_like(p) for p in others], [torch.zeros(()) for _ in others]
    control = ops.new_control("cpu")
    scales = [1.0, math.sqrt(20 / 12)]
    for seed in range(2):
        train(optimizer, [seed])
        torch.ops.torchopt_ext.muon_(
            others, [p.grad for p in params], momentum, [], steps, control, lr=0.05,
            ns_coefficients=JORDAN * 5, lr_scales=scales,
        )  # fmt: skip
    assert_same_bits(params, others)
    grads = [p.grad for p in params]
    for wrong, message in (
        ({"ns_coefficients": JORDAN[:2], "lr_scales": scales}, "three for each step"),
        ({"ns_coefficients": JORDAN, "lr_scales": scales[:1]}, "1 lr_scales"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message), unchanged(others):
            torch.ops.torchopt_ext.muon_(
                others, grads, momentum, [], steps, control, lr=0.05, **wrong
            )


# ---- which matrices ------------------------------------------------------------------------------

BLOCKS: dict[str, tuple[dict[str, Any], tuple[int, ...], Any]] = {
    "heads": ({"num_heads": 3}, (12, 20), lambda w: w.split(4)),
    "heads of columns": ({"num_heads": 4, "head_dim": 1}, (12, 20), lambda w: w.split(5, dim=1)),
    "fused projections": ({"split_sizes": (8, 2, 2)}, (12, 20), lambda w: w.split((8, 2, 2))),
    "experts": ({}, (3, 6, 10), lambda w: w.unbind()),
    "convolution": ({"flatten": True}, (6, 4, 3, 3), lambda w: [w.reshape(6, 36)]),
    "experts of heads": (
        {"num_heads": 2},
        (3, 6, 10),
        lambda w: [b for e in w for b in e.split(3)],
    ),
}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_blocks_are_as_separate_parameters(blocks: str, adjust: str | None) -> None:
    options, shape, cut = BLOCKS[blocks]
    (param,) = make_params([shape])
    parts = [nn.Parameter(part.clone()) for part in cut(param.detach())]
    group: dict[str, Any] = {"lr": 0.05, "adjust_lr_fn": adjust}
    optimizer = FusedMuon([{"params": [param], **options}], **group)
    separate = FusedMuon(parts, **group)
    for seed in range(3):
        set_gradients([param], seed=seed)
        for part, gradient in zip(parts, cut(param.grad), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
        separate.step()
    assert_same_bits(cut(param.detach()), parts)
    assert float(optimizer.control.orthogonalized) == len(parts)


@pytest.mark.parametrize(
    "memory_format",
    ["transposed", "channels_last", "gaps", "transposed with gaps", "transposed experts"],
)
def test_strides(memory_format: str) -> None:
    """Weights in another order of storage are stepped as contiguous ones."""
    options: dict[str, Any] = {"flatten": True} if memory_format == "channels_last" else {}
    shape = (6, 4, 3, 3) if options else (12, 20)
    if memory_format == "transposed experts":
        options, shape = {"num_heads": 2}, (3, 12, 20)
    (plain,) = make_params([shape])
    like = {
        "transposed experts": lambda w: w.mT.contiguous().mT,
        "transposed": lambda w: w.t().contiguous().t(),
        "channels_last": lambda w: w.contiguous(memory_format=torch.channels_last),
        "gaps": lambda w: torch.stack([w, w], dim=-1)[..., 0],
        "transposed with gaps": lambda w: torch.cat([w.t(), w.t()], dim=1).t()[: w.shape[0]],
    }[memory_format]
    other = nn.Parameter(like(plain.detach().clone()))
    assert other.stride() != plain.stride()
    optimizers = [FusedMuon([{"params": [p], **options}], lr=0.05) for p in (plain, other)]
    for seed in range(2):
        set_gradients([plain], seed=seed)
        other.grad = plain.grad.clone(memory_format=torch.preserve_format)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(other, plain, rtol=0, atol=1e-6)


def test_layouts() -> None:
    (param,) = make_params([(12, 20)])
    group = {"split_sizes": (8, 4), "adjust_lr_fn": lambda rows, cols: rows * 1000 + cols}
    assert matrices_of(group, param, 0) == [(0, 8, 20, 20, 8020), (160, 4, 20, 20, 4020)]


def test_memory_that_is_replaced_between_steps() -> None:
    """``p.data = ...`` in another order of storage moves the matrix."""
    (param,), (other,) = make_params([(12, 20)]), make_params([(12, 20)])
    optimizer, expected = FusedMuon([param], lr=0.05), FusedMuon([other], lr=0.05)
    train(optimizer, [0])
    train(expected, [0])
    param.data = param.data.t().contiguous().t()
    train(optimizer, [1, 2], [param])
    train(expected, [1, 2], [other])
    torch.testing.assert_close(param, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_heads", 3), ("ns_steps", 2), ("adjust_lr_fn", "match_rms_adamw"),
     ("ns_coefficients", (2.0, -1.5, 0.5)), ("orthogonalize_dtype", torch.bfloat16)],
)  # fmt: skip
def test_settings_that_change_between_steps(key: str, value: Any) -> None:
    (param,), (other,) = make_params([(12, 20)]), make_params([(12, 20)])
    optimizer = FusedMuon([param], lr=0.05)
    train(optimizer, [0])
    with torch.no_grad():
        other.copy_(param)
    fresh = FusedMuon([{"params": [other], key: value}], lr=0.05)
    fresh.load_state_dict(
        {**optimizer.state_dict(), "param_groups": fresh.state_dict()["param_groups"]}
    )
    optimizer.param_groups[0][key] = value
    unchanged = copy.deepcopy(optimizer)
    unchanged.param_groups[0][key] = {**unchanged.defaults, "num_heads": None,
                                      "orthogonalize_dtype": None}[key]  # fmt: skip
    for each in (optimizer, fresh, unchanged):
        train(each, [1])
    assert_same_bits([param], [other])
    assert snapshot(unchanged) != snapshot(optimizer)


# ---- QK-clip -------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("steps", [0, 2])
def test_rows_are_scaled_with_what_completes_them(
    way: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of the whole weight, rounded as a step rounds it, also before the first step."""
    monkeypatch.setattr(masters, "_ELEMENTS", 4 * 80 + 1)  # four rows at once, then two
    _, optimizer = WAYS[way].build(
        "Muon", [("q", p) for p in make_params([(6, 80)], WAYS[way].dtype)], lr=0.02
    )
    (param,) = params_of(optimizer)
    train(optimizer, range(steps))
    before = weight_of(param, optimizer.state[param]).clone()
    factors = torch.tensor([0.5, 1.0, 0.7])
    optimizer.scale_("q", factors)
    expected = before * factors.repeat_interleave(2)[:, None].to(before.dtype)
    after = weight_of(param, optimizer.state[param])
    exact = steps and WAYS[way].master in ("master_weight", "remainder")
    bits = 2**-15 if WAYS[way].master == "remainder8" and steps else torch.finfo(param.dtype).eps
    torch.testing.assert_close(after, expected, rtol=0 if exact else bits, atol=0)
    assert_same_bits([param], [after.to(param.dtype)])
    set_gradients([param], seed=9)
    optimizer.step()  # a master does not return to the former weight
    assert float((param.detach() - after).float().norm()) < 0.2 * float(after.float().norm())


def test_what_cannot_be_scaled() -> None:
    (param,) = make_params([(6, 8)])
    optimizer: Any = FusedMuon([("q", param)])
    for wrong, factors, error, message in (
        ("k", torch.ones(2), ValueError, "no parameter 'k'"),
        (torch.ones(2, 3), torch.ones(2), ValueError, r"no parameter of shape \(2, 3\)"),
        (0, torch.ones(2), TypeError, "param is 0, expected a parameter or its name"),
        (param, torch.ones(4), ValueError, "divides the 6 rows"),
        (param, torch.ones(3, 2), ValueError, "expected a vector"),
        (param, torch.ones(2, device="meta"), TypeError, "on meta.*expected a dense tensor"),
        (param, torch.ones(2).to_sparse(), TypeError, "sparse_coo.*expected a dense tensor"),
        (param, torch.ones(2) * 1j, TypeError, "complex64.*expected a dense tensor of real"),
    ):
        with pytest.raises(error, match=message), unchanged(optimizer):
            optimizer.scale_(wrong, factors)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("name", "lacks", "keys"),
    [
        ("adamw", "amsgrad", {**defaults_of("adamw"), "weight_decay": 0.1, "lr": 0.1}),
        ("normuon", "beta2", {"beta2": 0.95}),
        ("lion", "betas", {**defaults_of("lion"), "weight_decay": 0.1, "lr": 0.1}),
    ],
)
def test_a_group_gets_another_algorithm(
    steps: int, name: str, lacks: str, keys: dict[str, Any]
) -> None:
    """With all keys of its groups, and without the state of the former one."""
    params, expected = make_params([(8, 12)]), make_params([(8, 12)])
    optimizer = FusedMuon(params, lr=0.1)
    train(optimizer, range(steps))
    optimizer.state.clear()
    (group,) = optimizer.param_groups
    group["algorithm"] = name
    set_gradients(params)
    with pytest.raises(ValueError, match=rf"is of '{name}', .*{lacks}.* set these"):
        optimizer.step()
    assert not optimizer.state
    group |= keys
    with torch.no_grad():
        expected[0].copy_(params[0])
    other = FusedMuon([{"params": expected, "algorithm": name, **keys}], lr=0.1)
    train(optimizer, range(2))
    train(other, range(2))
    assert_same_bits(params, expected)


def test_unfrozen_vectors_get_no_state() -> None:
    """A group of Muon has checked its trainable parameters only."""
    params = make_params([(8, 12), (7,)])
    params[1].requires_grad_(requires_grad=False)
    optimizer = FusedMuon(params)
    params[1].requires_grad_()
    set_gradients(params)
    with pytest.raises(ValueError, match=r"parameter 1 has shape \(7,\)"):
        optimizer.step()
    assert params[1] not in optimizer.state


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"use_muon": True}, {"use_muon": False}),
        ({"kind": "muon"}, {"kind": "adamw"}),
        ({"use_muon": True, "algorithm": "muon"}, {"use_muon": False, "algorithm": "adamw"}),
    ],
)
def test_other_names_of_the_key(first: dict[str, Any], second: dict[str, Any]) -> None:
    params = make_params([(8, 12), (7,)])
    groups = [{"params": params[:1], **first}, {"params": params[1:], **second}]
    optimizer = FusedAdamW(groups)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    train(optimizer, [0])
    assert float(optimizer.control.orthogonalized) == 1
    with pytest.raises(ValueError, match="several algorithms: lion, muon"):
        FusedAdamW([{"params": params[:1], "use_muon": True, "algorithm": "lion"}])


# ---- edges ---------------------------------------------------------------------------------------


def test_matrices_of_no_rank() -> None:
    """Zero gradients leave weights to their decay, and no NaN."""
    params = make_params([(4, 6), (1, 1), (0, 3), (3, 0), (0, 3, 4)])
    before = [p.detach().clone() for p in params]
    optimizer = FusedMuon(params, lr=0.5, weight_decay=0.1)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_near(params, [0.95 * b.double() for b in before], atol=1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e18])
def test_the_scale_of_gradients_does_not_matter(scale: float) -> None:
    """Where eps does not: torch divides by the norm, and so forgets it."""
    small, usual = make_params([(16, 24)]), make_params([(16, 24)])
    train(FusedMuon(small, lr=0.5, eps=0.0), [0], scale=scale)
    train(FusedMuon(usual, lr=0.5, eps=0.0), [0])
    torch.testing.assert_close(small, usual, rtol=0, atol=1e-5)


# ---- state dicts ---------------------------------------------------------------------------------


def test_torchs_state_dicts() -> None:
    """In both directions; the gradient's scale and the momentum are torch's."""
    ours, theirs = make_params(SHAPES), make_params(SHAPES)
    optimizer, torchs = FusedMuon(ours, lr=0.01), torch.optim.Muon(theirs, lr=0.02, momentum=0.9)
    train(torchs, range(2))
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert {k: optimizer.param_groups[0][k] for k in torchs.defaults} == torchs.defaults
    for p, q in zip(ours, theirs, strict=True):
        assert_same_bits(
            [optimizer.state[p]["momentum_buffer"]], [torchs.state[q]["momentum_buffer"]]
        )
    back = torch.optim.Muon(copy_params(theirs), lr=1.0)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert back.param_groups[0]["momentum"] == 0.9
    train(back, [2])
    train(torchs, [2])
    assert_same_bits(params_of(back), theirs)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "group", "message"),
    [
        ((7,), {}, r"parameter 0 has shape \(7,\); Muon steps matrices"),
        ((2, 3, 4, 5), {}, "flatten=True"),
        ((6, 4), {"num_heads": 4}, "6 rows, num_heads 4"),
        ((6, 4), {"num_heads": 3, "head_dim": 1}, "4 columns, num_heads 3"),
        ((6, 4), {"split_sizes": (4, 4)}, "6 rows, split_sizes"),
        ((6, 4), {"split_sizes": (3, 3), "num_heads": 2}, "excludes num_heads"),
        ((6, 4), {"adjust_lr_fn": "spectral"}, "function spectral is not supported"),
        ((6, 4), {"ns_steps": 100}, "less than 100"),
        ((6, 4), {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ((6, 4), {"eps": -1.0}, "Invalid eps"),
        ((6, 4), {"momentum": -0.1}, "Invalid momentum"),
        ((6, 4), {"orthogonalize_dtype": torch.int8}, "orthogonalize_dtype"),
        ((6, 4), {"num_heads": 0}, "num_heads"),
        ((6, 4), {"split_sizes": (3, 3), "head_dim": 1}, "excludes num_heads and head_dim"),
        ((6, 4), {"ns_coefficients": (1.0, math.nan, 1.0)}, "finite"),
        ((6, 4), {"orthogonalize_dtype": torch.float16}, "orthogonalize_dtype"),
        ((6, 4), {"adjust_lr_fn": lambda rows, cols: 0.0}, "returns 0.0 for the 6 x 4 matrix"),
        ((6, 4), {"adjust_lr_fn": lambda rows, cols: None}, "returns None"),
        ((6, 4), {"decoupled_weight_decay": False}, "always decoupled"),
    ],
)
def test_what_is_rejected(shape: tuple[int, ...], group: dict[str, Any], message: str) -> None:
    """At construction, with the caller's group as it was."""
    params = make_params([shape])
    given = {"params": params, **group}
    before = dict(given)
    with pytest.raises(ValueError, match=message):
        FusedMuon([given])
    assert given == before


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"split_sizes": 3}, "split_sizes is 3"),
        ({"split_sizes": (1.5, 4.5)}, "split_sizes is 1.5"),
        ({"ns_coefficients": None}, "ns_coefficients is None"),
        ({"ns_coefficients": torch.ones(3)}, "ns_coefficients is tensor"),
        ({"flatten": "no"}, "flatten is 'no'"),
    ],
)
def test_what_is_of_a_wrong_type(group: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FusedMuon([{"params": make_params([(6, 4)]), **group}])


@pytest.mark.parametrize(
    ("options", "like"),
    [
        ({"split_sizes": (16, 4)}, lambda w: w.t().contiguous().t()),
        ({"flatten": True, "num_heads": 2, "head_dim": 1},
         lambda w: w[:, :, None].expand(-1, -1, 3).mT.contiguous().mT),
        ({"flatten": True, "num_heads": 2, "head_dim": 1},
         lambda w: w[:, :, None, None].expand(-1, -1, 3, 3).contiguous(
             memory_format=torch.channels_last)),
    ],
)  # fmt: skip
def test_blocks_that_are_strided_in_memory_are_rejected(options: dict[str, Any], like: Any) -> None:
    param = nn.Parameter(like(torch.randn(20, 12)))
    with pytest.raises(ValueError, match="row-major"):
        FusedMuon([{"params": [param], "adjust_lr_fn": "match_rms_adamw", **options}])


@pytest.mark.parametrize("key", ["eps", "flatten", "head_dim", "orthogonalize_dtype", "num_heads"])
def test_settings_are_checked_when_they_change(key: str) -> None:
    wrong = {"eps": math.nan, "flatten": "no", "head_dim": 7, "num_heads": 5,
             "orthogonalize_dtype": torch.float64}[key]  # fmt: skip
    params = make_params([(6, 4)])
    optimizer = FusedMuon(params)
    train(optimizer, [0])
    optimizer.param_groups[0][key] = wrong
    set_gradients(params, seed=1)
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert snapshot(optimizer) == before


def test_lists_are_kept_as_tuples() -> None:
    """A list that a program changes in place would not be seen."""
    given = {"params": make_params([(6, 4)]), "split_sizes": [4, 2], "eps": torch.tensor(1e-6)}
    optimizer = FusedMuon([given], ns_coefficients=[list(JORDAN)] * 3)
    group = optimizer.param_groups[0]
    assert group["split_sizes"] == (4, 2) and group["ns_coefficients"] == (JORDAN,) * 3
    assert isinstance(group["eps"], float)


def test_a_group_that_becomes_muons() -> None:
    """It has torch's defaults."""
    params, others = make_params([(6, 4)]), make_params([(6, 4)])
    optimizer, muon = FusedAdamW(params, lr=0.05, weight_decay=0.1), FusedMuon(others, lr=0.05)
    optimizer.param_groups[0] |= {"algorithm": "muon", "momentum": 0.95, "nesterov": True}
    for each in (optimizer, muon):
        train(each, range(2))
    assert_same_bits(params, others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "6 rows, num_heads 5"),
        ({"split_sizes": (4, 4)}, "6 rows, split_sizes"),
        ({"split_sizes": 16}, "split_sizes is 16"),
    ],
)
def test_a_state_dict_whose_settings_do_not_fit(change: dict[str, Any], message: str) -> None:
    optimizer = FusedMuon(make_params([(6, 4)]))
    train(optimizer, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= change
    with pytest.raises(ValueError, match=message), unchanged(optimizer):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = None
    with pytest.raises(ValueError, match="momentum_buffer"), unchanged(optimizer):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("cls", [FusedMuon, FusedAdamW])
def test_the_weight_of_an_embedding_is_rejected(cls: Any) -> None:
    """Groups of other algorithms take it; test_muon_groups.py has the names in the message."""
    embedding = nn.Embedding(6, 4)
    group = {"params": [embedding.weight], "algorithm": "muon"}
    with pytest.raises(ValueError, match=r"parameter 0 .* is the weight of an embedding"):
        cls([dict(group)])
    optimizer = cls([{"params": make_params([(6, 4)]), "algorithm": "muon"}])
    train(optimizer, [0])
    with pytest.raises(ValueError, match="the weight of an embedding"), unchanged(optimizer):
        optimizer.add_param_group(dict(group))
    train(optimizer, [1])
    optimizer.add_param_group({**group, "algorithm": "adamw"})
    train(optimizer, [2])
    assert optimizer.state[embedding.weight]["step"] == 1


def test_a_complex_matrix_is_rejected() -> None:
    with pytest.raises(ValueError, match="complex"):
        FusedMuon([nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))])


def test_arguments_that_muon_lacks_are_named() -> None:
    with pytest.raises(TypeError, match="betas"):
        FusedMuon([{"params": make_params([(3, 4)]), "betas": (0.9, 0.9)}])
    with pytest.raises(TypeError, match="did you mean 'ns_steps'"):
        FusedOptimizer(make_params([(3, 4)]), algorithm="muon", n_steps=3)
