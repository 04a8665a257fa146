"""Containers save and resume through torch.distributed.checkpoint, on one process."""

import copy

import pytest
import torch.distributed.checkpoint as dcp

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import LRSchedulersContainer, OptimizersContainer

from .conftest import assert_same, train


class Job:
    """The states that a trainer saves and loads."""

    def __init__(self, parts, lr=1e-2):
        self.parts = parts
        self.optimizer = OptimizersContainer(parts, FusedAdamW, {"lr": lr, "fused": True})
        self.lr_scheduler = LRSchedulersContainer(self.optimizer, lambda step: 1 / (step + 1))

    def states(self):
        models = {f"part{i}": part for i, part in enumerate(self.parts)}
        return {**models, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}

    def run(self, seeds):
        for seed in seeds:
            train(self.optimizer, self.parts, [seed])
            self.lr_scheduler.step()
        return self


@pytest.mark.parametrize("saved_at", [0, 3])
def test_a_resumed_job_ends_as_an_uninterrupted_one(parts, tmp_path, saved_at):
    job = Job(copy.deepcopy(parts)).run(range(saved_at))
    dcp.save(job.states(), checkpoint_id=tmp_path)
    scheduled = Job(copy.deepcopy(parts))
    dcp.load({"lr_scheduler": scheduled.lr_scheduler}, checkpoint_id=tmp_path)
    assert [g["lr"] for g in scheduled.optimizer.param_groups] == [1e-2 / (saved_at + 1)] * 2
    job.run(range(saved_at, 6))
    resumed = Job(parts, lr=1.0)
    dcp.load(resumed.states(), checkpoint_id=tmp_path)
    resumed.run(range(saved_at, 6))
    for left, right in zip(resumed.states().values(), job.states().values(), strict=True):
        assert_same(left.state_dict(), right.state_dict())


def test_a_checkpoint_lacking_a_key_changes_no_hyperparameter(parts, tmp_path):
    partial = OptimizersContainer(copy.deepcopy(parts[:1]), FusedAdamW, {"lr": 0.5})
    dcp.save({"optimizer": partial}, checkpoint_id=tmp_path)
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2})
    with pytest.raises(dcp.api.CheckpointException, match=r"layers\.2"):
        dcp.load({"optimizer": container}, checkpoint_id=tmp_path)
    assert [group["lr"] for group in container.param_groups] == [1e-2] * 2
    train(container, parts, [0])
