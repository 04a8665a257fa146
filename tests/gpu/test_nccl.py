"""Norms over a process group and a device mesh, FSDP2 and ZeRO, with NCCL and a world of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.zero import ZeroRedundancyOptimizer

from .support import bits, everything, make_params, marks, set_gradients, step_by_graph

pytestmark = marks


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_process_group_of_one_changes_no_bit() -> None:
    found = []
    for group in (None, dist.group.WORLD):
        params = make_params("cuda")
        optimizer = FusedAdamW(params, max_grad_norm=0.5, process_group=group)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        found.append(everything(params, optimizer))
    assert found[0] == found[1]


@pytest.mark.usefixtures("world")
def test_a_step_with_a_process_group_is_captured_after_eager_ones() -> None:
    found = []
    for captured in (False, True):
        params = make_params("cuda")
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = FusedAdamW(params, lr, max_grad_norm=0.5, process_group=dist.group.WORLD)
        set_gradients(params, 0)
        optimizer.step()
        if captured:
            step_by_graph(optimizer)
        else:
            optimizer.step()
        optimizer.step()
        found.append(everything(params, optimizer))
    assert found[0] == found[1]


@pytest.mark.usefixtures("world")
def test_dtensors_on_a_mesh_of_one_change_no_bit() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (1,))
    params = [p for p in make_params("cuda") if p.dim() == 2 and p.numel() > 0]
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in params]
    optimizers = [FusedAdamW(ps, max_grad_norm=0.5) for ps in (params, sharded)]
    for step in range(3):
        set_gradients(params, step)
        for param, shard in zip(params, sharded, strict=True):
            assert param.grad is not None
            shard.grad = distribute_tensor(param.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    for param, shard in zip(params, sharded, strict=True):
        assert torch.equal(param, shard.to_local())


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("dtype", "kwargs"),
    [
        (torch.float32, {"skip_nonfinite": True}),
        (torch.bfloat16, {"master_weights": "fp32"}),
        (torch.bfloat16, {"master_weights": "remainder"}),
    ],
    ids=["fp32", "masters", "remainders"],
)
def test_fsdp2_gives_the_bits_of_plain_parameters(
    dtype: torch.dtype, kwargs: dict[str, Any]
) -> None:
    """The plain twin gets copies of FSDP2's gradients. Parameters and norm are equal bitwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [nn.Linear(67, 130), nn.GELU(), nn.Linear(130, 5, bias=False)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cuda", (1,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    nets = (model, twin)
    optimizers = [FusedAdamW(n.parameters(), lr=1e-2, max_grad_norm=0.5, **kwargs) for n in nets]
    for _ in range(3):
        model(torch.randn(9, 67, device="cuda", dtype=dtype)).square().mean().backward()
        for shard, param in zip(model.parameters(), twin.parameters(), strict=True):
            param.grad = shard.grad.to_local().clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    local = [shard.to_local() for shard in model.parameters()]
    assert [bits(x) for x in local] == [bits(x) for x in twin.parameters()]
    norms = [bits(optimizer.control.grad_norm) for optimizer in optimizers]
    assert norms[0] == norms[1]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("partition", ["greedy", "balanced", "sharded"])
def test_sharded_optimizer(partition: str) -> None:
    """One rank of NCCL steps, consolidates and loads as the plain optimizer does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 90), torch.nn.Linear(90, 7)).cuda()
    twin = copy.deepcopy(model)
    plain = FusedAdamW(twin.parameters(), lr=1e-2, max_grad_norm=1.0)
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        FusedAdamW,
        partition="greedy" if partition == "greedy" else "balanced",
        sharded_gradients=partition == "sharded",
        lr=1e-2,
        max_grad_norm=1.0,
    )
    for step in range(4):
        data = torch.randn(5, 300, device="cuda")
        for net, optimizer in ((model, zero), (twin, plain)):
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()
        if step == 2:
            zero.consolidate_state_dict(to=0)
            zero.load_state_dict(zero.state_dict())
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
