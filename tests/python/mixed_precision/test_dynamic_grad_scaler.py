"""DynamicGradScaler: its interface, and how the scale moves under random settings.

test_scale_sequences.py compares with other projects' sequences.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchopt_ext.mixed_precision import DynamicGradScaler

from .plain_reference import ReferenceScaler, float32

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


# ---- random configurations -----------------------------------------------------------------------


def exactly(low: float, high: float, **kwargs: Any) -> st.SearchStrategy[float]:
    """Draws numbers that float32 can hold, so that one rounding decides a product."""
    return st.floats(float32(low), float32(high), width=32, **kwargs)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    initial = draw(exactly(2.0**-10, 2.0**30))
    largest = draw(st.one_of(st.sampled_from([None, 0, 0.0]), exactly(initial, 2.0**40)))
    smallest = draw(st.one_of(st.sampled_from([None, 0, 0.0]), exactly(2.0**-30, initial)))
    dtype = draw(st.sampled_from([FP16, BF16, FP32]))
    limits: dict[str, Any] = {"exclude_min": True} if dtype == FP16 else {}
    top: dict[str, Any] = {"exclude_max": True} if dtype == FP16 else {}
    return {
        "initial_scale": initial,
        "growth_factor": draw(exactly(1.0, 4.0, **limits)),
        "backoff_factor": draw(exactly(0.125, 1.0, **top)),
        "growth_interval": draw(st.integers(1, 5)),
        "min_scale": smallest,
        "max_scale": largest,
        "hysteresis": draw(st.integers(0, 4)),
        "dtype": dtype,
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(configurations(), st.lists(st.booleans(), max_size=25), st.booleans())
def test_random_sequences(config: dict[str, Any], sequence: list[bool], tensors: bool) -> None:
    """Scale and both counters match after every update, for flags as bools and as tensors."""
    scaler, plain = DynamicGradScaler(**config), ReferenceScaler(**config)
    assert scaler.state_dict() == plain.state_dict()
    for overflow in sequence:
        scaler.update(torch.tensor(overflow) if tensors else overflow)
        plain.update(overflow)
        assert scaler.state_dict() == plain.state_dict()
        assert float(scaler.scale) == plain.scale


@settings(max_examples=40, deadline=None, derandomize=True)
@given(configurations(), st.lists(st.booleans(), max_size=12), st.lists(st.booleans(), min_size=8))
def test_a_loaded_scaler_goes_on(
    config: dict[str, Any], sequence: list[bool], rest: list[bool]
) -> None:
    """State dicts move between ours and the reference, without the configuration."""
    scaler, plain = DynamicGradScaler(**config), ReferenceScaler(**config)
    for overflow in sequence:
        scaler.update(overflow)
        plain.update(overflow)
    later = DynamicGradScaler(**config)
    later.load_state_dict(plain.state_dict())
    back = ReferenceScaler(**config)
    back.load_state_dict(scaler.state_dict())
    for overflow in rest[:8]:
        for each in (scaler, plain, later, back):
            each.update(overflow)
        assert later.state_dict() == scaler.state_dict() == back.state_dict() == plain.state_dict()


# ---- limits, defaults, arguments -----------------------------------------------------------------


def test_defaults() -> None:
    scaler = DynamicGradScaler()
    assert scaler.state_dict() == {"_scale": 2.0**16, "_growth_step": 0, "_hysteresis_step": 0}
    assert [type(value) for value in scaler.state_dict().values()] == [float, int, int]
    plain = ReferenceScaler()
    for overflow in [False] * 999 + [True] + [False] * 1001 + [True] * 20:
        scaler.update(overflow)
        plain.update(overflow)
        assert float(scaler.scale) == plain.scale
    assert float(scaler.scale) == 1.0  # and not lower
    for _ in range(30 * 1000):
        plain.update(False)
    assert plain.scale == 2.0**24
    scaler.load_state_dict({"_scale": 2.0**24, "_growth_step": 999, "_hysteresis_step": 0})
    scaler.update(False)
    assert float(scaler.scale) == 2.0**24  # and not higher


def test_scale_and_its_inverse() -> None:
    """The scale is one lasting float32 tensor of one element; its inverse goes through double."""
    scaler = DynamicGradScaler(3.0, growth_factor=1.7, growth_interval=1, max_scale=None)
    scale = scaler.scale
    assert scale.shape == (1,) and scale.dtype == torch.float32
    for _ in range(20):
        scaler.update(False)
        assert float(scale) == float(scaler.scale)
        assert float(scaler.inv_scale) == float32(1.0 / float(scale))
        assert scaler.inv_scale.dtype == torch.float32
    scaler.load_state_dict({"_scale": 5.0, "_growth_step": 0, "_hysteresis_step": 0})
    assert float(scale) == 5.0


@pytest.mark.parametrize(
    "told",
    [
        lambda flag: flag,
        lambda flag: torch.tensor(flag),
        lambda flag: torch.tensor([flag]),
        lambda flag: torch.tensor(float(flag)),
        lambda flag: torch.tensor([float(flag)], dtype=torch.float64),
        lambda flag: torch.tensor(int(flag), dtype=torch.uint8),
        lambda flag: torch.tensor(3.0 * flag),
    ],
    ids=["bool", "bool tensor", "of one element", "float32", "float64", "uint8", "count of ranks"],
)
def test_kinds_of_flags(told: Any) -> None:
    """Flags may be bools, found_inf tensors or all-reduced bytes, and counts of ranks."""
    scaler, plain = (
        make(2.0**8, growth_interval=2) for make in (DynamicGradScaler, ReferenceScaler)
    )
    for overflow in (True, True, False, False, False, True, False):
        flag = told(overflow)
        kept = copy.deepcopy(flag)
        scaler.update(flag)
        plain.update(overflow)
        assert scaler.state_dict() == plain.state_dict()
        assert flag == kept


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (FP16, {"growth_factor": 1.0}),
        (FP16, {"growth_factor": 0.5}),
        (FP16, {"backoff_factor": 1.0}),
        (FP16, {"backoff_factor": 0.0}),
        (FP16, {"backoff_factor": -0.5}),
        (FP16, {"backoff_factor": 2.0}),
        (BF16, {"growth_factor": 0.5}),
        (BF16, {"backoff_factor": 0.0}),
        (BF16, {"backoff_factor": 1.5}),
        (FP32, {"growth_factor": 0.5}),
        (FP32, {"backoff_factor": 1.5}),
        (BF16, {"initial_scale": 1e-50}),
        (BF16, {"growth_interval": float("nan")}),
        (BF16, {"hysteresis": float("nan")}),
    ],
    ids=str,
)
def test_refused_arguments(dtype: torch.dtype, wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError if dtype == FP16 else (AssertionError, ValueError)):
        DynamicGradScaler(**wrong, dtype=dtype)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_by_themselves(how: str) -> None:
    scaler = DynamicGradScaler(2.0**8, growth_interval=2)
    for overflow in (True, False):
        scaler.update(overflow)
    other = pickle.loads(pickle.dumps(scaler)) if how == "pickle" else copy.deepcopy(scaler)
    before = scaler.state_dict()
    assert other.state_dict() == before
    traces = []
    for each in (other, scaler):
        trace = []
        for overflow in (False, True, True, True, False, False):
            each.update(overflow)
            trace.append(each.state_dict())
        traces.append(trace)
        if each is other:
            assert scaler.state_dict() == before
    assert traces[0] == traces[1]
    assert traces[0][-1] != before


@pytest.mark.parametrize("key", ["_scale", "_growth_step", "_hysteresis_step"])
@pytest.mark.parametrize("value", [None, float("inf"), float("nan"), -1.0])
def test_a_state_dict_that_lacks_an_entry_or_is_out_of_range(key: str, value: Any) -> None:
    scaler = DynamicGradScaler(2.0**8)
    scaler.update(True)
    before = scaler.state_dict()
    given = {"_scale": 2.0, "_growth_step": 7, "_hysteresis_step": 8, key: value}
    with pytest.raises(ValueError, match=key):
        scaler.load_state_dict({k: v for k, v in given.items() if v is not None})
    assert scaler.state_dict() == before
