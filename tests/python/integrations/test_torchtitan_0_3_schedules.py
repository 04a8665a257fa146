"""Our learning-rate schedules in torchtitan 0.3, compared with its own: the behavior of its
tests/unit_tests/test_lr_scheduler.py, metrics and states."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from torch import nn

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as stock
from torchtitan.components.optimizer import ParamGroupConfig

from torchopt_ext.integrations import torchtitan_0_3 as ours


def optimizers(kind: Any, rates: tuple[float, float] = (1e-2, 1e-2)) -> Any:
    """Builds AdamW with two groups, and Adam with one."""
    found = [("0.bias", "AdamW", rates[0]), ("1", "Adam", 3e-3), (".*", "AdamW", rates[1])]
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": lr})
        for pattern, name, lr in found
    ]
    part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return kind.OptimizersContainer.Config(param_groups=groups).build(model_parts=[part])


SCHEDULES = {
    "warmup and decay": ({"warmup_steps": 2}, 10, [0.5, 1, 1, *(1 - i / 8 for i in range(1, 9))]),
    "no warmup": ({"warmup_steps": 0}, 10, [1, *(1 - i / 10 for i in range(1, 11))]),
    "stable between": (
        {"warmup_steps": 2, "decay_ratio": 0.5},
        10,
        [0.5, *[1] * 5, 0.8, 0.6, 0.4, 0.2, 0],
    ),
    "decay shortened": (
        {"warmup_steps": 5, "decay_ratio": 0.8},
        10,
        [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2, 0],
    ),
    "no decay": ({"warmup_steps": 0, "decay_ratio": 0.0}, 10, [1] * 11),
    "warmup shortened": ({"warmup_steps": 10}, 5, [0.2, 0.4, 0.6, 0.8, 1, 1]),
    "minimum": (
        {"warmup_steps": 2, "min_lr_factor": 0.2},
        10,
        [0.5, 1, 1, *(1 - 0.1 * i for i in range(1, 9))],
    ),
    "total": ({"warmup_steps": 2, "total_steps": 10}, 4, [0.5, 1, 1, 7 / 8, 6 / 8]),
    "cosine": ({"warmup_steps": 2, "decay_type": "cosine"}, 4, [0.5, 1, 1, 0.5, 0]),
    "sqrt": ({"warmup_steps": 2, "decay_type": "sqrt"}, 4, [0.5, 1, 1, 1 - math.sqrt(0.5), 0]),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedule_is_stock_schedule(case: str) -> None:
    fields, steps, factors = SCHEDULES[case]
    seen = []
    for kind in (ours, stock):
        container = optimizers(kind)
        config = kind.LRSchedulersContainer.Config(**fields)
        schedulers = config.build(optimizers=container, training_steps=steps)
        assert type(schedulers) is kind.LRSchedulersContainer
        metrics = [schedulers.get_metrics()]
        for _ in factors[1:]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizers do not step here
                schedulers.step()
            metrics.append(schedulers.get_metrics())
        seen.append(metrics)
    assert [m["lr/AdamW/1"] / 1e-2 for m in seen[0]] == pytest.approx(factors, abs=1e-12)
    for found, expected in zip(*seen, strict=True):
        assert found.keys() == expected.keys() == {"lr/AdamW/0", "lr/AdamW/1", "lr/Adam"}
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_compat_torchtitan_gives_the_rates_before_0_1() -> None:
    container = optimizers(ours)
    config = ours.LRSchedulersContainer.Config(warmup_steps=2, compat="torchtitan")
    schedulers = config.build(optimizers=container, training_steps=10)
    factors = []
    for _ in range(11):
        factors.append(schedulers.get_metrics()["lr/AdamW/1"] / 1e-2)
        container.step()
        schedulers.step()
    assert factors == pytest.approx([1 / 3, 2 / 3, *(i / 9 for i in range(8, -1, -1))], abs=1e-15)


def test_unknown_decay_is_rejected_when_built() -> None:
    config = ours.LRSchedulersContainer.Config(decay_type="step")
    with pytest.raises(ValueError, match="decay_type is 'step'"):
        config.build(optimizers=optimizers(ours), training_steps=10)


@pytest.mark.parametrize("form", ["0.3", "0.2"])
def test_schedule_continues_from_either_form(form: str) -> None:
    def made() -> tuple[Any, Any]:
        container = optimizers(ours)
        config = ours.LRSchedulersContainer.Config(warmup_steps=2)
        return container, config.build(optimizers=container, training_steps=10)

    container, schedulers = made()
    container.step()
    for _ in range(4):
        schedulers.step()
    assert schedulers.state_dict() == {"last_epoch": 4}
    state = {"0.3": schedulers, "0.2": schedulers.schedulers[0]}[form].state_dict()
    other, resumed = made()
    resumed.load_state_dict(state)
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in container.param_groups]
    assert resumed.get_metrics() == schedulers.get_metrics()
    assert resumed.state_dict() == {"last_epoch": 4}


@pytest.mark.parametrize("saved", [(1e-2, 1e-2), (1e-2, 1e-3)])
@pytest.mark.parametrize("present", [(5e-2, 5e-2), (5e-2, 5e-3)])
def test_a_resumed_job_has_the_rates_of_its_configuration(
    saved: tuple[float, float], present: tuple[float, float]
) -> None:
    """Optimizers' state dicts hold the rates of the job that saved them."""

    def resumed(kind: Any) -> list[float]:
        state: dict[str, Any] = {}
        for rates in (saved, present):
            container = optimizers(kind, rates)
            config = kind.LRSchedulersContainer.Config(warmup_steps=2)
            schedulers = config.build(optimizers=container, training_steps=10)
            if state:
                container.load_state_dict(state["optimizer"])
                schedulers.load_state_dict(state["lr_scheduler"])
            container.step()
            schedulers.step()
            state = {
                "optimizer": container.state_dict(),
                "lr_scheduler": schedulers.state_dict(),
            }
        return [
            group["lr"] for optimizer in container.optimizers for group in optimizer.param_groups
        ]

    assert resumed(ours) == pytest.approx(resumed(stock))
