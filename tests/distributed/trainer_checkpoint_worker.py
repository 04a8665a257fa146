"""CheckpointManager with sharded models, on other numbers of ranks and when one rank fails.

It runs on 2, 1 and 2 ranks. Each run loads what the run before has saved.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_job import Job, differences

from tests.support.ranks import gathered, run_cases
from torchopt_ext.trainer import checkpoint_files as files
from torchopt_ext.trainer.distributed import seed_generators

ROOT = Path(sys.argv[1]).parent / "trainer_checkpoint"  # of all runs
MODES = ("disabled", "async")


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yields the messages that the package logs inside."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("torchopt_ext")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def saved(job: Job) -> list[str]:
    job.close()
    dist.barrier()
    return sorted(path.name for path in job.manager.folder.iterdir())


def drawn() -> list[float]:
    """Returns the generator's next numbers without advancing it."""
    with torch.random.fork_rng():
        return torch.rand(2).tolist()


def all_parts(job: Job) -> dict[str, Any]:
    """Returns the contents of all ranks' parts, without data positions."""
    every = gathered(job.contents())
    return {k: value for part in reversed(every) for k, value in part.items() if k != "taken"}


def resumes_with_the_same_bits(kind: str, mode: str) -> None:
    folder, rank = ROOT / f"{kind} {mode}", dist.get_rank()
    job, parts, numbers = Job(folder, kind=kind, async_mode=mode), {}, {}
    seed_generators(10 + rank)
    for step in (2, 4):
        job.train(step)
        parts[step], numbers[step] = all_parts(job), drawn()
    assert saved(job) == ["step-2", "step-4"]
    both = gathered(numbers[4])
    assert both[0] != both[1]
    for step in (2, 4):
        again = Job(folder, seed=1, kind=kind, load_only=True).resume(step)
        assert (again.data.taken, drawn()) == (step, numbers[step])
        assert differences(all_parts(again), parts[step]) == []
        assert differences(all_parts(again.train(4)), parts[4]) == []
    torch.save(parts[4], folder / f"rank{rank}.pt")


def loads_on_one_rank(kind: str, mode: str) -> None:
    folder = ROOT / f"{kind} {mode}"
    with logged() as messages:
        job = Job(folder, seed=1, kind="stages" if kind == "stages" else "").resume()
    assert "another layout" in " ".join(messages) or kind == "stages"
    expected = torch.load(folder / "rank0.pt")
    assert (job.step, job.data.taken, differences(all_parts(job), expected)) == (4, 4, [])
    torch.save(all_parts(job.train(6)), folder / "rank0.pt")
    job.close()


def loads_what_one_rank_saved(mode: str) -> None:
    """The position of rank 1's data is not known."""
    folder = ROOT / f"sharded {mode}"
    job = Job(folder, seed=1, kind="sharded", load_only=True).resume()
    assert gathered([job.step, job.data.taken]) == [[6, 6], [6, 0]]
    assert differences(all_parts(job), torch.load(folder / "rank0.pt")) == []


def all_ranks_skip_what_one_finds_damaged() -> None:
    job = Job(ROOT / "damaged", kind="sharded").train(4)
    saved(job)
    if dist.get_rank() == 0:
        path = job.manager.folder / "step-4" / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with logged() as messages:
        assert Job(ROOT / "damaged", kind="sharded", load_only=True).resume().step == 2
    assert dist.get_rank() or "__1_0.distcp has CRC-32" in " ".join(messages)


def one_ranks_failure_is_told_on_all(fault: str, mode: str) -> None:
    folder, rank = ROOT / f"{fault} {mode}", dist.get_rank()
    with logged() as messages:
        job = Job(folder, kind="sharded", async_mode=mode)
        state_dict = job.state_dict

        def gather() -> dict[str, Any]:
            if job.step == 4:
                raise MemoryError("no room")
            return state_dict()

        if fault == "no room" and rank == 1:
            job.state_dict = gather  # type: ignore[method-assign]
        elif fault != "no room" and rank == 0:
            saving = files.saving_folder(job.manager.folder, 4)
            saving.mkdir(parents=True)
            (saving / "__1_0.distcp").symlink_to("/dev/full")
        dist.barrier()
        assert saved(job.train(6)) == ["step-2", "step-6"]
    [message] = [message for message in messages if "training goes on" in message]
    assert "step 4" in message
    assert fault in message
    assert rank or "rank 1: " in message
    again = Job(folder, seed=1, kind="sharded", load_only=True).resume()
    assert again.step == 6
    assert differences(all_parts(again), all_parts(job)) == []


def all_ranks_wait_for_a_step_that_none_says_was_skipped(mode: str) -> None:
    job = Job(ROOT / f"skipped {mode}", kind="sharded", async_mode=mode)
    save, skipped = job.manager.save, 4 if dist.get_rank() else 0
    job.manager.save = lambda step: save(step, skipping=step == skipped)  # type: ignore
    assert saved(job.train(6)) == ["step-2", "step-5", "step-6"]


def all_ranks_resume_what_was_saved_after_going_back() -> None:
    folder, settings = ROOT / "back", {"kind": "sharded"}
    saved(Job(folder, **settings).train(4))
    saved(Job(folder, interval=1, **settings).resume(2).train(3))
    assert Job(folder, load_only=True, **settings).resume().step == 3


def cases() -> dict[str, Callable[[], None]]:
    if dist.get_world_size() == 1:
        chosen: list[Any] = [
            partial(loads_on_one_rank, *each) for each in product(("sharded", "stages"), MODES)
        ]
    elif ROOT.exists():
        chosen = [partial(loads_what_one_rank_saved, mode) for mode in MODES]
    else:
        faults = product(("No space left on device", "no room"), MODES)
        skipping = all_ranks_wait_for_a_step_that_none_says_was_skipped
        chosen = [
            *(partial(resumes_with_the_same_bits, *each)
              for each in product(("sharded", "zero", "stages"), MODES)),
            *(partial(one_ranks_failure_is_told_on_all, *each) for each in faults),
            *(partial(skipping, mode) for mode in MODES),
            partial(all_ranks_skip_what_one_finds_damaged),
            partial(all_ranks_resume_what_was_saved_after_going_back),
        ]  # fmt: skip
    dist.barrier()
    return {f"{case.func.__name__} {case.args}": case for case in chosen}


if __name__ == "__main__":
    run_cases(cases)
