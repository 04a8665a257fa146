"""Our fault-tolerant container for torchtitan 0.3, with torchft's Optimizer and a manager that the
test controls. tests/distributed/test_torchtitan_ft.py runs the Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW

pytest.importorskip("torchft")
pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components.optimizer import default_adamw
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from torchopt_ext.integrations import torchtitan_0_3
from torchopt_ext.integrations.torchtitan_0_3_torchft import FTOptimizersContainer, use_torchopt_ext


class Manager:
    def __init__(self, *decisions: bool) -> None:
        self.decisions, self.quorums = list(decisions), 0

    def start_quorum(self) -> None:
        self.quorums += 1

    def should_commit(self) -> bool:
        return self.decisions.pop(0)


def titan_manager(manager: Any, **fields: Any) -> Any:
    return SimpleNamespace(
        **{"enabled": True, "manager": manager, "use_async_quorum": True} | fields
    )


def test_trainers_configuration() -> None:
    config = use_torchopt_ext(llama3_torchft_debugmodel(), max_grad_norm=0.5)
    # The class tells the Trainer whether build() takes the manager.
    assert isinstance(config.optimizer, TorchFTOptimizersContainer.Config)
    assert type(config.lr_scheduler) is torchtitan_0_3.LRSchedulersContainer.Config
    model, manager = nn.Linear(2, 2), Manager(True, False, True)
    container = config.optimizer.build(model_parts=[model], ft_manager=titan_manager(manager))
    assert type(container) is FTOptimizersContainer
    assert [type(optimizer) for optimizer in container] == [FusedAdamW]
    assert [optimizer.max_grad_norm for optimizer in container] == [0.5]
    hooks = []
    container.register_step_pre_hook(lambda *_: hooks.append(1))
    for _ in range(3):
        container.zero_grad(set_to_none=True)
        model(torch.ones(1, 2)).sum().backward()
        container.step()
    assert (manager.quorums, manager.decisions, len(hooks)) == (3, [], 2)
    state = container.state_dict()
    assert state["state.weight.step"] == 2
    assert state.keys() == build_plain(model).state_dict().keys()


def build_plain(model: nn.Module) -> Any:
    config = torchtitan_0_3.OptimizersContainer.Config(param_groups=default_adamw().param_groups)
    return config.build(model_parts=[model])


def test_semi_synchronous_training_makes_every_step() -> None:
    config = use_torchopt_ext(llama3_torchft_debugmodel()).optimizer
    model, manager = nn.Linear(2, 2), Manager()
    container = config.build(
        model_parts=[model], ft_manager=titan_manager(manager, use_async_quorum=False)
    )
    model(torch.ones(1, 2)).sum().backward()
    container.step()
    assert container.state_dict()["state.weight.step"] == 1


def test_what_is_refused() -> None:
    config = llama3_torchft_debugmodel()
    with pytest.raises(ValueError, match="unknown_field"):
        use_torchopt_ext(config, unknown_field=1)
    schedule, config.lr_scheduler = config.lr_scheduler, object()
    with pytest.raises(TypeError, match="another container"):
        use_torchopt_ext(config)
    config.lr_scheduler = schedule
    assert type(config.optimizer) is TorchFTOptimizersContainer.Config  # nothing has changed
    with pytest.raises(TypeError, match="another container"):
        torchtitan_0_3.use_torchopt_ext(config)
    disabled = titan_manager(None, enabled=False)
    with pytest.raises(ValueError, match=r"fault_tolerance\.enable is false"):
        use_torchopt_ext(config).optimizer.build(model_parts=[nn.Linear(2, 2)], ft_manager=disabled)
