"""Traces of torch.profiler and snapshots of CUDA memory, every few steps."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from torchopt_ext._torch import dump_memory_snapshot, record_memory_history
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.distributed import choose_device

logger = logging.getLogger(__name__)

# Allocations and frees in a memory snapshot, as in torchtitan/tools/profiling.py.
_SNAPSHOT_ENTRIES = 100_000


def _write(what: str, path: Path, write: Callable[[str], object]) -> None:
    """Writes a file, or logs why it cannot be written, so that training continues."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write(str(path))
        path.stat()  # torch's profiler raises no error of a full disk
    except OSError as error:
        logger.error("%s cannot be written: %s; training goes on", what, error)
    else:
        logger.info("Wrote %s to %s", what, path)


@contextmanager
def maybe_enable_profiling(
    job_config: JobConfig, *, global_step: int = 0
) -> Iterator[profile | None]:
    """Yields a profiler whose `step()` ends a step, or None without `profiling.enable_profiling`.

    Each cycle of `profile_freq` steps ends with `profiler_warmup` steps, which are recorded and
    discarded, and `profiler_active` steps, of which a Chrome trace is written:
    {dump_folder}/{save_traces_folder}/iteration_{step}/rank{rank}_trace.json. On a CPU, traces also
    hold allocations and frees.
    """
    config = job_config.profiling
    if not config.enable_profiling:
        yield None
        return
    wait = config.profile_freq - config.profiler_warmup - config.profiler_active
    if wait < 0:
        raise ConfigError(
            f"profiling.profile_freq is {config.profile_freq}, expected at least profiler_warmup "
            f"({config.profiler_warmup}) + profiler_active ({config.profiler_active})"
        )
    folder = Path(job_config.job.dump_folder, config.save_traces_folder)
    rank, on_gpu = dist.get_rank(), choose_device(job_config).type == "cuda"

    def write(profiler: profile) -> None:
        if profiler.step_num % config.profile_freq:
            return  # torch also calls when training ends while a cycle records
        path = folder / f"iteration_{profiler.step_num}" / f"rank{rank}_trace.json"
        _write("a trace", path, profiler.export_chrome_trace)

    logger.info("Traces of every %d steps go to %s", config.profile_freq, folder)
    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu,
        schedule=schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active),
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=not on_gpu,
    ) as profiler:
        profiler.step_num = global_step
        yield profiler


class MemoryProfiler:
    """Writes the CUDA allocator's history for pytorch.org/memory_viz, every few steps."""

    def __init__(self, folder: Path, step_num: int, freq: int) -> None:
        self._folder, self.step_num, self._freq = folder, step_num, freq

    def step(self) -> None:
        self.step_num += 1
        if self.step_num % self._freq == 0:
            self.dump(f"iteration_{self.step_num}")

    def dump(self, name: str) -> None:
        path = self._folder / name / f"rank{dist.get_rank()}_memory_snapshot.pickle"
        _write("a memory snapshot", path, dump_memory_snapshot)


@contextmanager
def maybe_enable_memory_snapshot(
    job_config: JobConfig, *, global_step: int = 0
) -> Iterator[MemoryProfiler | None]:
    """Yields a MemoryProfiler, or None without `profiling.enable_memory_snapshot`.

    It writes a snapshot every `profile_freq` steps, and when memory runs out:
    {dump_folder}/{save_memory_snapshot_folder}/iteration_{step}[_exit]/rank{rank}_memory_snapshot.pickle.
    """
    config = job_config.profiling
    if not config.enable_memory_snapshot:
        yield None
        return
    if choose_device(job_config).type != "cuda":
        raise ConfigError(
            "profiling.enable_memory_snapshot needs training.device 'cuda', found a CPU: use "
            "profiling.enable_profiling, whose traces hold a CPU's allocations"
        )
    folder = Path(job_config.job.dump_folder, config.save_memory_snapshot_folder)
    logger.info("Memory snapshots of every %d steps go to %s", config.profile_freq, folder)
    record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
    profiler = MemoryProfiler(folder, global_step, config.profile_freq)
    try:
        yield profiler
    except torch.OutOfMemoryError:
        profiler.dump(f"iteration_{profiler.step_num}_exit")
        raise
    finally:
        record_memory_history(enabled=None)
