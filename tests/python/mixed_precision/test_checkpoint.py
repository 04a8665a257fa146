"""save_checkpoint and load_checkpoint in one process; tests/distributed covers several ranks."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchopt_ext.mixed_precision import checkpoint, load_checkpoint, save_checkpoint

from .training import content, ours_of, parameters, train, unchanged

SHAPES = ((4, 3), (), (5,), (1,))


def job(kind: str = "FusedAdamW", steps: int = 0) -> tuple[list[nn.Parameter], Any]:
    params = parameters(shapes=SHAPES, seed=steps)
    ours = ours_of(kind, [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}])
    train(ours, params, range(steps))
    return params, ours


@pytest.mark.parametrize("kind", ["FusedAdamW", "AdamW-foreach", "SGD"])
@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_as_if_never_interrupted(kind: str, steps: int, tmp_path: Path) -> None:
    """A fresh or a used optimizer loads; a link to a folder stays one."""
    params, ours = job(kind, steps)
    (tmp_path / "latest").symlink_to("step-1")
    (tmp_path / "step-1").mkdir()
    for path in (tmp_path / "step-1", tmp_path / "latest"):
        save_checkpoint(ours, path)
    for used, path in enumerate((tmp_path / "step-1", tmp_path / "latest")):
        others, resumed = job(kind, used)
        load_checkpoint(resumed, path)
        assert content(resumed, others) == content(ours, params)
        train(resumed, others, range(3, 6))
    train(ours, params, range(3, 6))
    assert content(resumed, others) == content(ours, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert (tmp_path / "latest").is_symlink()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def lightrfts_file(path: Path) -> None:
    path.mkdir()
    torch.save({"grad_scaler": Evil()}, path / "_rank0")


def of_fewer(path: Path) -> None:
    params = parameters(shapes=SHAPES)
    save_checkpoint(ours_of("SGD", [{"params": params[:2]}, {"params": params[2:3]}]), path)


def of_other_shapes(path: Path) -> None:
    params = parameters(shapes=((6,), (5,), (4,), (3,)))
    save_checkpoint(ours_of("SGD", [{"params": params[:2]}, {"params": params[2:]}]), path)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda path: None, "there is no checkpoint"),
        (lightrfts_file, "reading .*_rank0: UnpicklingError"),
        (of_fewer, "is inconsistent, 2 != 1"),
        (of_other_shapes, "saved weight of parameter 0 has shape"),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    save: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes, and no code of the files runs."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "one")
    params, ours = job("SGD", 1)
    with (
        unchanged(ours, params),
        pytest.raises((AssertionError, OSError, RuntimeError, ValueError), match=message),
    ):
        load_checkpoint(ours, tmp_path / "one")
    assert not (tmp_path / "ran").exists()


def full_disk(*_: Any, checkpoint_id: Path, **__: Any) -> None:
    checkpoint_id.mkdir()
    (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("why", ["full disk", "a value that would not load"])
def test_a_save_that_fails_leaves_the_old_checkpoint(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, ours = job(steps=2)
    save_checkpoint(ours, tmp_path / "one")
    saved = content(ours, params)
    train(ours, params, [2])
    with monkeypatch.context() as patched:
        if why == "full disk":
            patched.setattr(checkpoint, "save", full_disk)
        else:
            patched.setitem(ours.param_groups[0], "note", object())
        message = r"No space left|base_optim_states\.param_groups\.0\.note is of type object"
        with pytest.raises((RuntimeError, TypeError), match=message):
            save_checkpoint(ours, tmp_path / "one")
    load_checkpoint(ours, tmp_path / "one")
    assert content(ours, params) == saved
    save_checkpoint(ours, tmp_path / "one")


def save_and_be_killed(ours: Any, moment: str, path: Path) -> None:
    """Is killed while it saves."""

    def killed(*_args: Any, **_kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)  # OpenMP's threads were not forked
    save, rename, saving = checkpoint.save, os.rename, path.with_name("one.saving")

    def save_without_metadata(*args: Any, checkpoint_id: Path, **kwargs: Any) -> None:
        save(*args, checkpoint_id=checkpoint_id, **kwargs)
        (checkpoint_id / ".metadata").unlink()
        killed()

    def rename_then_die(source: Path, target: Path) -> None:
        rename(source, target)
        if source == (path if moment == "between two renames" else saving):
            killed()

    if moment == "while it writes":
        checkpoint.save = save_without_metadata
    elif moment == "before it replaces":
        checkpoint.publish = killed
    else:
        os.rename = rename_then_die  # type: ignore[assignment]
    save_checkpoint(ours, path)


@pytest.mark.parametrize("then", ["load", "save"])
@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        ("while it writes", 2),
        ("before it replaces", 2),
        ("between two renames", 2),
        ("before it cleans up", 3),
    ],
)
def test_kill_while_saving(moment: str, steps: int, then: str, tmp_path: Path) -> None:
    """The old checkpoint loads, or the new one if complete, and the next save works."""
    path = tmp_path / "one"
    params, ours = job(steps=2)
    save_checkpoint(ours, path)
    train(ours, params, [2])
    child = os.fork()  # it makes no backward, which torch may reject after a fork
    if child == 0:
        try:
            save_and_be_killed(ours, moment, path)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    params, expected = job(steps=2)
    train(expected, params, range(2, steps))
    if then == "save":
        save_checkpoint(expected, path)
    others, ours = job()
    load_checkpoint(ours, path)
    assert content(ours, others) == content(expected, params)
    save_checkpoint(ours, path)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def test_a_checkpoint_of_many_kinds_of_values(tmp_path: Path) -> None:
    """Group settings load with their types, numpy's numbers as Python's."""
    _, ours = job("AdamW-foreach", 1)
    note = ("text", 3, None, 1.5, np.int64(3), np.bool_(True))
    ours.param_groups[0] |= {"lr": np.float64(0.125), "note": note}
    save_checkpoint(ours, tmp_path / "one")
    ours.param_groups[0]["note"] = None
    load_checkpoint(ours, tmp_path / "one")
    assert str(ours.param_groups[0]["note"]) == "('text', 3, None, 1.5, 3, True)"
    assert ours.param_groups[0]["lr"] == 0.125
    assert ours.param_groups[0]["betas"] == (0.9, 0.95)


def test_other_files_are_not_deleted(tmp_path: Path) -> None:
    _, ours = job()
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "model").mkdir()
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path / "model")
    for path, message in {
        tmp_path: r"replaced as a whole, has 'model",
        tmp_path / "model": r"model\.weight",
        tmp_path / "model.safetensors": "is a file",
    }.items():
        with pytest.raises(FileExistsError, match=message):
            save_checkpoint(ours, path)
    assert (tmp_path / "model.safetensors").read_text() == "weights"
