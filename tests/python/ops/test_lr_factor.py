"""The learning-rate factor matches the oracle, in Python doubles, and mpmath."""

from __future__ import annotations

import sys
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext import ops

from ...support.oracle import cospi, lr_factor

KINDS = ("linear", "sqrt", "cosine")


schedules = st.fixed_dictionaries(
    {
        "warmup_steps": st.integers(0, 10_000),
        "stable_steps": st.integers(0, 10_000),
        "decay_steps": st.integers(0, 100_000),
        "decay_type": st.sampled_from(KINDS),
        "min_factor": st.one_of(st.just(0.0), st.floats(0, 1)),
        "generation": st.sampled_from([1, 2]),
    }
)


@given(schedules, st.lists(st.integers(0, 200_000), min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_values(schedule: dict[str, Any], steps: list[int]) -> None:
    warmup, stable = schedule["warmup_steps"], schedule["stable_steps"]
    length = warmup + stable + schedule["decay_steps"]
    corners = [warmup - 1, warmup, warmup + stable - 1, warmup + stable, length - 1, length]
    steps += [s for s in corners if s >= 0]
    expected = [lr_factor(s, **schedule) for s in steps]
    got = [ops.lr_factor(s, **schedule) for s in steps]
    assert all(isinstance(x, float) for x in got)
    assert got == expected
    tensor = ops.lr_factor(torch.tensor(steps), **schedule)
    assert tensor.dtype == torch.float64
    assert tensor.tolist() == expected


def test_defaults_are_linear_to_zero_of_generation_1() -> None:
    got = [ops.lr_factor(s, warmup_steps=2, stable_steps=1, decay_steps=3) for s in range(7)]
    assert got == [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_tensor_keeps_the_shape() -> None:
    schedule = {"warmup_steps": 3, "stable_steps": 0, "decay_steps": 9}
    steps = torch.arange(12).view(3, 4).t()
    got = ops.lr_factor(steps, **schedule)
    assert got.shape == (4, 3)
    assert got.tolist() == [[ops.lr_factor(s, **schedule) for s in row] for row in steps.tolist()]
    assert ops.lr_factor(torch.tensor(1), **schedule).shape == ()
    assert ops.lr_factor(torch.empty(0, 2, dtype=torch.int64), **schedule).shape == (0, 2)


def test_cosine_is_accurate_and_symmetric() -> None:
    """With min_factor 0 and generation 2, 2 f - 1 is cospi(progress). The roundings of 1 + cospi
    and of 0.5 * (...) add up to 2**-53."""
    n = 20_000
    schedule = {"warmup_steps": 0, "stable_steps": 0, "decay_steps": n, "decay_type": "cosine"}
    factors = ops.lr_factor(torch.arange(n), **schedule, generation=2).tolist()
    with mpmath.workprec(100):
        for step in range(0, n, 7):
            exact = mpmath.cospi(mpmath.mpf((step + 1) / n))
            assert abs(mpmath.mpf(cospi((step + 1) / n)) - exact) < 1e-15
            assert abs(mpmath.mpf(factors[step]) - (1 + exact) / 2) < 1e-15
    assert factors[n // 2 - 1] == 0.5
    assert factors[-1] == 0.0
    assert factors[n // 4 - 1] + factors[3 * n // 4 - 1] == pytest.approx(1.0, abs=2**-52)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay_type": "exponential"}, "exponential"),
        ({"generation": 3}, "generation"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"stable_steps": -2}, "stable_steps"),
        ({"decay_steps": -1}, "decay_steps"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    schedule = {"warmup_steps": 1, "stable_steps": 1, "decay_steps": 1} | change
    for step in (0, torch.tensor([0])):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ops.lr_factor(step, **schedule)


@pytest.mark.parametrize("endless", ["warmup_steps", "stable_steps", "decay_steps"])
@pytest.mark.parametrize("step", [0, 200, sys.maxsize])
def test_counts_up_to_the_largest(step: int, endless: str) -> None:
    lengths = {"warmup_steps": 100, "stable_steps": 0, "decay_steps": 0, endless: sys.maxsize}
    schedule = {**lengths, "decay_type": "linear", "min_factor": 0.0, "generation": 1}
    expected = min(lr_factor(step, **schedule), 1.0)
    assert ops.lr_factor(step, **schedule) == pytest.approx(expected, abs=1e-9)
    assert ops.lr_factor(torch.tensor([step]), **schedule).item() == ops.lr_factor(step, **schedule)


def test_bad_steps() -> None:
    schedule = {"warmup_steps": 1, "stable_steps": 1, "decay_steps": 1}
    with pytest.raises((ValueError, RuntimeError), match="step"):
        ops.lr_factor(-1, **schedule)
    with pytest.raises((ValueError, RuntimeError), match="int64"):
        ops.lr_factor(torch.tensor([0.5]), **schedule)
