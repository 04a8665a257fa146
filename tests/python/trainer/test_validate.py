"""Validator rejects data sets that give no batch, and batches that no schedule can split."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.forward_pass import Validator


def test_a_data_set_without_a_batch_is_named() -> None:
    config = JobConfig()
    config.validation.dataset, config.validation.dataset_path = "text", "held_out"
    forward_pass: Any = SimpleNamespace(model_parts=[], schedule=None, device=None)
    with pytest.raises(
        ValueError, match=r"validation.dataset is 'text' at 'held_out', .* no batch"
    ):
        Validator(forward_pass, config, lambda job_config: []).validate()


@pytest.mark.newest_torch  # earlier versions take the shape of training only
@pytest.mark.parametrize(("size", "fits"), [(8, True), (4, True), (6, False), (2, False)])
def test_a_pipeline_must_be_able_to_split_a_batch(size: int, fits: bool) -> None:
    config = JobConfig()
    config.training.batch_size = 4
    config.parallelism.pipeline_parallel_microbatch_size = 1
    config.validation.local_batch_size = size
    forward_pass: Any = SimpleNamespace(model_parts=[], schedule=object())
    if fits:
        Validator(forward_pass, config, lambda job_config: [])
        return
    with pytest.raises(ConfigError, match=f"local_batch_size is {size}, expected a multiple .* 4"):
        Validator(forward_pass, config, lambda job_config: [])
