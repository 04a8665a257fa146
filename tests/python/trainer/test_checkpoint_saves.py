"""CheckpointManager: which saves are made, which fail, and which checkpoints remain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from torchopt_ext.trainer import checkpoint_states
from torchopt_ext.trainer.checkpoint_files import contents_of
from torchopt_ext.trainer.checkpoint_writer import Staged

from ...distributed.checkpoint_job import Job
from .test_checkpoint import folder_of, saved_steps

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def go_back(folder: Path, step: int, until: int, **settings: Any) -> Job:
    """Returns a job that loads a step and saves every step after it."""
    job = Job(folder, interval=1, **settings).resume(step)
    job.train(until=until).close()
    return job


def resumed_step(folder: Path) -> int:
    return Job(folder).resume().step


@pytest.mark.parametrize(("keep", "left"), [(0, [2, 4, 5, 6, 8]), (2, [4, 5]), (4, [2, 4, 5, 8])])
def test_what_follows_load_step_outlives_the_abandoned(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    Job(tmp_path, keep_latest_k=0).train(until=8).close()
    job = go_back(tmp_path, 4, until=5, keep_latest_k=keep)
    assert saved_steps(job) == left
    assert job.manager.newest() == resumed_step(tmp_path) == 5


def test_checkpoints_are_abandoned_when_another_is_saved(tmp_path: Path) -> None:
    Job(tmp_path).train(until=6).close()
    go_back(tmp_path, 2, until=2)
    assert resumed_step(tmp_path) == 6
    go_back(tmp_path, 2, until=3)
    assert resumed_step(tmp_path) == 3
    shutil.rmtree(folder_of(go_back(tmp_path, 6, until=7), 7))
    assert resumed_step(tmp_path) == 6, "it was gone on from after all"


def test_a_checkpoint_that_cannot_be_marked_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(tmp_path).train(until=6).close()
    touch = Path.touch

    def fail(path: Path) -> None:
        if path.parent.name == "step-6":
            raise PermissionError("not allowed")
        touch(path)

    monkeypatch.setattr(Path, "touch", fail)
    go_back(tmp_path, 2, until=3)
    assert (
        "went back to step 2, but step 6 cannot be marked accordingly: not allowed" in caplog.text
    )
    folder = tmp_path / "checkpoint"
    assert {path.parent.name for path in folder.rglob("abandoned")} == {"step-4"}
    assert (folder / "step-3").exists()


def test_one_to_resume_from_stays_beside_the_model_only(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=3, model_weights_only=True, keep_latest_k=1).train(until=3)
    job.manager.save(3, force=True)
    job.close()
    assert saved_steps(job) == [2, 3]
    assert resumed_step(tmp_path) == 2


@pytest.mark.parametrize(
    ("mode", "stage"),
    [
        *(("disabled", "gathering"), ("async", "gathering"), ("async", "copying")),
        *(("disabled", "packing"), ("async", "packing")),
    ],
)
def test_a_periodic_save_without_memory_does_not_end_the_training(
    tmp_path: Path,
    mode: str,
    stage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(tmp_path, async_mode=mode)
    owner, name = {
        "gathering": (job, "state_dict"),
        "copying": (Staged, "__init__"),
        "packing": (checkpoint_states, "packed"),
    }[stage]
    call = getattr(owner, name)

    def fail(*args: Any, **more: Any) -> Any:
        if job.step == 4 and (stage != "packing" or "taken" in args[0]):  # the data position
            raise MemoryError("no room")
        return call(*args, **more)

    monkeypatch.setattr(owner, name, fail)
    job.train(until=6).close()
    assert saved_steps(job) == [2, 6]
    assert "step 4" in caplog.text
    assert "no room; training goes on" in caplog.text
    if stage != "copying":
        job.step = 4
        with pytest.raises(RuntimeError, match=r"step 4 in .* failed: no room"):
            job.manager.save(4, force=True)


def test_a_periodic_save_waits_for_the_end_of_skipped_steps(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_latest_k=0)
    for step in range(1, 9):
        job.manager.save(step, skipping=step in (4, 7, 8))
    assert saved_steps(job) == [2, 5, 6]
    assert job.manager.newest(until=4) == 2
    job.manager.save(8, force=True, skipping=True)
    assert job.manager.newest() == 8


def test_an_end_before_the_last_step_may_have_the_model_only(tmp_path: Path) -> None:
    """If the data ends early, the forced save may hold the model only."""
    job = Job(tmp_path, model_weights_only=True, export_safetensors=True).train(until=3)
    job.manager.save(3, force=True, ended=True)
    assert contents_of(folder_of(job, 3)) == "model"
    assert (job.manager.folder / "step-3.safetensors").exists()
