"""Every reader of a state dict reports all problems at once, before the first write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import snapshot
from ...support.problems import set_gradients

BASES = {"ours": FusedAdamW, "torch's": torch.optim.AdamW}
KINDS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, _: FusedAdamW(model.named_parameters()),
    "container": lambda model, cls: OptimizersContainer([model], cls, {}),
    "wrapper": lambda model, cls: FSDPadaptOptimizer(cls(model.named_parameters())),
    "sharded": lambda model, cls: ZeroRedundancyOptimizer(model.named_parameters(), cls),
}


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_wrong_is_reported_at_once(one_rank: Any, kind: str, base: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 5))
    optimizer = KINDS[kind](model, BASES[base])
    params = list(model.parameters())
    set_gradients(params)
    optimizer.step()
    if kind == "sharded":
        optimizer.consolidate_state_dict()
    saved = copy.deepcopy(optimizer.state_dict())
    if kind == "container":
        names = [f"state.{name}." for name, _ in model.named_parameters()]
        wrong = {names[0] + "exp_avg": torch.ones(2), names[1] + "exp_avg_sq": 1.0}
        wrong |= {name + "step": -1.0 for name in names[2:]} | {"param_groups.0.weight.lr": "fast"}
        saved |= wrong
        shown = list(wrong)[:5]
    else:
        indexed = saved.get("base_optim_states", saved)
        indexed["state"][0]["exp_avg"] = torch.ones(2)
        indexed["state"][1]["exp_avg_sq"] = 1.0
        for index in range(2, 6):
            indexed["state"][index]["step"] = -1.0
        indexed["param_groups"][0]["lr"] = "fast"
        shown = ["exp_avg of parameter 0", "exp_avg_sq of parameter 1"]
        shown += [f"step of parameter {index}" for index in range(2, 5)]
    before = snapshot(optimizer), [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=r"and \d more") as caught:
        optimizer.load_state_dict(saved)
    assert all(each in str(caught.value) for each in shown)
    assert (snapshot(optimizer), [group["lr"] for group in optimizer.param_groups]) == before
    if kind == "container":
        del saved[names[2] + "step"]  # a missing key raises KeyError, which also lists the others
        with pytest.raises(KeyError, match=r"step' is missing; .*and \d more"):
            optimizer.load_state_dict(saved)


def test_entries_of_no_known_meaning_are_checked_by_those_held() -> None:
    model = nn.Linear(3, 4)
    container = OptimizersContainer([model], torch.optim.NAdam, {})
    set_gradients(list(model.parameters()))
    container.step()
    wrong = copy.deepcopy(container.state_dict()) | {"state.bias.mu_product": torch.ones(3)}
    wrong["state.weight.exp_avg"] += 1
    before = snapshot(container)
    with pytest.raises(ValueError, match=r"'state\.bias\.mu_product' has shape|is not a number"):
        container.load_state_dict(wrong)
    assert snapshot(container) == before


def on_mesh(name: str) -> nn.Module:
    """A model whose parameters lie on a mesh of two ranks, of which this process is the second."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    torch.manual_seed(3)
    model = nn.Linear(6, 4)
    return distribute_module(model, mesh, lambda _, part, mesh: sharded(part, mesh))


def sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, param in [*module.named_parameters()]:
        shard = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(shard))


@pytest.mark.usefixtures("second_of_two_ranks")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["optimizer", "container", "wrapper"])
def test_state_of_a_mesh_of_another_name_loads(kind: str, base: str) -> None:
    """The same ranks, such as torchtitan's "fsdp" and "dp_shard"."""
    model, other = on_mesh("fsdp"), on_mesh("dp_shard")
    optimizer, loaded = (KINDS[kind](part, BASES[base]) for part in (model, other))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    loaded.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        with torch.no_grad():
            q.to_local().copy_(p.to_local())
        p.grad, q.grad = torch.full_like(p, 2.0), torch.full_like(q, 2.0)
    optimizer.step()
    loaded.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
    saved = loaded.state_dict()
    states = (saved.get("base_optim_states") or saved).get("state", saved)
    entries = [e for v in states.values() for e in (v.values() if isinstance(v, dict) else [v])]
    names = {e.device_mesh.mesh_dim_names for e in entries if isinstance(e, DTensor)}
    assert names == {("dp_shard",)}


def test_regrouped_state_is_not_another_optimizers(one_rank: Any) -> None:
    """torch's set_optimizer_state_dict drops the options of parameters that were regrouped."""
    model = nn.Linear(3, 4)
    optimizer = FusedAdamW(model.parameters())
    set_gradients([*model.parameters()])
    optimizer.step()
    regrouped = FusedAdamW([{"params": [p]} for p in model.parameters()])
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"group 0 has no options.*build the groups that were"):
        set_optimizer_state_dict(model, regrouped, saved)
    regrouped.init_state()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    set_optimizer_state_dict(model, regrouped, saved, options=flat)
    assert all(
        torch.equal(optimizer.state[p]["exp_avg"], regrouped.state[p]["exp_avg"])
        for p in model.parameters()
    )
