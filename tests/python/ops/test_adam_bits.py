"""The Adam step gives the specified bits for any input, split and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from exact_reference import (
    DTYPES,
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
from softfloat import number
from torch import Tensor

from torchopt_ext import ops

from ...support import oracle

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
Case = dict[str, Any]


def arguments(**overrides: Any) -> Case:
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
                "decoupled_weight_decay": True, "maximize": False, "amsgrad": False}  # fmt: skip
    return {**defaults, **overrides}


CASES = {
    "AdamW": arguments(weight_decay=0.01),
    "no decay": arguments(),
    "Adam": arguments(weight_decay=0.1, decoupled_weight_decay=False),
    "maximize": arguments(weight_decay=0.01, maximize=True),
    "amsgrad": arguments(weight_decay=0.01, amsgrad=True),
    "Adam, amsgrad, maximize": arguments(
        weight_decay=0.1, decoupled_weight_decay=False, amsgrad=True, maximize=True
    ),
    "small betas": arguments(betas=(0.3, 0.5), weight_decay=0.01),
    "zero betas": arguments(betas=(0.0, 0.0), eps=0.0),
    "clipped": arguments(weight_decay=0.01, grad_factor=0.37),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@dataclass
class State:
    """The tensors of one parameter; ``states`` are the moments, and amsgrad's maximum."""

    p: Tensor
    g: Tensor
    states: list[Tensor]
    step: Tensor = field(default_factory=lambda: torch.tensor(4.0))

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        states = [change(x) for x in self.states]
        return State(change(self.p), change(self.g), states, self.step.clone())

    def clone(self) -> State:
        # clone() would make tensors with gaps dense.
        return self.map(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x))

    def written(self) -> list[Tensor]:
        return [self.p, *self.states]


def random_state(dtype: torch.dtype, count: int, seed: int, amsgrad: bool = False) -> State:
    p, g, m = (
        random_elements(dtype, count, seed + i, low, 3, specials=True)
        for i, low in enumerate((-20, -30, -30))
    )
    squares = [
        random_elements(dtype, count, seed + i, -60, 3, signed=False, specials=True)
        for i in range(3, 4 + amsgrad)
    ]
    return State(p, g, [m, *squares])


def step(case: Case, states: list[State], *, skip: bool = False, lr: Any = None) -> None:
    control = ops.new_control(grad_factor=case.get("grad_factor", 1.0), skip=float(skip))
    kept = [[s.states[i] for s in states if i < len(s.states)] for i in range(3)]
    ops.adam_(
        [s.p for s in states], [s.g for s in states], *kept, [s.step for s in states], control,
        lr=case["lr"] if lr is None else lr, beta1=case["betas"][0], beta2=case["betas"][1],
        **{k: case[k] for k in ("eps", "weight_decay", "decoupled_weight_decay", "maximize")},
    )  # fmt: skip


def stepped(case: Case, state: State) -> State:
    after = state.clone()
    step(case, [after])
    return after


def assert_same(found: State, expected: State) -> None:
    for a, b in zip(found.written(), expected.written(), strict=True):
        assert same_bits(a, b)


def assert_specified(case: Case, before: State, after: State) -> None:
    count, flat = int(before.step.item()) + 1, before.map(lambda x: raw(x).view(x.dtype))
    factor = case.get("grad_factor", 1.0)
    param, states = oracle.step("adam", case, count, flat.p, flat.g, flat.states, factor)
    for found, expected in zip(after.written(), [param, *states], strict=True):
        assert same_bits(found, expected)
    assert after.step.item() == count


@by_dtype
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_bits_and_any_arguments(dtype: torch.dtype, data: st.DataObject) -> None:
    """The operator, the oracle and the golden program agree."""
    width = format_of(dtype).width
    beta = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 0.9, 0.999]))
    positive = st.one_of(st.floats(0, 1e30), st.sampled_from([0.0, 1e-8, 1e-3, 0.1]))
    case = arguments(
        lr=data.draw(positive),
        betas=(data.draw(beta), data.draw(beta)),
        eps=data.draw(positive),
        weight_decay=data.draw(positive),
        grad_factor=data.draw(st.one_of(st.just(1.0), st.floats())),
        **{k: data.draw(st.booleans())
           for k in ("decoupled_weight_decay", "amsgrad", "maximize")},
    )  # fmt: skip
    count = data.draw(st.one_of(st.integers(1, 20), st.integers(1, 2**24)))
    bits = st.lists(st.integers(0, 2**width - 1), min_size=9, max_size=9)
    columns = [data.draw(bits) for _ in range(4 + case["amsgrad"])]
    p, g, *states = (from_bits(dtype, column) for column in columns)
    before = State(p, g, states, torch.tensor(float(count - 1)))
    assert_golden(case, dtype, columns, stepped(case, before))
    assert_specified(case, before, stepped(case, before))


@by_dtype
@by_case
def test_many_elements(dtype: torch.dtype, case: Case) -> None:
    before = random_state(dtype, 20_011, 2, case["amsgrad"])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        after = stepped(case, before)
        assert_specified(case, before, after)
    few = before.map(lambda x: x[:60])
    columns = [to_bits(x) for x in (few.p, few.g, *few.states)]
    assert_golden(case, dtype, columns, after.map(lambda x: x[:60]))


def assert_golden(case: Case, dtype: torch.dtype, columns: list[list[int]], after: State) -> None:
    beta1, beta2 = map(number, case["betas"])
    golden = Adam(
        **{k: number(case[k]) for k in ("lr", "eps", "weight_decay")}, beta1=beta1, beta2=beta2,
        grad_factor=number(case.get("grad_factor", 1.0)), maximize=case["maximize"],
        amsgrad=case["amsgrad"], decoupled=case["decoupled_weight_decay"],
    )  # fmt: skip
    count, fmt = int(after.step), format_of(dtype)
    rows = [
        element(golden, fmt, count, p, g, states) for p, g, *states in zip(*columns, strict=True)
    ]
    expected = [[p for p, _ in rows], *map(list, zip(*(s for _, s in rows), strict=True))]
    assert [to_bits(x) for x in after.written()] == expected


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
    before = random_state(dtype, 30_000, 5)
    whole = stepped(case, before)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (1, 64, 333, 4096, 20_001):
            after = before.clone()
            count = 3000 if size == 1 else 30_000
            parts = [
                after.map(lambda x, a=start, n=size, end=count: x[:end][a : a + n])
                for start in range(0, count, size)
            ]
            step(case, parts[::-1])
            assert_same(after.map(lambda x, n=count: x[:n]), whole.map(lambda x, n=count: x[:n]))


LAYOUTS = {
    "channels_last": ((4, 6, 10, 10), (600, 1, 60, 6)),
    "transposed": ((60, 40), (1, 60)),
    "permuted with ones": ((3, 1, 40, 20), (800, 5, 1, 40)),
    "3-d reversed": ((20, 10, 12), (1, 20, 200)),
    "scalar": ((), ()),
}


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("case", [CASES["AdamW"], CASES["amsgrad"]], ids=["AdamW", "amsgrad"])
def test_layouts(dtype: torch.dtype, layout: tuple[Any, Any], case: Case) -> None:
    shape, strides = layout
    flat = random_state(dtype, torch.Size(shape).numel(), 6, case["amsgrad"])
    state = flat.map(lambda x: x.clone().as_strided(shape, strides))
    step(case, [state])
    assert_specified(case, flat, state)


@by_dtype
def test_gradient_with_other_strides(dtype: torch.dtype) -> None:
    """It is read through a copy, and stays."""
    case, square = CASES["AdamW"], random_state(dtype, 2400, 7).map(lambda x: x.view(60, 40))
    wide = torch.zeros(60, 100, dtype=dtype)
    wide[:, 10:50] = square.g
    repeated = torch.ones((), dtype=dtype).expand(60, 40)
    for gradient in (square.g.t().contiguous().t(), wide[:, 10:50], repeated):
        assert gradient.stride() != square.g.stride()
        state = replace(square.clone(), g=gradient)
        before = raw(gradient.contiguous())
        step(case, [state])
        assert_same(state, stepped(case, replace(square, g=gradient.contiguous())))
        assert torch.equal(raw(gradient.contiguous()), before)


@pytest.mark.parametrize("param_dtype", [d for d in DTYPES if d != torch.float64], ids=name_of)
@pytest.mark.parametrize("state_dtype", [d for d in DTYPES if d != torch.float64], ids=name_of)
@by_case
def test_state_of_another_dtype(
    param_dtype: torch.dtype, state_dtype: torch.dtype, case: Case
) -> None:
    states = random_state(state_dtype, 1500, 21, case["amsgrad"]).states
    before = replace(random_state(param_dtype, 1500, 20), states=states)
    assert_specified(case, before, stepped(case, before))


def test_tensors_of_any_dtype_count_and_size_in_one_call() -> None:
    """Each has its own step count, and advances even if it is empty, as in torch."""
    for case in (CASES["AdamW"], CASES["amsgrad"]):
        counts = [0, 1, 7, 99, 12_345, 2**24 - 2]
        before = [
            replace(random_state(dtype, size, 10 + k, case["amsgrad"]), step=torch.tensor(float(t)))
            for k, t in enumerate(counts)
            for dtype in DTYPES
            for size in (0, 1, 777)
        ]
        after = [s.clone() for s in before]
        step(case, after)
        for old, new in zip(before, after, strict=True):
            assert_specified(case, old, new)
        step(case, [])


@by_dtype
@by_case
def test_learning_rates_in_tensors_and_skipped_steps(dtype: torch.dtype, case: Case) -> None:
    case = case | {"lr": 2.0**-9}  # exact in both dtypes
    before = random_state(dtype, 300, 11, case["amsgrad"])
    for lr in (case["lr"], *(torch.tensor(case["lr"], dtype=d) for d in DTYPES[:2])):
        state, skipped = before.clone(), before.clone()
        step(case, [state], lr=lr)
        assert_same(state, stepped(case, before))
        step(case, [skipped], skip=True, lr=lr)
        assert_same(skipped, before)  # NaN payloads included
        assert same_bits(skipped.g, before.g)
        assert skipped.step.item() == before.step.item()


@by_dtype
@by_case
def test_a_negative_learning_rate_steps_and_decays_the_other_way(
    dtype: torch.dtype, case: Case
) -> None:
    """A schedule may make it negative; the decay changes its sign with it."""
    case = case | {"lr": -1e-3}
    before = random_state(dtype, 300, 13, case["amsgrad"])
    assert_specified(case, before, stepped(case, before))


@by_dtype
def test_first_step_of_zero_moments_has_unit_update(dtype: torch.dtype) -> None:
    """Checks without the formulas: the first update has size lr, whatever the gradient."""
    g = torch.tensor([1.0, -2.0, 0.25, -0.125], dtype=dtype)
    p, m, v = (torch.zeros(4, dtype=dtype) for _ in range(3))
    state = State(p, g, [m, v], torch.tensor(0.0))
    step(arguments(lr=0.5, eps=0.0), [state])
    torch.testing.assert_close(state.p, -0.5 * g.sign(), rtol=1e-6, atol=0)
    assert state.step.item() == 1
