"""Degrees of parallelism: which are valid, and which meshes they give."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext.trainer.parallel_dims import _TOGETHER, ParallelDims


def dims(*degrees: int, world_size: int, loss_parallel: bool = True) -> ParallelDims:
    return ParallelDims(*degrees, world_size, loss_parallel)


# dp_replicate, dp_shard, cp, tp, pp; ranks; sizes of the mesh; enabled kinds
MESHES = {
    "one rank": ((1, -1, 1, 1, 1), 1, {"dp_shard": 1}, ""),
    "fsdp": ((1, -1, 1, 1, 1), 4, {"dp_shard": 4}, "dp dp_shard fsdp dp_cp"),
    "ddp": ((4, 1, 1, 1, 1), 4, {"dp_replicate": 4}, "dp dp_replicate dp_cp"),
    "hsdp": (
        *((2, -1, 1, 1, 1), 8, {"dp_replicate": 2, "dp_shard": 4}),
        "dp dp_replicate dp_shard fsdp dp_cp",
    ),
    "tp": ((1, 1, 1, 2, 1), 2, {"tp": 2}, "tp loss_parallel"),
    "pp": ((1, 1, 1, 1, 2), 2, {"pp": 2}, "pp"),
    "cp": ((1, 1, 4, 1, 1), 4, {"cp": 4}, "cp fsdp dp_cp"),
    "all": (
        *((2, -1, 2, 2, 2), 32, {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}),
        "dp dp_replicate dp_shard cp dp_cp fsdp tp pp loss_parallel",
    ),
}
SWITCHES = ("dp", "dp_replicate", "dp_shard", "cp", "dp_cp", "fsdp", "tp", "pp", "loss_parallel")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group without computation, in which this process is the last rank."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=request.param - 1, world_size=request.param
    )
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("degrees", "ranks", "sizes", "enabled"), MESHES.values(), ids=MESHES, indirect=["ranks"]
)
def test_meshes(degrees: tuple[int, ...], ranks: int, sizes: dict[str, int], enabled: str) -> None:
    parallel = dims(*degrees, world_size=ranks)
    device = "cuda" if "cp" in sizes else "cpu"
    mesh = parallel.build_mesh(device)
    assert mesh.mesh_dim_names == tuple(sizes)
    assert mesh.shape == tuple(sizes.values())
    assert {name for name in SWITCHES if getattr(parallel, f"{name}_enabled")} == {*enabled.split()}
    for name, parts in _TOGETHER.items():
        present = [part for part in parts if part in sizes]
        if not present:
            with pytest.raises(ValueError, match=f"the mesh has no '{name}', expected one of"):
                parallel.get_mesh(name)
            continue
        together = parallel.get_mesh(name)
        expected = prod(sizes[part] for part in present)
        assert (together.ndim, together.size()) == (1, expected)
        assert together.get_local_rank() == expected - 1  # the last rank is last in each mesh
    if parallel.fsdp_enabled:
        shards = parallel.dp_shard * parallel.cp
        replicas = () if parallel.dp_replicate == 1 else (parallel.dp_replicate,)
        assert parallel.fsdp_mesh(mesh).shape == (*replicas, shards)
    assert parallel.non_data_parallel_size == ranks // (parallel.dp_replicate * parallel.dp_shard)


def test_loss_parallel_can_be_turned_off() -> None:
    assert not dims(1, 1, 1, 2, 1, world_size=2, loss_parallel=False).loss_parallel_enabled


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        ((1, 1, 1, 1, 1), 2, r"pp 1 \* dp_replicate 1 \* dp_shard 1 .* = 1 ranks, .* size is 2"),
        ((1, -1, 1, 3, 1), 4, r"dp_shard 1 \* cp 1 \* tp 3 = 3 ranks, but the world size is 4"),
        ((1, -1, 1, 4, 2), 4, r"pp 2 .* tp 4 = 8 ranks, but the world size is 4"),
        ((2, 2, 1, 1, 1), 2, r"= 4 ranks, but the world size is 2"),
        ((1, 0, 1, 1, 1), 1, r"data_parallel_shard_degree is 0, expected 1 or more, or -1"),
        ((1, -2, 1, 1, 1), 1, r"data_parallel_shard_degree is -2, expected 1 or more, or -1"),
        ((-1, 1, 1, 1, 1), 1, r"data_parallel_replicate_degree is -1, expected 1 or more"),
        ((1, 1, 0, 1, 1), 1, r"context_parallel_degree is 0, expected 1 or more"),
        ((1, 1, 1, 0, 1), 1, r"tensor_parallel_degree is 0, expected 1 or more"),
        ((1, 1, 1, 1, 0), 1, r"pipeline_parallel_degree is 0, expected 1 or more"),
    ],
)
def test_invalid_degrees(degrees: tuple[int, ...], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dims(*degrees, world_size=world_size)


def test_context_parallel_needs_a_gpu() -> None:
    """torch's context parallelism divides only CUDA's attention kernels."""
    with pytest.raises(ValueError, match=r"context_parallel_degree is 2, .* for 'cpu'"):
        dims(1, 1, 2, 1, 1, world_size=2).build_mesh("cpu")
