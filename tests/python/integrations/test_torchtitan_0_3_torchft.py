"""Our fault-tolerant container for torchtitan 0.3, with torchft's Optimizer and a manager that the
test controls. tests/distributed/test_torchtitan_ft.py runs the Trainer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW

pytest.importorskip("torchft")
pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as plain
from torchtitan.components.optimizer import ParamGroupConfig, default_adamw
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from torchopt_ext.integrations import torchtitan_0_3
from torchopt_ext.integrations.torchtitan_0_3_torchft import FTOptimizersContainer, use_torchopt_ext


class Manager:
    def __init__(self, *decisions):
        self.decisions, self.quorums = list(decisions), 0

    def start_quorum(self):
        self.quorums += 1

    def should_commit(self):
        return self.decisions.pop(0)


def titan_manager(manager=None, **fields):
    fields = {"enabled": True, "use_async_quorum": manager is not None} | fields
    return SimpleNamespace(manager=manager, **fields)


def test_trainers_configuration():
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
    groups = default_adamw().param_groups
    config = torchtitan_0_3.OptimizersContainer.Config(param_groups=groups)
    assert state.keys() == config.build(model_parts=[model]).state_dict().keys()


def trained(config_class, steps, **fields):
    """Returns the weights after AdamW steps of LocalSGD or DiLoCo, with the gradients 1, 2, ..."""
    torch.manual_seed(0)
    part = nn.Linear(3, 2)
    group = ParamGroupConfig(pattern="", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
    config = config_class(param_groups=[group], **fields)
    is_plain = config_class is plain.OptimizersContainer.Config
    container = config.build(
        model_parts=[part], **{} if is_plain else {"ft_manager": titan_manager()}
    )
    for step in range(1, steps + 1):
        for param in part.parameters():
            param.grad = torch.full_like(param, float(step))
        container.step()
    return torch.cat([param.detach().flatten() for param in part.parameters()])


@pytest.mark.parametrize(
    ("compat", "alike"),
    [
        ("torchtitan", TorchFTOptimizersContainer.Config),
        (None, plain.OptimizersContainer.Config),
    ],
)
def test_step_counts_are_torchtitans_or_right(compat, alike):
    """torchtitan's container counts an extra first step, unlike runs without fault tolerance."""
    found = trained(FTOptimizersContainer.Config, 3, compat=compat)
    torch.testing.assert_close(found, trained(alike, 3), rtol=1e-6, atol=1e-7)
    other = trained(FTOptimizersContainer.Config, 3, compat=None if compat else "torchtitan")
    assert (found - other).abs().min() > 1e-3


def test_what_is_refused():
    with pytest.raises(ValueError, match="Invalid compat: 'old', expected None or 'torchtitan'"):
        trained(FTOptimizersContainer.Config, 0, compat="old")
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
    disabled = titan_manager(enabled=False)
    with pytest.raises(ValueError, match=r"fault_tolerance\.enable is false"):
        use_torchopt_ext(config).optimizer.build(model_parts=[nn.Linear(2, 2)], ft_manager=disabled)
