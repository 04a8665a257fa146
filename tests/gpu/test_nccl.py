"""The norm over a process group and over a device mesh, with NCCL and a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext import FusedAdamW

from .support import everything, make_params, marks, set_gradients

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
def test_dtensors_on_a_mesh_of_one_change_no_bit() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (1,))
    params = [p for p in make_params("cuda") if p.dim() == 2 and p.numel() > 0]
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in params]
    optimizers = [FusedAdamW(ps, max_grad_norm=0.5) for ps in (params, sharded)]
    for step in range(3):
        set_gradients(params, step)
        for param, copy in zip(params, sharded, strict=True):
            assert param.grad is not None
            copy.grad = distribute_tensor(param.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    for param, copy in zip(params, sharded, strict=True):
        assert torch.equal(param, copy.to_local())
