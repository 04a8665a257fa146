"""The Adam step gives the specified bits for any input, split and layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from exact_reference import (
    DTYPES,
    adam_reference,
    double,
    format_of,
    from_bits,
    name_of,
    random_elements,
    raw,
    same_bits,
    to_bits,
)
from formulas import Adam, element
from hypothesis import given, settings
from hypothesis import strategies as st
from softfloat import Format, number
from torch import Tensor

from torchopt_ext import ops

pytestmark = pytest.mark.newest_torch

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
GRAD_FACTOR = ops.CONTROL_FIELDS.index("grad_factor")
SKIP = ops.CONTROL_FIELDS.index("skip")


def arguments(**overrides: Any) -> Adam:
    """Converts doubles to softfloat numbers."""
    defaults = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    chosen = defaults | overrides
    return Adam(**{k: x if isinstance(x, bool) else number(x) for k, x in chosen.items()})


CASES = {
    "AdamW": arguments(weight_decay=0.01),
    "no decay": arguments(),
    "Adam": arguments(weight_decay=0.1, decoupled=False),
    "maximize": arguments(weight_decay=0.01, maximize=True),
    "amsgrad": arguments(weight_decay=0.01, amsgrad=True),
    "Adam, amsgrad, maximize": arguments(
        weight_decay=0.1, decoupled=False, amsgrad=True, maximize=True
    ),
    "small betas": arguments(beta1=0.3, beta2=0.5, weight_decay=0.01),
    "zero betas": arguments(beta1=0.0, beta2=0.0, eps=0.0),
    "clipped": arguments(weight_decay=0.01, grad_factor=0.37),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@dataclass
class State:
    """The tensors of one parameter."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    vmax: Tensor | None
    step: Tensor = field(default_factory=lambda: torch.tensor(4.0))

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        vmax = None if self.vmax is None else change(self.vmax)
        moved = (change(x) for x in (self.p, self.g, self.m, self.v))
        return State(*moved, vmax, self.step.clone())

    def clone(self) -> State:
        # clone() would make tensors with gaps dense.
        return self.map(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x))

    def written(self) -> list[Tensor]:
        return [x for x in (self.p, self.m, self.v, self.vmax) if x is not None]


def random_state(dtype: torch.dtype, count: int, seed: int, amsgrad: bool) -> State:
    p = random_elements(dtype, count, seed, -20, 3, specials=True)
    g = random_elements(dtype, count, seed + 1, -30, 3, specials=True)
    m = random_elements(dtype, count, seed + 2, -30, 3, specials=True)
    v = random_elements(dtype, count, seed + 3, -60, 3, signed=False, specials=True)
    vmax = random_elements(dtype, count, seed + 4, -60, 3, signed=False, specials=True)
    return State(p, g, m, v, vmax if amsgrad else None)


def step(
    a: Adam,
    states: list[State],
    *,
    skip: bool = False,
    tensor_lr: torch.dtype | None = None,
) -> None:
    control = ops.new_control()
    control[GRAD_FACTOR] = double(a.grad_factor)
    control[SKIP] = float(skip)
    lr = double(a.lr)
    ops.adam_(
        [s.p for s in states],
        [s.g for s in states],
        [s.m for s in states],
        [s.v for s in states],
        [s.vmax for s in states if s.vmax is not None],
        [s.step for s in states],
        control,
        lr=lr if tensor_lr is None else torch.tensor(lr, dtype=tensor_lr),
        beta1=double(a.beta1),
        beta2=double(a.beta2),
        eps=double(a.eps),
        weight_decay=double(a.weight_decay),
        decoupled_weight_decay=a.decoupled,
        maximize=a.maximize,
    )


def stepped(a: Adam, state: State) -> State:
    result = state.clone()
    step(a, [result])
    return result


def assert_same(got: State, expected: State) -> None:
    for a, b in zip(got.written(), expected.written(), strict=True):
        assert same_bits(a, b)


def assert_reference(a: Adam, before: State, after: State) -> None:
    t = int(before.step.item()) + 1
    flat = before.map(lambda x: raw(x).view(x.dtype))
    expected = adam_reference(a, t, flat.p, flat.g, flat.m, flat.v, flat.vmax)
    for got, want in zip(after.written(), [x for x in expected if x is not None], strict=True):
        assert same_bits(got, want)
    assert after.step.item() == t


@by_dtype
@by_case
def test_reference_agrees_with_the_golden_program(dtype: torch.dtype, case: Adam) -> None:
    fmt = format_of(dtype)
    s = random_state(dtype, 60, 1, case.amsgrad)
    columns = [to_bits(x) for x in (s.p, s.g, s.m, s.v, s.vmax) if x is not None]
    rows = [stepped_bits(case, fmt, 5, row) for row in zip(*columns, strict=True)]
    fast = adam_reference(case, 5, s.p, s.g, s.m, s.v, s.vmax)
    for k, tensor in enumerate(tensor for tensor in fast if tensor is not None):
        assert to_bits(tensor) == [row[k] for row in rows]


def stepped_bits(case: Adam, fmt: Format, t: int, row: Sequence[int]) -> list[int]:
    """Returns the bits of parameter and states after a step from those with the gradient."""
    p, g, *states = row
    param, after = element(case, fmt, t, p, g, states)
    return [param, *after]


@by_dtype
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_bits_and_any_arguments(dtype: torch.dtype, data: st.DataObject) -> None:
    fmt = format_of(dtype)
    beta = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 0.9, 0.999]))
    positive = st.one_of(st.floats(0, 1e30), st.sampled_from([0.0, 1e-8, 1e-3, 0.1]))
    case = arguments(
        lr=data.draw(positive),
        beta1=data.draw(beta),
        beta2=data.draw(beta),
        eps=data.draw(positive),
        weight_decay=data.draw(positive),
        grad_factor=data.draw(st.one_of(st.just(1.0), st.floats())),
        decoupled=data.draw(st.booleans()),
        amsgrad=data.draw(st.booleans()),
        maximize=data.draw(st.booleans()),
    )
    t = data.draw(st.one_of(st.integers(1, 20), st.integers(1, 2**24)))
    columns = [
        data.draw(st.lists(st.integers(0, 2**fmt.width - 1), min_size=9, max_size=9))
        for _ in range(5)
    ]
    p, g, m, v, vmax = (from_bits(dtype, bits) for bits in columns)
    state = State(p, g, m, v, vmax if case.amsgrad else None, torch.tensor(float(t - 1)))
    step(case, [state])
    columns = columns if case.amsgrad else columns[:4]
    rows = [stepped_bits(case, fmt, t, row) for row in zip(*columns, strict=True)]
    for k, tensor in enumerate(state.written()):
        assert to_bits(tensor) == [row[k] for row in rows]
    assert state.step.item() == t


@by_dtype
@by_case
def test_many_elements(dtype: torch.dtype, case: Adam) -> None:
    before = random_state(dtype, 20_011, 2, case.amsgrad)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        after = stepped(case, before)
        assert_reference(case, before, after)


@by_dtype
def test_every_length_and_offset(dtype: torch.dtype) -> None:
    case = CASES["amsgrad"]
    before = random_state(dtype, 200, 3, amsgrad=True)
    whole = stepped(case, before)
    for n in range(1, 140):
        offset = n % 17
        part = before.clone()
        view = part.map(lambda x, a=offset, b=offset + n: x[a:b])
        step(case, [view])
        assert_same(view, whole.map(lambda x, a=offset, b=offset + n: x[a:b]))
        # Elements around the view stay unchanged.
        for got, was in zip(part.written(), before.written(), strict=True):
            assert same_bits(got[:offset], was[:offset])
            assert same_bits(got[offset + n :], was[offset + n :])


@by_dtype
def test_splits_and_order_of_tensors(dtype: torch.dtype) -> None:
    case = CASES["AdamW"]
    before = random_state(dtype, 30_000, 5, amsgrad=False)
    whole = stepped(case, before)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (1, 64, 333, 4096, 20_001):
            after = before.clone()
            count = 3000 if size == 1 else 30_000
            head = after.map(lambda x, n=count: x[:n])
            parts = [
                head.map(lambda x, a=start, n=size: x[a : a + n]) for start in range(0, count, size)
            ]
            step(case, parts[::-1])
            assert_same(head, whole.map(lambda x, n=count: x[:n]))


STRIDES = {
    "channels_last": ((4, 6, 10, 10), (600, 1, 60, 6)),
    "transposed": ((60, 40), (1, 60)),
    "permuted with ones": ((3, 1, 40, 20), (800, 5, 1, 40)),
    "3-d reversed": ((20, 10, 12), (1, 20, 200)),
}


@by_dtype
@pytest.mark.parametrize("layout", STRIDES.values(), ids=STRIDES.keys())
def test_dense_strides(dtype: torch.dtype, layout: tuple[tuple[int, ...], ...]) -> None:
    shape, strides = layout
    for case in (CASES["AdamW"], CASES["amsgrad"]):
        flat = random_state(dtype, 2400, 6, case.amsgrad)
        state = flat.map(lambda x: x.clone().as_strided(shape, strides))
        step(case, [state])
        assert_reference(case, flat, state)


@by_dtype
def test_gradient_with_other_strides(dtype: torch.dtype) -> None:
    case = CASES["AdamW"]
    flat = random_state(dtype, 2400, 7, amsgrad=False)
    square = flat.map(lambda x: x.view(60, 40))
    expected = stepped(case, square)
    wide = torch.zeros(60, 100, dtype=dtype)
    wide[:, 10:50] = square.g
    for gradient in (square.g.t().contiguous().t(), wide[:, 10:50]):
        assert gradient.stride() != square.g.stride()
        state = replace(square.clone(), g=gradient)
        before = raw(gradient.contiguous())
        step(case, [state])
        assert_same(state, expected)
        assert torch.equal(raw(gradient.contiguous()), before)
    # A gradient that repeats one element.
    ones = replace(square.clone(), g=torch.ones((), dtype=dtype).expand(60, 40))
    step(case, [ones])
    assert_same(ones, stepped(case, replace(square, g=torch.ones(60, 40, dtype=dtype))))


@by_dtype
@by_case
def test_zero_dimensional_tensors(dtype: torch.dtype, case: Adam) -> None:
    flat = random_state(dtype, 1, 8, case.amsgrad)
    scalar = flat.map(lambda x: x.clone().view(()))
    step(case, [scalar])
    assert_reference(case, flat, scalar)


@by_dtype
def test_empty_tensors_and_lists(dtype: torch.dtype) -> None:
    case = CASES["AdamW"]
    flat = random_state(dtype, 10, 8, amsgrad=False)
    states = [flat.map(lambda x, n=n: x.new_empty(n)) for n in ((3, 0), (0,), (10,))]
    states[2] = flat.clone()
    step(case, states)
    assert_reference(case, flat, states[2])
    assert [s.step.item() for s in states] == [5, 5, 5]  # every tensor advances, as in torch
    step(case, [])


@pytest.mark.parametrize("param_dtype", [d for d in DTYPES if d != torch.float64], ids=name_of)
@pytest.mark.parametrize("state_dtype", [d for d in DTYPES if d != torch.float64], ids=name_of)
@by_case
def test_state_of_another_type(
    param_dtype: torch.dtype, state_dtype: torch.dtype, case: Adam
) -> None:
    params = random_state(param_dtype, 1500, 20, case.amsgrad)
    states = random_state(state_dtype, 1500, 21, case.amsgrad)
    before = replace(params, m=states.m, v=states.v, vmax=states.vmax)
    after = before.clone()
    step(case, [after])
    assert_reference(case, before, after)


def test_mixed_dtypes_in_one_call() -> None:
    case = CASES["amsgrad"]
    before = [random_state(dtype, 777, 9, amsgrad=True) for dtype in DTYPES]
    after = [s.clone() for s in before]
    step(case, after)
    for old, new in zip(before, after, strict=True):
        assert_reference(case, old, new)


@by_dtype
def test_each_tensor_has_its_own_step_count(dtype: torch.dtype) -> None:
    case = CASES["AdamW"]
    counts = [0, 1, 7, 99, 12_345, 2**24 - 2]
    before = [
        replace(random_state(dtype, 50, 10 + k, amsgrad=False), step=torch.tensor(float(t)))
        for k, t in enumerate(counts)
    ]
    after = [s.clone() for s in before]
    step(case, after)
    for old, new in zip(before, after, strict=True):
        assert_reference(case, old, new)


@by_dtype
@by_case
@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=name_of)
def test_learning_rate_in_a_tensor(dtype: torch.dtype, case: Adam, lr_dtype: torch.dtype) -> None:
    case = replace(case, lr=number(2.0**-9))  # exact in both types
    before = random_state(dtype, 300, 11, case.amsgrad)
    state = before.clone()
    step(case, [state], tensor_lr=lr_dtype)
    assert_same(state, stepped(case, before))


@by_dtype
@by_case
def test_skipped_step_changes_nothing(dtype: torch.dtype, case: Adam) -> None:
    before = random_state(dtype, 5000, 12, case.amsgrad)
    for tensor_lr in (None, torch.float32):
        state = before.clone()
        step(case, [state], skip=True, tensor_lr=tensor_lr)
        assert_same(state, before)  # NaN payloads included
        assert same_bits(state.g, before.g)
        assert state.step.item() == before.step.item()


@by_dtype
def test_first_step_of_zero_moments_has_unit_update(dtype: torch.dtype) -> None:
    """Checks without the formulas: the first update has size lr, whatever the gradient."""
    g = torch.tensor([1.0, -2.0, 0.25, -0.125], dtype=dtype)
    zeros = torch.zeros(4, dtype=dtype)
    state = State(zeros.clone(), g, zeros.clone(), zeros.clone(), None, torch.tensor(0.0))
    step(arguments(lr=0.5, eps=0.0), [state])
    torch.testing.assert_close(state.p, -0.5 * g.sign(), rtol=1e-6, atol=0)
    assert math.isclose(state.step.item(), 1)
