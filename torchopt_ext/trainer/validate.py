"""Validation: the mean loss over held-out data, the same data every time."""

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import prepare_stages_again
from torchopt_ext.trainer.config import ConfigError, JobConfig, expect_multiple
from torchopt_ext.trainer.forward_pass import ForwardPass
from torchopt_ext.trainer.pipeline import is_v_shaped


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

    Args:
        build_dataloader: builds this rank's loader from the keyword `job_config`, in which
            `validation` replaces the data set, batch size and sequence length of `training`.

    Raises:
        ConfigError: A pipeline schedule cannot split the batches.
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
        """Returns this rank's mean loss, 0-dim; a negative one on stages before the last.

        Raises:
            ValueError: The data set has no batch.
        """
        forward_pass, config = self._forward_pass, self._config
        prepare_stages_again(forward_pass.schedule)
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
        prepare_stages_again(forward_pass.schedule)
        if not losses:
            raise ValueError(
                f"validation.dataset is {config.dataset!r} at {config.dataset_path!r}, which gives "
                f"no batch of {config.local_batch_size} x {config.seq_len} tokens"
            )
        return torch.stack(losses).mean()
