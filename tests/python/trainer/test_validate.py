"""Validator: data sets that give nothing."""

from types import SimpleNamespace

import pytest

from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.validate import Validator


def test_a_data_set_without_a_batch_is_named() -> None:
    config = JobConfig()
    config.validation.dataset, config.validation.dataset_path = "text", "held_out"
    trainer = SimpleNamespace(job_config=config, model_parts=[])
    with pytest.raises(
        ValueError, match=r"validation.dataset is 'text' at 'held_out', .* no batch"
    ):
        Validator(trainer, lambda job_config: []).validate()  # type: ignore[arg-type]
