"""State dicts of ZeroOptimizersContainer on one rank, and what its load rejects."""

from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.trainer.zero_container import ZeroOptimizersContainer

from ...support.compare import unchanged

pytestmark = pytest.mark.usefixtures("one_rank")

each = pytest.mark.parametrize("partition", ["greedy", "balanced"])


def make(kind: str, scheduled: bool = False) -> tuple[Any, Any]:
    """Returns a model, and the optimizer of a container over it: plain, or with a partition."""
    torch.manual_seed(0)
    model, options = nn.Linear(4, 3), {"lr": 0.1, "skip_nonfinite": True}
    if kind == "plain":
        container: Any = OptimizersContainer([model], FusedAdamW, options)
    else:
        container = ZeroOptimizersContainer([model], FusedAdamW, options, partition=kind)
    if scheduled:
        container._fused()[0].set_schedule(warmup_steps=8, stable_steps=9, decay_steps=9)
    return model, container


def train(model: Any, container: Any, scales: list[float]) -> None:
    for scale in scales:
        container.zero_grad()
        (model(torch.ones(2, 4)).square().sum() * scale).backward()
        container.step()


@each
@pytest.mark.parametrize("source", ["plain", "same"])
def test_counts_of_a_schedule_are_saved_and_loaded(partition: str, source: str) -> None:
    model, container = make(source.replace("same", partition), scheduled=True)
    train(model, container, [1.0, float("nan"), 1.0])
    saved = container.state_dict()
    assert {"torchopt_ext.control.steps", "torchopt_ext.control.skipped_steps"} <= saved.keys()
    other, resumed = make(partition, scheduled=True)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    assert resumed._fused()[0].control.skipped_steps == 1
    train(model, container, [1.0])
    train(other, resumed, [1.0])
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@each
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "param_groups.bias.weight_decay",
            0.5,
            r"'param_groups\.bias\.weight_decay' is 0\.5 but 'param_groups\.weight\.weight_decay' "
            r"is .*, and both parameters are in one group here",
        ),
        ("param_groups.bias.lr", None, r"'param_groups\.bias\.lr' is missing"),
        ("param_groups.weight.amsgrad", True, r"'param_groups\.weight\.amsgrad' is True"),
        ("state.bias.", None, r"'state\.bias\.step' is missing"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(
    partition: str, key: str, value: Any, message: str
) -> None:
    model, container = make(partition)
    train(model, container, [1.0])
    saved = container.state_dict()
    wrong = {name: entry for name, entry in saved.items() if not name.startswith(key)}
    kind: type[Exception] = KeyError
    if value is not None:
        wrong, kind = {**saved, key: value}, ValueError
    with unchanged(container._zero.optim), pytest.raises(kind, match=message):
        container.load_state_dict(wrong)
    container.load_state_dict(saved)
