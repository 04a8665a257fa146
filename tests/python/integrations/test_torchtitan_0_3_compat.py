"""compat="torchtitan" in our fault-tolerant torchtitan 0.3 container, compared with theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")
pytest.importorskip("torchft")

from torchtitan.components import optimizer as plain
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.experiments.torchft import optimizer as stock

from torchopt_ext.integrations import torchtitan_0_3_torchft as ours

MANAGER = SimpleNamespace(enabled=True, manager=None, use_async_quorum=False)
"""A manager as of LocalSGD or DiLoCo, which makes every step."""


def trained(config_class: Any, steps: int, **fields: Any) -> torch.Tensor:
    """Returns the weights after AdamW steps with the gradients 1, 2, and so on."""
    torch.manual_seed(0)
    part = nn.Linear(3, 2)
    group = ParamGroupConfig(pattern="", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
    config = config_class(param_groups=[group], **fields)
    manager = {} if config_class is plain.OptimizersContainer.Config else {"ft_manager": MANAGER}
    container = config.build(model_parts=[part], **manager)
    for step in range(1, steps + 1):
        for param in part.parameters():
            param.grad = torch.full_like(param, float(step))
        container.step()
    return torch.cat([param.detach().flatten() for param in part.parameters()])


@pytest.mark.parametrize(
    ("compat", "alike"),
    [
        ("torchtitan", stock.TorchFTOptimizersContainer.Config),
        (None, plain.OptimizersContainer.Config),
    ],
)
def test_step_counts_are_torchtitans_or_right(compat: Any, alike: Any) -> None:
    """torchtitan's container counts an extra first step, unlike runs without fault tolerance."""
    found = trained(ours.FTOptimizersContainer.Config, 3, compat=compat)
    torch.testing.assert_close(found, trained(alike, 3), rtol=1e-6, atol=1e-7)
    other = trained(ours.FTOptimizersContainer.Config, 3, compat=None if compat else "torchtitan")
    assert (found - other).abs().min() > 1e-3


def test_compat_is_torchtitan_or_nothing() -> None:
    with pytest.raises(ValueError, match="Invalid compat: 'old', expected None or 'torchtitan'"):
        trained(ours.FTOptimizersContainer.Config, 0, compat="old")
