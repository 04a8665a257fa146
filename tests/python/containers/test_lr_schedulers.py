"""Learning-rate schedules: the formulas of two torchtitan generations, and the container."""

import copy
import functools
import logging
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


GENERATIONS = pytest.mark.parametrize("build", [first_generation, second_generation])


def factors(schedulers, count):
    """Returns the factors of the first `count` steps by stepping."""
    found = []
    for _ in range(count):
        found.append(schedulers.schedulers[0].get_last_lr()[0] / BASE_LR)
        for scheduler in schedulers:
            scheduler.optimizer.step()
        schedulers.step()
    return found


# The published tables


def fractions_of(text):
    return [Fraction(item) for item in text.split()]


def down_from(first, count, step):
    return [Fraction(first) - i * Fraction(step) for i in range(count)]


ONES = [Fraction(1)]
# (steps, warmup, decay ratio, min factor, factors after 0..steps steps of generations 1 and 2)
TABLE = {
    "10-2": (
        (10, 2, None, 0.0),
        fractions_of("1/3 2/3") + down_from("8/9", 9, "1/9"),
        fractions_of("1/2 1 1") + down_from("7/8", 8, "1/8"),
    ),
    "10-0": (
        (10, 0, None, 0.0),
        down_from("10/11", 11, "1/11"),
        down_from(1, 11, "1/10"),
    ),
    "10-2-half": (
        (10, 2, 0.5, 0.0),
        fractions_of("1/3 2/3 1 1 1") + down_from("5/6", 6, "1/6"),
        fractions_of("1/2 1 1 1 1 1") + down_from("4/5", 5, "1/5"),
    ),
    "10-5-shortened": (
        (10, 5, 0.8, 0.0),
        fractions_of("1/6 2/6 3/6 4/6 5/6") + down_from("5/6", 6, "1/6"),
        fractions_of("1/5 2/5 3/5 4/5 1 1") + down_from("4/5", 5, "1/5"),
    ),
    "10-0-no-decay": (
        (10, 0, 0.0, 0.0),
        ONES * 10 + [Fraction(0)],
        ONES * 11,
    ),
    "5-5": (
        (5, 5, None, 0.0),
        fractions_of("1/6 2/6 3/6 4/6 5/6 0"),
        fractions_of("1/5 2/5 3/5 4/5 1 1"),
    ),
    "5-10": (
        (5, 10, None, 0.0),
        fractions_of("1/11 2/11 3/11 4/11 5/11 6/11"),
        fractions_of("1/5 2/5 3/5 4/5 1 1"),
    ),
    "10-2-min": (
        (10, 2, None, 0.2),
        fractions_of("1/3 2/3")
        + [Fraction(1, 5) + Fraction(4, 5) * Fraction(i, 9) for i in range(8, -1, -1)],
        fractions_of("1/2 1 1") + down_from("9/10", 8, "1/10"),
    ),
}


@pytest.mark.parametrize("form", ["first", "second", "second, compat"])
@pytest.mark.parametrize(("arguments", *("first", "second")), TABLE.values(), ids=TABLE)
def test_published_factors(optimizers, arguments, first, second, form):
    """With compat="torchtitan" the second form's configuration gives the first form's factors."""
    steps, warmup, ratio, minimum = arguments
    build = first_generation if form == "first" else second_generation
    compat = {"compat": "torchtitan"} if form == "second, compat" else {}
    schedulers = build(
        optimizers, steps, warmup_steps=warmup, decay_ratio=ratio, min_factor=minimum, **compat
    )
    expected = [float(f) for f in (second if form == "second" else first)]
    assert len(expected) == steps + 1
    assert factors(schedulers, steps + 1) == pytest.approx(expected, rel=1e-15, abs=1e-16)


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
    schedulers = build(
        [optimizer],
        steps,
        warmup_steps=warmup,
        decay_ratio=ratio,
        decay_type=decay_type,
        min_factor=minimum,
    )
    # The lengths as torchtitan computes them, clamped to 0 where torchtitan's go negative.
    if generation == 2:
        warmup = min(warmup, steps)
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    stable = steps - warmup - max(decay, 0)
    expected = [
        ops.lr_factor(
            s,
            warmup_steps=warmup,
            stable_steps=max(stable, 0) + (generation == 2),
            decay_steps=max(decay, 0),
            decay_type=decay_type,
            min_factor=minimum,
            generation=generation,
        )
        for s in range(steps + 10)
    ]
    found = factors(schedulers, steps + 10)
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-15)
    assert all(0 <= factor <= 1 for factor in found)


@GENERATIONS
def test_half_a_step_of_decay_rounds_to_even(optimizers, build):
    schedulers = build(optimizers, 5, decay_ratio=0.5)  # 2.5 steps round to 2
    lambdas = schedulers.schedulers[0].lr_lambdas
    assert lambdas[0].keywords["decay_steps"] == 2


@GENERATIONS
def test_warmup_is_not_raised_to_the_minimum(optimizers, build):
    schedulers = build(optimizers, 10, warmup_steps=4, min_factor=0.9)
    assert schedulers.schedulers[0].get_last_lr()[0] / BASE_LR < 0.5


def test_total_steps_replaces_training_steps(optimizers):
    schedulers = second_generation(optimizers, 10, total_steps=20)
    assert factors(schedulers, 21)[-2:] == pytest.approx([1 / 20, 0])


# Refused configurations


@GENERATIONS
@pytest.mark.parametrize("decay_type", ["exponential", "Linear", "", None])
def test_an_unknown_decay_type_is_rejected_at_once(optimizers, build, decay_type):
    with pytest.raises(ValueError, match=f"decay_type is {decay_type!r}, expected one of"):
        build(optimizers, 10, warmup_steps=5, decay_type=decay_type)


def test_compat_is_torchtitan_or_nothing(optimizers):
    with pytest.raises(ValueError, match="Invalid compat: True, expected None or 'torchtitan'"):
        second_generation(optimizers, 10, compat=True)


@GENERATIONS
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
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
def test_senseless_numbers_are_rejected(optimizers, build, arguments, name):
    with pytest.raises(ValueError, match=name):
        build(optimizers, **{"steps": 10, **arguments})
    assert optimizers.param_groups[0]["lr"] == BASE_LR
    assert "initial_lr" not in optimizers.param_groups[0]


@GENERATIONS
def test_what_is_cut_is_warned_about(optimizers, build, caplog):
    with caplog.at_level(logging.WARNING):
        build(optimizers, 10, warmup_steps=5, decay_ratio=0.8)
        assert "decay is shortened to 5 steps" in caplog.text
        assert "Warmup (5 steps) and decay (8 steps)" in caplog.text
        caplog.clear()
        build(optimizers, 5, warmup_steps=10)
        assert "Warmup (10 steps) is longer than the training (5 steps)" in caplog.text
        caplog.clear()
        build(optimizers, 10, warmup_steps=5, decay_ratio=0.5)
        build(optimizers, 10, warmup_steps=10)
        assert caplog.text == ""


# Ways to build


def test_every_way_to_pass_the_arguments(optimizers):
    config = section("min_lr_factor", total_steps=None)
    job_config = SimpleNamespace(training=SimpleNamespace(steps=4), lr_scheduler=section("lr_min"))
    first = [
        build_lr_schedulers(optimizers, job_config),
        build_lr_schedulers(optimizers=optimizers, job_config=job_config),
    ]
    second = [
        build_lr_schedulers(optimizers, config, 4),
        build_lr_schedulers(optimizers=optimizers, lr_scheduler_config=config, training_steps=4),
    ]
    for schedulers, generation in [(s, 1) for s in first] + [(s, 2) for s in second]:
        assert schedulers.schedulers[0].lr_lambdas[0].keywords["generation"] == generation


def test_a_wrong_call_is_pythons_own_error(optimizers):
    with pytest.raises(TypeError, match="training_steps"):
        build_lr_schedulers(optimizers, section("min_lr_factor", total_steps=None))
    with pytest.raises(AttributeError, match="min_lr_factor"):
        build_lr_schedulers(optimizers, section("lowest", total_steps=None), 10)


@pytest.mark.parametrize("minimum", ["lr_min", "min_lr_factor"])
def test_both_forms_know_both_names_of_the_minimum(optimizers, minimum):
    """torchtitan 0.1 has the later formula, and the name of earlier versions."""
    config = section(minimum, warmup_steps=2, total_steps=None, **{minimum: 0.2})
    job_config = SimpleNamespace(training=SimpleNamespace(steps=10), lr_scheduler=config)
    for arguments, *expected in (((job_config,), 1), ((config, 10), 2)):
        factor = build_lr_schedulers(optimizers, *arguments).schedulers[0].lr_lambdas[0]
        assert [factor.keywords["generation"]] == expected
        assert factor(10) == pytest.approx(0.2)


def test_no_optimizer_and_one_alone_are_refused():
    with pytest.raises(AssertionError, match="at least one optimizer"):
        LRSchedulersContainer([], lambda step: 1.0)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(
        TypeError, match="optimizers is of type AdamW, expected a container or a list"
    ):
        LRSchedulersContainer(optimizer, lambda step: 1.0)


# The container


def test_a_container_is_iterated_once(optimizers):
    """torchtitan's own tests give a mock whose __iter__ returns one iterator."""
    held = list(optimizers)
    container = MagicMock(spec=OptimizersContainer, __len__=lambda _: len(held))
    container.__iter__.return_value = iter(held)
    schedulers = LRSchedulersContainer(container, lambda step: 0.5)
    assert [scheduler.optimizer for scheduler in schedulers] == held


def test_one_scheduler_per_optimizer_stepping_together(optimizers):
    schedulers = LRSchedulersContainer(optimizers, lambda step: 0.5**step)
    assert isinstance(schedulers, Stateful)
    assert len(schedulers) == len(list(schedulers)) == 2
    assert all(isinstance(scheduler, LambdaLR) for scheduler in schedulers)
    for expected in (BASE_LR, BASE_LR / 2, BASE_LR / 4):
        assert [opt.param_groups[0]["lr"] for opt in optimizers] == [expected] * 2
        assert [scheduler.get_last_lr() for scheduler in schedulers] == [[expected]] * 2
        optimizers.step()
        schedulers.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_is_that_of_stock_schedulers_with_one_call_for_many_optimizers():
    lrs = [[0.5], [0.25, 1.0], [torch.tensor(0.5)], [0.25], [1.0], [0.5], [2.0], [0.5], [0.5]]

    def optimizers():
        return [
            torch.optim.SGD([{"params": [torch.ones(1)], "lr": copy.copy(lr)} for lr in own])
            for own in lrs
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
        for own, other in zip(ours, stock, strict=True):
            assert own.state_dict() == other.state_dict()
            assert own.optimizer.param_groups == other.optimizer.param_groups


@GENERATIONS
def test_a_job_runs_without_warnings(parts, build, recwarn, train):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": BASE_LR})
    schedulers = build(container, 4, warmup_steps=1)
    for seed in range(6):
        train(container, parts, [seed])
        schedulers.step()
    assert [str(warning.message) for warning in recwarn] == []


@GENERATIONS
def test_the_lambda_can_be_pickled(optimizers, build):
    schedulers = build(optimizers, 10, warmup_steps=2, decay_type="cosine", min_factor=0.1)
    function = schedulers.schedulers[0].lr_lambdas[0]
    again = pickle.loads(pickle.dumps(function))
    assert [again(s) for s in range(15)] == [function(s) for s in range(15)]


def test_a_tensor_lr_is_filled_in_place(parts):
    lr = torch.tensor(BASE_LR)
    container = OptimizersContainer(parts[:1], FusedAdamW, {"lr": lr})
    (group,) = container.param_groups
    held = group["lr"]
    schedulers = LRSchedulersContainer(container, lambda step: 0.5**step)
    container.step()
    schedulers.step()
    assert group["lr"] is held
    assert held == BASE_LR / 2
    schedulers.load_state_dict({"last_epoch": 3})
    assert group["lr"] is held
    assert held == BASE_LR / 8
    assert schedulers.get_metrics() == {"lr/AdamW": BASE_LR / 8}


# State dict


@GENERATIONS
def test_state_dict_is_that_of_a_stock_scheduler(optimizers, build):
    schedulers = build(optimizers, 10, warmup_steps=2)
    stock_optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=BASE_LR)

    def stock_lambda(step):
        return schedulers.schedulers[0].lr_lambdas[0](step)

    stock = LambdaLR(stock_optimizer, stock_lambda)
    for _ in range(4):
        optimizers.step()
        stock_optimizer.step()
        schedulers.step()
        stock.step()
    saved = schedulers.state_dict()
    # The attributes of a callable lambda would be saved and required: ours has none.
    assert saved["lr_lambdas"] == [{}]
    expected = stock.state_dict()
    assert expected["lr_lambdas"] == [None]
    assert {**saved, "lr_lambdas": None} == {**expected, "lr_lambdas": None}
    assert saved["last_epoch"] == 4


def make(parts, lrs=(BASE_LR, BASE_LR)):
    container = OptimizersContainer(parts, FusedAdamW, {"lr": BASE_LR})
    for group, lr in zip(container.param_groups, lrs, strict=True):
        group["lr"] = lr
    return container, first_generation(container, 20, warmup_steps=5, decay_type="sqrt")


def run(container, schedulers, parts, train, seeds):
    lrs = []
    for seed in seeds:
        lrs.append([group["lr"] for group in container.param_groups])
        train(container, parts, [seed])
        schedulers.step()
    return lrs


@pytest.mark.parametrize("form", ["whole", "newer"])
@pytest.mark.parametrize("done", [0, 1, 3, 25])
def test_the_lr_after_loading_is_the_schedules(parts, train, form, done, recwarn):
    """If only the schedule is loaded and not the optimizer, the next step has the right lr."""
    copies = copy.deepcopy(parts)
    container, schedulers = make(parts)
    run(container, schedulers, parts, train, range(done))
    saved = schedulers.state_dict() if form == "whole" else {"last_epoch": done}
    before = copy.deepcopy(saved)
    resumed_container, resumed = make(copies)
    resumed.load_state_dict(saved)
    assert saved == before
    assert [group["lr"] for group in resumed_container.param_groups] == [
        group["lr"] for group in container.param_groups
    ]
    assert resumed.state_dict() == schedulers.state_dict()
    assert run(resumed_container, resumed, copies, train, range(3)) == run(
        container, schedulers, parts, train, range(3)
    )
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_order_of_loading_optimizer_and_schedule_does_not_matter(
    parts, train, optimizer_first, assert_same
):
    copies = copy.deepcopy(parts)
    container, schedulers = make(parts)
    run(container, schedulers, parts, train, range(3))
    for part, other in zip(parts, copies, strict=True):
        other.load_state_dict(part.state_dict())
    resumed_container, resumed = make(copies)
    pairs = [
        (resumed_container, copy.deepcopy(container.state_dict())),
        (resumed, copy.deepcopy(schedulers.state_dict())),
    ]
    for target, saved in pairs if optimizer_first else reversed(pairs):
        target.load_state_dict(saved)
    assert_same(resumed_container.state_dict(), container.state_dict())
    assert run(resumed_container, resumed, copies, train, range(4)) == run(
        container, schedulers, parts, train, range(4)
    )
    assert_same(parts, copies)


def test_different_base_lrs_are_kept(parts, train):
    copies = copy.deepcopy(parts)
    container, schedulers = make(parts, lrs=(0.5, 0.25))
    run(container, schedulers, parts, train, range(3))
    resumed_container, resumed = make(copies, lrs=(0.5, 0.25))
    resumed.load_state_dict(schedulers.state_dict())
    assert [scheduler.base_lrs for scheduler in resumed] == [[0.5], [0.25]]
    assert [group["lr"] for group in resumed_container.param_groups] == [
        group["lr"] for group in container.param_groups
    ]


@pytest.mark.parametrize("optimizers_first", [True, False])
@pytest.mark.parametrize("saver", range(4))
def test_base_lrs_of_groups_come_from_the_optimizers(parts, saver, optimizers_first):
    """The dict is of one scheduler, perhaps of another pipeline stage, with other groups."""
    first, second = parts
    stages = []
    for part, multipliers, factors in (
        (first, {"weight": 0.5}, [0.5, 1.0]),
        (second, {"bias": 4.0}, [1.0, 4.0]),
        (second, {}, [1.0]),
        (second, {"": 0.25}, [0.25]),
    ):
        stage = OptimizersContainer(
            [part], FusedAdamW, {"lr": BASE_LR}, lr_multipliers=multipliers, partial=True
        )
        stages.append((stage, LRSchedulersContainer(stage, functools.partial(max, 1.0)), factors))
    saved = copy.deepcopy(stages[saver][1].state_dict())
    for stage, schedulers, factors in stages:
        state = copy.deepcopy(stage.state_dict())
        for group in stage.param_groups:
            group["initial_lr"] = 7.0  # of another configuration
        if optimizers_first:
            stage.load_state_dict(state)
        schedulers.load_state_dict(saved)
        if not optimizers_first:
            stage.load_state_dict(state)
        expected = [BASE_LR * factor for factor in factors]
        assert schedulers.state_dict()["base_lrs"] == expected
        assert [group["lr"] for group in stage.param_groups] == expected


def test_a_schedule_may_be_built_after_the_optimizers_are_loaded(parts, train):
    def make(modules):
        return OptimizersContainer(
            modules, FusedAdamW, {"lr": BASE_LR}, lr_multipliers={"bias": 0.5}
        )

    container = make(parts)
    schedulers = LRSchedulersContainer(container, lambda step: 0.5**step)
    run(container, schedulers, parts, train, range(3))
    resumed = make(copy.deepcopy(parts))
    resumed.load_state_dict(container.state_dict())
    later = LRSchedulersContainer(resumed, lambda step: 0.5**step)
    later.load_state_dict(schedulers.state_dict())
    for _ in range(2):
        assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in container.param_groups]
        schedulers.step()
        later.step()


def test_a_common_base_lr_comes_from_the_dict(parts, train):
    container, schedulers = make(parts, lrs=(0.5, 0.5))
    run(container, schedulers, parts, train, range(3))
    saved = schedulers.state_dict()
    resumed_container, resumed = make(copy.deepcopy(parts), lrs=(0.125, 0.125))
    resumed.load_state_dict(saved)
    assert [scheduler.base_lrs for scheduler in resumed] == [[0.5], [0.5]]
    assert resumed_container.param_groups[1]["lr"] == container.param_groups[1]["lr"]
    resumed.schedulers[0].base_lrs[0] = 7.0
    assert resumed.schedulers[1].base_lrs == saved["base_lrs"] == [0.5]


def test_another_number_of_parts_can_load_it(parts, model, train):
    container, schedulers = make(parts)
    run(container, schedulers, parts, train, range(3))
    single = OptimizersContainer([model], FusedAdamW, {"lr": BASE_LR})
    resumed = first_generation(single, 20, warmup_steps=5, decay_type="sqrt")
    resumed.load_state_dict(schedulers.state_dict())
    assert single.param_groups[0]["lr"] == container.param_groups[0]["lr"]


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
    assert resumed.schedulers[0].lr_lambdas[0].factors is not saved["lr_lambdas"][0]["factors"]
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(IndexError):  # of the saved table
        resumed.load_state_dict({**saved, "last_epoch": 5})
    assert resumed.state_dict() == before
    longer = LRSchedulersContainer(optimizers, Table([1.0]))
    longer.load_state_dict({**saved, "last_epoch": 1})  # beyond the current table
    assert longer.schedulers[0].lr_lambdas[0](1) == 0.5


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


def test_a_load_that_raises_changes_nothing(optimizers):
    schedulers = LRSchedulersContainer(optimizers, lambda step: [1.0, 0.5][step])
    before = copy.deepcopy([vars(s) for s in schedulers]), copy.deepcopy(optimizers.param_groups)
    with pytest.raises(IndexError):
        schedulers.load_state_dict({"last_epoch": 7})
    with pytest.raises(ValueError, match="base_lrs is"):
        schedulers.load_state_dict({**schedulers.state_dict(), "base_lrs": ["x"]})
    counts = [(s.last_epoch, s.base_lrs, s.get_last_lr()) for s in schedulers]
    assert counts == [(v["last_epoch"], v["base_lrs"], v["_last_lr"]) for v in before[0]]
    assert [g["lr"] for g in optimizers.param_groups] == [g["lr"] for g in before[1]]


@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
def test_a_senseless_step_is_refused(optimizers, value):
    schedulers = LRSchedulersContainer(optimizers, lambda step: 0.5**step)
    before = copy.deepcopy(schedulers.state_dict())
    with pytest.raises(ValueError, match=f"last_epoch is {value!r}, expected a number of steps"):
        schedulers.load_state_dict({**before, "last_epoch": value})
    with pytest.raises(KeyError, match="last_epoch"):
        schedulers.load_state_dict({"base_lrs": [1.0]})
    assert schedulers.state_dict() == before


# Metrics


def test_metrics_name_one_lr_after_the_optimizer(optimizers):
    schedulers = LRSchedulersContainer(optimizers, lambda step: 0.5**step)
    assert schedulers.get_metrics() == {"lr/AdamW": BASE_LR}
    optimizers.step()
    schedulers.step()
    assert schedulers.get_metrics() == {"lr/AdamW": BASE_LR / 2}


def test_metrics_number_the_groups(parts):
    container = OptimizersContainer(parts, torch.optim.Adam, {"lr": BASE_LR})
    for optimizer in container:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.25})
    schedulers = LRSchedulersContainer(container, lambda step: 0.5)
    assert schedulers.get_metrics() == {"lr/Adam/0": BASE_LR / 2, "lr/Adam/1": 0.125}


def test_metrics_of_parts_that_differ(optimizers):
    optimizers.param_groups[1]["lr"] = 0.25
    schedulers = LRSchedulersContainer(optimizers, lambda step: 0.0)
    assert schedulers.get_metrics() == {"lr/AdamW/0": 0.0, "lr/AdamW/1": 0.0}
