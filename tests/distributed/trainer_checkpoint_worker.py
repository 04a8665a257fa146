"""One phase of a job on a number of ranks. Other phases load its checkpoints.

Arguments: the job's folder, and a JSON object with the arguments of :func:`main`.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_job import Job, differences, reseed_all

from torchopt_ext.trainer import checkpoint_files as files


def main(
    folder: Path,
    *,
    load: int | None,
    until: int,
    kind: str = "sharded",
    full_disk: int = 0,
    no_memory: int = 0,
    skipped: int = 0,
    damage: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Loads and trains, and returns what this rank found.

    Args:
        load: the step to load, if any. Its contents, and with `load_only` the contents of all
            later steps, are compared with the files of the saving phase.
        until: the step to train to. Without `load_only` each step's contents go to a file.
        kind: the Job's kind on several ranks.
        full_disk: the step in which rank 1's file cannot be written.
        no_memory: the step in which rank 1's state cannot be gathered.
        skipped: the step that rank 1 reports as skipped when saving.
        damage: a file in which a bit is flipped first.
    """
    rank = dist.get_rank()
    if damage and rank == 0:
        path = folder / "checkpoint" / damage
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    if dist.get_world_size() == 1 and kind != "stages":
        kind = ""
    job = Job(folder, seed=until, kind=kind, **settings)
    reseed_all(10 + rank)
    found: dict[str, Any] = {}
    if load is not None:
        assert job.manager.load(load)
        found |= {"step": job.step, "taken": job.data.taken, "differences": compared(job, folder)}
        found["drawn"] = drawn()
    if full_disk and rank == 0:
        saving = files.saving_folder(job.manager.folder, full_disk)
        saving.mkdir(parents=True)
        (saving / "__1_0.distcp").symlink_to("/dev/full")
    if rank == 1:
        state_dict, save = job.state_dict, job.manager.save

        def gather() -> dict[str, Any]:
            if job.step == no_memory:
                raise MemoryError("no room")
            return state_dict()

        job.state_dict = gather  # type: ignore[method-assign]
        job.manager.save = lambda step: save(step, skipping=step == skipped)  # type: ignore
    dist.barrier()
    while job.step < until:
        job.train(job.step + 1)
        if load is not None and settings.get("load_only"):
            found["differences"] += compared(job, folder)
        elif rank == 0:
            torch.save(all_parts(job), folder / f"expected-{job.step}.pt")
        else:
            all_parts(job)
    job.close()
    dist.barrier()
    found["next"] = drawn()
    found["saved"] = sorted(path.name for path in job.manager.folder.iterdir())
    return found


def drawn() -> list[float]:
    """Returns the generator's next numbers without advancing it."""
    with torch.random.fork_rng():
        return torch.rand(2).tolist()


def compared(job: Job, folder: Path) -> list[str]:
    expected = torch.load(folder / f"expected-{job.step}.pt")
    return [key for key in differences(all_parts(job), expected) if key != "taken"]


def all_parts(job: Job) -> dict[str, Any]:
    """Gathers the contents of all ranks' parts."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, job.contents())
    return {key: value for own in reversed(every) for key, value in own.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    folder = Path(sys.argv[1])
    log = folder / f"log{dist.get_rank()}.txt"
    log.unlink(missing_ok=True)
    logging.getLogger("torchopt_ext").addHandler(logging.FileHandler(log))
    result = main(folder, **json.loads(sys.argv[2]))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    os._exit(0)
