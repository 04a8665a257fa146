"""The states of CheckpointManager: their contents, and how they load."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from torchopt_ext.trainer import checkpoint_states, saved_values
from torchopt_ext.trainer.config import ConfigError, Parallelism

from ...distributed.checkpoint_job import Job, differences
from .test_checkpoint import folder_of

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def test_the_data_position_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing must not read the state again, which would delay the training thread."""
    state = {"dp_rank_0": {"buffer": [*range(9)], 1: (b"x", torch.ones(2), OrderedDict(a=None))}}
    data: Any = type("Data", (), {"state_dict": lambda _: state})()
    with monkeypatch.context() as context:
        context.delattr(torch, "load")
        packed = checkpoint_states.DataPosition(data).state_dict()
    found = saved_values.unpacked(packed["dp_rank_0"], "state")
    assert repr(found) == repr(state["dp_rank_0"])


def test_a_job_with_numpys_numbers_resumes(tmp_path: Path) -> None:
    settings = {"arguments": {"lr": np.float64(0.1), "weight_decay": np.float64(0.1)}}
    job = Job(tmp_path, **settings)
    position = job.data.state_dict
    job.data.state_dict = lambda: position() | {"at": np.int64(7)}  # type: ignore[method-assign]
    expected = job.train(until=2).contents()
    resumed = Job(tmp_path, seed=1, **settings).resume()
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


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_not_loaded_may_be_left_out(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    def job(**settings: Any) -> Job:
        made = Job(tmp_path, async_mode=mode, **settings)
        made.data.state_dict = lambda: {"order": np.arange(3)}  # type: ignore[method-assign]
        return made

    job(exclude_from_loading=["dataloader"]).train(until=4).close()
    resumed = job(exclude_from_loading=["dataloader"]).resume()
    assert resumed.step == 4
    assert caplog.text.count("without dataloader, which is excluded from loading: dataloader") == 1
    with pytest.raises(TypeError, match=r"^dataloader\.order is a numpy"):
        job(exclude_from_loading=["lr_scheduler"]).manager.save(6)


def with_state(folder: Path, value: Any) -> tuple[Job, list[Any]]:
    """Returns a job with a value in its state, and the list of values that it loads."""
    job, loaded = Job(folder), []
    step_only: Callable[[Any], None] = job.load_state_dict
    job.state_dict = lambda: {"step": job.step, "value": value}  # type: ignore[method-assign]

    def load(state: Any) -> None:
        step_only(state)
        loaded.append(state["value"])

    job.load_state_dict = load  # type: ignore[method-assign]
    return job, loaded


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({0: 5}, {0: 99}),
        ({0: 5}, {}),
        ({"a": 1, "b": {"c": 2}}, {"a": 0}),
        ({(1, "x"): [{2: None}]}, {}),
        (Counter({30: 1}), Counter({40: 2})),
        (OrderedDict(b=1, a=2), None),
        ([{"a": 1}, {0: 1}], []),
        ({}, {}),
        ({}, {"a": 1}),
        ({"a": {}, "b": [{}]}, {"a": {"x": 1}}),
        ({"t": torch.ones(2), "n": {1: 2}}, {"t": torch.zeros(2), "n": {}}),
    ],
)
def test_a_state_comes_back_as_it_was_saved(tmp_path: Path, saved: Any, live: Any) -> None:
    with_state(tmp_path, saved)[0].train(until=2).close()
    job, loaded = with_state(tmp_path, live)
    assert job.manager.load()
    assert repr(loaded) == repr([saved])
    assert job.step == 2


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    Job(tmp_path).train(until=2).close()
    with pytest.raises(ConfigError, match=r"step-2 lacks train_state\.value$"):
        with_state(tmp_path, 5)[0].manager.load()


def test_a_schedules_milestones_come_back(tmp_path: Path) -> None:
    for milestones, load in (([3, 3, 5], False), ([4], True)):
        job = Job(tmp_path)
        schedule = MultiStepLR(job.optimizers.optimizers[0], milestones)
        job.manager._states["lr_scheduler"] = schedule
        if load:
            assert job.manager.load()
            assert schedule.milestones == Counter({3: 2, 5: 1})
        else:
            job.manager.save(2, force=True)


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
        (b"raw", None),
        ({0: 1, "a": 2}, {0: 5, "a": 3}),
        ({"s": "x"}, {"s": "y", "t": {"u": 1}}),
        ({}, {"n": 0}),
        ({"a": {}}, {"a": {"x": 1}}),
        ({"a.b": 1, "a": {"b": 2}}, {}),
        (OrderedDict(a=(1, [2])), {}),
    ],
)
def test_extra_state_comes_back_as_it_was_saved(tmp_path: Path, saved: Any, live: Any) -> None:
    jobs = [Job(tmp_path), Job(tmp_path)]
    for job, value in zip(jobs, (saved, live), strict=True):
        job.model.add_module("noted", Noted(value))
    jobs[0].manager.save(2, force=True)
    assert jobs[1].manager.load()
    assert repr(jobs[1].model.noted.value) == repr(saved)


@pytest.mark.parametrize(
    ("saved", "live"), [({"n": 3, "t": torch.ones(2)}, {"n": 0, "u": 1}), ({}, {}), (5, 6)]
)
def test_extra_state_that_torchs_writer_has_saved(tmp_path: Path, saved: Any, live: Any) -> None:
    """torch's writer, as in torchtitan's checkpoints, divides extra state into entries."""
    jobs = [Job(tmp_path / "a"), Job(tmp_path / "b", initial_load_path=str(tmp_path / "c"))]
    for job, value in zip(jobs, (saved, live), strict=True):
        job.model.add_module("noted", Noted(value))
    torch_dcp.save(jobs[0].model.state_dict(), checkpoint_id=tmp_path / "c")
    assert jobs[1].manager.load()
    assert repr(jobs[1].model.noted.value) == repr(saved)


def test_extra_state_that_is_not_there_is_named(tmp_path: Path) -> None:
    Job(tmp_path).train(until=2).close()
    job = Job(tmp_path)
    job.model.add_module("noted", Noted({"n": 0}))
    with pytest.raises(ValueError, match=r"of another model: it lacks noted\._extra_state"):
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
def test_random_numbers_of_another_layout_are_seeded_anew(
    tmp_path: Path, with_manifest: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks with the same seed draw the same numbers, other than at the start."""
    path = folder_of(Job(tmp_path / "a").train(until=2), 2)
    if not with_manifest:
        (path / "manifest.json").unlink()
    job = Job(tmp_path / "b", initial_load_path=str(path), initial_load_model_only=False)
    layout = checkpoint_states.layout(Parallelism(tensor_parallel_degree=2), 2)
    job.manager._positions["rng"] = checkpoint_states.RandomState(0, layout)
    torch.manual_seed(8)
    assert job.manager.load()
    assert torch.initial_seed() == 8 + 2
    assert random.random() == random.Random(8 + 2).random()
    assert "another layout" in caplog.text
