"""What checkpoints load() reads, from where, and what it rejects; test_round_trips has the bits."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import load_checkpoint, save_checkpoint
from torchopt_ext.statedict.dcp import Reader, load

from ...support.compare import assert_same, unchanged
from .jobs import container_of, job, train

# ---- layouts -------------------------------------------------------------------------------------


class Nested(torch.optim.SGD):
    """An optimizer with its own state dict layout."""

    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"groups.weight": {"lr": 0.5, "count": torch.ones(3)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Flat(Nested):
    """Tells how to read the layout that it has."""

    def state_dict(self) -> dict[str, Any]:
        return {"state.w.sum": torch.arange(3.0)}

    def _checkpoint_buffers(self, ids: list[str]) -> Any:
        return lambda path, like: torch.empty(like.shape)


@pytest.mark.parametrize("kind", [Nested, Flat])
def test_other_layouts_are_loaded(kind: type[Nested], tmp_path: Path) -> None:
    """As torch does, in place, or into buffers of the optimizer."""
    optimizer = kind(nn.Linear(2, 2).parameters(), lr=0.1)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    load({"optim": optimizer}, checkpoint_id=tmp_path)
    assert_same(optimizer.loaded, optimizer.state_dict())


@pytest.mark.parametrize("saved", ["container", "adapted", "optimizer"])
@pytest.mark.parametrize("loaded", ["container", "adapted", "optimizer"])
def test_another_layout_is_named(tmp_path: Path, saved: str, loaded: str) -> None:
    dcp.save({"optim": job(saved, "torch", 1, 1)[1]}, checkpoint_id=tmp_path)
    model, optimizer = job(loaded, "torch", 1, 1)
    if saved == loaded:
        load({"optim": optimizer}, checkpoint_id=tmp_path)
        return
    message = f"saved as 'optim' is .* but that of {type(optimizer).__name__} is"
    with unchanged(optimizer, model), pytest.raises(ValueError, match=message):
        load({"optim": optimizer}, checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.SGD(nn.Linear(4, 4).parameters(), momentum=0.9), "lacks .*momentum"),
        (lambda: torch.optim.AdamW(nn.Linear(5, 4).parameters()), r"shape \(4, 4\), .* \(4, 5\)"),
    ],
)
def test_torchs_optimizers_take_what_fits_only(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    model = nn.Linear(4, 4)
    source, target = FusedAdamW(model.parameters()), make()
    train(model, source, [0])
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    with unchanged(target), pytest.raises(ValueError, match=message):
        load({"optim": target}, checkpoint_id=tmp_path)


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "memory://", "file://"])
def test_a_folder_may_be_a_url(tmp_path: Path, scheme: str) -> None:
    """A reader reads the metadata once, and again after a checkpoint was written again."""
    url, reader = f"{scheme}{tmp_path}", Reader("elsewhere")
    with pytest.raises(RuntimeError, match=f"there is no checkpoint in {url}: it lacks .metadata"):
        load({"optim": job("optimizer", "fp32", 1, 1)[1]}, checkpoint_id=url)
    for seed in (1, 2):
        model, optimizer = job("optimizer", "fp32", seed, seed)
        saved = {"model": model, "optim": optimizer, f"of {seed}": seed}
        dcp.save(saved, checkpoint_id=url)
        for place in ({"checkpoint_id": url}, {"storage_reader": reader, "checkpoint_id": url}):
            other, resumed = job("optimizer", "fp32", 3, 0)
            load({"model": other, "optim": resumed}, **place)
            assert_same(other.state_dict(), model.state_dict())
            assert_same(resumed.state_dict(), optimizer.state_dict())
        metadata = reader.read_metadata()
        assert f"of {seed}" in metadata.state_dict_metadata and metadata is reader.read_metadata()
    with pytest.raises(ValueError, match="needs a checkpoint_id or a storage_reader"):
        load({"optim": optimizer})


def test_an_interrupt_is_no_failure_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = job("container", "fp32", 1, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load({"optim": optimizer}, checkpoint_id=tmp_path)


# ---- damage --------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def truncate(folder: Path) -> None:
    (data,) = folder.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 100)  # cuts into the last entry


def in_metadata(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../saved/{info.relative_path}"


def pickled_value(folder: Path) -> None:
    _, optimizer = job("container", "fp32", 2, 1)
    optimizer.param_groups[0]["lr"] = Evil()
    dcp.save({"optim": optimizer}, checkpoint_id=folder)


def of_model(model: nn.Module) -> Callable[[Path], None]:
    return lambda folder: dcp.save(
        {"optim": container_of(model.bfloat16(), "fp32")}, checkpoint_id=folder
    )


refer_to_mkdir = in_metadata(lambda metadata: metadata.planner_data.update(evil=Evil()))
other_shapes = nn.Sequential(
    nn.Linear(200, 8), nn.Conv1d(8, 5, 16), nn.LayerNorm(8), nn.Linear(7, 5)
)
DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "other metadata": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"planner_data": {}})),
        RuntimeError, r"ValueError: .*\.metadata is not .*: it is of type dict",
    ),
    "cut metadata": (
        lambda folder: os.truncate(folder / ".metadata", 40),
        RuntimeError, r"ValueError: .*\.metadata is not a checkpoint's metadata",
    ),
    "files elsewhere": (
        in_metadata(elsewhere), RuntimeError, r"\.\./saved/.* is not in the checkpoint's folder",
    ),
    "code in metadata": (refer_to_mkdir, RuntimeError, r"\.metadata refers to posix\.mkdir"),
    "code in a value": (pickled_value, RuntimeError, "Weights only load failed"),
    "cut data": (truncate, RuntimeError, "reading the optimizer state: rank 0"),
    "no data": (
        lambda folder: (folder / "__0_0.distcp").unlink(),
        RuntimeError, "reading the optimizer state: rank 0",
    ),
    "no element": (
        in_metadata(
            lambda m: m.state_dict_metadata["optim.state.0.weight.exp_avg"].chunks.clear()
        ),
        ValueError, "'optim.state.0.weight.exp_avg' is incomplete: .* 0 of its 6000 elements",
    ),
    "no optimizer": (
        lambda folder: dcp.save({"model": nn.Linear(2, 2)}, checkpoint_id=folder),
        ValueError, r"the checkpoint has no 'optim'; it has \['model'\]",
    ),
    "other names": (of_model(nn.Linear(9, 7)), KeyError, r"'state\.0\.weight\.step' is missing"),
    "other shapes": (of_model(other_shapes), ValueError, r"has shape \(8, 200\), expected \(30,"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_checkpoint_changes_nothing_and_runs_nothing(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = job("container", "fp32", 1, 2)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "saved")
    make, error, message = DAMAGE[damage]
    make(tmp_path / "saved")
    with unchanged(optimizer, model), pytest.raises(error, match=message):
        load({"optim": optimizer, "model": model}, checkpoint_id=tmp_path / "saved")
    assert not (tmp_path / "ran").exists()


def test_no_reader_of_ours_runs_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = job("adapted", "plain", 1, 1)
    folder = tmp_path / "saved"
    save_checkpoint(optimizer, folder)
    refer_to_mkdir(folder)
    for call in (
        lambda: load_checkpoint(optimizer, folder),
        lambda: save_checkpoint(optimizer, folder),
        lambda: dcp.load({"model": model.state_dict()}, storage_reader=Reader(folder)),
    ):
        # torch 2.11's load does not say why the metadata is missing.
        with pytest.raises(BaseException, match=r"\.metadata refers to posix|metadata is None"):
            call()
    assert not (tmp_path / "ran").exists()
