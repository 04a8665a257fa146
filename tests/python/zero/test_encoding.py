"""State as JSON: decoding returns what was encoded."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compare import assert_same
from torchopt_ext.zero.exchange import decode, encode

WHERE = "state of parameter 3"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**60, max_value=2**200)
    | st.floats(allow_nan=False)  # which is no key
    | st.text(st.characters(exclude_categories=()))  # including surrogates
)
KEYS = st.recursive(SCALARS, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
DEVICES = st.sampled_from(["cpu", "cuda", "cuda:3", "meta"]).map(torch.device)
TENSORS = st.integers(0, 3).map(lambda number: torch.full((2,), number))
LEAVES = SCALARS | st.just(math.nan) | st.complex_numbers() | DTYPES | DEVICES | TENSORS
VALUES = st.recursive(
    LEAVES,
    lambda v: st.lists(v) | st.lists(v).map(tuple) | st.dictionaries(KEYS, v, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_comes_back_is_what_went_in(value: Any) -> None:
    text, tensors = encode(value, WHERE)
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    assert_same(decode(text, tensors), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.Size([2, 3]), (2, 3)),
        (OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
        (defaultdict(list, {"a": [1]}), {"a": [1]}),
    ],
)
def test_near_relatives_of_tuple_and_dict(value: Any, expected: Any) -> None:
    assert_same(decode(encode(value, WHERE)[0], ()), expected)


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: None, "function"),
        (torch.nn.Module, "type"),
        (np.ones(2), "ndarray"),
        (np.float64(1.0), "float64"),
        (Color.RED, "Color"),
        (Point(1, 2), "Point"),
        (Counter(a=1), "Counter"),
        (object(), "object"),
        (range(3), "range"),
        (torch.Generator(), "Generator"),
    ],
)
def test_anything_else_is_named(value: Any, name: str) -> None:
    with pytest.raises(TypeError) as caught:
        encode({"hook": [0, (value,)]}, WHERE)
    assert str(caught.value) == (
        f"state of parameter 3: cannot send a {name}; state may hold tensors, numbers, strings, "
        f"lists, tuples, dicts"
    )
