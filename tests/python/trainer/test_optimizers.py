"""The optimizers of a job: which there are, and who clips."""

from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.optimizers import build_optimizers, clips_in_step


@pytest.mark.parametrize("partition", ["none", "greedy"])
def test_an_unknown_optimizer_is_named(partition: Any) -> None:
    config = JobConfig()
    config.optimizer.name, config.parallelism.zero = "SGD", partition
    with pytest.raises(ConfigError, match=r"optimizer.name is 'SGD', expected 'Adam' or 'AdamW'"):
        build_optimizers([nn.Linear(2, 2)], config)


def test_low_precision_shards_need_a_step_that_writes_them() -> None:
    config = JobConfig()
    config.parallelism.fsdp_keep_low_precision_shards = True
    config.optimizer.implementation = "foreach"
    with pytest.raises(ValueError, match=r"no effect with optimizer.implementation 'foreach'"):
        build_optimizers([nn.Linear(2, 2)], config)


@pytest.mark.parametrize(
    ("optimizer", "options", "clips"),
    [
        (FusedAdamW, {"max_grad_norm": 1.0}, True),
        (FusedAdamW, {"max_grad_norm": float("inf")}, True),
        (FusedAdamW, {}, False),
        (torch.optim.AdamW, {}, False),
    ],
)
def test_steps_clip_if_their_optimizers_do(optimizer: Any, options: Any, clips: bool) -> None:
    container = OptimizersContainer([nn.Linear(2, 2)], optimizer, {"lr": 0.1, **options})
    assert clips_in_step(container) is clips
