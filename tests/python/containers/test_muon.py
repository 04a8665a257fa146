"""Containers and configurations send a model's parameters to Muon and to AdamW."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedMuon, FusedOptimizer, muon_groups
from torchopt_ext.containers import (
    OptimizersContainer,
    OptimizersInBackwardContainer,
    build_optimizers,
)

from ...support.compare import assert_same_bits, snapshot
from ...support.problems import through_file


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(20, 12)
        self.layers = nn.ModuleList([Block(), Block()])
        self.output = nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def train(model: nn.Module, optimizer: Any, seeds: range = range(3)) -> None:
    for seed in seeds:
        tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


ADAMW = {"betas": (0.9, 0.95)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("cls", [OptimizersContainer, OptimizersInBackwardContainer])
@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 0.5}])
@pytest.mark.parametrize("optimizer_cls", [FusedMuon, FusedOptimizer])
def test_a_container_is_muon_groups(cls: Any, more: dict[str, Any], optimizer_cls: Any) -> None:
    """In backward, matrices are held until the norm, or updated when their gradient is final."""
    models = [Model(), Model()]
    arguments = {**OPTIONS, **more} | ({} if optimizer_cls is FusedMuon else {"algorithm": "muon"})
    container = cls([models[0]], optimizer_cls, arguments, adamw_options=ADAMW)
    groups = muon_groups(models[1], adamw_options=ADAMW, no_decay=(), quiet=True)
    reference = FusedMuon(groups, **OPTIONS, **more)
    for model, optimizer in zip(models, (container, reference), strict=True):
        train(model, optimizer)
    assert_same_bits(models[0].parameters(), models[1].parameters())
    by_name = {
        name: group["algorithm"]
        for group in container.param_groups
        for name, p in models[0].named_parameters()
        if any(p is q for q in group["params"])
    }
    assert {n for n, a in by_name.items() if a == "muon"} == {
        f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")
    }


@pytest.mark.parametrize(
    ("more", "backwards", "moves"),
    [({}, 1, "hook"), ({"max_grad_norm": 0.5}, 1, "end"), ({"max_grad_norm": 0.5}, None, "step")],
)
def test_when_matrices_move_in_backward(
    more: dict[str, Any], backwards: int | None, moves: str
) -> None:
    """A large one when its own gradient is final; with a norm all when the last gradient is there.

    With ``backwards_per_step=None`` that is in step().
    """
    torch.manual_seed(0)
    layers = [nn.Linear(264, 264, bias=False) for _ in range(3)]  # larger than what is batched
    options = {**OPTIONS, **more}
    container = OptimizersInBackwardContainer(
        [nn.Sequential(*layers)], FusedMuon, options, backwards_per_step=backwards
    )
    algorithms = [group["algorithm"] for group in container.param_groups]
    assert sorted(algorithms) == (["adamw", "muon", "muon"] if not more else ["adamw", "muon"])
    before = [layer.weight.detach().clone() for layer in layers]

    def moved() -> list[bool]:
        weights = [layer.weight for layer in layers]
        return [not torch.equal(*pair) for pair in zip(weights, before, strict=True)]

    seen: list[list[bool]] = []
    x = layers[0](torch.randn(4, 264))
    x.register_hook(lambda gradient: seen.append(moved()))  # before the first layer's gradient
    layers[2](layers[1](x.tanh()).tanh()).square().sum().backward()
    assert seen == [[False, moves == "hook", moves == "hook"]]
    assert moved() == [moves != "step"] * 3
    container.step()
    assert moved() == [True] * 3
    assert float(container.control.orthogonalized) == 2
    assert "orthogonalized=2" in repr(container.control)


def test_patterns_decide_otherwise() -> None:
    model = Model()
    container = OptimizersContainer([model], FusedMuon, OPTIONS, muon=["output"], adamw=["up"])
    algorithm = {id(p): g["algorithm"] for g in container.param_groups for p in g["params"]}
    assert algorithm[id(model.output.weight)] == "muon"
    assert algorithm[id(model.layers[0].up.weight)] == "adamw"
    with pytest.raises(ValueError, match="no effect without FusedMuon"):
        OptimizersContainer([model], FusedOptimizer, {}, muon=["output"])


@pytest.mark.parametrize("cls", [OptimizersContainer, OptimizersInBackwardContainer])
def test_rows_are_scaled_by_name(cls: Any) -> None:
    """As by an optimizer over the same parameters, between steps."""
    models = [Model(), Model()]
    container = cls([models[0]], FusedMuon, OPTIONS, adamw_options=ADAMW)
    groups = muon_groups(models[1], adamw_options=ADAMW, no_decay=(), quiet=True)
    optimizer = FusedMuon(groups, **OPTIONS)
    for model, each in zip(models, (container, optimizer), strict=True):
        train(model, each)
        before = model.layers[0].up.weight.detach().clone()
        each.scale_("layers.0.up.weight", torch.tensor([0.5, 1.0]))
        each.scale_(model.layers[1].up.weight, torch.tensor([2.0]))
        half = before.shape[0] // 2
        assert_same_bits(
            model.layers[0].up.weight.detach().split(half), (before[:half] / 2, before[half:])
        )
        train(model, each)
        with pytest.raises(ValueError, match="has no parameter 'up'"):
            each.scale_("up", torch.ones(1))
        with pytest.raises(TypeError, match="param is 0, expected a parameter or its name"):
            each.scale_(0, torch.ones(1))
    assert_same_bits(models[0].parameters(), models[1].parameters())


def test_a_flat_state_dict_resumes() -> None:
    models = [Model(), Model()]
    optimizers = [OptimizersContainer([m], FusedMuon, OPTIONS) for m in models]
    train(models[0], optimizers[0])
    saved = through_file(optimizers[0].state_dict())
    assert "state.layers.0.up.weight.momentum_buffer" in saved
    assert "state.tok.weight.exp_avg_sq" in saved
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    optimizers[1].load_state_dict(saved)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3, 5))
    assert_same_bits(models[0].parameters(), models[1].parameters())
    assert snapshot(optimizers[0]) == snapshot(optimizers[1])


def section(**changes: Any) -> SimpleNamespace:
    values = {"name": "Muon", "lr": 0.02, "implementation": "fused"}
    return SimpleNamespace(**values | {"early_step_in_backward": False} | changes)


DIMS = SimpleNamespace(pp_enabled=False, ep_enabled=False)


def test_a_configuration() -> None:
    """One learning rate serves both; betas and eps are those of AdamW's groups."""
    container = build_optimizers([Model()], section(beta2=0.98, eps=1e-6, momentum=0.0), DIMS)
    by_algorithm = {group["algorithm"]: group for group in container.param_groups}
    muon, adamw = by_algorithm["muon"], by_algorithm["adamw"]
    assert (muon["lr"], muon["momentum"], muon["adjust_lr_fn"]) == (0.02, 0.95, "match_rms_adamw")
    assert (adamw["lr"], adamw["betas"], adamw["eps"]) == (0.02, (0.9, 0.98), 1e-6)
    settings = {"adjust_lr_fn": "original", "ns_steps": 3, "momentum": 0.9, "muon": ["output"]}
    container = build_optimizers([Model()], section(**settings), DIMS)
    muon = next(g for g in container.param_groups if g["algorithm"] == "muon")
    assert {key: muon[key] for key in ("adjust_lr_fn", "ns_steps", "momentum")} == {
        key: settings[key] for key in ("adjust_lr_fn", "ns_steps", "momentum")
    }
    assert len(muon["params"]) == 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"implementation": "foreach"}, NotImplementedError, "Muon is not available"),
        ({"amsgrad": True}, ValueError, "amsgrad has no effect"),
        ({"muon": ["no such"]}, ValueError, "no such"),
        ({"name": "AdamW", "ns_steps": 3}, ValueError, "ns_steps has no effect"),
        ({"name": "AdamW", "muon": ["output"]}, ValueError, "no effect without FusedMuon"),
    ],
)
def test_configurations_that_are_rejected(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_optimizers([Model()], section(**changes), DIMS)
