"""Validation: the mean loss over held-out data, the same data every time."""

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchopt_ext._torch import prepare_stages_again
from torchopt_ext.trainer.config import ConfigError
from torchopt_ext.trainer.pipeline import is_v_shaped

if TYPE_CHECKING:
    from torchopt_ext.trainer.trainer import Trainer


def _check_batch_size(trainer: "Trainer") -> None:
    if trainer.pp_schedule is None:
        return
    training, validation = trainer.job_config.training, trainer.job_config.validation
    parallelism = trainer.job_config.parallelism
    if is_v_shaped(parallelism):
        raise ConfigError(
            "validation.enable does not go with parallelism.pipeline_parallel_schedule "
            f"{parallelism.pipeline_parallel_schedule!r}: torch evaluates no V-shaped schedule"
        )
    size = parallelism.pipeline_parallel_microbatch_size
    microbatches = training.batch_size // size
    if validation.local_batch_size % microbatches:
        raise ConfigError(
            f"validation.local_batch_size is {validation.local_batch_size}, expected a multiple of "
            f"the pipeline schedule's {microbatches} microbatches"
        )
    shape = validation.local_batch_size, validation.seq_len
    trained = training.batch_size, training.seq_len
    if torch.__version__ < "2.15" and shape != trained:
        raise ConfigError(
            f"validation.local_batch_size and seq_len are {shape}, expected training's {trained}: "
            "pipeline stages of torch before 2.15 keep the first shape that they see"
        )


class Validator:
    """Evaluates a Trainer's model on `[validation]`'s data set, always read from its beginning.

    Args:
        trainer: the Trainer whose model, loss and contexts are used.
        build_dataloader: builds this rank's loader from the keyword `job_config`, in which
            `validation` replaces the data set, batch size and sequence length of `training`.

    Raises:
        ConfigError: A pipeline schedule cannot split the batches.
    """

    def __init__(self, trainer: "Trainer", build_dataloader: Callable[..., Any]) -> None:
        config = trainer.job_config.validation
        _check_batch_size(trainer)
        training = dataclasses.replace(
            trainer.job_config.training,
            dataset=config.dataset,
            dataset_path=config.dataset_path,
            batch_size=config.local_batch_size,
            seq_len=config.seq_len,
            dataloader=config.dataloader,
            epochs=1,
        )
        self._job_config = dataclasses.replace(trainer.job_config, training=training)
        self._trainer, self._build, self._config = trainer, build_dataloader, config

    def should_validate(self, step: int) -> bool:
        """Returns True every `validation.freq` steps, before the first step and after the last."""
        return step % self._config.freq == 0 or step == self._job_config.training.steps

    @torch.no_grad()
    def validate(self) -> Tensor:
        """Returns this rank's mean loss, 0-dim; a negative one on stages before the last.

        Raises:
            ValueError: The data set has no batch.
        """
        trainer = self._trainer
        prepare_stages_again(trainer.pp_schedule)
        for part in trainer.model_parts:
            part.eval()
        losses = []
        limit = self._config.steps if self._config.steps > 0 else None
        for input_dict, labels in islice(self._build(job_config=self._job_config), limit):
            inputs, labels = input_dict["input"].to(trainer.device), labels.to(trainer.device)
            with trainer.train_context(), trainer.maybe_enable_amp:
                if trainer.pp_schedule is None:
                    losses.append(trainer.loss_fn(trainer.model_parts[0](inputs), labels))
                else:
                    # The schedule's loss is divided by the number of accumulated batches.
                    loss = trainer.run_pipeline(trainer.pp_schedule.eval, inputs, labels)
                    losses.append(loss * trainer.gradient_accumulation_steps)
        for part in trainer.model_parts:
            part.train()
        prepare_stages_again(trainer.pp_schedule)
        if not losses:
            raise ValueError(
                f"validation.dataset is {self._config.dataset!r} at "
                f"{self._config.dataset_path!r}, which gives no batch of "
                f"{self._config.local_batch_size} x {self._config.seq_len} tokens"
            )
        return torch.stack(losses).mean()
