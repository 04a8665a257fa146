"""Which builders torchtitan's models get once the integration is imported; asserts, or exits 0."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from unittest import mock

import cpu_shim
import torch
from torch import nn

cpu_shim.install()

from torchtitan.components import optimizer as stock  # noqa: E402
from torchtitan.config import LRScheduler, Optimizer  # noqa: E402
from torchtitan.models import llama3  # noqa: E402  (before the integration: holds stock builders)
from torchtitan.protocols import train_spec  # noqa: E402

from torchopt_ext import containers  # noqa: E402
from torchopt_ext.integrations import torchtitan_0_2  # noqa: E402

ONE_PROCESS = SimpleNamespace(
    ep_enabled=False, pp_enabled=False, get_optional_mesh=lambda name: None
)


class MoEModel(nn.Module):
    """As much of a mixture-of-experts model as torchtitan's load balancing looks at."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(2, 2)
        block.moe_enabled = True
        block.moe = nn.Module()
        block.moe.load_balance_coeff = 0.5
        block.moe.register_buffer("tokens_per_expert", torch.tensor([3.0, 1.0]))
        block.moe.register_buffer("expert_bias", torch.zeros(2))
        self.layers = nn.ModuleDict({"0": block})


def check_dense() -> None:
    assert llama3.get_train_spec().build_optimizers_fn is not containers.build_optimizers
    spec = train_spec.get_train_spec("llama3")
    optimizers = spec.build_optimizers_fn([nn.Linear(2, 2)], Optimizer(), ONE_PROCESS)
    schedules = spec.build_lr_schedulers_fn(optimizers, LRScheduler(warmup_steps=2), 10)
    assert type(optimizers) is containers.OptimizersContainer
    assert type(schedules) is containers.LRSchedulersContainer
    assert spec.build_dataloader_fn is llama3.get_train_spec().build_dataloader_fn


def check_mixture_of_experts() -> None:
    model = MoEModel()
    builder = train_spec.get_train_spec("deepseek_v3").build_optimizers_fn
    optimizers = builder([model], Optimizer(), ONE_PROCESS)
    assert type(optimizers) is containers.OptimizersContainer
    block = model.layers["0"]
    before = block.weight.detach().clone()
    block(torch.ones(1, 2)).sum().backward()
    optimizers.step()
    assert not torch.equal(block.weight, before)
    # The hook ran once: biases move by coeff against the load, and the counters start again.
    assert block.moe.expert_bias.tolist() == [-0.5, 0.5]
    assert block.moe.tokens_per_expert.tolist() == [0.0, 0.0]


def check_builders_of_ones_own() -> None:
    own = mock.Mock(spec=stock.build_optimizers, name="own")
    spec = dataclasses.replace(llama3.get_train_spec(), build_optimizers_fn=own)
    train_spec.register_train_spec("mine", spec)
    logger = logging.getLogger(torchtitan_0_2.__name__)
    with mock.patch.object(logger, "warning") as warning:
        found = train_spec.get_train_spec("mine")
    assert found.build_optimizers_fn is own
    assert found.build_lr_schedulers_fn is containers.build_lr_schedulers
    warning.assert_called_once()


if __name__ == "__main__":
    check_dense()
    check_mixture_of_experts()
    check_builders_of_ones_own()
