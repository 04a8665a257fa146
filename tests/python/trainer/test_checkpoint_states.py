"""What CheckpointManager's states hold, and how they come back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchopt_ext.trainer import checkpoint_states

from ...distributed.checkpoint_job import Job, differences
from .test_checkpoint import folder_of

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(3.5), 3.5),
        ({"a": (np.int64(1), None)}, {"a": (1, None)}),
        ([np.bool_(True), [np.str_("x")]], [True, ["x"]]),
        (Counter(a=np.int64(2)), Counter(a=2)),
        (OrderedDict(a=1, b={1, 2}), OrderedDict(a=1, b={1, 2})),
    ],
)
def test_numbers_of_numpy_become_pythons(value: Any, expected: Any) -> None:
    found = checkpoint_states.loadable(value, "state")
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.arange(3), r"^state is a numpy\.ndarray"),
        ([0, {"at": Path("x")}], r"^state\.1\.at is a pathlib\.\w+, .* expected plain values"),
        ({"call": lambda: None}, r"^state\.call is a builtins\.function"),
    ],
)
def test_what_cannot_be_loaded_again_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checkpoint_states.loadable(value, "state")


def test_a_job_with_numpys_numbers_resumes(tmp_path: Path) -> None:
    settings = {"arguments": {"lr": np.float64(0.1), "weight_decay": np.float64(0.1)}}
    job = Job(tmp_path, **settings)
    position = job.data.state_dict
    job.data.state_dict = lambda: position() | {"at": np.int64(7)}  # type: ignore[method-assign]
    expected = job.train(until=2).contents()
    resumed = Job(tmp_path, seed=1, **settings)
    assert resumed.manager.load()
    found = resumed.contents()
    state = [key for key in found if not key.startswith(("param_groups", "lr"))]
    assert not set(differences(found, expected)) & set(state)
    assert type(resumed.optimizers.param_groups[0]["weight_decay"]) is float


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("at", "key"), [("data", "dataloader.dp_rank_0"), ("", "train_state")])
def test_a_state_that_cannot_be_loaded_ends_the_training(
    tmp_path: Path, mode: str, at: str, key: str
) -> None:
    job = Job(tmp_path, async_mode=mode)
    owner: Any = job.data if at else job
    state = {"order": np.arange(3)}
    owner.state_dict = lambda: {"dp_rank_0": state} if at else state
    with pytest.raises(TypeError, match=rf"^{key}\.order is a numpy\.ndarray"):
        job.train(until=2)
    assert not job.manager.folder.exists()


class Noted(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"n": 3}, {"n": 0}),
        ({}, {}),
        ({"a": 1, "b": {"c": torch.ones(2)}}, {}),
        ({"seen": {}, "n": 3}, {"seen": {"x": 1}, "n": 0}),
        ([1, {"a": 2}], []),
        ([1, 2], [0, 0, 0]),
        (torch.ones(3), None),
        (5, {"n": 0}),
    ],
)
def test_extra_state_comes_back_as_it_was_saved(tmp_path: Path, saved: Any, live: Any) -> None:
    jobs = [Job(tmp_path), Job(tmp_path)]
    for job, value in zip(jobs, (saved, live), strict=True):
        job.model.add_module("noted", Noted(value))
    jobs[0].manager.save(2, force=True)
    assert jobs[1].manager.load()
    torch.testing.assert_close(jobs[1].model.noted.value, saved, rtol=0, atol=0)  # type: ignore


def test_extra_state_that_is_not_there_is_named(tmp_path: Path) -> None:
    Job(tmp_path).train(until=2).close()
    job = Job(tmp_path)
    job.model.add_module("noted", Noted({"n": 0}))
    with pytest.raises(ValueError, match=r"lacks of the model: noted\._extra_state"):
        job.manager.load()


def test_without_the_schedule_the_rates_are_those_of_its_beginning(tmp_path: Path) -> None:
    Job(tmp_path).train(until=2).close()
    job = Job(tmp_path, exclude_from_loading=["lr_scheduler"])
    fresh = job.optimizers.param_groups[0]["lr"]
    assert job.manager.load()
    [schedule] = job.lr_schedulers.schedulers
    assert schedule.last_epoch == 0
    assert [group["lr"] for group in job.optimizers.param_groups] == schedule.get_last_lr()
    assert job.optimizers.param_groups[0]["lr"] == fresh


@pytest.mark.parametrize("with_manifest", [True, False])
def test_another_jobs_step_seeds_random_numbers_anew(tmp_path: Path, with_manifest: bool) -> None:
    path = folder_of(Job(tmp_path / "a").train(until=2), 2)
    if not with_manifest:
        (path / "manifest.json").unlink()
    job = Job(tmp_path / "b", initial_load_path=str(path), initial_load_model_only=False)
    job.manager._own["rng"] = checkpoint_states.RandomState(0, "another")
    torch.manual_seed(8)
    assert job.manager.load()
    assert torch.initial_seed() == 8 + 2
