"""Trainer: the training loop of torchtitan, on any device, with torchopt_ext's optimizer step."""

import json
import logging
import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from torchopt_ext.containers import OptimizersInBackwardContainer
from torchopt_ext.trainer import distributed, ft
from torchopt_ext.trainer.checkpoint import CheckpointManager
from torchopt_ext.trainer.config import ConfigError, JobConfig, as_config_error
from torchopt_ext.trainer.extras import import_custom
from torchopt_ext.trainer.forward_pass import ForwardPass, Validator
from torchopt_ext.trainer.load_config import check_supported
from torchopt_ext.trainer.measures import OptimizerTime, SkippedSteps
from torchopt_ext.trainer.metrics import MetricsProcessor
from torchopt_ext.trainer.optimizers import (
    build_for_stage,
    clips_in_step,
    gradient_accumulation_steps,
)
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.parallelize import init_parts, tied_names
from torchopt_ext.trainer.process import GarbageCollection, StopOnSignal, record
from torchopt_ext.trainer.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchopt_ext.trainer.train_spec import TrainSpec, convert_model, get_train_spec

logger = logging.getLogger(__name__)


class Trainer(Stateful):
    """Builds everything that a job needs, and trains.

    Interface and order of operations are those of torchtitan's Trainer at commit 96c11f922
    (torchtitan/train.py). But the device is a setting, the optimizer's step clips, a step with an
    overflow changes nothing, and SIGTERM ends training after a checkpoint.

    Attributes:
        step: number of steps done; saved in checkpoints.
        stopped_by: why `train` returned before `training.steps`: "SIGTERM", "data" or None.

    Args:
        job_config: the job.

    Raises:
        ConfigError: A setting is wrong or has no effect. The message names the setting. The process
            group is then destroyed, unless it is NCCL's with several ranks.
    """

    @record
    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = job_config
        check_supported(job_config)
        if job_config.experimental.custom_import:
            import_custom(job_config.experimental.custom_import)
        self.train_spec = spec = get_train_spec(job_config.model.name)
        self.device = distributed.init_distributed(job_config)
        try:
            self._build(job_config, spec)
        except BaseException:
            # NCCL's destruction would wait for ranks that have not failed.
            if self.device.type == "cpu" or dist.get_world_size() == 1:
                dist.destroy_process_group()
            raise

    def _build(self, job_config: JobConfig, spec: TrainSpec) -> None:
        logger.info("Starting job: %s", job_config.job.description)
        if job_config.job.print_args:
            logger.info("Running with args: %s", job_config.to_dict())
        _prepare_folder(job_config)
        self.ft_manager = ft.init_ft_manager(job_config)
        world_size = dist.get_world_size()
        self.parallel_dims = dims = ParallelDims.of(job_config.parallelism, world_size)
        self.world_mesh = dims.build_mesh(self.device.type)
        self._set_timeouts(job_config.comm.init_timeout_seconds)  # new groups have torch's
        dp_degree, dp_rank = 1, 0
        if dims.dp_enabled:
            mesh = dims.get_mesh("dp")
            dp_degree, dp_rank = mesh.size(), mesh.get_local_rank()
        dp_degree, dp_rank = self.ft_manager.get_dp_info(dp_degree, dp_rank)
        self.gradient_accumulation_steps = gradient_accumulation_steps(job_config, dp_degree)
        training = job_config.training
        distributed.set_determinism(
            self.world_mesh, self.device, training.seed, training.deterministic
        )
        build_tokenizer = spec.build_tokenizer_fn
        self.tokenizer = build_tokenizer(job_config) if build_tokenizer else None
        ranks = {"dp_world_size": dp_degree, "dp_rank": dp_rank}
        build_dataloader = partial(spec.build_dataloader_fn, **ranks, tokenizer=self.tokenizer)
        self.dataloader = build_dataloader(job_config=job_config)
        self._build_model()
        self._build_optimizers()
        self.validator: Validator | None = None
        if job_config.validation.enable:
            self.validator = Validator(self.forward_pass, job_config, build_dataloader)

        # Everything that checkpoints hold must exist before a checkpoint is loaded.
        self.step = 0
        self.stopped_by: str | None = None
        with as_config_error():
            self.checkpointer = CheckpointManager(
                dataloader=self.dataloader,
                model_parts=self.model_parts,
                optimizers=self.optimizers,
                lr_schedulers=self.lr_schedulers,
                states={"train_state": self},
                job_config=job_config,
                ft_manager=self.ft_manager,
            )
        # Last, because it changes the process until close().
        self.gc_handler = GarbageCollection(training.gc_freq, training.gc_debug)
        global_batch_size = training.batch_size * self.gradient_accumulation_steps * dp_degree
        logger.info(
            f"Trainer is initialized with local batch size {training.batch_size}, "
            f"{self.gradient_accumulation_steps} gradient accumulation steps, "
            f"global batch size {global_batch_size}, sequence length {training.seq_len}, "
            f"total steps {training.steps} (warmup {job_config.lr_scheduler.warmup_steps}), "
            f"on {self.device}"
        )

    def _build_model(self) -> None:
        """Builds this rank's model parts, parallelized, with initial weights."""
        job_config, dims, spec = self.job_config, self.parallel_dims, self.train_spec
        if job_config.model.flavor not in spec.config:
            raise ConfigError(
                f"model.flavor is {job_config.model.flavor!r}, expected one of "
                f"{', '.join(map(repr, spec.config))}, which {spec.name} has"
            )
        model_args = spec.config[job_config.model.flavor]
        model_args.update_from_config(job_config, self.tokenizer)
        logger.info("Building %s %s with %s", spec.name, job_config.model.flavor, model_args)
        default = torch.get_default_dtype()
        torch.set_default_dtype(distributed.DTYPES[job_config.training.dtype])
        try:
            with torch.device("meta"):
                model = spec.cls.from_model_args(model_args)  # type: ignore[attr-defined]
        finally:
            torch.set_default_dtype(default)
        self.model_converters = convert_model(model, job_config, dims)
        ties = tied_names(model)

        build_metrics = spec.build_metrics_processor_fn or MetricsProcessor
        self.metrics_processor = metrics = build_metrics(job_config, dims)
        count, metrics.num_flops_per_token = model_args.get_nparams_and_flops(
            model, job_config.training.seq_len
        )
        logger.info("Model %s %s: %s parameters", spec.name, job_config.model.flavor, f"{count:,}")

        accumulated, mesh = self.gradient_accumulation_steps, self.world_mesh
        self.forward_pass = ForwardPass(
            model, model_args, spec, job_config, mesh, dims, self.device, accumulated
        )
        self.model_parts = self.forward_pass.model_parts
        init_parts(self.model_parts, ties, job_config, self.device)

    def _build_optimizers(self) -> None:
        job_config, dims = self.job_config, self.parallel_dims
        arguments = self.model_parts, job_config, self.ft_manager
        build = partial(self.train_spec.build_optimizers_fn, *arguments)
        if dims.pp_enabled:
            build = partial(build_for_stage, build, job_config, dims.get_mesh("pp").get_group())
        self.optimizers = build()
        self.lr_schedulers = self.train_spec.build_lr_schedulers_fn(self.optimizers, job_config)
        for converter in self.model_converters:
            self.optimizers.register_step_post_hook(
                lambda *_, converter=converter: converter.post_optimizer_hook(self.model_parts)
            )
        self.metrics_processor.optimizers = self.optimizers
        self.metrics_processor.lr_schedulers = self.lr_schedulers
        self._clips_in_step = clips_in_step(self.optimizers)
        self._steps_in_backward = isinstance(self.optimizers, OptimizersInBackwardContainer)
        self._forward_writes = any(map(_saves_buffers, self.model_parts))
        self._skips = SkippedSteps(job_config.training.max_consecutive_skips)
        self._optimizer_time = OptimizerTime(self.device)

    # ---- one step -------------------------------------------------------------------------------

    def next_batch(self, data_iterator: Iterable[Any]) -> tuple[dict[str, Tensor], Tensor]:
        """Returns inputs and labels of a step: all local batches that it accumulates, concatenated.

        Raises StopIteration when the data set has ended.
        """
        started = time.perf_counter()
        iterator = iter(data_iterator)
        batches = [next(iterator) for _ in range(self.gradient_accumulation_steps)]
        input_dict, labels = batches[0]
        if len(batches) > 1:
            input_dict = {
                key: torch.cat([inputs[key] for inputs, _ in batches]) for key in input_dict
            }
            labels = torch.cat([labels for _, labels in batches])
        self.metrics_processor.ntokens_since_last_log += labels.numel()
        self.metrics_processor.data_loading_times.append(time.perf_counter() - started)
        inputs = {
            key: value.to(self.device, non_blocking=True) for key, value in input_dict.items()
        }
        return inputs, labels.to(self.device, non_blocking=True)

    def train_step(self, input_dict: dict[str, Tensor], labels: Tensor) -> None:
        """Makes one step, and logs it if logging is due.

        Args:
            input_dict: "input" is int64 [batch, seq_len], where batch is `training.batch_size`
                times the gradient accumulation steps. The model gets no other entry.
            labels: int64 [batch, seq_len].
        """
        self.optimizers.zero_grad()
        if self._steps_in_backward or self._forward_writes:
            self.checkpointer.maybe_wait_for_staging()
        loss = self.forward_pass.backward(input_dict, labels)
        self.ft_manager.average_gradients(self.model_parts)
        grad_norm, usable, dims = None, True, self.parallel_dims
        with self._optimizer_time:
            if not self._clips_in_step:
                grad_norm = distributed.clip_grad_norm_(
                    [p for part in self.model_parts for p in part.parameters()],
                    self.job_config.training.max_norm,
                    dims.get_mesh("pp") if dims.pp_enabled else None,
                )
                skips = self.job_config.optimizer.skip_nonfinite  # torch's optimizers do not skip
                usable = not skips or bool(grad_norm.isfinite())
            self.checkpointer.maybe_wait_for_staging()
            if usable:
                self.optimizers.step()
        if self.metrics_processor.should_log(self.step):  # a rate on a GPU makes the host wait
            rates = (scheduler.get_last_lr() for scheduler in self.lr_schedulers.schedulers)
            self._step_lr = max(map(float, chain(*rates)), default=math.nan)
        self.lr_schedulers.step()
        if usable and not getattr(self.optimizers, "committed", True):
            logger.warning("The replica groups refused to commit step %d", self.step)
            if grad_norm is None:  # the step would have measured it
                grad_norm = torch.full((), math.nan)
        elif self._clips_in_step:
            self._skips.note(self.optimizers.control.skipped_steps)
        else:
            self._skips.count(self._skips.total + (not usable))
        if self.metrics_processor.should_log(self.step):
            self._log(loss, grad_norm)

    def _mean_and_max(self, loss: Tensor) -> tuple[float, float]:
        """Reduces the loss over the ranks that read different tokens. Waits for the device."""
        dims = self.parallel_dims
        if not dims.dp_cp_enabled:
            return (loss.item(),) * 2
        return distributed.mean_and_max(loss, dims.get_mesh("dp_cp"))

    def _log(self, loss: Tensor, grad_norm: Tensor | None) -> None:
        if grad_norm is None:
            grad_norm = self.optimizers.control.grad_norm
        seconds = self._optimizer_time.mean()
        more = {
            "grad_norm": grad_norm.item(),
            "lr": self._step_lr,
            "skipped_steps": float(self._skips.total),
        }
        if not self._steps_in_backward:
            more["time_metrics/optimizer(s)"] = seconds
        self.metrics_processor.log(self.step, *self._mean_and_max(loss), extra_metrics=more)

    # ---- the loop -------------------------------------------------------------------------------

    @record
    def train(self) -> None:
        """Trains from the newest checkpoint to `training.steps`, SIGTERM or the end of the data.

        Raises:
            RuntimeError: Too many steps in a row were skipped. The message names the last
                checkpoint before them.
        """
        job_config, steps = self.job_config, self.job_config.training.steps
        self.checkpointer.load(step=job_config.checkpoint.load_step)
        if self._clips_in_step:
            self._skips.total = int(self.optimizers.control.skipped_steps)
        if self.step < steps:
            logger.info("Training starts at step %d of %d.", self.step + 1, steps)
        else:
            logger.warning("Step %d of %d is done: there is nothing to train.", self.step, steps)
        warming_up = True  # lazy initialization and compilation
        with (
            StopOnSignal(self.device) as stop,
            maybe_enable_profiling(job_config, global_step=self.step) as torch_profiler,
            maybe_enable_memory_snapshot(job_config, global_step=self.step) as memory_profiler,
        ):
            if self.step == 0:
                self._validate()
            data_iterator = iter(self.dataloader)
            self.metrics_processor.time_last_log = time.perf_counter()
            while self.step < steps:
                last = stop.last_step(self.step + 1)
                if last is not None and last <= self.step:
                    self.stopped_by = "SIGTERM"
                    break
                self.step += 1
                self.gc_handler.run(self.step)
                try:
                    inputs, labels = self.next_batch(data_iterator)
                except StopIteration:
                    self.step -= 1
                    self.stopped_by = "data"
                    break
                self.train_step(inputs, labels)
                self._stop_if_stuck()
                self._validate()
                if self.checkpointer.is_due(self.step):
                    self._skips.wait()
                skipping = self._skips.consecutive > 0
                self.checkpointer.save(self.step, force=self.step == steps, skipping=skipping)
                for profiler in (torch_profiler, memory_profiler):
                    if profiler:
                        profiler.step()
                if warming_up:
                    warming_up = False
                    self._set_timeouts(job_config.comm.train_timeout_seconds)
            if self.stopped_by:
                ended = self.stopped_by == "data"
                why = "the data set has ended" if ended else "SIGTERM"
                logger.warning("Training stops after step %d of %d: %s", self.step, steps, why)
                if ended:
                    self._validate(due=False)
                self.checkpointer.save(self.step, force=True, ended=ended)
        self.metrics_processor.close()
        logger.info("Training completed")

    def _set_timeouts(self, seconds: int) -> None:
        meshes = self.parallel_dims.meshes
        distributed.set_pg_timeouts(timedelta(seconds=seconds), self.world_mesh, meshes)

    def _validate(self, due: bool = True) -> None:
        """Validates after this step if a validation is due, or with ``due=False`` if none is."""
        if self.validator is None or self.validator.should_validate(self.step) != due:
            return
        averages = self.job_config.optimizer.ema_decay is not None
        weights = self.optimizers.ema_weights() if averages else nullcontext()
        with self.metrics_processor.pause(), weights:
            loss = self._mean_and_max(self.validator.validate())[0]
            self.metrics_processor.log_validation(loss, self.step)

    def _stop_if_stuck(self) -> None:
        if not 0 < self._skips.limit <= self._skips.consecutive:
            return
        newest = self.checkpointer.newest(until=self.step - self._skips.since_good)
        raise RuntimeError(
            f"{self._skips.consecutive} steps in a row were skipped for gradients or losses that "
            f"are not finite, up to step {self.step}; the last checkpoint before them is "
            + ("none" if newest is None else f"step {newest} in {self.checkpointer.folder}")
            + "; a restart repeats them: change training.seed or the data before it, or go back by "
            "checkpoint.load_step"
        )

    # ---- what checkpoints hold of the Trainer ----------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])

    def close(self) -> None:
        """Waits for background saves and completes metrics' files. The process group stays."""
        self.gc_handler.close()
        self.metrics_processor.close()
        self.checkpointer.close()


def _prepare_folder(job_config: JobConfig) -> None:
    """Creates the dump folder, and writes the settings into a file if the job says so."""
    folder = Path(job_config.job.dump_folder)
    with as_config_error("job.dump_folder cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    if job_config.job.save_config_file and dist.get_rank() == 0:
        file = folder / job_config.job.save_config_file
        text = json.dumps(job_config.to_dict(), indent=2, default=str)  # an extension's types
        with as_config_error("job.save_config_file cannot be written"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")


def _saves_buffers(part: nn.Module) -> bool:
    """Returns whether a part's state dict has buffers, such as BatchNorm's statistics."""
    saved = part.state_dict()
    return any(name in saved for name, _ in part.named_buffers())
