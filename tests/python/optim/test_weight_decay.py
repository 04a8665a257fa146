"""Options of the decoupled weight decay: cautious, and in proportion to the learning rate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD
from torchopt_ext.state.algorithms import ALGORITHMS

from .test_algorithms import params_of, set_gradients

KINDS: dict[str, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    "adamw": (FusedAdamW, {}),
    "adam": (FusedAdam, {"decoupled_weight_decay": True}),
    "lion": (FusedLion, {}),
    "sgd": (FusedSGD, {"momentum": 0.9, "decoupled_weight_decay": True}),
}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp64": (torch.float64, {}),
    "fp32, clipped": (torch.float32, {"max_grad_norm": 1.0}),
    "fp32, int8": (torch.float32, {"state_dtype": "int8", "fp32_moments": ()}),
    "fp16, master": (torch.float16, {"master_weights": "fp32"}),
    "bf16, master, int8": (torch.bfloat16, {"master_weights": "fp32", "state_dtype": "int8"}),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"cautious_weight_decay": True},
    {"decay_follows_lr": 0.2},
    {"cautious_weight_decay": True, "decay_follows_lr": True, "maximize": True},
)
each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, params: Any, **more: Any) -> FusedOptimizer:
    cls, fixed = KINDS[kind]
    return cls(params, **fixed, **more)


def weights_of(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> list[Tensor]:
    held = [optimizer.state[param].get("master_weight", param) for param in params]
    return [weight.detach().double().clone() for weight in held]


@each_kind
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_formula(kind: str, way: str, options: dict[str, Any], tensor_lr: bool) -> None:
    """The decay is what a step adds to the step of a copy without weight decay."""
    dtype, storage = WAYS[way]
    params, peak = params_of(dtype), options.get("decay_follows_lr")
    with torch.no_grad():
        params[0][0, :50] = 0.0
    optimizer = build(
        kind, params, lr=torch.tensor(0.1) if tensor_lr else 0.1, weight_decay=0.5,
        **options, **storage,
    )  # fmt: skip
    if peak is not None:
        peak = optimizer.param_groups[0]["decay_follows_lr"]
        assert peak == pytest.approx(0.1 if options["decay_follows_lr"] is True else 0.2)
    optimizer.init_state()
    opposite = 0
    for seed, lr in enumerate((0.1, 0.06, 0.3)):
        group = optimizer.param_groups[0]
        if tensor_lr:
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        plain = copy.deepcopy(optimizer)
        plains = plain.param_groups[0]["params"]
        plain.param_groups[0]["weight_decay"] = 0.0
        before = weights_of(optimizer, params)
        for each, of in ((optimizer, params), (plain, plains)):
            set_gradients(of, seed)
            of[0].grad[1, :50] = 0.0  # type: ignore[index]
            each.step()
        after, undecayed = weights_of(optimizer, params), weights_of(plain, plains)
        for p, ours, without in zip(before, after, undecayed, strict=True):
            decays = torch.ones_like(p)
            if options.get("cautious_weight_decay"):
                decays = ((p - without) * p >= 0).double()
                opposite += int((decays == 0).sum())
            factor = lr * 0.5 * (1 if peak is None else lr / peak)
            tolerance = 1e-14 if dtype == torch.float64 and not tensor_lr else 1e-6
            expected = without - factor * decays * p
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert bool(opposite) is bool(options.get("cautious_weight_decay"))


def test_the_smallest_products_have_a_sign() -> None:
    """A product of direction and weight would round to 0 here."""
    tiny = 1e-30
    param = nn.Parameter(torch.tensor([tiny, -tiny, tiny, -tiny]))
    param.grad = torch.tensor([tiny, tiny, -tiny, -tiny])
    expected = param.detach() - 0.5 * torch.tensor([tiny, 0.0, 0.0, -tiny]) - param.grad
    optimizer = build("sgd", [param], lr=1.0, weight_decay=0.5, cautious_weight_decay=True)
    optimizer.step()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0)


@each_kind
def test_groups_have_the_keys_where_they_are_set(kind: str) -> None:
    """State dicts of torch lack them, and must load; groups may differ."""
    options = {"cautious_weight_decay": True, "decay_follows_lr": 0.5}
    unset = build(kind, params_of(), cautious_weight_decay=False, decay_follows_lr=0.0)
    assert not options.keys() & unset.param_groups[0].keys()
    first, second, third = ([p] for p in params_of()[:3])
    groups = [{"params": first, **options}, {"params": second, "lr": 0.3, "decay_follows_lr": True}]
    mixed = build(kind, [*groups, {"params": third}])
    assert mixed.param_groups[0].items() >= options.items()
    assert mixed.param_groups[1]["decay_follows_lr"] == 0.3
    assert not options.keys() & mixed.param_groups[2].keys()
    saved = copy.deepcopy(mixed.state_dict())
    restored = build(kind, [{"params": [p]} for p in params_of()[:3]])
    restored.load_state_dict(saved)
    assert restored.param_groups[0].items() >= options.items()
    saved["param_groups"][0] = {
        key: value for key, value in saved["param_groups"][0].items() if key not in options
    }
    mixed.load_state_dict(saved)
    assert mixed.param_groups[0].items() >= options.items()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["cautious_weight_decay", "decay_follows_lr"])
def test_coupled_weight_decay_is_rejected(algorithm: str, name: str) -> None:
    coupled = {"decoupled_weight_decay": False, name: True}
    with pytest.raises(ValueError, match="require decoupled_weight_decay"):
        FusedOptimizer(params_of(), algorithm=algorithm, **coupled)
    params = params_of()
    optimizer = FusedOptimizer(params, algorithm=algorithm, decoupled_weight_decay=False)
    optimizer.param_groups[0][name] = 1.0
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="require decoupled_weight_decay"):
        optimizer.step()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cautious_weight_decay": "no"}, "cautious_weight_decay is 'no', expected a bool"),
        ({"decay_follows_lr": -1.0}, "Invalid decay_follows_lr value: -1"),
        ({"decay_follows_lr": "yes"}, "decay_follows_lr is 'yes', expected a"),
        ({"decay_follows_lr": True, "lr": 0.0}, "decay_follows_lr is True, but lr is 0"),
        ({"cautious_decay": True}, "did you mean 'cautious_weight_decay'"),
    ],
)
def test_bad_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FusedAdamW(params_of(), **wrong)
    with pytest.raises((TypeError, ValueError), match=message):
        FusedOptimizer(params_of(), **wrong)


def test_true_between_steps_is_rejected() -> None:
    """It would be a learning rate of 1."""
    params = params_of()
    optimizer = FusedAdamW(params)
    optimizer.param_groups[0]["decay_follows_lr"] = True
    set_gradients(params, 0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(TypeError, match="decay_follows_lr is True, expected a learning rate"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
