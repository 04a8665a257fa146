"""Metrics of training, computed on the host from values that the Trainer provides."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchopt_ext.trainer import metric_writers as to
from torchopt_ext.trainer.config import JobConfig, as_config_error
from torchopt_ext.trainer.distributed import choose_device
from torchopt_ext.trainer.measures import DeviceMemoryMonitor, get_peak_flops
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.pipeline import is_v_shaped

logger = logging.getLogger(__name__)


def metrics_rank(parallel_dims: ParallelDims, job_config: JobConfig) -> int:
    """Returns the rank that has and reports the loss: the first rank of the last pipeline stage."""
    if not parallel_dims.pp_enabled or is_v_shaped(job_config.parallelism):
        return 0
    return parallel_dims.world_size // parallel_dims.pp * (parallel_dims.pp - 1)


class MetricsProcessor:
    """Computes and writes metrics, as torchtitan/components/metrics.py at commit 96c11f922.

    The Trainer adds to the counters at every step. Nothing here reads a tensor or waits for a
    device.

    Attributes:
        num_flops_per_token: floating-point operations for one token, forward and backward; 0 or
            less: unknown.
        optimizers, lr_schedulers: set by the Trainer, for metrics of a subclass.
        ntokens_since_last_log: tokens that this rank has read.
        data_loading_times: seconds that each step since the last log waited for data.
        time_last_log: time.perf_counter() at the start of the measured time.

    Raises MissingExtra if a writer's package is not installed.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        self.job_config, self.parallel_dims = job_config, parallel_dims
        self.device_memory_monitor = DeviceMemoryMonitor(choose_device(job_config))
        self.peak_flops = get_peak_flops(self.device_memory_monitor.device_name)
        self.num_flops_per_token: float = 0
        self.optimizers: Any = None
        self.lr_schedulers: Any = None
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.time_last_log = time.perf_counter()
        self._writers = _build_writers(job_config, parallel_dims)
        self._failed: list[to.MetricWriter] = []

    def should_log(self, step: int) -> bool:
        """Returns whether to log at `step`: the first step, and every `metrics.log_freq` steps."""
        return step == 1 or step % self.job_config.metrics.log_freq == 0

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        extra_metrics: dict[str, float] | None = None,
    ) -> None:
        """Writes the metrics of the steps since the last log, and resets the counters.

        Args:
            global_avg_loss, global_max_loss: over the ranks that read different tokens.
            extra_metrics: further metrics by tag. They replace metrics of the same tag.
        """
        seconds = time.perf_counter() - self.time_last_log
        waited, steps = sum(self.data_loading_times), max(len(self.data_loading_times), 1)
        # Per device: tensor, pipeline and context parallel ranks share the same tokens.
        devices = self.parallel_dims.non_data_parallel_size
        tokens_per_second = self.ntokens_since_last_log / (seconds * devices)
        metrics = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "throughput(tps)": tokens_per_second,
        }
        if self.num_flops_per_token > 0:
            flops = self.num_flops_per_token * tokens_per_second
            metrics["tflops"] = flops / 1e12
            if self.peak_flops is not None:
                metrics["mfu(%)"] = 100 * flops / self.peak_flops
        metrics |= {
            "time_metrics/end_to_end(s)": seconds / steps,
            "time_metrics/data_loading(s)": waited / steps,
            "time_metrics/data_loading(%)": 100 * waited / seconds,
            **self.device_memory_monitor.get_peak_stats(),
            **(extra_metrics or {}),
        }
        self._write(step, metrics)
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time spent inside, such as a validation, from the measured time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.time_last_log += time.perf_counter() - started

    def log_validation(self, loss: float, step: int) -> None:
        self._write(step, {"validation_metrics/loss": loss})

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        for writer in self._writers:
            with self._logs_failure(writer):
                writer.write(step, metrics)

    @contextmanager
    def _logs_failure(self, writer: to.MetricWriter) -> Iterator[None]:
        """Logs a writer's first error, such as a full disk, and lets training continue."""
        try:
            yield
        except BrokenPipeError:  # the reader of stdout has exited, which ends the job
            raise
        except OSError as error:
            if writer not in self._failed:
                name = type(writer).__name__
                logger.error("%s cannot write metrics: %s; training goes on", name, error)
                self._failed.append(writer)

    def close(self) -> None:
        """Closes the writers, which completes their files. A second call is a no-op."""
        while self._writers:
            writer = self._writers.pop()
            with self._logs_failure(writer):
                writer.close()


def _build_writers(job_config: JobConfig, parallel_dims: ParallelDims) -> list[to.MetricWriter]:
    """Returns this rank's writers: files on one rank or on all, the console on one rank."""
    config, rank = job_config.metrics, dist.get_rank()
    reports = rank == metrics_rank(parallel_dims, job_config)
    if not reports and not config.save_for_all_ranks:
        return []
    folder = Path(job_config.job.dump_folder)
    if job_config.fault_tolerance.enable:
        folder /= f"replica_{job_config.fault_tolerance.replica_id}"
    run = folder / config.save_tb_folder / datetime.now().strftime("%Y%m%d-%H%M")
    if config.save_for_all_ranks:
        run /= f"rank_{rank}"
    writers: list[to.MetricWriter] = []
    if reports:
        terminal = sys.stdout.isatty()
        bar = config.progress_bar == "on" or (config.progress_bar == "auto" and terminal)
        colored = terminal and not config.disable_color_printing
        writers.append(to.ProgressBar(job_config.training.steps) if bar else to.Lines(colored))
    with as_config_error("files for [metrics] cannot be opened"):
        if config.enable_wandb:
            writers.append(to.WeightsAndBiases(run, job_config.to_dict()))
        if config.enable_tensorboard:
            writers.append(to.TensorBoard(run))
        if config.enable_jsonl:
            name = "metrics.jsonl" if reports else f"metrics_{rank}.jsonl"
            writers.append(to.JsonLines(folder / name))
    return writers
