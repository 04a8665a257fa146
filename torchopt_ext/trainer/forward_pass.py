"""How local batches pass through this rank's part of the model, in training and validation."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchopt_ext import _torch
from torchopt_ext.trainer.config import ConfigError, JobConfig, expect_multiple
from torchopt_ext.trainer.distributed import DTYPES
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.parallelize import set_gradient_sync
from torchopt_ext.trainer.pipeline import is_v_shaped
from torchopt_ext.trainer.train_spec import TrainSpec

logger = logging.getLogger(__name__)

SHARDED_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
"""The kernels that torch's context parallelism shards: all except MATH."""


class ForwardPass:
    """This rank's model parts, and the way from a batch to the loss and its gradients.

    Args:
        model: the whole model, on the meta device.
        accumulated: local batches whose gradients a step accumulates.

    Attributes:
        model_parts: the parts, parallelized. They have no weights yet.
        schedule: the pipeline's schedule; None without pipeline parallelism.
        loss_fn: the mean loss of a local batch.
    """

    def __init__(
        self,
        model: nn.Module,
        model_args: Any,
        spec: TrainSpec,
        job_config: JobConfig,
        world_mesh: DeviceMesh,
        dims: ParallelDims,
        device: torch.device,
        accumulated: int,
    ) -> None:
        self._config, self._mesh, self._dims = job_config, world_mesh, dims
        self.device, self._accumulated = device, accumulated
        self.loss_fn = spec.build_loss_fn(job_config)
        self._amp = maybe_enable_amp(dims, job_config.training.mixed_precision_param, device.type)
        common = model, world_mesh, dims, job_config
        self.schedule: Any = None
        if not dims.pp_enabled:
            self.model_parts = [spec.parallelize_fn(*common)]
            return
        if spec.pipelining_fn is None:
            raise ConfigError(f"{spec.name} has no pipelining_fn, which pipeline stages need")
        self.schedule, self.model_parts, self._has_first_stage, self._has_last_stage = (
            spec.pipelining_fn(
                *common, device, model_args, spec.parallelize_fn, self._share_of_loss
            )
        )

    def backward(self, input_dict: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Computes gradients of the mean loss over a step's local batches, concatenated.

        Returns the loss, detached; on stages before the last a negative number.
        """
        count = self._accumulated
        total = torch.zeros((), device=self.device)
        chunks = zip(input_dict["input"].chunk(count), labels.chunk(count), strict=True)
        for index, (inputs, targets) in enumerate(chunks):
            if count > 1:
                set_gradient_sync(self.model_parts, index == count - 1)
            with self._contexts(inputs, targets):
                if self.schedule is not None:
                    loss = self._run(self.schedule.step, inputs, targets)
                else:
                    with self._amp:
                        loss = self._share_of_loss(self.model_parts[0](inputs), targets)
                    torch.autograd.backward(loss)
            total = total + loss.detach()
        return total

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns a local batch's mean loss; on stages before the last a negative number."""
        with self._contexts(), self._amp:
            if self.schedule is None:
                return self.loss_fn(self.model_parts[0](inputs), labels)
            return self._run(self.schedule.eval, inputs, labels) * self._accumulated

    def _run(self, run: Callable[..., Any], inputs: Tensor, labels: Tensor) -> Tensor:
        """Calls a method of the schedule. Returns the loss, or -1 on stages before the last."""
        losses: list[Tensor] = []
        first = (inputs,) if self._has_first_stage else ()
        last = {"target": labels, "losses": losses} if self._has_last_stage else {}
        run(*first, **last)
        if not losses:
            return torch.full((), -1.0, device=self.device)
        return torch.stack(losses).mean().detach().to(self.device)

    def _share_of_loss(self, pred: Tensor, labels: Tensor) -> Tensor:
        """Returns a local batch's share of the mean loss of the step.

        If it is not finite, gradients become NaN: all ranks skip, and no host waits.
        """
        loss: Tensor = self.loss_fn(pred, labels) / self._accumulated
        if self._config.optimizer.skip_nonfinite and loss.requires_grad:
            loss.register_hook(partial(_nan_unless_finite, loss.detach()))  # type: ignore[no-untyped-call]
        return loss

    @contextlib.contextmanager
    def _contexts(self, *batch: Tensor) -> Iterator[None]:
        """In it, under context parallelism, a batch's tensors hold this rank's positions."""
        with contextlib.ExitStack() as stack:
            if self._dims.loss_parallel_enabled:
                stack.enter_context(parallel.loss_parallel())
            if self._config.parallelism.enable_compiled_autograd:
                stack.enter_context(_torch.compiled_autograd())
            if batch and self._dims.cp_enabled:
                stack.enter_context(sdpa_kernel([*SHARDED_KERNELS]))
                stack.enter_context(self._sharded(batch))
            yield

    def _sharded(self, batch: tuple[Tensor, ...]) -> AbstractContextManager[None]:
        """Returns torch's context_parallel, in which attention exchanges keys and values.

        Tables of positions, `freqs_cis` [seq_len, ...] of a part, are restored.
        """
        from torch.distributed.tensor.experimental import context_parallel

        # Two chunks per rank, to balance causal work.
        what = "twice parallelism.context_parallel_degree"
        expect_multiple("training.seq_len", batch[0].shape[1], 2 * self._dims.cp, what)
        tables: list[Any] = [part.freqs_cis for part in self.model_parts]
        _torch.set_rotate_method(self._config.parallelism.context_parallel_rotate_method)
        return context_parallel(
            self._mesh["cp"],
            buffers=[*batch, *tables],
            buffer_seq_dims=[1] * len(batch) + [0] * len(tables),
            no_restore_buffers=set(batch),
        )


def maybe_enable_amp(
    parallel_dims: ParallelDims, mixed_precision_param: str, device_type: str
) -> AbstractContextManager[Any]:
    """Returns autocast for mixed precision with DDP or on one rank, as in torchtitan."""
    if mixed_precision_param == "float32" or parallel_dims.fsdp_enabled:
        return contextlib.nullcontext()
    if parallel_dims.tp_enabled or parallel_dims.pp_enabled:
        logger.warning(
            "training.mixed_precision_param is %r, which tensor and pipeline parallel do only "
            "together with FSDP; this job computes in training.dtype",
            mixed_precision_param,
        )
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[mixed_precision_param])


def _nan_unless_finite(loss: Tensor, grad: Tensor) -> Tensor:
    return torch.where(loss.isfinite(), grad, math.nan)


def _check_batch_size(job_config: JobConfig) -> None:
    """Rejects batches that a pipeline's schedule cannot split."""
    training, validation = job_config.training, job_config.validation
    parallelism = job_config.parallelism
    if is_v_shaped(parallelism):
        raise ConfigError(
            "validation.enable does not go with parallelism.pipeline_parallel_schedule "
            f"{parallelism.pipeline_parallel_schedule!r}: torch evaluates no V-shaped schedule"
        )
    microbatches = training.batch_size // parallelism.pipeline_parallel_microbatch_size
    what = "the microbatches of the pipeline's schedule"
    expect_multiple("validation.local_batch_size", validation.local_batch_size, microbatches, what)
    shape = validation.local_batch_size, validation.seq_len
    trained = training.batch_size, training.seq_len
    if torch.__version__ < "2.15" and shape != trained:
        raise ConfigError(
            f"validation.local_batch_size and seq_len are {shape}, expected training's {trained}: "
            "pipeline stages of torch before 2.15 keep the first shape that they see"
        )


class Validator:
    """Evaluates a model on `[validation]`'s data set, always read from its beginning.

    `build_dataloader` builds this rank's loader from the keyword `job_config`, in which
    `validation` replaces the data set, batch size and sequence length of `training`.
    """

    def __init__(
        self, forward_pass: ForwardPass, job_config: JobConfig, build_dataloader: Callable[..., Any]
    ) -> None:
        config = job_config.validation
        if forward_pass.schedule is not None:
            _check_batch_size(job_config)
        training = dataclasses.replace(
            job_config.training,
            dataset=config.dataset,
            dataset_path=config.dataset_path,
            batch_size=config.local_batch_size,
            seq_len=config.seq_len,
            dataloader=config.dataloader,
            epochs=1,
        )
        self._job_config = dataclasses.replace(job_config, training=training)
        self._forward_pass, self._build, self._config = forward_pass, build_dataloader, config

    def should_validate(self, step: int) -> bool:
        """Returns True every `validation.freq` steps, before the first step and after the last."""
        return step % self._config.freq == 0 or step == self._job_config.training.steps

    @torch.no_grad()
    def validate(self) -> Tensor:
        """Returns this rank's mean loss, 0-dim; a negative one on stages before the last."""
        forward_pass, config = self._forward_pass, self._config
        _torch.prepare_stages_again(forward_pass.schedule)
        for part in forward_pass.model_parts:
            part.eval()
        limit = config.steps if config.steps > 0 else None
        device = forward_pass.device
        losses = [
            forward_pass.evaluate(input_dict["input"].to(device), labels.to(device))
            for input_dict, labels in islice(self._build(job_config=self._job_config), limit)
        ]
        for part in forward_pass.model_parts:
            part.train()
        _torch.prepare_stages_again(forward_pass.schedule)
        if not losses:
            raise ValueError(
                f"validation.dataset is {config.dataset!r} at {config.dataset_path!r}, which gives "
                f"no batch of {config.local_batch_size} x {config.seq_len} tokens"
            )
        return torch.stack(losses).mean()
