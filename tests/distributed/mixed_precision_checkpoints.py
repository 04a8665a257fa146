"""Cases of mixed_precision_worker.py that save checkpoints, load them and reject bad loads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mixed_precision_common import (
    BASES,
    DYNAMIC,
    Job,
    assert_alike,
    one_mesh,
)
from rank_cases import difference
from torch.distributed.tensor import Replicate

from torchopt_ext.mixed_precision import load_checkpoint, save_checkpoint

folder = Path(sys.argv[1]).parent / "mixed_precision_checkpoints"  # shared by all world sizes


def chain(base: str) -> None:
    """Trains on 4 ranks, then resumes on 2 and on 1, as if never interrupted.

    An unsharded optimizer loads the checkpoint.
    """
    size = dist.get_world_size()
    steps = {4: range(3), 2: range(3, 6), 1: range(6, 9)}[size]
    dtype = torch.bfloat16 if base == "remainder" else torch.float16
    job = Job(base, dtype, one_mesh(), grad_scal_cfg=DYNAMIC)
    path = folder / base
    if steps.start:
        load_checkpoint(job.optimizer, path)
    job.run(steps)
    save_checkpoint(job.optimizer, path)
    whole = Job(base, dtype, grad_scal_cfg=DYNAMIC).run(range(steps.stop))
    unsharded = Job(base, dtype, grad_scal_cfg=DYNAMIC)
    load_checkpoint(unsharded.optimizer, path)
    assert_alike(base, job.values(), whole.values())
    scalers = [j.optimizer.grad_scaler.state_dict() for j in (job, whole)]
    assert scalers[0] == scalers[1]
    assert difference(unsharded.values(), job.values()) == ""
    assert not list(folder.glob(f"{base}.*")), "nothing is left behind"


def rank_files(base: str) -> None:
    """LightRFT's files, one per rank, load. If a rank cannot read its file, all ranks raise and
    none changes."""
    path = folder / f"ranks-{base}-{dist.get_world_size()}"
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    job = Job(base, mesh=one_mesh()).run(range(3))
    torch.save(job.optimizer.state_dict(), path / f"_rank{dist.get_rank()}")
    dist.barrier()
    fresh = Job(base, mesh=one_mesh())
    load_checkpoint(fresh.optimizer, path)
    assert difference(fresh.values(), job.values()) == ""
    dist.barrier()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        whole = (path / f"_rank{last}").read_bytes()
        (path / f"_rank{last}").write_bytes(whole[: len(whole) // 2])
    before = fresh.values()
    with pytest.raises((RuntimeError, ValueError), match=f"_rank{last}"):
        load_checkpoint(fresh.optimizer, path)
    assert difference(fresh.values(), before) == ""


def bad_loads() -> None:
    job = Job("fused", mesh=one_mesh()).run(range(2))
    other = Job("fused", mesh=one_mesh(), placements=[Replicate()]).run(range(2))
    before = job.values()
    states = other.optimizer.state_dict()
    message = r"saved weight of parameter 0.*Replicate\(\)"
    with pytest.raises(ValueError, match=message):
        job.optimizer.load_state_dict(states)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(job.optimizer, folder / "nothing")
    assert difference(job.values(), before) == ""


def hook_that_fails() -> None:
    """Saves while rank 1 cannot make its state dict. All ranks raise, the old checkpoint stays."""
    job = Job("fused", mesh=one_mesh()).run(range(2))
    path = folder / f"hook-{dist.get_world_size()}"
    save_checkpoint(job.optimizer, path)
    saved = job.values()
    job.run(range(2, 3))
    if dist.get_rank() == 1:
        job.optimizer.register_state_dict_pre_hook(lambda _: 1 / 0)
    with pytest.raises((ValueError, ZeroDivisionError), match="division by zero"):
        save_checkpoint(job.optimizer, path)
    fresh = Job("fused", mesh=one_mesh())
    load_checkpoint(fresh.optimizer, path)
    assert difference(fresh.values(), saved) == ""


def checkpoint_cases() -> dict[str, Callable[[], None]]:
    folder.mkdir(exist_ok=True)
    found: dict[str, Callable[[], None]] = {
        f"chain {base}": functools.partial(chain, base) for base in BASES
    }
    if dist.get_world_size() > 1:
        found["bad loads"] = bad_loads
        found["hook that fails"] = hook_that_fails
        for base in ("fused", "sgd"):
            found[f"rank files {base}"] = functools.partial(rank_files, base)
    return found
