"""CheckpointManager on one process: what it restores and rejects, and what a crash leaves."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.statedict.dcp import Reader
from torchopt_ext.trainer import checkpoint_files as files
from torchopt_ext.trainer import checkpoint_states, checkpoint_writer
from torchopt_ext.trainer.config import ConfigError
from torchopt_ext.trainer.export import export_safetensors

from ...distributed.checkpoint_job import Job, differences, reseed_all

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
KINDS: dict[str, dict[str, Any]] = {
    "ours": {},
    "masters": {"dtype": torch.bfloat16, "arguments": {"master_weights": "fp32"}},
    "remainders": {"dtype": torch.bfloat16, "arguments": {"master_weights": "remainder"}},
    "clipping": {"arguments": {"max_grad_norm": 0.1, "skip_nonfinite": True}},
    "in backward": {"container": OptimizersInBackwardContainer},
    "torch": {"optimizer": torch.optim.AdamW},
}


def folder_of(job: Job, step: int) -> Path:
    return job.manager.folder / f"step-{step}"


def saved_steps(job: Job) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in job.manager.folder.iterdir())


# ---- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_job_has_the_same_bits(tmp_path: Path, kind: str, mode: str) -> None:
    """Training continues at once, so a copy taken after the call would have later values."""
    settings = {**KINDS[kind], "async_mode": mode}
    reseed_all(5)
    undisturbed = Job(tmp_path, **settings).train(until=7)
    undisturbed.close()
    for step in (4, -1):
        reseed_all(6)
        resumed = Job(tmp_path, seed=1, **settings | {"load_only": True}).resume(step)
        assert resumed.step == (4 if step == 4 else 6)
        assert differences(resumed.train(until=7).contents(), undisturbed.contents()) == []


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


# ---- what is saved, and when ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "async"])
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


def test_a_seed_gives_the_model_only(tmp_path: Path) -> None:
    seed = Job(tmp_path, seed=3)
    seed.manager.save(0, force=True)
    job = Job(tmp_path, seed=4).resume()
    assert differences(job.contents(), seed.contents()) == []
    metadata = Reader(folder_of(job, 0)).read_metadata()
    assert metadata.state_dict_metadata.keys() == job.model.state_dict().keys()


def test_the_last_save_may_have_the_model_only(tmp_path: Path) -> None:
    settings = {"model_weights_only": True, "export_dtype": "bfloat16"}
    job = Job(tmp_path, steps=3, **settings).train(until=3)
    job.manager.save(3, force=True)
    weights = job.model.state_dict()
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in weights.items()}
    assert job.manager.newest() == 3

    resumed = Job(tmp_path, seed=1).resume()
    assert resumed.step == 2, "training cannot go on from the model only"
    with pytest.raises(ValueError, match="the model only"):
        resumed.manager.load(3)

    path = str(folder_of(job, 3))
    with pytest.raises(ConfigError, match="the model only"):
        Job(
            tmp_path / "other", initial_load_path=path, initial_load_model_only=False
        ).manager.load()
    other = Job(tmp_path / "other", seed=1, initial_load_path=path).resume()
    assert other.step == 0
    found = {k: v.bfloat16() if v.is_floating_point() else v for k, v in other.contents().items()
             if k in weights}  # fmt: skip
    assert differences(found, expected) == []


def test_a_forced_save_before_the_last_step_is_full(tmp_path: Path) -> None:
    """A save that a signal forces before the last step has the full state."""
    job = Job(tmp_path, model_weights_only=True, async_mode="async").train(until=3)
    job.manager.save(3, force=True)
    assert Job(tmp_path).manager.load(3)


def test_nothing_is_saved_twice(tmp_path: Path) -> None:
    job = Job(tmp_path, async_mode="async").train(until=2)
    job.manager.save(2, force=True)
    before = (folder_of(job, 2) / ".metadata").stat().st_mtime_ns
    job.manager.save(2, force=True)
    assert (folder_of(job, 2) / ".metadata").stat().st_mtime_ns == before


def test_a_step_is_saved_again_after_going_back(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=4).resume(2)
    reseed_all(5)
    job.train(until=4)
    again = Job(tmp_path, seed=1).resume(4)
    assert differences(again.contents(), job.contents()) == []


def test_a_slow_removal_does_not_remove_a_new_checkpoint_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(tmp_path, keep_latest_k=0).train(until=6).close()
    removals, rmtree = threading.Event(), shutil.rmtree

    def slow(path: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            removals.wait(30)
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    job = Job(tmp_path, keep_latest_k=1).resume(2)
    job.train(until=3).manager.save(3, force=True)  # abandons steps 4 and 6, removes all others
    job.train(until=4)
    removals.set()
    job.close()
    assert saved_steps(job) == [4]


@pytest.mark.parametrize("settings", [{"exclude_from_loading": ["optimizer"]}, {}])
def test_masters_that_exist_follow_weights_loaded_alone(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    first = Job(tmp_path / "a", **KINDS["masters"]).train(until=2)
    path = str(folder_of(first, 2))
    job = Job(tmp_path / "b", seed=1, initial_load_path=path, **KINDS["masters"], **settings)
    state = job.optimizers.optimizers[0].state
    job.optimizers.state_dict()  # makes the state
    assert job.manager.load()
    for p in job.model.parameters():
        assert torch.equal(state[p]["master_weight"], p.float())


def test_another_jobs_checkpoint_is_loaded_where_there_is_none(tmp_path: Path) -> None:
    first = Job(tmp_path / "a").train(until=2)
    path = str(folder_of(first, 2))
    model_only = Job(tmp_path / "b", seed=1, initial_load_path=path).resume()
    assert model_only.step == 0
    assert all(map(torch.equal, model_only.model.parameters(), first.model.parameters()))
    settings = {"initial_load_path": path, "initial_load_model_only": False}
    full = Job(tmp_path / "b", seed=1, **settings).resume()
    assert differences(full.contents(), first.contents()) == []
    full.train(until=4)
    own = Job(tmp_path / "b", **settings).resume()
    assert own.step == 4, "its own checkpoint comes first"


@pytest.mark.parametrize("key", ["model", "optimizer", "lr_scheduler", "dataloader", "train_state"])
def test_what_is_excluded_is_not_loaded(tmp_path: Path, key: str) -> None:
    saved = Job(tmp_path).train(until=2).contents()
    job = Job(tmp_path, seed=1, exclude_from_loading=[key])
    own = job.contents()
    assert job.manager.load()
    of_key = {
        "model": [*job.model.state_dict()],
        "optimizer": [k for k in own if k.startswith("state.")],
        "lr_scheduler": ["lr"],
        "dataloader": ["taken"],
        "train_state": ["step"],
    }[key]
    found = job.contents()
    kept = {name for name in of_key if name not in differences(found, own)}
    assert kept == set(of_key)
    rest = [k for k in saved if k not in of_key and not k.startswith("param_groups")]
    assert not set(rest) & set(differences(found, saved))


# ---- damaged checkpoints -------------------------------------------------------------------------


def damage(path: Path, position: int) -> None:
    """Flips a bit of one byte."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_without_manifest(path: Path) -> None:
    """Cuts the data file and removes the manifest, which torchtitan's checkpoints lack."""
    (path / "manifest.json").unlink()
    os.truncate(path / "__0_0.distcp", path.joinpath("__0_0.distcp").stat().st_size // 2)


def of_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-2"), path)


def half_written(path: Path) -> None:
    """Leaves only the data files, like an interrupted torch writer."""
    (path / "manifest.json").unlink()
    (path / ".metadata").unlink()


class RunsCode:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(__file__).with_name("code ran")),)


def with_code_in_metadata(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / ".metadata").write_bytes(pickle.dumps(RunsCode()))


def with_a_sum_for_less(path: Path) -> None:
    """Writes a manifest with a valid sum that omits the metadata."""
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    del body["files"][".metadata"]
    sum_ = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps({"crc32": sum_, "manifest": body}))


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: cut(p / "__0_0.distcp"), r"__0_0.distcp has \d+ bytes, expected \d+"),
    "flipped": (lambda p: damage(p / "__0_0.distcp", 999), "__0_0.distcp has CRC-32"),
    "missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp: No such file"),
    "metadata missing": (lambda p: (p / ".metadata").unlink(), ".metadata: No such file"),
    "manifest truncated": (lambda p: cut(p / "manifest.json"), "manifest.json is damaged"),
    "manifest of less": (with_a_sum_for_less, ".metadata is not in its manifest"),
    "no manifest, truncated": (cut_without_manifest, r"__0_0.distcp has \d+ bytes, expected \d+"),
    "code in metadata": (with_code_in_metadata, "does not belong to a checkpoint's metadata"),
    "another step's": (of_another_step, "of step 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_skipped_or_rejected(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    inflict, message = FAULTS[fault]
    Job(tmp_path).train(until=4).close()
    inflict(tmp_path / "checkpoint" / "step-4")
    job = Job(tmp_path, seed=1)
    before = job.contents()
    with pytest.raises(ValueError, match=message):
        job.manager.load(4)
    assert differences(job.contents(), before) == []
    assert job.manager.load()
    assert job.step == 2
    assert job.manager.newest() == 2
    assert "Skipped" in caplog.text
    assert "step-4" in caplog.text
    assert not Path(__file__).with_name("code ran").exists()
    job.train(until=4).close()
    assert Job(tmp_path).manager.load(4), "it is replaced when the step comes again"


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=2)
    chosen = random.Random(0)
    for path in folder_of(job, 2).iterdir():
        whole = path.read_bytes()
        for _ in range(40):
            damage(path, chosen.randrange(len(whole)))
            try:
                assert files.problems(folder_of(job, 2), 2, 0, 1)
            except ValueError:
                assert path.name == "manifest.json"
            path.write_bytes(whole)
    assert files.problems(folder_of(job, 2), 2, 0, 1) == []


def test_what_torch_left_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    Job(tmp_path).train(until=4).close()
    half_written(tmp_path / "checkpoint" / "step-4")
    job = Job(tmp_path)
    assert job.manager.newest() == 2
    assert job.manager.load()
    assert job.step == 2


def test_training_does_not_start_over_where_all_are_damaged(tmp_path: Path) -> None:
    Job(tmp_path).train(until=4).close()
    for step in (2, 4):
        cut(tmp_path / "checkpoint" / f"step-{step}" / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"step 4: .*; step 2: .*"):
        Job(tmp_path).manager.load()


def test_a_checkpoint_without_manifest_loads(tmp_path: Path) -> None:
    """A checkpoint in torchtitan's layout by torch's own writer loads without its data position."""
    job = Job(tmp_path).train(until=2)
    entries = {
        "optimizer": job.optimizers,
        "lr_scheduler": job.lr_schedulers,
        "train_state": job,
        "dataloader": {"dp_rank_0": pickle.dumps({"taken": 2}, protocol=2)},
    }
    saved = job.model.state_dict() | entries
    torch_dcp.save(saved, checkpoint_id=tmp_path / "other" / "checkpoint" / "step-2")
    rejected = Job(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"dataloader.dp_rank_0 was not saved by this package"):
        rejected.manager.load()
    resumed = Job(tmp_path / "other", seed=1, exclude_from_loading=["dataloader"]).resume()
    assert differences(resumed.contents(), job.contents()) == ["taken"]


def test_a_checkpoint_that_lost_its_manifest_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes could not be checked, while those of others can. If it is asked for, it loads."""
    Job(tmp_path).train(until=4).close()
    (tmp_path / "checkpoint" / "step-4" / "manifest.json").unlink()
    assert Job(tmp_path, seed=1).resume().step == 2
    assert "it lost its manifest.json; checkpoint.load_step loads it" in caplog.text
    assert "only the lengths" not in caplog.text
    assert Job(tmp_path, seed=1).resume(4).step == 4
    assert "step-4 has no manifest.json: only the lengths of its files were checked" in caplog.text
    shutil.rmtree(tmp_path / "checkpoint" / "step-2")
    assert Job(tmp_path, seed=1).resume().step == 4


def test_settings_that_a_checkpoint_replaces_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Job(tmp_path).train(until=2).close()
    Job(tmp_path).resume().close()
    job = Job(tmp_path, arguments={"lr": 0.3, "weight_decay": 0.5}).resume().train(until=4)
    assert job.lr_schedulers.schedulers[0].base_lrs == [0.1]
    excluded = ["optimizer", "lr_scheduler"]
    Job(tmp_path, arguments={"lr": 0.3}, exclude_from_loading=excluded).resume().close()
    texts = [record.getMessage() for record in caplog.records]
    [said] = [text for text in texts if "the configuration's" in text]
    assert "step-2 are kept" in said
    assert said.endswith(
        ": lr 0.1 instead of lr 0.3, weight_decay 0.01 instead of weight_decay 0.5"
    )


def test_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    """Equal values are saved once, but 1, 1.0 and True are not equal here."""
    job = Job(tmp_path)
    job.lr_schedulers.schedulers[0].base_lrs = [1]
    group = job.optimizers.param_groups[0]
    group["eps"], group["weight_decay"], group["betas"] = 1.0, 1, (1.0, 0.5)
    job.manager.save(1, force=True)
    fresh = Job(tmp_path / "none", seed=1)
    found = {"optimizer": fresh.optimizers.state_dict(), **fresh.model.state_dict()}
    torch_dcp.load(found, checkpoint_id=folder_of(job, 1))
    expected = {"optimizer": job.optimizers.state_dict(), **job.model.state_dict()}
    assert differences(found.pop("optimizer"), expected.pop("optimizer")) == []
    assert differences(found, expected) == []


def test_a_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    job = Job(tmp_path).train(until=2)
    job.model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"model: it lacks extra\.bias, extra\.weight$"):
        job.manager.load()
    name = next(name for name, _ in job.model.named_parameters())
    owner, _, own = name.rpartition(".")
    del job.model.extra
    setattr(job.model.get_submodule(owner), own, torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match=rf"model: its {name} is \[.*, the job's is \[1\]$"):
        job.manager.load()


def test_groups_that_the_saved_settings_do_not_fit_are_rejected(tmp_path: Path) -> None:
    """For example without the `no_decay` of the job that saved them."""
    Job(tmp_path, container=partial(OptimizersContainer, no_decay=["bias"])).train(until=2)
    with pytest.raises(ConfigError, match="both parameters are in one group here"):
        Job(tmp_path).manager.load()


def test_entries_that_the_model_lacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example after a change of the number of layers in the configuration."""
    job = Job(tmp_path)
    job.model.extra = torch.nn.Linear(1, 1)
    job.manager.save(2, force=True)
    assert Job(tmp_path).manager.load()
    assert "the job's model lacks, and that are not loaded: extra.bias, extra.weight" in caplog.text


def test_a_folder_that_cannot_be_created_ends_the_job_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoint\.folder cannot be used: \[Errno 17\]"):
        Job(tmp_path / "file")


def test_a_missing_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step-7 cannot be loaded: .* lacks \.metadata"):
        Job(tmp_path).manager.load(7)
    with pytest.raises(ConfigError, match=r"none cannot be loaded: .* lacks \.metadata"):
        Job(tmp_path, initial_load_path=str(tmp_path / "none")).manager.load()


# ---- saves that fail -----------------------------------------------------------------------------


def fill_disk(job: Job, step: int) -> None:
    """Makes writes of this step's data fail as on a full disk."""
    saving = files.saving_folder(job.manager.folder, step)
    saving.mkdir(parents=True)
    (saving / "__0_0.distcp").symlink_to("/dev/full")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, async_mode=mode)
    fill_disk(job, 4)
    job.train(until=7)
    job.close()
    assert saved_steps(job) == [2, 6], "nothing is left of what could not be written"
    own = (r for r in caplog.records if r.name.startswith("torchopt_ext"))
    [error] = [record for record in own if record.levelno == logging.ERROR]
    assert "step 4" in error.message
    assert "No space left on device" in error.message


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
        torch.save(torch.zeros(1000), stream)


@pytest.mark.parametrize("mode", ["disabled", "async"])
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


def test_an_error_of_the_last_save_is_told_when_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, async_mode="async")
    fill_disk(job, 2)
    job.train(until=2).close()
    assert "step 2" in caplog.text


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
    assert again.manager.load()
    assert differences(again.contents(), job.contents()) == []


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
    found = Job(tmp_path, seed=1).resume()
    assert differences(found.contents(), job.contents()) == []
    assert saved_steps(job) == [2]


def save_until_killed(folder: Path, mode: str, run: int) -> None:
    torch.set_num_threads(1)  # other thread counts change the last bit of sums
    reseed_all(run)
    Job(folder, interval=1, keep_latest_k=2, async_mode=mode).train(until=10**6)


@pytest.mark.slow
@pytest.mark.newest_torch
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_process_leaves_a_loadable_checkpoint(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaded state is that of an undisturbed job at the same step."""
    torch.set_num_threads(1)
    # Not "fork": a child would destroy this process's gloo group without its threads.
    processes = get_context("forkserver")
    processes.set_forkserver_preload(["torch.distributed.checkpoint"])
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # where children find this module
    chosen = random.Random(1)
    for run in range(10):
        folder = tmp_path / str(run)
        process = processes.Process(target=save_until_killed, args=(folder, mode, run))
        process.start()
        while not (folder / "checkpoint" / "step-2").exists():
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(chosen.random() * 0.3)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        newest = max(files.steps(folder / "checkpoint"))
        loaded = Job(folder, seed=1).resume()
        assert loaded.step >= newest
        reseed_all(run)
        undisturbed = Job(tmp_path / "none", enable_checkpoint=False).train(loaded.step)
        assert differences(loaded.contents(), undisturbed.contents()) == []


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_mode": "async_with_pinned_mem"}, "the model is on the host: set 'async'"),
        ({"exclude_from_loading": ["optimiser"]}, r"has \['optimiser'\], expected some of"),
    ],
)
def test_wrong_settings_are_rejected(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Job(tmp_path, **settings)


def test_a_model_with_a_reserved_name_is_rejected(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.model.register_buffer("rng", torch.zeros(1))
    with pytest.raises(ValueError, match=r"the model has \['rng'\]"):
        job.manager.save(1, force=True)


# ---- fault tolerance, export ---------------------------------------------------------------------


def test_one_replica_group_saves_and_gives_its_state_to_another(tmp_path: Path) -> None:
    manager = MagicMock()
    manager.participating_rank.return_value = 1
    manager.state_dict.return_value = committed = {"step": 6, "batches_committed": 12}
    enabled = SimpleNamespace(enabled=True, manager=manager)
    job = Job(tmp_path, ft_manager=enabled).train(until=2)
    assert not job.manager.folder.exists()
    load, _ = manager.set_state_dict_fns.call_args.args
    peer = Job(tmp_path / "peer", seed=1).train(until=4)
    load(checkpoint_states.PeerState(peer.parts, peer.manager._states).state_dict())
    assert differences(job.contents(), peer.contents()) == ["taken"], "but for its own data"
    manager.participating_rank.return_value = 0
    job.train(until=6)
    assert job.manager.newest() == 6
    # torchft compares the groups' counts of steps: groups without the checkpoint take its state.
    Job(tmp_path, ft_manager=enabled).resume()
    assert Job(tmp_path).manager.load()  # without fault tolerance
    peer.manager.save(5, force=True)
    Job(tmp_path / "peer", ft_manager=enabled).resume()  # whose checkpoint has no counts
    manager.load_state_dict.assert_called_once_with(committed)


class Positioned:
    """A data loader's position."""

    def __init__(self, shared: bool | None) -> None:
        self.same_position_on_all_ranks, self.position = shared, 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_returning_group_takes_its_peers_data_position(tmp_path: Path) -> None:
    manager = MagicMock()
    loaders = [Positioned(shared) for shared in (True, True, None)]
    for loader in loaders:
        Job(tmp_path, data=loader, ft_manager=SimpleNamespace(enabled=True, manager=manager))
    loaders[0].position = 5
    (_, state), *others = [call.args for call in manager.set_state_dict_fns.call_args_list]
    for heal, _ in others:
        heal(state())
    assert [loader.position for loader in loaders] == [5, 5, 0]


@pytest.mark.parametrize("excluded", [[], ["dataloader"]])
def test_a_stream_of_each_group_is_rejected_unless_it_is_not_loaded(
    tmp_path: Path, excluded: list[str]
) -> None:
    enabled = SimpleNamespace(enabled=True, manager=MagicMock())
    settings = {"data": Positioned(False), "exclude_from_loading": excluded}
    with nullcontext() if excluded else pytest.raises(ValueError, match="exclude_from_loading"):
        Job(tmp_path, ft_manager=enabled, **settings)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    read = pytest.importorskip("safetensors.torch", exc_type=ImportError)
    found: dict[str, torch.Tensor] = read.load_file(path)
    return found


@pytest.mark.parametrize("model_only", [False, True])
def test_the_last_save_may_export_the_model(tmp_path: Path, model_only: bool) -> None:
    settings = {"export_safetensors": True, "export_dtype": "bfloat16"}
    job = Job(tmp_path, steps=2, model_weights_only=model_only, **settings).train(until=1)
    job.manager.save(1, force=True)
    job.train(until=2)
    job.manager.save(2, force=True)
    [path] = job.manager.folder.glob("*.safetensors")
    weights = job.model.state_dict()
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in weights.items()}
    assert differences(read_safetensors(path), halves) == []


def test_an_export_holds_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(4, 3).half(),
        "narrow": torch.randn(7).bfloat16(),
        "index": torch.arange(5),
        "flag": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "eighth": torch.randn(3).to(torch.float8_e4m3fn),
    }
    others = {"optimizer": {"state": torch.ones(3)}, "step": 3}
    torch_dcp.save(tensors | others, checkpoint_id=tmp_path / "step-1")
    output = tmp_path / "model.safetensors"
    export_safetensors(tmp_path / "step-1", output)
    assert differences(read_safetensors(output), tensors) == []
    export_safetensors(tmp_path / "step-1", output, torch.float16)
    halves = {k: v.half() if v.is_floating_point() else v for k, v in tensors.items()}
    assert differences(read_safetensors(output), halves) == []
    torch_dcp.save({"c": torch.zeros(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "step-2")
    with pytest.raises(ValueError, match=r"'c' is torch\.complex128"):
        export_safetensors(tmp_path / "step-2", output)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [output.name]


def test_model_state_is_torchs() -> None:
    """Keys lack the names that wrappers add."""
    model = nn.Sequential(nn.Linear(3, 4), torch.compile(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    for wrapped in (model, nn.parallel.DistributedDataParallel(model)):
        ours, theirs = checkpoint_states.model_state([wrapped]), get_model_state_dict(wrapped)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].data_ptr() == theirs[key].data_ptr() for key in theirs)
