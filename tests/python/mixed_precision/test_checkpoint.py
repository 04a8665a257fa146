"""save_checkpoint and load_checkpoint in one process; tests/distributed covers several ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    checkpoint,
    load_checkpoint,
    save_checkpoint,
)

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": FusedAdamW,
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
every_base = pytest.mark.parametrize("base", BASES)
SHAPES = [(4, 3), (), (5,), (1,)]


def job(base: str = "fused") -> tuple[list[nn.Parameter], FSDPadaptOptimizer]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    return params, FSDPadaptOptimizer(BASES[base](groups))


def train(params: list[nn.Parameter], optimizer: FSDPadaptOptimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def content(optimizer: FSDPadaptOptimizer) -> Any:
    """Returns all weights and state in a form that == compares."""

    def plain(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tuple(tensor.shape), tensor.detach().flatten().tolist()

    params = [p for own in optimizer.params_by_group for p in own]
    return tree_map_only(Tensor, plain, (params, optimizer.state_dict()))


@every_base
def test_training_goes_on_as_if_never_interrupted(base: str, tmp_path: Path) -> None:
    params, optimizer = job(base)
    train(params, optimizer, range(3))
    save_checkpoint(optimizer, tmp_path / "one")
    others, resumed = job(base)
    load_checkpoint(resumed, tmp_path / "one")
    assert content(resumed) == content(optimizer)
    train(params, optimizer, range(3, 6))
    train(others, resumed, range(3, 6))
    assert content(resumed) == content(optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@every_base
def test_before_the_first_step(base: str, tmp_path: Path) -> None:
    _, optimizer = job(base)
    save_checkpoint(optimizer, tmp_path / "new")
    params, other = job(base)
    train(params, other, range(1))
    load_checkpoint(other, tmp_path / "new")
    assert content(other) == content(optimizer)


def test_a_parameter_too_few_or_of_another_shape(tmp_path: Path) -> None:
    params, optimizer = job()
    train(params, optimizer, range(2))
    save_checkpoint(optimizer, tmp_path / "one")
    fewer = FSDPadaptOptimizer(FusedAdamW([{"params": params[:2]}, {"params": params[2:3]}]))
    before = content(fewer)
    with pytest.raises((ValueError, AssertionError), match="is inconsistent, 1 != 2"):
        load_checkpoint(fewer, tmp_path / "one")
    assert content(fewer) == before
    others = [nn.Parameter(torch.zeros(6 - i, dtype=torch.bfloat16)) for i in range(4)]
    wrong = FSDPadaptOptimizer(FusedAdamW([{"params": others[:2]}, {"params": others[2:]}]))
    before = content(wrong)
    with pytest.raises(ValueError, match="saved weight of parameter 0 has shape"):
        load_checkpoint(wrong, tmp_path / "one")
    assert content(wrong) == before


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    """LightRFT's layout is pickled: its files may hold only tensors and plain values."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    _, optimizer = job()
    (tmp_path / "seed").mkdir()
    torch.save({"grad_scaler": Evil()}, tmp_path / "seed" / "_rank0")
    with pytest.raises(RuntimeError, match="_rank0"):
        load_checkpoint(optimizer, tmp_path / "seed")
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = job()
    train(params, optimizer, range(2))
    save_checkpoint(optimizer, tmp_path / "one")
    saved = content(optimizer)
    train(params, optimizer, range(2, 3))
    monkeypatch.setattr(checkpoint, "save", full_disk)
    with pytest.raises(RuntimeError, match="No space left"):
        save_checkpoint(optimizer, tmp_path / "one")
    monkeypatch.undo()
    load_checkpoint(optimizer, tmp_path / "one")
    assert content(optimizer) == saved
    save_checkpoint(optimizer, tmp_path / "one")


def full_disk(*_: Any, checkpoint_id: Path, **__: Any) -> None:
    checkpoint_id.mkdir()
    (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def save_and_be_killed(moment: str, path: Path) -> None:
    """Saves the state after step 2, and is killed while it saves the state after step 3."""

    def killed(*_args: Any, **_kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)  # OpenMP's threads were not forked
    params, optimizer = job()
    train(params, optimizer, range(2))
    save_checkpoint(optimizer, path)
    train(params, optimizer, range(2, 3))
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
    save_checkpoint(optimizer, path)


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        ("while it writes", 2),
        ("before it replaces", 2),
        ("between two renames", 2),
        ("before it cleans up", 3),
    ],
)
def test_kill_while_saving(moment: str, steps: int, tmp_path: Path) -> None:
    """The old checkpoint loads, or the new one if complete, and the next save works."""
    path = tmp_path / "one"
    child = os.fork()
    if child == 0:
        try:
            save_and_be_killed(moment, path)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    params, expected = job()
    train(params, expected, range(steps))
    _, optimizer = job()
    load_checkpoint(optimizer, path)
    assert content(optimizer) == content(expected)
    save_checkpoint(optimizer, path)
    load_checkpoint(optimizer, path)
    assert content(optimizer) == content(expected)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def test_a_checkpoint_of_many_kinds_of_values(tmp_path: Path) -> None:
    """Group settings load with their types, numpy's numbers as Python's."""
    params, optimizer = job("adamw")
    train(params, optimizer, range(1))
    note = ("text", 3, None, 1.5, np.int64(3), np.bool_(True))
    optimizer.param_groups[0] |= {"lr": np.float64(0.125), "note": note}
    save_checkpoint(optimizer, tmp_path / "one")
    optimizer.param_groups[0]["note"] = None
    load_checkpoint(optimizer, tmp_path / "one")
    assert str(optimizer.param_groups[0]["note"]) == "('text', 3, None, 1.5, 3, True)"
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    _, optimizer = job()
    save_checkpoint(optimizer, tmp_path / "one")
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(TypeError, match=r"base_optim_states\.param_groups\.0\.note"):
        save_checkpoint(optimizer, tmp_path / "one")
    load_checkpoint(job()[1], tmp_path / "one")


def test_a_link_to_a_checkpoint_stays_one(tmp_path: Path) -> None:
    _, optimizer = job()
    save_checkpoint(optimizer, tmp_path / "step-1")
    (tmp_path / "latest").symlink_to("step-1")
    for _ in range(2):
        save_checkpoint(optimizer, tmp_path / "latest")
        load_checkpoint(optimizer, tmp_path / "latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert (tmp_path / "latest").is_symlink()


def test_other_files_are_not_deleted(tmp_path: Path) -> None:
    _, optimizer = job()
    (tmp_path / "model.safetensors").write_text("weights")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        save_checkpoint(optimizer, tmp_path)
    (tmp_path / "model").mkdir()
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path / "model")
    with pytest.raises(FileExistsError, match=r"model\.weight"):
        save_checkpoint(optimizer, tmp_path / "model")
    with pytest.raises(FileExistsError, match="is a file"):
        save_checkpoint(optimizer, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_text() == "weights"
