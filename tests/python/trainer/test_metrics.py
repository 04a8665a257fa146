"""Metrics of the Trainer: their values, their tags, the reporting rank, and their outputs."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchopt_ext.trainer import metrics as metrics_module
from torchopt_ext.trainer.config import ConfigError, JobConfig, Parallelism
from torchopt_ext.trainer.measures import DeviceMemoryMonitor, get_peak_flops
from torchopt_ext.trainer.metrics import MetricsProcessor, metrics_rank
from torchopt_ext.trainer.parallel_dims import ParallelDims

pytestmark = pytest.mark.usefixtures("one_rank")

# Tags of torchtitan/components/metrics.py, without mfu(%), which needs a known device peak.
MEMORY = {
    f"memory/{name}"
    for name in (
        *("max_active(GiB)", "max_active(%)", "max_reserved(GiB)", "max_reserved(%)"),
        *("num_alloc_retries", "num_ooms"),
    )
}
TORCHTITAN_TAGS = MEMORY | {
    *("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "throughput(tps)", "tflops"),
    *("time_metrics/end_to_end(s)", "time_metrics/data_loading(s)", "time_metrics/data_loading(%)"),
}


@pytest.fixture
def job_config(tmp_path: Path) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.training.device, config.metrics.log_freq = "cpu", 4
    return config


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now.seconds)
    return now


def dims(world_size: int = 1, pp: int = 1, tp: int = 1) -> ParallelDims:
    degrees = Parallelism(pipeline_parallel_degree=pp, tensor_parallel_degree=tp)
    return ParallelDims.of(degrees, world_size)


def lines(config: JobConfig) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    text = Path(config.job.dump_folder, "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_values(
    job_config: JobConfig, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "get_peak_flops", lambda _: 4e12)
    processor = MetricsProcessor(job_config, dims(2, tp=2))
    processor.num_flops_per_token = 2e9
    assert [step for step in range(1, 13) if processor.should_log(step)] == [1, 4, 8, 12]
    for step in (4, 8):  # counters restart
        processor.ntokens_since_last_log += 8000
        processor.data_loading_times += [0.25, 0.75, 0.5, 0.5]
        clock.seconds += 8
        with processor.pause():
            clock.seconds += 5
        processor.log(step, 1.5, 2.5, {"grad_norm": 0.5, "lr": 1e-3})
    processor.log_validation(3.0, 8)
    processor.close()
    first, second, validation = lines(job_config)
    expected = {
        "step": 4,
        "loss_metrics/global_avg_loss": 1.5,
        "loss_metrics/global_max_loss": 2.5,
        "throughput(tps)": 500,  # 8000 tokens in 8 s on 2 devices
        "tflops": 1,
        "mfu(%)": 25,
        "time_metrics/end_to_end(s)": 2,
        "time_metrics/data_loading(s)": 0.5,
        "time_metrics/data_loading(%)": 25,
        "grad_norm": 0.5,
        "lr": 1e-3,
    }
    for line in (first, second):
        assert {key: value for key, value in line.items() if key not in MEMORY} == expected
        expected["step"] = 8
        assert line.keys() - {"step", "mfu(%)", "grad_norm", "lr"} == TORCHTITAN_TAGS
    assert validation == {"step": 8, "validation_metrics/loss": 3.0}


def test_what_is_not_known_is_left_out(job_config: JobConfig) -> None:
    """Unknown CPU peaks and model operations are omitted; a non-finite loss becomes null."""
    processor = MetricsProcessor(job_config, dims())
    for step, flops in ((1, 0), (4, 10)):
        processor.num_flops_per_token = flops
        processor.log(step, float("nan"), float("inf"))
    no_flops, with_flops = lines(job_config)
    assert with_flops.keys() - no_flops.keys() == {"tflops"}
    assert "mfu(%)" not in with_flops
    assert (
        with_flops["loss_metrics/global_avg_loss"]
        is with_flops["loss_metrics/global_max_loss"]
        is None
    )


@pytest.mark.parametrize(
    ("world_size", "pp", "schedule", "rank"),
    [
        (4, 1, "1F1B", 0),
        (2, 2, "1F1B", 1),
        (8, 4, "Interleaved1F1B", 6),
        (8, 4, "ZBVZeroBubble", 0),
        (8, 2, "DualPipeV", 0),
    ],
)
def test_one_rank_reports(
    job_config: JobConfig,
    capsys: pytest.CaptureFixture[str],
    world_size: int,
    pp: int,
    schedule: str,
    rank: int,
) -> None:
    job_config.parallelism.pipeline_parallel_schedule = schedule
    layout = dims(world_size, pp)
    assert metrics_rank(layout, job_config) == rank
    for all_ranks, names in ((False, set()), (True, {"metrics_0.jsonl"})):
        job_config.metrics.save_for_all_ranks = all_ranks
        processor = MetricsProcessor(job_config, layout)  # this is rank 0
        processor.log(1, 1.0, 1.0)
        processor.close()
        expected = {"metrics.jsonl"} if rank == 0 else names
        assert {path.name for path in Path(job_config.job.dump_folder).iterdir()} == expected
        assert ("loss: 1.0" in capsys.readouterr().out) == (rank == 0)


def test_a_resumed_job_appends(job_config: JobConfig) -> None:
    for steps in ((1, 4, 8), (8, 12)):
        processor = MetricsProcessor(job_config, dims())
        for step in steps:
            processor.log(step, 1.0, 1.0)
        assert lines(job_config)[-1]["step"] == steps[-1]  # before the file is closed
        with Path(job_config.job.dump_folder, "metrics.jsonl").open("a") as torn:
            torn.write('{"step": 9, "loss')
        with pytest.raises(ValueError, match="Unterminated"):
            lines(job_config)
    processor = MetricsProcessor(job_config, dims())
    assert [line["step"] for line in lines(job_config)] == [1, 4, 8, 8, 12]


def test_a_full_disk_is_logged_once_and_training_goes_on(
    job_config: JobConfig, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = MetricsProcessor(job_config, dims())
    _, file = processor._writers

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file._file = SimpleNamespace(write=fail, close=fail)
    for step in (1, 4):
        processor.log(step, 1.0, 1.0)
    processor.close()
    assert caplog.text.count("JsonLines cannot write metrics: [Errno 28] No space left") == 1
    assert "step:  4" in capsys.readouterr().out


def test_a_file_that_cannot_be_opened_ends_the_job_at_its_start(job_config: JobConfig) -> None:
    Path(job_config.job.dump_folder, "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"files for \[metrics\] cannot be opened: \[Errno 21\]"):
        MetricsProcessor(job_config, dims())


def test_tensorboard(job_config: JobConfig) -> None:
    job_config.metrics.enable_tensorboard = True
    job_config.metrics.enable_jsonl = False
    processor = MetricsProcessor(job_config, dims())
    processor.num_flops_per_token = 1
    for step in (1, 4):
        processor.log(step, step / 2, 2.0, {"grad_norm": 0.25})
    processor.close()
    (run,) = Path(job_config.job.dump_folder, "tb").iterdir()
    events = EventAccumulator(str(run)).Reload()
    assert set(events.Tags()["scalars"]) == TORCHTITAN_TAGS | {"grad_norm"}
    losses = [(e.step, e.value) for e in events.Scalars("loss_metrics/global_avg_loss")]
    assert losses == [(1, 0.5), (4, 2.0)]
    assert not Path(job_config.job.dump_folder, "metrics.jsonl").exists()


def test_weights_and_biases(job_config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    job_config.metrics.enable_wandb = True
    processor = MetricsProcessor(job_config, dims())
    processor.log(1, 1.5, 1.5)
    processor.close()
    options, run = wandb.init.call_args.kwargs, wandb.init.return_value
    assert Path(options["dir"]).is_dir()
    assert (options["project"], options["config"]["metrics"]["log_freq"]) == ("mine", 4)
    run.log.assert_called_once_with(ANY, step=1)
    assert run.log.call_args.args[0]["loss_metrics/global_avg_loss"] == 1.5
    run.finish.assert_called_once_with()


@pytest.mark.parametrize(
    ("setting", "value", "module", "advice"),
    [
        ("enable_wandb", True, "wandb", "pip install wandb"),
        ("enable_tensorboard", True, "torch.utils.tensorboard", r"'torchopt_ext\[trainer\]'"),
        ("progress_bar", "on", "tqdm", r"'torchopt_ext\[trainer\]'"),
    ],
)
def test_missing_packages_are_named(
    job_config: JobConfig,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: Any,
    module: str,
    advice: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    setattr(job_config.metrics, setting, value)
    with pytest.raises(ImportError, match=f"metrics.{setting} needs {module}.*{advice}"):
        MetricsProcessor(job_config, dims())


@pytest.mark.parametrize(
    ("progress_bar", "terminal", "bar"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_console(
    job_config: JobConfig,
    monkeypatch: pytest.MonkeyPatch,
    progress_bar: str,
    terminal: bool,
    bar: bool,
) -> None:
    stdout = io.StringIO()
    stdout.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stdout)
    handler = logging.StreamHandler(stdout)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    job_config.metrics.progress_bar, job_config.training.steps = progress_bar, 40
    processor = MetricsProcessor(job_config, dims())
    for step in (20, 24):
        processor.log(step, 1.5, 2.0, {"grad_norm": 0.25, "skipped_steps": float(step == 24)})
    processor.log_validation(1.75, 24)
    logging.getLogger("torchopt_ext").warning("a message")
    processor.close()
    assert handler in logging.root.handlers
    text = stdout.getvalue()
    assert "a message\n" in text
    if bar:
        assert "24/40" in text and "loss=1.50000, grad_norm=0.2500, skipped=1" in text
        assert "step: 24  validation loss: 1.75000\n" in text
        return
    assert ("\033[" in text) == terminal
    if not terminal:
        first, second, validation, _ = text.splitlines()
        assert first.startswith("step: 20  loss: 1.50000  grad_norm: 0.2500  memory: ")
        assert second.startswith("step: 24  loss: 1.50000  grad_norm: 0.2500  skipped: 1  mem")
        assert validation == "step: 24  validation loss: 1.75000"


def test_memory_of_a_cpu() -> None:
    """The stats are the peak resident set and its share of the machine's memory, as in /proc."""

    def read(path: str, key: str) -> int:
        [line] = [line for line in Path(path).read_text().splitlines() if line.startswith(key)]
        return int(line.split()[1]) * 1024

    stats = DeviceMemoryMonitor(torch.device("cpu")).get_peak_stats()
    peak = read("/proc/self/status", "VmHWM:")
    peaks = (peak / 2**30, 100 * peak / read("/proc/meminfo", "MemTotal:"))
    assert tuple(stats.values()) == pytest.approx((*peaks, *peaks, 0, 0), rel=0.02)


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The stats are torch.cuda's, and the monitor resets the peaks."""
    resets: list[Any] = []
    stats = {
        "active_bytes.all.peak": 2 << 30,
        "reserved_bytes.all.peak": 4 << 30,
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    properties = SimpleNamespace(total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    device = torch.device("cuda", 1)
    monitor = DeviceMemoryMonitor(device)
    assert monitor.device_name == "NVIDIA H100 80GB HBM3"
    assert tuple(monitor.get_peak_stats().values()) == (2, 12.5, 4, 25, 3, 1)
    assert "3 CUDA memory allocations were retried" in caplog.text
    monitor.reset_peak_stats()
    assert resets == [device, device]


def test_peak_flops() -> None:
    teraflops = {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": 835,
        "NVIDIA H200": 989,
        "NVIDIA H20": 148,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA B200": 2250,
        "AMD Instinct MI300X": 1300,
    }
    assert {name: get_peak_flops(name) for name in teraflops} == {
        name: value * 1e12 for name, value in teraflops.items()
    }
    assert get_peak_flops("NVIDIA GeForce GTX 1080") is get_peak_flops("x86_64 CPU") is None
