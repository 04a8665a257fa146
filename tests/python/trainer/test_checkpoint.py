"""CheckpointManager on one process: what it restores, and what it rejects."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.statedict.dcp import Reader
from torchopt_ext.trainer import checkpoint_files as files
from torchopt_ext.trainer import checkpoint_states
from torchopt_ext.trainer.config import ConfigError, Parallelism
from torchopt_ext.trainer.distributed import seed_generators
from torchopt_ext.trainer.export import export_safetensors

from ...distributed.checkpoint_job import Job, differences

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
both_modes = pytest.mark.parametrize("mode", ["disabled", "async"])


def folder_of(job: Job, step: int) -> Path:
    return job.manager.folder / f"step-{step}"


def halves(tensors: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}


# ---- resuming ------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_job_has_the_same_bits(tmp_path: Path, kind: str, mode: str) -> None:
    """Training continues at once, so a copy taken after the call would have later values."""
    settings = {**KINDS[kind], "async_mode": mode}
    seed_generators(5)
    undisturbed = Job(tmp_path, **settings).train(until=7)
    undisturbed.close()
    for step in (4, -1):
        seed_generators(6)
        resumed = Job(tmp_path, seed=1, **settings | {"load_only": True}).resume(step)
        assert resumed.step == (4 if step == 4 else 6)
        assert differences(resumed.train(until=7).contents(), undisturbed.contents()) == []


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
    assert job.manager.newest() == 3

    resumed = Job(tmp_path, seed=1).resume()
    assert resumed.step == 2, "training cannot go on from the model only"
    with pytest.raises(ValueError, match="the model only"):
        resumed.manager.load(3)

    start = {"initial_load_path": str(folder_of(job, 3))}
    with pytest.raises(ConfigError, match="the model only"):
        Job(tmp_path / "other", **start, initial_load_model_only=False).manager.load()
    other = Job(tmp_path / "other", seed=1, **start).resume()
    assert other.step == 0
    assert differences(halves(other.model.state_dict()), halves(weights)) == []


@pytest.mark.parametrize("settings", [{"exclude_from_loading": ["optimizer"]}, {}])
def test_masters_that_exist_follow_weights_loaded_alone(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    first = Job(tmp_path / "a", **KINDS["masters"]).train(until=2)
    path = str(folder_of(first, 2))
    job = Job(tmp_path / "b", seed=1, initial_load_path=path, **KINDS["masters"], **settings)
    job.optimizers.state_dict()  # makes the state
    assert job.manager.load()
    for p in job.model.parameters():
        assert torch.equal(job.optimizers.optimizers[0].state[p]["master_weight"], p.float())


def test_another_jobs_checkpoint_is_loaded_where_there_is_none(tmp_path: Path) -> None:
    first = Job(tmp_path / "a").train(until=2)
    settings = {"initial_load_path": str(folder_of(first, 2))}
    model_only = Job(tmp_path / "b", seed=1, **settings).resume()
    assert model_only.step == 0
    assert all(map(torch.equal, model_only.model.parameters(), first.model.parameters()))
    settings["initial_load_model_only"] = False
    full = Job(tmp_path / "b", seed=1, **settings).resume()
    assert differences(full.contents(), first.contents()) == []
    full.train(until=4)
    assert Job(tmp_path / "b", **settings).resume().step == 4, "its own checkpoint comes first"


@pytest.mark.parametrize("key", ["model", "optimizer", "lr_scheduler", "dataloader", "train_state"])
def test_what_is_excluded_is_not_loaded(tmp_path: Path, key: str) -> None:
    saved = Job(tmp_path).train(until=2).contents()
    job = Job(tmp_path, seed=1, exclude_from_loading=[key])
    before = job.contents()
    assert job.manager.load()
    of_key = {
        "model": [*job.model.state_dict()],
        "optimizer": [k for k in before if k.startswith("state.")],
        "lr_scheduler": ["lr"],
        "dataloader": ["taken"],
        "train_state": ["step"],
    }[key]
    assert not set(of_key) & set(differences(job.contents(), before))
    rest = [k for k in saved if k not in of_key and not k.startswith("param_groups")]
    assert not set(rest) & set(differences(job.contents(), saved))


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


def test_a_rank_reads_only_its_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    random_state = job.manager._positions["rng"]
    entries = random_state.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(random_state, "state_dict", lambda: entries | {"rank_1": b"another's"})
        job.manager.save(2, force=True)
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(random_state, "load_state_dict", lambda state: not loaded.update(state))
    job.resume()
    assert loaded == entries


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
    [text] = [text for text in texts if "the configuration's" in text]
    assert "step-2 are kept" in text
    assert text.endswith(
        ": lr 0.1 instead of lr 0.3, weight_decay 0.01 instead of weight_decay 0.5"
    )


# ---- states --------------------------------------------------------------------------------------


class Noted(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def noted(folder: Path, value: Any, **settings: Any) -> Job:
    job = Job(folder, **settings)
    job.model.add_module("noted", Noted(value))
    return job


VALUES: list[tuple[Any, Any]] = [  # saved, and held before they are loaded
    ({"n": 3}, {"n": 0}),
    ({0: 5}, {0: 99}),
    ({0: 5}, {}),
    ({0: 1, "a": 2}, {0: 5, "a": 3}),
    ({"a": 1, "b": {"c": 2}}, {"a": 0}),
    ({"a": 1, "b": {"c": torch.ones(2)}}, {}),
    ({"a.b": 1, "a": {"b": 2}}, {}),
    ({(1, "x"): [{2: None}]}, {}),
    (Counter({30: 1}), Counter({40: 2})),
    (OrderedDict(b=1, a=2), None),
    (OrderedDict(a=(1, [2])), {}),
    ([{"a": 1}, {0: 1}], []),
    ([1, 2], [0, 0, 0]),
    ({}, {}),
    ({}, {"a": 1}),
    ({"a": {}, "b": [{}]}, {"a": {"x": 1}}),
    ({"t": torch.ones(2), "n": {1: 2}}, {"t": torch.zeros(2), "n": {}}),
    (torch.ones(3), None),
    (5, {"n": 0}),
    (b"raw", None),
]
STATES: list[tuple[Any, Any]] = [  # of which each entry must be there
    ({0: torch.ones(2)}, {0: torch.zeros(2)}),
    ({0: 5}, {"a": 1}),
    ([1, torch.ones(2), {"a": 1}], [0, torch.zeros(2)]),
    ([], [1]),
    (torch.ones(2), torch.zeros(2)),
    (None, None),
    ({"a": 1}, None),
    ([{}], [{}]),
]


class State:
    """A state of a job that is a value, or that has it as its only entry."""

    def __init__(self, value: Any, key: str | None) -> None:
        self.value, self.key = value, key

    def state_dict(self) -> Any:
        return self.value if self.key is None else {self.key: self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state if self.key is None else state[self.key]


def holding(folder: Path, form: str, values: Iterable[Any]) -> tuple[Job, list[Any]]:
    """Returns a job, and the states or modules in which it holds the values."""
    job, held = Job(folder), []
    for number, value in enumerate(values):
        if form == "extra state":
            held.append(Noted(value))
            job.model.add_module(f"noted{number}", held[-1])
        else:
            held.append(State(value, "entry" if form == "entry" else None))
            job.manager._states[f"held{number}"] = held[-1]
    return job, held


@pytest.mark.parametrize("form", ["state", "entry", "extra state"])
def test_a_value_comes_back_as_it_was_saved(tmp_path: Path, form: str) -> None:
    """What a state's `state_dict` returns need not be a dict with texts as keys."""
    saved, live = zip(*(STATES if form == "state" else VALUES), strict=True)
    holding(tmp_path, form, saved)[0].manager.save(2, force=True)
    job, held = holding(tmp_path, form, live)
    assert job.manager.load()
    assert [repr(one.value) for one in held] == [*map(repr, saved)]


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.manager.save(2, force=True)
    job.manager._states["other"] = SimpleNamespace(state_dict=lambda: [1])
    with pytest.raises(ConfigError, match=r"step-2 lacks other$"):
        job.manager.load()
    with pytest.raises(ConfigError, match=r"step-2 lacks held0\.entry$"):
        holding(tmp_path, "entry", [5])[0].manager.load()


@pytest.mark.parametrize(
    ("saved", "live"), [({"n": 3, "t": torch.ones(2)}, {"n": 0, "u": 1}), ({}, {}), (5, 6)]
)
def test_extra_state_that_torchs_writer_has_saved(tmp_path: Path, saved: Any, live: Any) -> None:
    """torch's writer, as in torchtitan's checkpoints, divides extra state into entries."""
    torch_dcp.save(noted(tmp_path / "a", saved).model.state_dict(), checkpoint_id=tmp_path / "c")
    job = noted(tmp_path / "b", live, initial_load_path=str(tmp_path / "c")).resume()
    assert repr(job.model.noted.value) == repr(saved)


def test_model_state_is_torchs() -> None:
    """Keys lack the names that wrappers add."""
    model = nn.Sequential(nn.Linear(3, 4), torch.compile(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    for wrapped in (model, nn.parallel.DistributedDataParallel(model)):
        ours, theirs = checkpoint_states.model_state([wrapped]), get_model_state_dict(wrapped)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].data_ptr() == theirs[key].data_ptr() for key in theirs)


@both_modes
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


@both_modes
def test_what_is_not_loaded_may_be_left_out(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    def job(excluded: str) -> Job:
        built = Job(tmp_path, async_mode=mode, exclude_from_loading=[excluded])
        built.data.state_dict = lambda: {"order": np.arange(3)}  # type: ignore[method-assign]
        return built

    job("dataloader").train(until=4).close()
    assert job("dataloader").resume().step == 4
    assert caplog.text.count("without dataloader, which is excluded from loading: dataloader") == 1
    with pytest.raises(TypeError, match=r"^dataloader\.order is a numpy"):
        job("lr_scheduler").manager.save(6)


# ---- damaged and foreign checkpoints -------------------------------------------------------------


def damage(path: Path, position: int) -> None:
    """Flips a bit of one byte."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def cut(path: Path, *missing: Path, to: int = -1) -> None:
    """Truncates a file, and removes others."""
    os.truncate(path, to % path.stat().st_size)
    remove(*missing)


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def of_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-2"), path)


class RunsCode:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(__file__).with_name("code ran")),)


def with_code_in_metadata(path: Path) -> None:
    remove(path / "manifest.json")
    (path / ".metadata").write_bytes(pickle.dumps(RunsCode()))


def with_a_sum_for_less(path: Path) -> None:
    """Writes a manifest with a valid sum that omits the metadata."""
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    del body["files"][".metadata"]
    sum_ = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps({"crc32": sum_, "manifest": body}))


DATA, MANIFEST, METADATA = "__0_0.distcp", "manifest.json", ".metadata"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: cut(p / DATA), r"__0_0.distcp has \d+ bytes, expected \d+"),
    "flipped": (lambda p: damage(p / DATA, 999), "__0_0.distcp has CRC-32"),
    "missing": (lambda p: remove(p / DATA), "__0_0.distcp: No such file"),
    "metadata missing": (lambda p: remove(p / METADATA), ".metadata: No such file"),
    "manifest truncated": (lambda p: cut(p / MANIFEST), "manifest.json is damaged"),
    "manifest of less": (with_a_sum_for_less, ".metadata is not in its manifest"),
    "no manifest, truncated": (
        lambda p: cut(p / DATA, p / MANIFEST, to=999),
        r"__0_0.distcp has \d+ bytes, expected \d+",
    ),
    "half written": (lambda p: remove(p / MANIFEST, p / METADATA), r"lacks \.metadata"),
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
    assert job.step == job.manager.newest() == 2
    # What torch's writer has left half written is no checkpoint.
    assert ("Skipped" in caplog.text and "step-4" in caplog.text) == (fault != "half written")
    assert not Path(__file__).with_name("code ran").exists()
    job.train(until=4).close()
    assert Job(tmp_path).manager.load(4), "it is replaced when the step comes again"


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    folder, chosen = folder_of(Job(tmp_path).train(until=2), 2), random.Random(0)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for _ in range(40):
            damage(path, chosen.randrange(len(whole)))
            try:
                assert files.problems(folder, 2, 0, 1)
            except ValueError:
                assert path.name == "manifest.json"
            path.write_bytes(whole)
    assert files.problems(folder, 2, 0, 1) == []


def test_training_does_not_start_over_where_all_are_damaged(tmp_path: Path) -> None:
    Job(tmp_path).train(until=4).close()
    for step in (2, 4):
        cut(tmp_path / "checkpoint" / f"step-{step}" / DATA)
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
    with pytest.raises(ValueError, match=r"dataloader.dp_rank_0 was not saved by this package"):
        Job(tmp_path / "other", seed=1).manager.load()
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


def test_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    """Equal values are saved once, but 1, 1.0 and True are not equal here."""
    job = Job(tmp_path)
    job.lr_schedulers.schedulers[0].base_lrs = [1]
    group = job.optimizers.param_groups[0]
    group["eps"], group["weight_decay"], group["betas"] = 1.0, 1, (1.0, 0.5)
    job.manager.save(1, force=True)
    fresh = Job(tmp_path / "none", seed=1)
    loaded = {"optimizer": fresh.optimizers.state_dict(), **fresh.model.state_dict()}
    torch_dcp.load(loaded, checkpoint_id=folder_of(job, 1))
    assert differences(loaded.pop("optimizer"), job.optimizers.state_dict()) == []
    assert differences(loaded, job.model.state_dict()) == []


def test_a_checkpoint_of_another_model_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries that the model lacks are only named."""
    job = Job(tmp_path).train(until=2)
    job.model.extra = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"model: it lacks extra\.bias, extra\.weight$"):
        job.manager.load()
    with pytest.raises(ConfigError, match=r"of another model: it lacks noted\._extra_state"):
        noted(tmp_path, {"n": 0}).manager.load()
    job.manager.save(4, force=True)
    assert Job(tmp_path).manager.load()
    assert "the job's model lacks, and that are not loaded: extra.bias, extra.weight" in caplog.text
    job.model.extra.weight = nn.Parameter(torch.ones(1))
    message = r"model: its extra\.weight is \[1, 1\], the job's is \[1\]$"
    with pytest.raises(ConfigError, match=message):
        job.manager.load()


def test_groups_that_the_saved_settings_do_not_fit_are_rejected(tmp_path: Path) -> None:
    """For example without the `no_decay` of the job that saved them."""
    Job(tmp_path, container=partial(OptimizersContainer, no_decay=["bias"])).train(until=2)
    with pytest.raises(ConfigError, match="both parameters are in one group here"):
        Job(tmp_path).manager.load()


def test_a_missing_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step-7 cannot be loaded: .* lacks \.metadata"):
        Job(tmp_path).manager.load(7)
    with pytest.raises(ConfigError, match=r"none cannot be loaded: .* lacks \.metadata"):
        Job(tmp_path, initial_load_path=str(tmp_path / "none")).manager.load()


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


def test_a_folder_that_cannot_be_created_ends_the_job_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoint\.folder cannot be used: \[Errno 17\]"):
        Job(tmp_path / "file")


# ---- fault tolerance, export ---------------------------------------------------------------------


def fault_tolerance() -> SimpleNamespace:
    return SimpleNamespace(enabled=True, manager=MagicMock())


def test_one_replica_group_saves_and_gives_its_state_to_another(tmp_path: Path) -> None:
    enabled = fault_tolerance()
    manager = enabled.manager
    manager.participating_rank.return_value = 1
    manager.state_dict.return_value = committed = {"step": 6, "batches_committed": 12}
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
    enabled, loaders = fault_tolerance(), [Positioned(shared) for shared in (True, True, None)]
    for loader in loaders:
        Job(tmp_path, data=loader, ft_manager=enabled)
    loaders[0].position = 5
    (_, state), *others = [c.args for c in enabled.manager.set_state_dict_fns.call_args_list]
    for heal, _ in others:
        heal(state())
    assert [loader.position for loader in loaders] == [5, 5, 0]


@pytest.mark.parametrize("excluded", [[], ["dataloader"]])
def test_a_stream_of_each_group_is_rejected_unless_it_is_not_loaded(
    tmp_path: Path, excluded: list[str]
) -> None:
    settings = {"data": Positioned(False), "exclude_from_loading": excluded}
    with nullcontext() if excluded else pytest.raises(ValueError, match="exclude_from_loading"):
        Job(tmp_path, ft_manager=fault_tolerance(), **settings)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    return pytest.importorskip("safetensors.torch", exc_type=ImportError).load_file(path)


@pytest.mark.parametrize("model_only", [False, True])
def test_the_last_save_may_export_the_model(tmp_path: Path, model_only: bool) -> None:
    settings = {"export_safetensors": True, "export_dtype": "bfloat16"}
    job = Job(tmp_path, steps=2, model_weights_only=model_only, **settings).train(until=1)
    job.manager.save(1, force=True)
    job.train(until=2)
    job.manager.save(2, force=True)
    [path] = job.manager.folder.glob("*.safetensors")
    assert differences(read_safetensors(path), halves(job.model.state_dict())) == []


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
    assert differences(read_safetensors(output), halves(tensors, torch.float16)) == []
    torch_dcp.save({"c": torch.zeros(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "step-2")
    with pytest.raises(ValueError, match=r"'c' is torch\.complex128"):
        export_safetensors(tmp_path / "step-2", output)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [output.name]
