"""param_groups: default rules, patterns, tied and frozen parameters, and torch's optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchopt_ext import FusedAdamW, param_groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 4)
        self.block = nn.Sequential(
            nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(4)
        )
        self.gate = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tok.weight


def names(groups: list[dict]) -> dict[str, set[str]]:
    return {group["name"]: {name for name, _ in group["params"]} for group in groups}


SPARED = {"block.0.bias"} | {f"block.{i}.{n}" for i, n in
          ((1, "weight"), (1, "bias"), (2, "weight"), (3, "weight"), (3, "bias"))}  # fmt: skip


@pytest.mark.parametrize(
    ("no_decay", "spared"),
    [
        (("norm", "bias", "vector"), SPARED | {"gate"}),
        (("norm", "bias"), SPARED),
        (("vector",), SPARED | {"gate"}),
        ((), set()),
        (("bias",), {"block.0.bias", "block.1.bias", "block.3.bias"}),
        (("norm", "bias", "embedding"), SPARED | {"tok.weight"}),
        (("gate$",), {"gate"}),
        (("^head",), {"tok.weight"}),  # the tied weight's other name
    ],
)
def test_rule(no_decay: tuple[str, ...], spared: set[str]) -> None:
    model = Model()
    groups = param_groups(model, 0.3, no_decay=no_decay)
    by_group = names(groups)
    assert by_group.get("no_decay", set()) == spared
    assert by_group["decay"] == dict(model.named_parameters()).keys() - spared
    assert {g["name"]: g["weight_decay"] for g in groups} == (
        {"decay": 0.3, "no_decay": 0.0} if spared else {"decay": 0.3}
    )
    assert all("lr" not in group for group in groups)


def test_biases_of_torchs_modules() -> None:
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(4, 4), "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True)}
    )
    named = dict(model.named_parameters())
    spared = names(param_groups(model, no_decay=["bias"]))["no_decay"]
    assert spared == {name for name in named if "bias" in name}
    debiased = nn.ParameterDict({"debias_scale": torch.ones(2, 2)})
    assert "no_decay" not in names(param_groups(debiased))


class Vectors(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("name", "shape", "is_norm"),
    [
        ("LlamaRMSNorm", (4,), True),
        ("FSDPLayerNormFP32", (4,), True),
        ("Rmsnorm", (1, 4, 1, 1), True),
        ("NormLinear", (4, 4), False),
        ("NormedBlock", (4,), False),
        ("Normalizer", (4,), False),
    ],
)
def test_others_norms_are_known_by_the_word(
    name: str, shape: tuple[int, ...], is_norm: bool
) -> None:
    module = type(name, (Vectors,), {})(*shape)
    (group,) = param_groups(module, no_decay=("norm",))
    assert (group["name"] == "no_decay") == is_norm


def test_torchs_norms_may_have_any_shape_and_any_name() -> None:
    class Scale(nn.LayerNorm): ...

    model = nn.Sequential(nn.LayerNorm((3, 4)), Scale(4), nn.Linear(4, 4, bias=False))
    assert names(param_groups(model, no_decay=("norm",)))["decay"] == {"2.weight"}


def test_learning_rates() -> None:
    groups = param_groups(
        Model(), lr=1e-2, lr_multipliers={"tok": 0.1, r"block\.0": 2.0, "weight": 3.0},
        no_decay=("norm", "bias"),
    )  # fmt: skip
    assert {g["name"]: (g["lr"], sorted(n for n, _ in g["params"])) for g in groups} == {
        "decay": (1e-2, ["gate"]),
        "decay, lr * 0.1": (1e-3, ["tok.weight"]),
        "decay, lr * 2": (2e-2, ["block.0.weight"]),
        "no_decay, lr * 2": (2e-2, ["block.0.bias"]),
        "no_decay, lr * 3": (3e-2, ["block.1.weight", "block.2.weight", "block.3.weight"]),
        "no_decay": (1e-2, ["block.1.bias", "block.3.bias"]),
    }


def test_multipliers_that_look_alike_stay_apart() -> None:
    groups = param_groups(
        nn.Linear(2, 2), lr=1.0, lr_multipliers={"weight": 0.1, "bias": 0.1 + 1e-12}, no_decay=()
    )
    assert [group["lr"] for group in groups] == [0.1, 0.1 + 1e-12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_decay": ("norms",)}, r"no parameter has a name with \['norms'\]"),
        ({"lr": 1.0, "lr_multipliers": {"hed.weight": 2.0}}, r"'hed.weight': \['head.weight'"),
        ({"lr_multipliers": {"tok": 2.0}}, "needs lr="),
        ({"no_decay": ("(",)}, "is not a regular expression"),
        ({"weight_decay": -1.0}, "Invalid weight_decay"),
        ({"lr": float("inf")}, "Invalid lr: inf, expected a finite number"),
        ({"lr": 1.0, "lr_multipliers": {"tok": float("nan")}}, "Invalid lr_multipliers"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), **arguments)


def test_other_types_and_flattened_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a sequence such as \('bias',\)"):
        param_groups(Model(), no_decay="bias")
    model = Model()
    assert param_groups(model, no_decay=iter(("norm", "bias"))) == param_groups(
        model, no_decay=("norm", "bias")
    )
    with pytest.raises(TypeError, match=r"model is of type generator, expected a torch.nn.Module"):
        param_groups(Model().parameters())
    with pytest.raises(TypeError, match=r"weight_decay is '0.1', expected a number"):
        param_groups(Model(), "0.1")
    model = Model()
    model.gate._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="gate is flattened by FullyShardedDataParallel"):
        param_groups(model)


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        param_groups(model)
    model.block[0].weight.requires_grad_(True)
    assert names(param_groups(model, no_decay=("tok",))) == {"decay": {"block.0.weight"}}


@pytest.mark.parametrize("optimizer", [FusedAdamW, torch.optim.AdamW, torch.optim.SGD])
def test_decays_by_group_and_saves_names(optimizer: type[torch.optim.Optimizer]) -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = optimizer(param_groups(model, 0.5), lr=0.1)
    spared = SPARED | {"gate"}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), before[name] * (1 if name in spared else 0.95))
    saved = opt.state_dict()
    assert {n for g in saved["param_groups"] for n in g["param_names"]} == before.keys()
    other = optimizer(param_groups(Model(), 0.5), lr=0.1)
    other.load_state_dict(saved)
    assert other.state_dict()["param_groups"] == saved["param_groups"]
    assert set(get_optimizer_state_dict(model, opt)["state"]) <= before.keys()


@pytest.mark.usefixtures("one_rank")
def test_fsdp_keeps_groups() -> None:
    model = Model()
    expected = names(param_groups(model))
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    groups = param_groups(model)
    assert names(groups) == expected
    assert all(isinstance(p, DTensor) for g in groups for _, p in g["params"])
    FusedAdamW(groups)
