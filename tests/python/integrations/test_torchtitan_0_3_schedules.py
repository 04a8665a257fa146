"""Our learning-rate schedules in torchtitan 0.3, compared with its own: the behavior of its
tests/unit_tests/test_lr_scheduler.py, metrics and states."""

import math

import pytest
from torch import nn

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as stock
from torchtitan.components.optimizer import ParamGroupConfig

from torchopt_ext.integrations import torchtitan_0_3 as ours

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def built(kind, steps=10, rates=(1e-2, 1e-2), **fields):
    """Builds AdamW with two groups, Adam with one, and their schedules."""
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": lr})
        for pattern, name, lr in (
            ("0.bias", "AdamW", rates[0]),
            ("1", "Adam", 3e-3),
            (".*", "AdamW", rates[1]),
        )
    ]
    part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = kind.OptimizersContainer.Config(param_groups=groups).build(model_parts=[part])
    config = kind.LRSchedulersContainer.Config(**{"warmup_steps": 2} | fields)
    schedulers = config.build(optimizers=optimizers, training_steps=steps)
    assert type(schedulers) is kind.LRSchedulersContainer
    return optimizers, schedulers


def metrics(kind, count, steps, **fields):
    _, schedulers = built(kind, steps, **fields)
    for step in range(count):
        if step:
            schedulers.step()
        yield schedulers.get_metrics()


def down(count, first=1.0):
    return [first * (1 - i / count) for i in range(1, count + 1)]


OLD = [1 / 3, 2 / 3, 8 / 9, *down(8, 8 / 9)]
SCHEDULES = {
    "warmup and decay": ({}, 10, [0.5, 1, 1, *down(8)]),
    "no warmup": ({"warmup_steps": 0}, 10, [1, *down(10)]),
    "stable between": ({"decay_ratio": 0.5}, 10, [0.5, *[1] * 5, *down(5)]),
    "decay shortened": (
        {"warmup_steps": 5, "decay_ratio": 0.8},
        10,
        [0.2, 0.4, 0.6, 0.8, 1, 1, *down(5)],
    ),
    "no decay": ({"warmup_steps": 0, "decay_ratio": 0.0}, 10, [1] * 11),
    "warmup shortened": ({"warmup_steps": 10}, 5, [0.2, 0.4, 0.6, 0.8, 1, 1]),
    "minimum": ({"min_lr_factor": 0.2}, 10, [0.5, 1, 1, *(1 - 0.1 * i for i in range(1, 9))]),
    "total": ({"total_steps": 10}, 4, [0.5, 1, 1, 7 / 8, 6 / 8]),
    "cosine": ({"decay_type": "cosine"}, 4, [0.5, 1, 1, 0.5, 0]),
    "sqrt": ({"decay_type": "sqrt"}, 4, [0.5, 1, 1, 1 - math.sqrt(0.5), 0]),
    "before 0.1": ({"compat": "torchtitan"}, 10, OLD),
}


@pytest.mark.parametrize(("fields", "steps", "factors"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedule_is_stock_schedule(fields, steps, factors):
    found = [*metrics(ours, len(factors), steps, **fields)]
    assert [m["lr/AdamW/1"] / 1e-2 for m in found] == pytest.approx(factors, abs=1e-12)
    if "compat" not in fields:
        for metric, expected in zip(
            found, metrics(stock, len(factors), steps, **fields), strict=True
        ):
            assert metric.keys() == expected.keys() == {"lr/AdamW/0", "lr/AdamW/1", "lr/Adam"}
            assert metric == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_unknown_decay_is_rejected_when_built():
    with pytest.raises(ValueError, match="decay_type is 'step'"):
        built(ours, decay_type="step")


@pytest.mark.parametrize("form", ["0.3", "0.2"])
def test_schedule_continues_from_either_form(form):
    container, schedulers = built(ours)
    for _ in range(4):
        schedulers.step()
    assert schedulers.state_dict() == {"last_epoch": 4}
    state = {"0.3": schedulers, "0.2": schedulers.schedulers[0]}[form].state_dict()
    other, resumed = built(ours)
    resumed.load_state_dict(state)
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in container.param_groups]
    assert resumed.get_metrics() == schedulers.get_metrics()
    assert resumed.state_dict() == {"last_epoch": 4}


@pytest.mark.parametrize("saved", [(1e-2, 1e-2), (1e-2, 1e-3)])
@pytest.mark.parametrize("present", [(5e-2, 5e-2), (5e-2, 5e-3)])
def test_a_resumed_job_has_the_rates_of_its_configuration(saved, present):
    """Optimizers' state dicts hold the rates of the job that saved them."""

    def resumed(kind):
        before = built(kind, rates=saved)
        after = built(kind, rates=present)
        for each in before:
            each.step()
        for each, source in zip(after, before, strict=True):
            each.load_state_dict(source.state_dict())
        for each in after:
            each.step()
        return [
            group["lr"] for optimizer in after[0].optimizers for group in optimizer.param_groups
        ]

    assert resumed(ours) == pytest.approx(resumed(stock))
