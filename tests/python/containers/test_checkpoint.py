"""Containers save and resume through torch.distributed.checkpoint, on one process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
)


class Job:
    """The states that a trainer saves and loads."""

    def __init__(self, parts, cls=OptimizersContainer, optimizer_cls=FusedAdamW, lr=1e-2):
        self.parts = parts
        self.optimizer = cls(parts, optimizer_cls, {"lr": lr, "fused": True, "foreach": False})
        self.lr_scheduler = LRSchedulersContainer(self.optimizer, lambda step: 1 / (step + 1))

    def states(self):
        models = {f"part{i}": part for i, part in enumerate(self.parts)}
        return {**models, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}

    def save(self, path):
        dcp.save(self.states(), checkpoint_id=path)

    def load(self, path):
        dcp.load(self.states(), checkpoint_id=path)

    def run(self, train, seeds):
        for seed in seeds:
            train(self.optimizer, self.parts, [seed])
            self.lr_scheduler.step()
        return self


@pytest.fixture
def compare(assert_same):
    def compare(left, right):
        assert_same(left.optimizer.state_dict(), right.optimizer.state_dict())
        assert_same(left.lr_scheduler.state_dict(), right.lr_scheduler.state_dict())
        assert_same(left.parts, right.parts)

    return compare


@pytest.mark.parametrize("saved_at", [0, 3])
def test_a_resumed_job_ends_as_an_uninterrupted_one(parts, train, tmp_path, saved_at, compare):
    job = Job(copy.deepcopy(parts)).run(train, range(saved_at))
    job.save(tmp_path)
    job.run(train, range(saved_at, 6))
    resumed = Job(parts, lr=1.0)
    resumed.load(tmp_path)
    resumed.run(train, range(saved_at, 6))
    compare(resumed, job)


def test_a_checkpoint_without_optimizer_still_sets_the_lr(parts, train, tmp_path):
    job = Job(copy.deepcopy(parts)).run(train, range(3))
    job.save(tmp_path)
    resumed = Job(parts)
    dcp.load({"lr_scheduler": resumed.lr_scheduler}, checkpoint_id=tmp_path)
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [1e-2 / 4] * 2


def test_parts_of_a_pipeline_load_from_one_whole_model(parts, train, tmp_path, assert_same):
    whole = copy.deepcopy(parts[0])
    whole.layers.update(copy.deepcopy(parts[1].layers))
    job = Job([whole]).run(train, range(2))
    dcp.save({"optimizer": job.optimizer}, checkpoint_id=tmp_path)
    for part in parts:  # one part per rank of the pipeline
        stage = Job([part], lr=1.0)
        dcp.load({"optimizer": stage.optimizer}, checkpoint_id=tmp_path)
        loaded = stage.optimizer.state_dict()
        saved = job.optimizer.state_dict()
        assert_same(loaded, {key: saved[key] for key in loaded})


def test_a_checkpoint_lacking_a_key_changes_no_hyperparameter(parts, train, tmp_path):
    partial = OptimizersContainer(copy.deepcopy(parts[:1]), FusedAdamW, {"lr": 0.5})
    dcp.save({"optimizer": partial}, checkpoint_id=tmp_path)
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 1e-2})
    with pytest.raises(dcp.api.CheckpointException, match=r"layers\.2"):
        dcp.load({"optimizer": container}, checkpoint_id=tmp_path)
    assert [group["lr"] for group in container.param_groups] == [1e-2] * 2
    train(container, parts, [0])


def test_weights_only_file(choice, parts, train, tmp_path, assert_same):
    container = choice.container(parts)
    train(container, parts, [0])
    torch.save(container.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    other = choice.container(copy.deepcopy(parts))
    other.load_state_dict(loaded)
    assert_same(other.state_dict(), container.state_dict())


def test_state_of_torchs_nested_form_is_not_mistaken_for_ours(choice, model):
    nested = get_optimizer_state_dict(model, choice.optimizer(model.parameters()))
    with pytest.raises(KeyError, match="is missing"):
        choice.container([model]).load_state_dict(nested)
