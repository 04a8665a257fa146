"""CheckpointManager: which saves are made, which fail, which checkpoints remain, and crashes."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchopt_ext.trainer import checkpoint_files as files
from torchopt_ext.trainer import checkpoint_states, checkpoint_writer
from torchopt_ext.trainer.distributed import seed_generators

from ...distributed.checkpoint_job import Job, differences
from .test_checkpoint import both_modes, damage, folder_of

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def saved_steps(job: Job) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in job.manager.folder.glob("step-*"))


def resumed_step(folder: Path) -> int:
    return Job(folder).resume().step


# ---- what is saved, and when ---------------------------------------------------------------------


def test_without_enable_checkpoint_there_is_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, enable_checkpoint=False).train(until=2)
    job.manager.save(2, force=True)
    assert not job.manager.load()
    assert job.manager.newest() is None
    assert not job.manager.folder.exists()
    job.close()


def test_load_only_neither_saves_nor_clears_up(tmp_path: Path) -> None:
    Job(tmp_path).train(until=2).close()
    (tmp_path / "checkpoint" / "step-4.saving").mkdir()
    job = Job(tmp_path, load_only=True).resume()
    job.train(until=4)
    assert {path.name for path in job.manager.folder.iterdir()} == {"step-2", "step-4.saving"}


def test_forced_saves_are_full_before_the_last_step_and_are_not_repeated(tmp_path: Path) -> None:
    job = Job(tmp_path, model_weights_only=True, async_mode="async").train(until=3)
    job.manager.save(3, force=True)
    before = (folder_of(job, 3) / ".metadata").stat().st_mtime_ns
    job.manager.save(3, force=True)
    assert (folder_of(job, 3) / ".metadata").stat().st_mtime_ns == before
    assert Job(tmp_path).manager.load(3)


def test_an_end_before_the_last_step_may_have_the_model_only(tmp_path: Path) -> None:
    """If the data ends early, the forced save may hold the model only."""
    job = Job(tmp_path, model_weights_only=True, export_safetensors=True).train(until=3)
    job.manager.save(3, force=True, ended=True)
    assert files.contents_of(folder_of(job, 3)) == "model"
    assert (job.manager.folder / "step-3.safetensors").exists()


def test_a_periodic_save_waits_for_the_end_of_skipped_steps(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_latest_k=0)
    for step in range(1, 9):
        job.manager.save(step, skipping=step in (4, 7, 8))
    assert saved_steps(job) == [2, 5, 6]
    assert job.manager.newest(until=4) == 2
    job.manager.save(8, force=True, skipping=True)
    assert job.manager.newest() == 8


def test_a_model_with_a_reserved_name_is_rejected(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.model.register_buffer("rng", torch.zeros(1))
    with pytest.raises(ValueError, match=r"the model has \['rng'\]"):
        job.manager.save(1, force=True)


# ---- which checkpoints remain --------------------------------------------------------------------


@both_modes
def test_the_latest_k_are_kept(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, keep_latest_k=2, async_mode=mode)
    job.manager.save(0, force=True)
    job.train(until=10).close()
    assert saved_steps(job) == [0, 8, 10], "a seed stays"


def test_damaged_ones_are_not_counted_among_the_latest(tmp_path: Path) -> None:
    Job(tmp_path, keep_latest_k=0).train(until=8).close()
    damage(tmp_path / "checkpoint" / "step-8" / "__0_0.distcp", -1)
    job = Job(tmp_path, keep_latest_k=2).resume()
    job.manager.save(job.step, force=True)
    job.close()
    assert saved_steps(job) == [4, 6, 8]
    assert job.manager.newest() == 6


def test_one_to_resume_from_stays_beside_the_model_only(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=3, model_weights_only=True, keep_latest_k=1).train(until=3)
    job.manager.save(3, force=True)
    job.close()
    assert saved_steps(job) == [2, 3]
    assert resumed_step(tmp_path) == 2


@both_modes
def test_a_slow_removal_does_not_remove_a_new_checkpoint_of_its_step(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not delay a save either."""
    Job(tmp_path, keep_latest_k=0).train(until=6).close()
    removals, rmtree = threading.Event(), shutil.rmtree

    def slow(path: Any, **kwargs: Any) -> None:
        if Path(path).suffix == ".removing":
            removals.wait()
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    job = Job(tmp_path, keep_latest_k=1, async_mode=mode).resume(2)
    job.train(until=3).manager.save(3, force=True)  # renames steps 4 and 6, removes all others
    try:
        job.train(until=4).manager.save(4, force=True)  # the latter waits for the former
    finally:
        removals.set()
    job.close()
    assert saved_steps(job) == [4]


# ---- going back ----------------------------------------------------------------------------------


def go_back(folder: Path, step: int, until: int, **settings: Any) -> Job:
    """Returns a job that loads a step and saves every step after it."""
    job = Job(folder, interval=1, **settings).resume(step)
    job.train(until=until).close()
    return job


def test_a_step_is_saved_again_after_going_back(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=4).resume(2)
    seed_generators(5)
    job.train(until=4)
    assert differences(Job(tmp_path, seed=1).resume(4).contents(), job.contents()) == []


def test_what_follows_load_step_is_resumed(tmp_path: Path) -> None:
    """Later checkpoints get another name when another is saved, and are not counted."""
    Job(tmp_path, keep_latest_k=0).train(until=8).close()
    go_back(tmp_path, 4, until=4)
    assert resumed_step(tmp_path) == 8
    for until in (5, 6, 5):  # some are abandoned twice
        job = go_back(tmp_path, 4, until=until, keep_latest_k=3)
        assert job.manager.newest() == resumed_step(tmp_path) == until
    names = {path.name for path in job.manager.folder.iterdir()}
    assert names == {"step-4", "step-5", *(f"abandoned-{step}" for step in (5, 6, 8))}


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_has_the_name_of_an_abandoned_checkpoint_stays(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    Job(tmp_path).train(until=4).close()
    other, abandoned = tmp_path / "other", tmp_path / "checkpoint" / "abandoned-4"
    (other / "notes").mkdir(parents=True)
    (other / ".metadata").touch()
    if kind == "file":
        abandoned.touch()
    elif kind == "link":
        abandoned.symlink_to(other)
    else:
        (abandoned / "notes").mkdir(parents=True)
    job = go_back(tmp_path, 2, until=3)
    assert saved_steps(job) == [2, 3, 4]
    assert f"step 4 cannot be renamed to {abandoned}" in caplog.text
    assert "training goes on" not in caplog.text
    assert abandoned.is_file() if kind == "file" else (abandoned / "notes").exists()
    job = go_back(tmp_path, 3, until=5)
    assert saved_steps(job) == [2, 3, 4, 5], "step 4 is replaced"


def test_a_checkpoint_with_the_mark_of_abandoned_ones_is_not_resumed(tmp_path: Path) -> None:
    Job(tmp_path).train(until=4).close()
    (tmp_path / "checkpoint" / "step-4" / "abandoned").touch()
    job = Job(tmp_path).resume()
    assert job.step == 2
    assert job.train(until=4).manager.newest() == 4, "a new one replaces it"


# ---- saves that fail -----------------------------------------------------------------------------


def fill_disk(job: Job, step: int) -> None:
    """Makes writes of this step's data fail as on a full disk."""
    saving = files.saving_folder(job.manager.folder, step)
    saving.mkdir(parents=True)
    (saving / "__0_0.distcp").symlink_to("/dev/full")


@both_modes
@pytest.mark.parametrize("last", [False, True])
def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, mode: str, last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An asynchronous mode reports the last save when it closes."""
    job = Job(tmp_path, async_mode=mode)
    fill_disk(job, 4)
    job.train(until=4 if last else 7).close()
    assert saved_steps(job) == [2] if last else [2, 6], "nothing is left of step 4"
    records = [record for record in caplog.records if record.name.startswith("torchopt_ext.")]
    [error] = [record.message for record in records if record.levelname == "ERROR"]
    assert "step 4" in error
    assert "No space left on device" in error


@both_modes
def test_a_full_disk_ends_forced_saves_and_the_first(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, async_mode=mode, enable_first_step_checkpoint=True)
    fill_disk(job, 3)
    job.step = 3
    with pytest.raises(RuntimeError, match=r"step 3 in .*No space left on device"):
        job.manager.save(3, force=True)
    fill_disk(job, 1)
    job.step = 0
    with pytest.raises(RuntimeError, match=r"step 1 in .*No space left on device"):
        job.train(until=2)
    assert saved_steps(job) == []


class FullDisk(io.FileIO):
    """A file on a disk with room for 1000 bytes, whose close does not fail."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_disk_that_fills_within_a_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the full disk, although torch.save says "unexpected pos"."""
    monkeypatch.setattr(io, "FileIO", FullDisk)
    written = checkpoint_writer.Writer(tmp_path).fs.create_stream(tmp_path / "file", "wb")
    with pytest.raises(OSError, match="No space left on device"), written as stream:
        torch.save(torch.zeros(100_000), stream)


@both_modes
@pytest.mark.parametrize("stage", ["gathering", "copying", "packing"])
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
        "copying": (checkpoint_writer.Staged, "__init__"),  # in asynchronous modes
        "packing": (checkpoint_states, "packed"),
    }[stage]
    call = getattr(owner, name)

    def fail(*args: Any, **more: Any) -> Any:
        if job.step == 4 and (stage != "packing" or "taken" in args[0]):  # the data position
            raise MemoryError("no room")
        return call(*args, **more)

    monkeypatch.setattr(owner, name, fail)
    job.train(until=6).close()
    if stage == "copying" and mode == "disabled":
        return
    assert saved_steps(job) == [2, 6]
    assert "step 4" in caplog.text
    assert "no room; training goes on" in caplog.text
    if stage != "copying":
        job.step = 4
        with pytest.raises(RuntimeError, match=r"step 4 in .* failed: no room"):
            job.manager.save(4, force=True)


# ---- crashes -------------------------------------------------------------------------------------


def test_leftovers_of_a_crash_are_cleared_away(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=4)
    folder = job.manager.folder
    (folder / "step-4").rename(folder / "step-4.saving")  # killed between two renames
    (folder / "step-2").rename(folder / "step-2.removing")
    (folder / "step-6.saving").mkdir()
    (folder / "step-6.safetensors.saving").write_text("half")
    (folder / "notes.saving").mkdir()
    again = Job(tmp_path, seed=1)
    assert {path.name for path in folder.iterdir()} == {"step-4", "notes.saving"}
    assert differences(again.resume().contents(), job.contents()) == []


def test_what_another_living_job_saves_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = tmp_path / "checkpoint" / "step-2.saving"
    saving.mkdir(parents=True)
    program = "import fcntl, os, sys; fcntl.lockf(1, fcntl.LOCK_EX); os.write(2, b'!'); input()"
    pipe = subprocess.PIPE
    with open(tmp_path / "checkpoint.lock", "a") as lock:
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=pipe, stdout=lock, stderr=pipe) as other:
            assert other.stderr is not None
            assert other.stderr.read(1) == b"!"
            Job(tmp_path).close()
            other.kill()
    assert saving.exists()
    assert "Another job saves in" in caplog.text
    Job(tmp_path).close()
    assert not saving.exists()


@pytest.mark.parametrize("crash", [False, True])
def test_a_checkpoint_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    """`crash`: the old one cannot get its name back either."""
    job = Job(tmp_path).train(until=2)
    again = Job(tmp_path, seed=1).resume()
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(target).name == "step-2" and (crash or Path(source).suffix == ".saving"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(RuntimeError, match="Input/output error"):
            again.manager.save(2, force=True)
    resumed = Job(tmp_path, seed=1).resume()
    assert differences(resumed.contents(), job.contents()) == []
    assert saved_steps(job) == [2]
