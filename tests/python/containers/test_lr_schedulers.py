"""Learning-rate schedules: the formulas of two torchtitan generations, and the container."""

import copy
import functools
import math
import pickle
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import FusedAdamW, ops
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
    build_lr_schedulers,
)

from .conftest import train

BASE_LR = 0.5  # factors times a power of two are exact


@pytest.fixture
def optimizers(parts):
    return OptimizersContainer(parts, FusedAdamW, {"lr": BASE_LR})


def section(minimum, **changes):
    values = {"warmup_steps": 0, "decay_ratio": None, "decay_type": "linear", minimum: 0.0}
    return SimpleNamespace(**{**values, **changes})


def first_generation(optimizers, steps, *, min_factor=0.0, **changes):
    job_config = SimpleNamespace(
        training=SimpleNamespace(steps=steps),
        lr_scheduler=section("lr_min", lr_min=min_factor, **changes),
    )
    return build_lr_schedulers(optimizers, job_config)


def second_generation(optimizers, steps, *, min_factor=0.0, total_steps=None, **changes):
    config = section("min_lr_factor", min_lr_factor=min_factor, total_steps=total_steps, **changes)
    return build_lr_schedulers(optimizers, config, steps)


compat = functools.partial(second_generation, compat="torchtitan")
GENERATIONS = pytest.mark.parametrize("build", [first_generation, second_generation])


def factor_of(schedulers):
    """Returns the function that torch's schedulers call."""
    return schedulers.schedulers[0].lr_lambdas[0]


def factors(schedulers, count):
    """Returns the factors of the first `count` steps by stepping."""
    found = []
    for _ in range(count):
        found.append(schedulers.schedulers[0].get_last_lr()[0] / BASE_LR)
        for scheduler in schedulers:
            scheduler.optimizer.step()
        schedulers.step()
    return found


# The published tables: steps, warmup, decay ratio, min factor, and the factors after 0 to `steps`
# steps of generations 1 and 2. 3/8..1/8 is 3/8 2/8 1/8.
TABLE = [
    (10, 2, None, 0.0, "1/3 2/3 8/9..0/9", "1/2 1/1 1/1 7/8..0/8"),
    (10, 0, None, 0.0, "10/11..0/11", "10/10..0/10"),
    (10, 2, 0.5, 0.0, "1/3 2/3 1/1 1/1 1/1 5/6..0/6", "1/2 1/1 1/1 1/1 1/1 1/1 4/5..0/5"),
    (10, 5, 0.8, 0.0, "1/6..5/6 5/6..0/6", "1/5..5/5 1/1 4/5..0/5"),
    (10, 0, 0.0, 0.0, "1/1 " * 10 + "0/1", "1/1 " * 11),
    (5, 5, None, 0.0, "1/6..5/6 0/1", "1/5..5/5 1/1"),
    (5, 10, None, 0.0, "1/11..6/11", "1/5..5/5 1/1"),
    (4, 0, None, 0.2, "21/25 17/25 13/25 9/25 5/25", "5/5..1/5"),
]


def fractions_of(text):
    for item in text.split():
        first, *last = [int(n.split("/")[0]) for n in item.split("..")]
        step = -1 if last and last[0] < first else 1
        for n in range(first, (last or [first])[0] + step, step):
            yield float(Fraction(n, int(item.split("/")[-1])))


@pytest.mark.parametrize("build", [first_generation, second_generation, compat])
@pytest.mark.parametrize(("steps", "warmup", "ratio", "minimum", "first", "second"), TABLE)
def test_published_factors(optimizers, steps, warmup, ratio, minimum, first, second, build):
    options = {"warmup_steps": warmup, "decay_ratio": ratio, "min_factor": minimum}
    expected = [*fractions_of(second if build is second_generation else first)]
    assert len(expected) == steps + 1
    found = factors(build(optimizers, steps, **options), steps + 1)
    assert found == pytest.approx(expected, rel=1e-15, abs=1e-16)


# Lengths only: tests/python/ops/test_lr_factor.py tests the formula.


@given(
    steps=st.integers(1, 60),
    warmup=st.integers(0, 70),
    ratio=st.none() | st.floats(0, 1.5),
    decay_type=st.sampled_from(["linear", "sqrt", "cosine"]),
    minimum=st.floats(0, 1),
    generation=st.sampled_from([1, 2]),
)
def test_whole_schedules(steps, warmup, ratio, decay_type, minimum, generation):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE_LR)
    build = first_generation if generation == 1 else second_generation
    form = {"decay_type": decay_type, "min_factor": minimum}
    schedulers = build([optimizer], steps, warmup_steps=warmup, decay_ratio=ratio, **form)
    # The lengths as torchtitan computes them, clamped to 0 where torchtitan's go negative.
    if generation == 2:
        warmup = min(warmup, steps)
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    stable = steps - warmup - max(decay, 0)
    lengths = {
        "warmup_steps": warmup,
        "stable_steps": max(stable, 0) + (generation == 2),
        "decay_steps": max(decay, 0),
    }
    count = range(steps + 10)
    expected = [ops.lr_factor(s, **lengths, **form, generation=generation) for s in count]
    found = factors(schedulers, steps + 10)
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-15)
    assert all(0 <= factor <= 1 for factor in found)


@GENERATIONS
def test_what_a_configuration_means(optimizers, build):
    factor = factor_of(build(optimizers, 5, decay_ratio=0.5))  # 2.5 steps round to even
    assert factor.keywords["decay_steps"] == 2
    options = {"decay_type": "cosine", "min_factor": 0.9, "warmup_steps": 4}
    factor = factor_of(build(optimizers, 10, **options))
    assert factor(0) < 0.5  # warmup is not raised to the minimum
    again = pickle.loads(pickle.dumps(factor))
    assert [again(s) for s in range(15)] == [factor(s) for s in range(15)]
    longer = second_generation(optimizers, 10, total_steps=20)
    assert factors(longer, 21)[-2:] == pytest.approx([1 / 20, 0])


# Refused configurations


@GENERATIONS
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"decay_type": kind}, f"decay_type is {kind!r}, expected one of")
            for kind in ("exponential", "Linear", "", None)
        ),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_steps": math.nan}, "warmup_steps is nan"),
        ({"decay_ratio": -0.5}, r"decay_ratio is -0\.5"),
        ({"decay_ratio": math.nan}, "decay_ratio is nan"),
        ({"decay_ratio": math.inf}, "decay_ratio is inf"),
        ({"min_factor": -0.1}, r"(lr_min|min_lr_factor) is -0\.1"),
        ({"min_factor": math.nan}, "(lr_min|min_lr_factor) is nan"),
        ({"min_factor": 1.5}, r"(lr_min|min_lr_factor) is 1\.5, expected .* from 0 to 1"),
        ({"steps": -5}, "training steps is -5"),
        ({"steps": 10.5}, r"training steps is 10\.5, expected a whole number"),
        ({"warmup_steps": 2.5}, r"warmup_steps is 2\.5, expected a whole number"),
        ({"steps": math.nan}, "training steps is nan"),
    ],
)
def test_senseless_settings_are_rejected(optimizers, build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(optimizers, **{"steps": 10, **arguments})
    assert optimizers.param_groups[0]["lr"] == BASE_LR
    assert "initial_lr" not in optimizers.param_groups[0]


@GENERATIONS
@pytest.mark.parametrize(
    ("steps", "warmup", "ratio", "warning"),
    [
        (10, 5, 0.8, "Warmup (5 steps) and decay (8 steps) are longer than the training (10 steps)"
         ": decay is shortened to 5 steps"),
        (5, 10, None, "Warmup (10 steps) is longer than the training (5 steps)"),
        (10, 5, 0.5, ""),
        (10, 10, None, ""),
    ],
)  # fmt: skip
def test_what_is_cut_is_warned_about(optimizers, build, caplog, steps, warmup, ratio, warning):
    build(optimizers, steps, warmup_steps=warmup, decay_ratio=ratio)
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


# Ways to build


@pytest.mark.parametrize("minimum", ["lr_min", "min_lr_factor"])
def test_every_way_to_pass_the_arguments(optimizers, minimum):
    """torchtitan 0.1 has the later formula, and the minimum's name of earlier versions."""
    config = section(minimum, warmup_steps=2, total_steps=None, **{minimum: 0.2})
    job_config = SimpleNamespace(training=SimpleNamespace(steps=10), lr_scheduler=config)
    for schedulers, generation in (
        (build_lr_schedulers(optimizers, job_config), 1),
        (build_lr_schedulers(optimizers=optimizers, job_config=job_config), 1),
        (build_lr_schedulers(optimizers, config, 10), 2),
        (build_lr_schedulers(optimizers, lr_scheduler_config=config, training_steps=10), 2),
    ):
        assert factor_of(schedulers).keywords["generation"] == generation
        assert factor_of(schedulers)(10) == pytest.approx(0.2)
    with pytest.raises(TypeError, match="training_steps"):
        build_lr_schedulers(optimizers, config)
    with pytest.raises(AttributeError, match="min_lr_factor"):
        build_lr_schedulers(optimizers, section("lowest", total_steps=None), 10)
    with pytest.raises(ValueError, match="Invalid compat: True, expected None or 'torchtitan'"):
        second_generation(optimizers, 10, compat=True)


def test_no_optimizer_and_one_alone_are_refused():
    with pytest.raises(AssertionError, match="at least one optimizer"):
        LRSchedulersContainer([], lambda step: 1.0)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="is of type AdamW, expected a container or a list"):
        LRSchedulersContainer(optimizer, lambda step: 1.0)


# The container


def test_a_container_is_iterated_once(optimizers):
    """torchtitan's own tests give a mock whose __iter__ returns one iterator."""
    held = list(optimizers)
    container = MagicMock(spec=OptimizersContainer, __len__=lambda _: len(held))
    container.__iter__.return_value = iter(held)
    schedulers = LRSchedulersContainer(container, lambda step: 0.5)
    assert [scheduler.optimizer for scheduler in schedulers] == held
    assert isinstance(schedulers, Stateful) and len(schedulers) == len(held)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_is_that_of_stock_schedulers_with_one_call_for_many_optimizers():
    lrs = [[0.5], [0.25, 1.0], [torch.tensor(0.5)], [0.25], [1.0], [0.5], [2.0], [0.5], [0.5]]

    def optimizers():
        return [
            torch.optim.SGD([{"params": [torch.ones(1)], "lr": copy.copy(lr)} for lr in each])
            for each in lrs
        ]

    steps = []

    def factor(step):
        steps.append(step)
        return 0.7**step

    ours = LRSchedulersContainer(optimizers(), factor)
    stock = [LambdaLR(optimizer, factor) for optimizer in optimizers()]
    for schedulers in (ours.schedulers, stock):
        schedulers[-1].lr_lambdas = [lambda step: 0.1 * step]
        schedulers[-2].last_epoch = 5
    for number in range(1, 5):
        steps.clear()
        ours.step()
        # torch checks the order of calls in the first step. Later, four optimizers share a call.
        assert steps.count(number) == (8 if number == 1 else 5)
        for scheduler in stock:
            scheduler.step()
        for found, other in zip(ours, stock, strict=True):
            assert found.state_dict() == other.state_dict()
            assert found.optimizer.param_groups == other.optimizer.param_groups


def test_a_tensor_lr_is_filled_in_place(parts):
    lr = torch.tensor(BASE_LR)
    container = OptimizersContainer(parts[:1], FusedAdamW, {"lr": lr})
    (group,) = container.param_groups
    held = group["lr"]
    schedulers = LRSchedulersContainer(container, lambda step: 0.5**step)
    container.step()
    schedulers.step()
    assert group["lr"] is held and held == BASE_LR / 2
    schedulers.load_state_dict({"last_epoch": 3})
    assert group["lr"] is held and held == BASE_LR / 8
    assert schedulers.get_metrics() == {"lr/AdamW": BASE_LR / 8}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # without backward
@pytest.mark.parametrize("kind", [OptimizersContainer, OptimizersInBackwardContainer])
def test_a_tensor_that_optimizers_share_is_each_ones_base(parts, kind):
    container = kind(parts, FusedAdamW, {"lr": torch.tensor(BASE_LR)})
    schedulers = LRSchedulersContainer(container, lambda step: (step + 1) / 4)
    for step in range(3):
        assert {float(lr) for s in schedulers for lr in s.base_lrs} == {BASE_LR}
        assert {float(g["lr"]) for g in container.param_groups} == {BASE_LR * (step + 1) / 4}
        container.step()
        schedulers.step()


def test_metrics_number_groups_and_parts_that_differ(parts):
    container = OptimizersContainer(parts, torch.optim.Adam, {"lr": BASE_LR})
    for optimizer in container:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.25})
    found = LRSchedulersContainer(container, lambda step: 0.5).get_metrics()
    assert found == {"lr/Adam/0": BASE_LR / 2, "lr/Adam/1": 0.125}
    container = OptimizersContainer(parts, FusedAdamW, {"lr": BASE_LR})
    container.param_groups[1]["lr"] = 0.25
    found = LRSchedulersContainer(container, lambda step: 0.0).get_metrics()
    assert found == {"lr/AdamW/0": 0.0, "lr/AdamW/1": 0.0}


# State dict


@GENERATIONS
def test_state_dict_is_that_of_a_stock_scheduler(optimizers, build):
    schedulers = build(optimizers, 10, warmup_steps=2)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    stock = LambdaLR(optimizer, lambda step: factor_of(schedulers)(step))
    for _ in range(4):
        for each in (optimizers, optimizer, schedulers, stock):
            each.step()
    saved, expected = schedulers.state_dict(), stock.state_dict()
    # The attributes of a callable lambda would be saved and required: ours has none.
    assert (saved.pop("lr_lambdas"), expected.pop("lr_lambdas")) == ([{}], [None])
    assert saved == expected
    assert saved["last_epoch"] == 4


class Job:
    def __init__(self, parts, lrs=(BASE_LR, BASE_LR), schedule=None, **choice):
        self.parts = parts
        self.container = OptimizersContainer(parts, FusedAdamW, {"lr": BASE_LR}, **choice)
        for group, lr in zip(self.container.param_groups, () if choice else lrs, strict=False):
            group["lr"] = lr
        if schedule is None:
            build = functools.partial(first_generation, warmup_steps=5, decay_type="sqrt")
            self.schedulers = build(self.container, 20)
        else:
            self.schedulers = LRSchedulersContainer(self.container, schedule)

    @property
    def lrs(self):
        return [group["lr"] for group in self.container.param_groups]

    def run(self, seeds):
        lrs = []
        for seed in seeds:
            lrs.append(self.lrs)
            train(self.container, self.parts, [seed])
            self.schedulers.step()
        return lrs


@pytest.mark.parametrize("form", ["whole", "newer"])
@pytest.mark.parametrize("done", [0, 1, 3, 25])
@pytest.mark.parametrize("lrs", [(0.5, 0.5), (0.5, 0.25)])
def test_the_lr_after_loading_is_the_schedules(parts, form, done, lrs, recwarn):
    """If only the schedule is loaded and not the optimizer, the next step has the right lr."""
    job, resumed = Job(parts, lrs), Job(copy.deepcopy(parts), lrs)
    job.run(range(done))
    saved = job.schedulers.state_dict() if form == "whole" else {"last_epoch": done}
    before = copy.deepcopy(saved)
    resumed.schedulers.load_state_dict(saved)
    assert saved == before
    assert resumed.lrs == job.lrs
    assert [s.base_lrs for s in resumed.schedulers] == [[lr] for lr in lrs]
    assert resumed.schedulers.state_dict() == job.schedulers.state_dict()
    assert resumed.run(range(3)) == job.run(range(3))
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("optimizers_first", [True, False])
@pytest.mark.parametrize("saver", range(4))
def test_base_lrs_of_groups_come_from_the_optimizers(parts, saver, optimizers_first):
    """The dict is of one scheduler, perhaps of another pipeline stage, with other groups."""
    first, second = parts
    choices = [
        (first, {"weight": 0.5}, [0.5, 1.0]),
        (second, {"bias": 4.0}, [1.0, 4.0]),
        (second, {}, [1.0]),
        (second, {"": 0.25}, [0.25]),
    ]
    constant = functools.partial(max, 1.0)
    stages = [
        Job([part], schedule=constant, lr_multipliers=multipliers, partial=True)
        for part, multipliers, _ in choices
    ]
    saved = copy.deepcopy(stages[saver].schedulers.state_dict())
    for stage, (*_, multiples) in zip(stages, choices, strict=True):
        state = copy.deepcopy(stage.container.state_dict())
        for group in stage.container.param_groups:
            group["initial_lr"] = 7.0  # of another configuration
        loads = [(stage.container, state), (stage.schedulers, saved)]
        for target, values in loads if optimizers_first else reversed(loads):
            target.load_state_dict(values)
        expected = [BASE_LR * multiple for multiple in multiples]
        assert stage.schedulers.state_dict()["base_lrs"] == expected
        assert stage.lrs == expected


def test_a_schedule_may_be_built_after_the_optimizers_are_loaded(parts):
    job = Job(parts, schedule=lambda step: 0.5**step, lr_multipliers={"bias": 0.5})
    job.run(range(3))
    resumed = OptimizersContainer(
        copy.deepcopy(parts), FusedAdamW, {"lr": BASE_LR}, lr_multipliers={"bias": 0.5}
    )
    resumed.load_state_dict(job.container.state_dict())
    later = LRSchedulersContainer(resumed, lambda step: 0.5**step)
    later.load_state_dict(job.schedulers.state_dict())
    for _ in range(2):
        assert [g["lr"] for g in resumed.param_groups] == job.lrs
        job.schedulers.step()
        later.step()


def test_a_common_base_lr_comes_from_the_dict(parts, model):
    """Also if the number of parts is another."""
    job = Job(parts)
    job.run(range(3))
    saved = job.schedulers.state_dict()
    resumed, single = Job(copy.deepcopy(parts), lrs=(0.125, 0.125)), Job([model], lrs=(0.125,))
    for other in (resumed, single):
        other.schedulers.load_state_dict(saved)
        assert [s.base_lrs for s in other.schedulers] == [[0.5]] * len(other.schedulers)
        assert other.lrs == job.lrs[: len(other.lrs)]
    resumed.schedulers.schedulers[0].base_lrs[0] = 7.0
    assert resumed.schedulers.schedulers[1].base_lrs == saved["base_lrs"] == [0.5]


def test_a_lambda_with_state_is_restored(optimizers):
    class Table:
        def __init__(self, factors):
            self.factors = factors

        def __call__(self, step):
            return self.factors[step]

    saved = LRSchedulersContainer(optimizers, Table([0.25, 0.5])).state_dict()
    assert saved["lr_lambdas"] == [{"factors": [0.25, 0.5]}]
    resumed = LRSchedulersContainer(optimizers, Table([1.0, 1.0]))
    resumed.load_state_dict(saved)
    assert [group["lr"] for group in optimizers.param_groups] == [BASE_LR / 4] * 2
    assert factor_of(resumed).factors is not saved["lr_lambdas"][0]["factors"]
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(IndexError):  # of the saved table
        resumed.load_state_dict({**saved, "last_epoch": 5})
    assert resumed.state_dict() == before
    longer = LRSchedulersContainer(optimizers, Table([1.0]))
    longer.load_state_dict({**saved, "last_epoch": 1})  # beyond the current table
    assert factor_of(longer)(1) == 0.5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"last_epoch": 7}, IndexError, "list index out of range"),
        ({"base_lrs": ["x"]}, ValueError, "base_lrs is"),
        ({"last_epoch": ()}, KeyError, "last_epoch"),
        *(
            ({"last_epoch": step}, ValueError, f"last_epoch is {step!r}, expected a number of")
            for step in (-1, 1.5, "3", None, True)
        ),
    ],
)
def test_a_load_that_raises_changes_nothing(optimizers, changes, error, message):
    schedulers = LRSchedulersContainer(optimizers, lambda step: [1.0, 0.5][step])
    saved = schedulers.state_dict() | changes
    if saved["last_epoch"] == ():
        del saved["last_epoch"]
    before = copy.deepcopy([s.state_dict() for s in schedulers])
    with pytest.raises(error, match=message):
        schedulers.load_state_dict(saved)
    assert [s.state_dict() for s in schedulers] == before
    assert [g["lr"] for g in optimizers.param_groups] == [BASE_LR] * 2
