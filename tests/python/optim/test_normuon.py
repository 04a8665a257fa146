"""NorMuon: rows that are normalized after the orthogonalization, and a user's function instead.

test_every_way.py has the bits in every way to hold weights and state ("Muon, beta2").
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dicts

from torchopt_ext import FusedAdamW, FusedMuon, FusedOptimizer, muon_groups, ops, orthogonalize
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import assert_same_bits, snapshot, unchanged
from ...support.problems import copy_params, make_params, set_gradients, through_file, train

SHAPES = ((24, 40), (40, 24), (16, 16), (1, 9), (9, 1))


def row_normalized(o: Tensor, average: Tensor, beta2: float) -> Tensor:
    """dion's ``normuon_normalization`` (dion/normuon.py) of one matrix, in float64."""
    o, norm = o.double(), o.double().norm()
    average.lerp_(o.square().mean(-1, keepdim=True), 1 - beta2)
    normalized = o / (average.sqrt() + 1e-8)
    return normalized * (norm / (normalized.norm() + 1e-8))


@pytest.mark.parametrize("device_dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_dions(device_dtype: torch.dtype) -> None:
    params = make_params(SHAPES)
    averages = [torch.zeros(p.shape[0], 1, dtype=torch.float64) for p in params]
    optimizer = FusedMuon(
        [{"params": params, "orthogonalize_dtype": device_dtype}], lr=1.0, weight_decay=0.0,
        momentum=0.0, nesterov=False, beta2=0.9,
    )  # fmt: skip
    tight = device_dtype == torch.float32
    for seed in range(3):
        before = [p.detach().double() for p in params]
        train(optimizer, [seed])
        for p, was, average in zip(params, before, averages, strict=True):
            o = orthogonalize(p.grad.to(device_dtype), "jordan").double()
            scale = math.sqrt(max(1, p.shape[0] / p.shape[1]))
            expected = was - scale * row_normalized(o, average, 0.9)
            torch.testing.assert_close(p.double(), expected, rtol=0, atol=3e-6 if tight else 0.02)
            held = optimizer.state[p]["second_momentum_buffer"]
            assert held.dtype == torch.float32
            torch.testing.assert_close(held.double(), average, rtol=1e-5 if tight else 0.05, atol=0)


def test_the_names_that_people_use() -> None:
    """A group's algorithm, beta2 of the class or of a group, and nanochat's kind."""
    runs = []
    for cls, group, more in (
        (FusedMuon, {"algorithm": "normuon"}, {}),
        (FusedMuon, {"beta2": 0.95}, {}),
        (FusedMuon, {}, {"beta2": 0.95}),
        (FusedMuon, {"kind": "normuon"}, {}),
        (FusedOptimizer, {}, {"algorithm": "normuon"}),
        (FusedAdamW, {"algorithm": "normuon", "weight_decay": 0.1}, {}),
    ):
        params = make_params(SHAPES)
        optimizer = cls([{"params": params, **group}], lr=0.02, **more)
        assert optimizer.param_groups[0]["beta2"] == 0.95
        train(optimizer, range(2))
        runs.append([p.detach() for p in params])
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    (other,) = FusedOptimizer(
        [{"params": make_params(SHAPES), "algorithm": "muon"}], algorithm="normuon"
    ).param_groups
    assert not other["beta2"]
    assert "beta2" not in FusedMuon(make_params(SHAPES)).param_groups[0]


def test_blocks_are_as_separate_parameters() -> None:
    """Heads, splits, experts and convolutions have a norm of their own each; rows one value."""
    for shape, group, parts in (
        ((12, 10), {"num_heads": 3}, lambda t: t.split(4)),
        ((12, 10), {"split_sizes": (6, 2, 4)}, lambda t: t.split((6, 2, 4))),
        ((3, 4, 10), {}, lambda t: t.unbind()),
        ((6, 2, 3, 3), {"flatten": True}, lambda t: [t.reshape(6, -1)]),
    ):
        (whole,) = make_params([shape])
        pieces = [torch.nn.Parameter(p.detach().clone()) for p in parts(whole)]
        ours = FusedMuon([{"params": [whole], **group}], lr=0.1, beta2=0.9)
        theirs = FusedMuon(pieces, lr=0.1, beta2=0.9)
        for seed in range(2):
            set_gradients([whole], seed=seed)
            for piece, grad in zip(pieces, parts(whole.grad), strict=True):
                piece.grad = grad.clone()
            ours.step()
            theirs.step()
        assert_same_bits([p.clone() for p in parts(whole.detach())], [p.detach() for p in pieces])
        held = ours.state[whole]["second_momentum_buffer"]
        assert held.dim() == len(shape)
        rows = torch.cat([theirs.state[p]["second_momentum_buffer"].flatten() for p in pieces])
        assert_same_bits([held.flatten()], [rows])


def test_rows_that_vary_in_size_get_even() -> None:
    (param,) = make_params([(64, 128)])
    steps = {}
    for beta2 in (0.0, 0.9):
        (p,) = copy_params([param])
        optimizer = FusedMuon([p], lr=1.0, weight_decay=0.0, beta2=beta2)
        p.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        p.grad *= torch.logspace(-4, 0, 64)[:, None]
        optimizer.step()
        steps[beta2] = (p.detach() - param.detach()).norm(dim=1)
    assert steps[0.9].std() / steps[0.9].mean() < 1e-5
    assert steps[0.0].std() / steps[0.0].mean() > 0.1
    torch.testing.assert_close(steps[0.9].norm(), steps[0.0].norm())


def test_an_overflow_leaves_the_averages() -> None:
    params = make_params(SHAPES)
    optimizer = FusedMuon(params, beta2=0.9, skip_nonfinite=True)
    train(optimizer, [0])
    before = snapshot(optimizer)
    set_gradients(params, seed=1)
    params[0].grad[0, 0] = math.nan
    optimizer.step()
    assert snapshot(optimizer) == before
    assert float(optimizer.control.orthogonalized) == 0


def test_zero_gradients_and_zero_matrices() -> None:
    params = make_params([(4, 6)])
    optimizer = FusedMuon(params, lr=0.1, weight_decay=0.0, beta2=0.9)
    before = params[0].detach().clone()
    params[0].grad = torch.zeros(4, 6)
    optimizer.step()
    assert_same_bits(params, [before])


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flatten", [False, True])
def test_a_state_dict_resumes(flatten: bool) -> None:
    group = {"flatten": flatten}
    params = make_params([(3, 8, 12), (8, 12)])
    optimizer = FusedMuon([{"params": params, **group}], lr=0.1, beta2=0.9)
    train(optimizer, range(2))
    others = copy_params(params)
    loaded = FusedMuon([{"params": others, **group}], lr=0.1, beta2=0.9)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, loaded, twin):
        train(each, [2, 3])
    assert snapshot(optimizer) == snapshot(loaded) == snapshot(twin)


def test_muons_checkpoint_begins_a_normuon() -> None:
    """Rows without an average begin with zeros, as in a new run; the other way they are dropped."""
    params = make_params(SHAPES)
    muon = FusedMuon(params, lr=0.1)
    train(muon, range(2))
    others = copy_params(params)
    normuon = FusedMuon(others, lr=0.1, beta2=0.9)
    normuon.load_state_dict(muon.state_dict())
    assert normuon.param_groups[0]["beta2"] == 0.9
    train(normuon, [3])
    for p in others:
        assert float(normuon.state[p]["second_momentum_buffer"].sum()) > 0
    muon.load_state_dict(normuon.state_dict())
    train(muon, [4])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(24, 40), "expected .24, 1., a value for each row"),
        (torch.zeros(24), "expected .24, 1., a value for each row"),
        (torch.zeros(24, 1, dtype=torch.int64), "expected a floating-point tensor"),
        (torch.zeros(24, 1, device="meta"), "with memory"),
    ],
)
def test_averages_that_do_not_fit(value: Tensor, message: str) -> None:
    params = make_params([(24, 40)])
    optimizer = FusedMuon(params, beta2=0.9)
    train(optimizer, [0])
    saved = optimizer.state_dict()
    saved["state"][0]["second_momentum_buffer"] = value
    with unchanged(params), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    optimizer.state[params[0]]["second_momentum_buffer"] = value
    set_gradients(params, seed=1)
    with unchanged(params), pytest.raises(ValueError, match=message):
        optimizer.step()


def test_averages_that_are_replaced_between_steps() -> None:
    params = make_params([(24, 40)])
    optimizer, twin = FusedMuon(params, beta2=0.9), FusedMuon(copy_params(params), beta2=0.9)
    train(optimizer, [0])
    train(twin, [0])
    state = optimizer.state[params[0]]
    for change in (
        lambda v: v.clone(), lambda v: v.double(), lambda v: v.expand(24, 3)[:, :1],
        lambda v: v.bfloat16(),
    ):  # fmt: skip
        state["second_momentum_buffer"] = change(state["second_momentum_buffer"])
        if state["second_momentum_buffer"].dtype == torch.bfloat16:
            (other,) = twin.state.values()
            other["second_momentum_buffer"].copy_(other["second_momentum_buffer"].bfloat16())
        train(optimizer, [1])
        train(twin, [1])
    assert snapshot(optimizer) == snapshot(twin)


def test_what_is_rejected() -> None:
    (param,) = make_params([(24, 40)])
    with pytest.raises(ValueError, match="head_dim=1 excludes beta2"):
        FusedMuon([{"params": [param], "num_heads": 2, "head_dim": 1}], beta2=0.9)
    with pytest.raises(ValueError, match="Invalid beta2 value: 1"):
        FusedMuon([param], beta2=1.0)
    with pytest.raises(ValueError, match="row-major"):
        FusedMuon([torch.nn.Parameter(torch.zeros(5, 4).t())], beta2=0.9)
    lists = [[torch.ones(2, 3)], [torch.ones(2, 3)], [torch.zeros(2, 3)], [], [torch.zeros(())]]
    more = {"lr": 0.1, "beta2": 0.9, "ns_coefficients": [2.0, -1.5, 0.5], "lr_scales": [1.0]}
    with pytest.raises(RuntimeError, match="beta2 needs second_momentum_buffers"):
        torch.ops.torchopt_ext.muon_(*lists, ops.new_control("cpu"), **more)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"master_weights": "remainder"}, 2 + 2 + 4),
        ({"master_weights": "remainder8", "state_dtype": "int8"}, 2 + 1 + 1 + 4 / 64),
        ({"master_weights": "remainder8", "state_dtype": "int8", "beta2": 0.9}, 4.0625 + 4 / 1024),
    ],
)
def test_held_bytes(options: dict[str, Any], expected: float) -> None:
    """With the weight: at most 4.1 bytes a parameter with 8 bits of momentum and remainder."""
    param = torch.nn.Parameter(torch.randn(256, 1024).bfloat16())
    optimizer = FusedMuon([param], fp32_moments=(), **options)
    param.grad = torch.randn_like(param)
    optimizer.step()
    state = optimizer.state[param]
    held = sum(t.numel() * t.element_size() for t in (param, *state.values()))
    assert held == expected * param.numel() + 4  # the step count


def test_muon_groups_carry_it() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 16),
                                torch.nn.Linear(16, 8))  # fmt: skip
    optimizer = FusedMuon(muon_groups(model, quiet=True), beta2=0.9)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    held = {tuple(p.shape): set(state) for p, state in optimizer.state.items()}
    assert held[16, 16] == {"step", "momentum_buffer", "second_momentum_buffer"}
    assert held[8, 16] == {"step", "exp_avg", "exp_avg_sq"}


# ---- a function instead of the iterations --------------------------------------------------------


def test_a_function_instead_of_the_iterations() -> None:
    seen: list[tuple[int, ...]] = []

    def by_svd(batch: Tensor) -> Tensor:
        seen.append(tuple(batch.shape))
        u, _, vh = torch.linalg.svd(batch, full_matrices=False)
        return u @ vh

    params = make_params([(6, 9), (6, 9), (9, 6)])
    before = [p.detach().clone() for p in params]
    optimizer = FusedMuon(
        [{"params": params, "orthogonalize": by_svd}], lr=1.0, weight_decay=0.0, momentum=0.0
    )
    train(optimizer, [0])
    assert sorted(seen) == [(1, 9, 6), (2, 6, 9)]
    for p, was in zip(params, before, strict=True):
        u, _, vh = torch.linalg.svd(p.grad, full_matrices=False)
        scale = math.sqrt(max(1, p.shape[0] / p.shape[1]))
        torch.testing.assert_close(was - p.detach(), scale * (u @ vh), rtol=0, atol=1e-5)
    optimizer.param_groups[0]["orthogonalize"] = None
    train(optimizer, [1])
    assert len(seen) == 2


def test_functions_that_do_not_fit() -> None:
    params = make_params([(6, 9)])
    with pytest.raises(TypeError, match="orthogonalize is 3, expected a function"):
        FusedMuon([{"params": params, "orthogonalize": 3}])
    results: dict[Any, tuple[Any, str]] = {
        "shape": (RuntimeError, r"returns a tensor of shape \[9, 6\], expected \[1, 6, 9\]"),
        "error": (RuntimeError, "of its own"),
        "none": (TypeError, r"orthogonalize returns None, expected a tensor of shape \(1, 6, 9\)"),
    }
    for kind, (error, message) in results.items():

        def wrong(batch: Tensor, kind: str = kind) -> Any:
            if kind == "error":
                raise RuntimeError("of its own")
            return batch[0].mT if kind == "shape" else None

        optimizer = FusedMuon([{"params": params, "orthogonalize": wrong}])
        set_gradients(params, seed=0)
        with pytest.raises(error, match=message):
            optimizer.step()


@pytest.mark.parametrize(
    "kind",
    [
        *("optimizer", "container", "ZeRO"),
        *("torch's functions", "torch's functions, flat", "ZeRO, torch's functions, flat"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_functions_stay_out_of_checkpoints(kind: str) -> None:
    """torch.load reads no functions, and no file takes a local one. A load keeps the own ones."""

    def by_svd(batch: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(batch, full_matrices=False)
        return u @ vh

    functions = {"orthogonalize": by_svd, "adjust_lr_fn": lambda rows, cols: 0.3}
    models = [nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)) for _ in range(2)]
    built: list[Any] = []
    for model, lr in zip(models, (0.1, 0.2), strict=True):
        groups = muon_groups(model, quiet=True)
        if kind == "container":
            built.append(OptimizersContainer([model], FusedMuon, {"lr": lr, **functions}))
        elif kind.startswith("ZeRO"):
            built.append(ZeroRedundancyOptimizer(groups, FusedMuon, lr=lr, **functions))
        else:
            built.append(FusedMuon(groups, lr=lr, **functions))
    first, second = built
    set_gradients([*models[0].parameters()], seed=0)
    first.step()
    if kind.startswith("ZeRO"):
        first.consolidate_state_dict()
    if "torch's functions" in kind:
        options = dicts.StateDictOptions(flatten_optimizer_state_dict=kind.endswith("flat"))
        saved = dicts.get_optimizer_state_dict(models[0], first, options=options)
        dicts.set_optimizer_state_dict(models[1], second, through_file(saved), options=options)
    else:
        second.load_state_dict(through_file(first.state_dict()))
    for optimizer in built:
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert {k: optimizer.param_groups[0][k] for k in functions} == functions
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, built, strict=True):
        set_gradients([*model.parameters()], seed=1)
        optimizer.step()
    assert_same_bits(models[0].parameters(), models[1].parameters())
