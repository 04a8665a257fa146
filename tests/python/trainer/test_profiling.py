"""Traces and memory snapshots: which steps they cover, and where they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchopt_ext.trainer import profiling
from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job_config(tmp_path: Path) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.training.device, config.profiling.profile_freq = "cpu", 5
    return config


def files(config: JobConfig) -> dict[str, Path]:
    folder = Path(config.job.dump_folder)
    return {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }


def test_nothing_by_default(job_config: JobConfig) -> None:
    for context in (maybe_enable_profiling, maybe_enable_memory_snapshot):
        with context(job_config) as profiler:
            assert profiler is None
    assert files(job_config) == {}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_traces(job_config: JobConfig) -> None:
    """A resumed job traces the same steps, and each trace holds one step."""
    job_config.profiling.enable_profiling = True
    with maybe_enable_profiling(job_config, global_step=7) as profiler:
        assert profiler is not None
        for step in range(8, 20):  # ends while step 20 would be traced
            torch.ones(step, 3) @ torch.ones(3, 2)
            profiler.step()
    traces = files(job_config)
    assert traces.keys() == {
        f"profile_traces/iteration_{step}/rank0_trace.json" for step in (10, 15)
    }
    for name, path in traces.items():
        events = json.loads(path.read_text())["traceEvents"]
        shapes = [e["args"]["Input Dims"] for e in events if e.get("name") == "aten::mm"]
        assert shapes == [[[int(name.split("_")[2].split("/")[0]), 3], [3, 2]]]
        assert any(event.get("name") == "[memory]" for event in events)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("full", [False, True])
def test_a_trace_that_cannot_be_written_is_logged(
    job_config: JobConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    full: bool,
) -> None:
    """`full`: the disk, of which torch's profiler raises no error."""
    if full:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)
    else:
        Path(job_config.job.dump_folder, "profile_traces").touch()
    job_config.profiling.enable_profiling = True
    with maybe_enable_profiling(job_config) as profiler:
        assert profiler is not None
        for _ in range(5):
            profiler.step()
    assert "a trace cannot be written" in caplog.text
    assert "Wrote" not in caplog.text


def test_short_cycles_are_refused(job_config: JobConfig) -> None:
    job_config.profiling.enable_profiling, job_config.profiling.profile_freq = True, 3
    with (
        pytest.raises(ValueError, match=r"profiling.profile_freq is \d, expected at least"),
        maybe_enable_profiling(job_config),
    ):
        pass


def test_memory_snapshots(job_config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without GPU, the calls to torch and their times are right."""
    job_config.profiling.enable_memory_snapshot = True
    with (
        pytest.raises(ValueError, match=r"needs training.device 'cuda', found a CPU"),
        maybe_enable_memory_snapshot(job_config),
    ):
        pass
    calls: list[Any] = []
    monkeypatch.setattr(profiling, "record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(profiling, "dump_memory_snapshot", lambda path: Path(path).touch())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    job_config.training.device = "cuda"

    def run_out_of_memory() -> None:
        """Raises in step 13, after a resume at step 8."""
        with maybe_enable_memory_snapshot(job_config, global_step=8) as memory:
            for _ in range(9, 13):
                memory.step()
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory()
    assert calls == [{"max_entries": 100_000}, {"enabled": None}]
    assert files(job_config).keys() == {
        f"memory_snapshot/iteration_{name}/rank0_memory_snapshot.pickle"
        for name in ("10", "12_exit")
    }
