"""Master weights and remainders: conversions, writes from outside, and values at the edges.

test_every_way.py has the bits of their steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdamW, FusedMuon

from ...support.compare import assert_same_bits, bits, snapshot
from ...support.oracle import floats, is_upper_tie, join, split, split8, words
from ...support.problems import copy_params, make_params, set_gradients, train
from ...support.ways import BF16, FP16, FP32, FP64, MASTER_ENTRY, hybrid

SHAPES = ((3, 4), (7,), (), (2, 1030))
REMAINDERS = {"remainder": split, "remainder8": split8}
each_kind = pytest.mark.parametrize("kind", MASTER_ENTRY)
each_remainder = pytest.mark.parametrize("kind", REMAINDERS)
each_16_bit = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)

# ---- every low half ----------------------------------------------------------------------------

# Zero, denormals, both parities, values around 1, the largest finite numbers; both signs.
HIGHS = (0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F)


def every_low_half() -> np.ndarray:
    highs = np.array([*HIGHS, *(h | 0x8000 for h in HIGHS)], np.uint64)
    return (highs[:, None] << np.uint64(16) | np.arange(2**16, dtype=np.uint64)).flatten()


def loaded_and_left_alone(
    dtype: torch.dtype, saved_entry: dict[str, Tensor], weight: Tensor, kind: str
) -> tuple[nn.Parameter, dict[str, Tensor]]:
    """Loads the entry and runs a step that rounds all values in the kernel but changes none."""
    p = nn.Parameter(weight.to(dtype, copy=True))
    optimizer = FusedAdamW([p], lr=0.0, weight_decay=0.0, master_weights=kind)
    saved = optimizer.state_dict()
    zeros = torch.zeros(p.shape)
    moments = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    saved["state"] = {0: {**moments, **saved_entry}}
    optimizer.load_state_dict(saved)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return p, optimizer.state[p]


def test_fp32_to_remainder_and_back_over_every_low_half() -> None:
    """Master to remainder changes ties only, by one float; the way back changes nothing."""
    values = every_low_half()
    master = floats(values)
    p, state = loaded_and_left_alone(BF16, {"master_weight": master}, master, "remainder")
    assert "master_weight" not in state
    weight, remainder = split(values)
    assert (words(p) == weight).all()
    assert (state["remainder"].numpy().astype(np.int64) == remainder).all()
    assert remainder.max() == 0x7FFF  # 0x8000 would not fit, which is the tie that moves
    assert_same_bits([p], [master.bfloat16()])  # the cast of the exact value, ties included

    q, back = loaded_and_left_alone(BF16, {"remainder": state["remainder"]}, p.detach(), "fp32")
    assert "remainder" not in back
    tie = is_upper_tie(values)
    assert tie.sum() > 0
    assert (words(back["master_weight"]) == values - tie.astype(np.uint64)).all()
    assert_same_bits([q], [p])
    entry = {"master_weight": back["master_weight"]}
    _, again = loaded_and_left_alone(BF16, entry, q.detach(), "remainder")
    assert_same_bits([again["remainder"]], [state["remainder"]])


@pytest.mark.parametrize("source", [None, "fp32", "remainder", "remainder8"])
def test_to_an_8_bit_remainder_and_on_over_every_low_half(source: str | None) -> None:
    """The pair is the nearest to its source and keeps the parameter; more loads lose nothing."""
    values = every_low_half()
    master = floats(values)
    entries: dict[str | None, dict[str, Tensor]] = {
        None: {},
        "fp32": {"master_weight": master},
        "remainder": {"remainder": torch.from_numpy(split(values)[1]).to(torch.int16)},
        "remainder8": {"remainder8": torch.from_numpy(split8(values)[1]).to(torch.int8)},
    }
    weight, remainder = split8(values)
    p, state = loaded_and_left_alone(BF16, entries[source], master, "remainder8")
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "remainder8"}
    assert_same_bits([p], [master.bfloat16()])
    assert (words(p) == weight).all()
    actual = state["remainder8"].numpy().astype(np.int64)
    assert (actual == (0 if source is None else remainder)).all()
    for kind, entry in MASTER_ENTRY.items():
        held = {"remainder8": state["remainder8"]}
        q, other = loaded_and_left_alone(BF16, held, p.detach(), kind)
        exact = words(other[entry]) if kind == "fp32" else join(q, other[entry])
        assert (exact == join(p, state["remainder8"])).all()
        _, again = loaded_and_left_alone(BF16, {entry: other[entry]}, q.detach(), "remainder8")
        assert_same_bits([q, again["remainder8"]], [p, state["remainder8"]])


@each_16_bit
def test_parameter_is_the_cast_of_the_master(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (2**18,), generator=generator).to(torch.int32)
    # Ties of fp16, its denormals, and the edge of its range.
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    values = torch.cat([floats(every_low_half()), anything.view(torch.float32), halves,
                        halves * (1 + 2.0**-11), torch.tensor([65519.0, 65520.0])])  # fmt: skip
    values = values[values.isfinite()]
    p, state = loaded_and_left_alone(dtype, {"master_weight": values}, values, "fp32")
    assert_same_bits([state["master_weight"]], [values])
    assert_same_bits([p], [values.to(dtype)])


@pytest.mark.parametrize(
    ("dtype", "kind"), [(BF16, "fp32"), (FP16, "fp32"), *((BF16, kind) for kind in REMAINDERS)]
)
def test_specials_stay_what_they_are(dtype: torch.dtype, kind: str) -> None:
    """NaNs become the canonical NaN. Infinities and both zeros stay."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    odd_nans = torch.tensor([0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    master = torch.cat([values, odd_nans])
    start = torch.cat([values, torch.full((3,), math.nan)]).to(dtype)
    entry = {"master_weight": master} if kind == "fp32" else {}
    p, state = loaded_and_left_alone(dtype, entry, start, kind)
    nan = torch.tensor([math.nan], dtype=dtype)
    assert_same_bits([p], [torch.where(start.isnan(), nan, start)])
    if kind == "fp32":
        quiet = torch.tensor([math.nan])
        assert_same_bits([state["master_weight"]], [torch.where(master.isnan(), quiet, master)])
    else:
        assert not state[kind].any()


# ---- refresh_masters, replaced entries ---------------------------------------------------------


def stepped(
    kind: str | None, dtype: torch.dtype = BF16, cls: Any = FusedAdamW, **kwargs: Any
) -> tuple[Any, Any]:
    """Returns parameters and an optimizer after two steps, of FusedMuon one with other groups."""
    if cls is FusedMuon:
        params, optimizer = hybrid(dtype=dtype, master_weights=kind, **kwargs)
    else:
        params = make_params(SHAPES, dtype)
        optimizer = cls(params, lr=0.02, master_weights=kind, **kwargs)
    train(optimizer, range(2))
    return params, optimizer


def assert_next_step_is_of(params: Any, optimizer: Any, weight: Callable[[Any], Tensor]) -> None:
    """Asserts that the next step is a float32 step from these weights."""
    wide = [nn.Parameter(weight(p).clone()) for p in params]
    cls = type(optimizer)
    twin = hybrid(wide)[1] if cls is FusedMuon else cls(wide, lr=0.02)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        for name in MASTER_ENTRY.values():
            entry.pop(name, None)
    twin.load_state_dict(saved)
    set_gradients(params, seed=9)
    for p, w in zip(params, wide, strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    twin.step()
    assert_same_bits(params, [w.detach().to(p.dtype) for p, w in zip(params, wide, strict=True)])


@each_kind
@pytest.mark.parametrize("cls", [FusedAdamW, FusedMuon])
def test_refresh_masters(kind: str, cls: Any) -> None:
    """Weights changed from outside count in masters at once, and remainders become 0."""
    params, optimizer = stepped(kind, cls=cls)
    before = [bits(optimizer.state[p][MASTER_ENTRY[kind]]) for p in params]
    with torch.no_grad():
        for p in params:
            p.mul_(1.5)
    optimizer.refresh_masters()
    held = [optimizer.state[p][MASTER_ENTRY[kind]] for p in params]
    assert [bits(t) for t in held] != before
    for p, t in zip(params, held, strict=True):
        assert t.equal(p.detach().float()) if kind == "fp32" else not t.any()
    assert_next_step_is_of(params, optimizer, lambda p: p.detach().float())


@each_remainder
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_parameters_that_a_mask_set_to_zero_go_on_from_zero(kind: str, zero: float) -> None:
    """A negative remainder of a zero is ignored, since the joined bits would be a NaN."""
    params, optimizer = stepped(kind)
    masks = [torch.rand(param.shape) < 0.5 for param in params]
    for param, mask in zip(params, masks, strict=True):
        param.data.masked_fill_(mask, zero)
        assert mask.numel() < 100 or (optimizer.state[param][kind][mask] < 0).any()
    twin, others = copy.deepcopy((optimizer, params))
    for param, mask in zip(others, masks, strict=True):
        remainder = twin.state[param][kind]
        remainder[mask] = remainder[mask].clamp(min=0)
    for each in (optimizer, twin):
        train(each, [7])
    assert not any(param.isnan().any() for param in params)
    assert snapshot(optimizer) == snapshot(twin)


@each_kind
@pytest.mark.parametrize("how", ["entry", "data", "in place"])
def test_a_replaced_master_is_noticed(how: str, kind: str) -> None:
    params, optimizer = stepped(kind)
    held = {p: optimizer.state[p][MASTER_ENTRY[kind]] for p in params}
    other = {p: t * 1.25 if kind == "fp32" else -t.clamp(min=-127) for p, t in held.items()}
    exact = {p: t if kind == "fp32" else floats(join(p, t)).view_as(p) for p, t in other.items()}
    for p, master in other.items():
        if how == "entry":
            optimizer.state[p][MASTER_ENTRY[kind]] = master
        elif how == "data":
            held[p].data = master
        else:
            held[p].copy_(master)
    assert_next_step_is_of(params, optimizer, exact.__getitem__)


def test_of_two_entries_the_one_that_is_used_stays() -> None:
    params, optimizer = stepped("fp32")
    optimizer.state[params[0]]["remainder"] = torch.zeros(3, 4, dtype=torch.int16)
    train(optimizer, [2])
    assert "remainder" not in optimizer.state[params[0]]


def test_parameters_of_other_dtypes_have_no_master() -> None:
    params = [p for dtype in (BF16, FP32, FP64) for p in make_params(SHAPES[:2], dtype)]
    optimizer, plain = FusedAdamW(params, master_weights="fp32"), FusedAdamW(copy_params(params))
    for each in (optimizer, plain):
        train(each, range(3))
    for p, q in zip(params[2:], plain.param_groups[0]["params"][2:], strict=True):
        assert_same_bits([p], [q])
        assert optimizer.state[p].keys() == plain.state[q].keys()
    assert "master_weight" in optimizer.state[params[0]]


def test_a_master_is_converted_by_a_step_and_not_by_looking() -> None:
    params, saved = stepped("fp32")
    others = [nn.Parameter(torch.full_like(p, 3.0)) for p in params]  # the model is loaded later
    optimizer = FusedAdamW(others, lr=0.02, master_weights="remainder")
    optimizer.load_state_dict(saved.state_dict())
    optimizer.init_state()
    assert all(q.eq(3).all() for q in others)
    assert set(optimizer.state_dict()["state"][0]) >= {"master_weight"}
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p)
    for each in (saved, optimizer):
        train(each, [5])
    assert_same_bits(others, params)
    assert "master_weight" not in optimizer.state[others[0]]


def test_a_spawned_process_takes_an_optimizer_that_has_stepped() -> None:
    """torch.multiprocessing's process opens shared tensors after they were pickled."""
    _, optimizer = stepped(None, FP32)
    process = torch.multiprocessing.get_context("spawn").Process(target=len, args=([optimizer],))
    process.start()
    process.join(60)
    assert process.exitcode == 0
