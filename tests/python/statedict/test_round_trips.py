"""Save under one way to hold weights and moments, load under another: by the oracle's bits."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.state.quantized import dequantize, quantize
from torchopt_ext.statedict.dcp import Reader, load

from ...support.compare import assert_same, contents, unchanged
from .jobs import (
    CODES,
    HOLDS,
    LAYOUTS,
    OURS,
    codes_of,
    container_of,
    exact_weights,
    expected_moments,
    job,
    kept,
    moment_of,
    optimizer_of,
    same_moments,
    through_checkpoint,
    train,
)

FULL = StateDictOptions(full_state_dict=True)
WAYS = [
    ("optimizer", "state dict", 2),
    ("optimizer", "checkpoint", 0),
    ("optimizer", "full", 0),  # torch adds what the optimizer holds itself
    ("optimizer", "full", 2),
    ("container", "state dict", 0),
    ("container", "checkpoint", 2),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("layout", "way", "steps", "saved", "held"),
    [
        (*way, saved, held)
        for way, saved, held in product(WAYS, HOLDS, OURS)
        if way is WAYS[0] or held in ("plain", "fp32", "remainder", "remainder8, int8")
    ],
)
def test_any_state_loads_as_any(
    layout: str, way: str, steps: int, saved: str, held: str, tmp_path: Path
) -> None:
    """Moments are converted by the load, weights by the next step, and the source stays."""
    model, source = job(layout, saved, 1, 3)
    other, target = job(layout, held, 2, steps)
    states = [source.state[p] for p in model.parameters()]
    exact = exact_weights(model, source)
    with unchanged(source, model):
        if way == "checkpoint":
            through_checkpoint(tmp_path / "saved", {"optim": source}, {"optim": target})
        elif way == "full":
            if steps == 0:  # the model may be loaded first
                other.load_state_dict(model.state_dict())
            state_dict = get_optimizer_state_dict(model, source, options=FULL)
            set_optimizer_state_dict(other, target, state_dict, options=FULL)
            other, target = copy.deepcopy((other, target))
        else:
            target.load_state_dict(source.state_dict())
        other.load_state_dict(model.state_dict())
        loaded = [target.state[p] for p in other.parameters()]
        alone = optimizer_of(copy.deepcopy(other), held)
        alone.init_state()
        pairs = zip(states, alone.state.values(), strict=True)
        assert same_moments(loaded, [expected_moments(*pair) for pair in pairs])
        target.param_groups[0].update(lr=0.0, weight_decay=0.0)
        train(other, target, [7])
    assert_same([*other.state_dict().values()], [*model.state_dict().values()])
    assert_same(exact_weights(other, target), kept(exact, held))
    assert all(float(state["step"]) == 4 for state in loaded)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *(((layout, "plain"),) * 2 for layout in ("adapted", "adapted SGD", "in backward")),
        *(((layout, "torch"),) * 2 for layout in ("optimizer", "container", "adapted")),
        (("in backward", "plain"), ("container", "fp32")),
        (("container", "remainder"), ("in backward", "plain")),
        (("optimizer", "remainder"), ("optimizer", "torch")),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpoint_loads_as_the_state_dict_does(
    saved: Any, loaded: Any, steps: int, tmp_path: Path
) -> None:
    model, source = job(*saved, 1, 3)
    (expected_model, expected), (other, target) = (job(*loaded, seed, steps) for seed in (2, 3))
    expected_model.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(source.state_dict()))
    through_checkpoint(
        tmp_path, {"model": model, "optim": source}, {"model": other, "optim": target}
    )
    for each in ((expected_model, expected), (other, target)):
        train(*each, range(2))
    assert_same(other.state_dict(), expected_model.state_dict())
    assert_same(contents(target.state_dict()), contents(expected.state_dict()))


def test_options_are_copies() -> None:
    """Groups share a learning rate that saved groups share, but nothing with the dict."""
    rate, rates = torch.tensor(0.5), []
    for _ in range(2):
        params = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
        optimizer = FusedAdamW(params, lr=0.1)
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["lr"] = rate
        optimizer.load_state_dict(saved)
        rates += [group["lr"] for group in optimizer.param_groups]
    assert rates[0] is rates[1] and rates[2] is rates[3]
    assert rates == [0.5] * 4 and len({id(rate), id(rates[0]), id(rates[2])}) == 3


def test_schedulers_and_scalers_go_along(tmp_path: Path) -> None:
    def states(seed: int, steps: int, epoch: int) -> dict[str, Any]:
        model, optimizer = job("optimizer", "fp32", seed, steps)
        found: dict[str, Any] = {"optim": optimizer, "model": model, "epoch": epoch}
        return found | {"lr": LambdaLR(optimizer, lambda n: 0.5**n), "scaler": GradScaler("cpu")}

    source, target = states(1, 1, 3), states(2, 0, 0)
    source["lr"].step()
    source["scaler"].load_state_dict(source["scaler"].state_dict() | {"scale": 8.0})
    through_checkpoint(tmp_path, source, target)
    load(target, checkpoint_id=tmp_path, storage_reader=Reader("elsewhere"))
    assert target["epoch"] == 3
    for key in ("optim", "model", "lr", "scaler"):
        assert_same(contents(target[key].state_dict()), contents(source[key].state_dict()))


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30, 200), (5, 8, 16), (2, 64), (0, 70), (3, 300_001)])
@pytest.mark.parametrize("name", CODES)
def test_codes_are_the_documented_ones_and_keep(name: str, shape: tuple[int, ...]) -> None:
    moment = torch.randn(shape) * torch.randn(shape).exp()
    moment = moment.square() if name == "exp_avg_sq" else moment
    moment[:1, :64] = 0
    codes, scales = quantize(name, moment)
    assert_same([codes, scales], [*codes_of(name, moment)])
    back = dequantize(name, codes, scales)
    assert_same(back, moment_of(name, codes, scales))
    assert quantize(name, back)[0].equal(codes)
    assert not (back == 0)[moment > 0].any() or name != "exp_avg_sq"


def test_what_is_not_finite_stays_so() -> None:
    moment = torch.ones(2, 128)
    moment[0, 3], moment[1, 70] = torch.nan, torch.inf
    for name in CODES:
        back = dequantize(name, *quantize(name, moment))
        finite = back.isfinite().view(4, 64).any(1)
        assert finite.tolist() == [False, True, True, False]


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
def test_a_layout_that_changed_since_the_last_step(first: torch.memory_format) -> None:
    """A container loads as FusedAdamW does: parameters that are not contiguous have no codes."""
    weights = []
    for make in (container_of, optimizer_of):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Conv2d(16, 4, 3)).to(memory_format=first)
        optimizer = make(model, "int8")
        train(model, optimizer, [0])
        saved = copy.deepcopy(optimizer.state_dict())
        last = {torch.contiguous_format, torch.channels_last} - {first}
        model.to(memory_format=last.pop())
        optimizer.load_state_dict(saved)
        train(model, optimizer, [1])
        weights.append(contents(model.state_dict()))
    assert_same(*weights)


# ---- meshes --------------------------------------------------------------------------------------


def on_mesh(name: str) -> nn.Module:
    """A model whose parameters lie on a mesh of two ranks, of which this process is the second."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    torch.manual_seed(3)
    model = nn.Linear(6, 4)
    for name, param in [*model.named_parameters()]:
        shard = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(model, name, nn.Parameter(shard))
    return model


@pytest.mark.usefixtures("second_of_two_ranks")
@pytest.mark.parametrize(
    ("layout", "held"),
    [("optimizer", "plain"), *product(("container", "adapted"), ("plain", "torch"))],
)
def test_state_of_a_mesh_of_another_name_loads(layout: str, held: str) -> None:
    """The same ranks, such as torchtitan's "fsdp" and "dp_shard"."""
    model, other = on_mesh("fsdp"), on_mesh("dp_shard")
    optimizer, loaded = (LAYOUTS[layout](each, held) for each in (model, other))

    def step(each: nn.Module, stepped: Any, gradient: float) -> None:
        for p in each.parameters():
            p.grad = torch.full_like(p, gradient)
        stepped.step()

    step(model, optimizer, 1.0)
    loaded.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.to_local().copy_(p.to_local())
    step(model, optimizer, 2.0)
    step(other, loaded, 2.0)
    assert_same(contents([*other.parameters()]), contents([*model.parameters()]))
    entries = torch.utils._pytree.tree_leaves(loaded.state_dict())
    names = {e.device_mesh.mesh_dim_names for e in entries if isinstance(e, DTensor)}
    assert names == {("dp_shard",)}
