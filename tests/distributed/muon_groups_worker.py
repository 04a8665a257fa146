"""Cases of test_workers.py: checkpoints of Muon go on in process groups of other ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.muon_worker import Run
from tests.support.compare import assert_same_bits
from tests.support.ranks import gathered, run_cases
from torchopt_ext import FusedMuon, ZeroRedundancyOptimizer
from torchopt_ext.statedict.dcp import load


def zero(partition: str, way: str, group: Any) -> Run:
    sharded: Any = partial(
        ZeroRedundancyOptimizer, optimizer_class=FusedMuon, process_group=group,
        partition=partition,
    )  # fmt: skip
    return Run(way=way, build=sharded)


def cut(dim: int, way: str, group: Any) -> Run:
    mesh = DeviceMesh.from_group(group, "cpu")

    def place(tensor: Tensor) -> Tensor:
        placement = Shard(dim) if dim < tensor.dim() else Replicate()
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    return Run(place, way)


def equal(way: str, group: Any) -> Run:
    return Run(way=way, orthogonalize_over=group)


HELD: list[tuple[list[int], Callable[..., Run]]] = [
    ([0, 1], partial(zero, "balanced")),
    ([1, 2, 3], partial(cut, 0)),
    ([0, 3], partial(zero, "greedy")),
    ([0, 2, 3], partial(zero, "balanced")),
    ([2], lambda way, _: Run(way=way)),
    ([0, 1, 2, 3], partial(cut, 1)),
    ([3, 1], equal),
    ([0, 1, 2], partial(zero, "balanced")),
]
"""Who trains, one after another, and how these ranks hold matrices."""


def trains_on(way: str) -> None:
    """Each group loads what the one before saved. The bits are those of one process."""
    folder, alone = Path(gathered(tempfile.mkdtemp())[0]), Run(way=way)
    for number, (ranks, build) in enumerate(HELD):
        group = dist.new_group(ranks)
        alone.train(2 * number, 2 * number + 1)
        if dist.get_rank() not in ranks:
            continue
        run = build(way, group)
        saved = {"model": dict(enumerate(run.params)), "optimizer": run.optimizer}
        if number:
            load(saved, checkpoint_id=folder / str(number - 1), process_group=group)
        run.train(2 * number, 2 * number + 1)
        assert_same_bits(run.weights(), alone.weights())
        dcp.save(saved, checkpoint_id=folder / str(number), process_group=group)
    dist.barrier()


def cases() -> dict[str, Callable[[], Any]]:
    ways = "fp32", "NorMuon, fp32", "NorMuon, remainder8, random"
    return {way: partial(trains_on, way) for way in ways}


if __name__ == "__main__":
    run_cases(cases)
