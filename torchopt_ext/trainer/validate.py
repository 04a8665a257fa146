"""Validation: the loss over held-out data, the same data every time."""

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext.trainer.config import JobConfig


class Validator:
    """Computes the mean loss over `[validation]`'s data set.

    Args:
        job_config: the job; its `validation` section takes the place of the data set, batch size
            and sequence length of `training`.
        build_dataloader: for that configuration, a data loader that starts at its beginning.
        loss_fn: from model output and labels to the mean loss of a batch.
        context: entered around each batch.
        pp_schedule, has_first_stage, has_last_stage: of pipeline stages; the schedule may be None.
        device: of the model.
    """

    def __init__(
        self,
        job_config: JobConfig,
        build_dataloader: Callable[[JobConfig], Any],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        context: Callable[[], Any],
        pp_schedule: Any,
        has_first_stage: bool,
        has_last_stage: bool,
        device: torch.device,
    ) -> None:
        config = job_config.validation
        if config.freq < 1:
            raise ValueError(f"validation.freq is {config.freq}, expected 1 or more")
        training = dataclasses.replace(
            job_config.training,
            dataset=config.dataset,
            dataset_path=config.dataset_path,
            batch_size=config.local_batch_size,
            seq_len=config.seq_len,
        )
        self._job_config = dataclasses.replace(job_config, training=training)
        self._config, self._build, self._loss_fn = config, build_dataloader, loss_fn
        self._context, self._device = context, device
        self._schedule = pp_schedule
        self._first, self._last = has_first_stage, has_last_stage

    def should_validate(self, step: int) -> bool:
        return step % self._config.freq == 0 or step == self._job_config.training.steps

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module]) -> Tensor:
        """This rank's mean loss, 0-dim; -1 where pipeline stages do not see it."""
        for part in model_parts:
            part.eval()
        total, count = torch.zeros((), device=self._device), 0
        limit = self._config.steps if self._config.steps > 0 else None
        for input_dict, labels in islice(self._build(self._job_config), limit):
            inputs, labels = input_dict["input"].to(self._device), labels.to(self._device)
            with self._context():
                total += self._loss(model_parts, inputs, labels)
            count += 1
        for part in model_parts:
            part.train()
        if not count:
            raise ValueError(f"validation.dataset {self._config.dataset!r} has no whole batch")
        return total / count

    def _loss(self, model_parts: list[nn.Module], inputs: Tensor, labels: Tensor) -> Tensor:
        if self._schedule is None:
            return self._loss_fn(model_parts[0](inputs), labels)
        losses: list[Tensor] = []
        last = {"target": labels, "losses": losses} if self._last else {}
        self._schedule.eval(*((inputs,) if self._first else ()), **last)
        return torch.stack(losses).mean() if losses else torch.full((), -1.0)
