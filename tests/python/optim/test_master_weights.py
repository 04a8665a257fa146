"""16-bit parameters with master weights take the steps of a float32 run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from .independent import floats, is_upper_tie, join, round_to_bf16, split, split8, words
from .subject import (
    OURS,
    assert_same_bits,
    bits,
    each_class,
    make_params,
    set_gradients,
    snapshot,
)

# One element, odd sizes, more than a tile (512), and more than a chunk (32,768).
SHAPES = ((3, 4), (7,), (), (2, 1030), (1, 40_003))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLIT = {"remainder": split, "remainder8": split8}
KINDS = {"fp32": "master_weight", **{kind: kind for kind in SPLIT}}
each_remainder = pytest.mark.parametrize("kind", SPLIT)
each_16_bit = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


def gradients(
    shapes: tuple[tuple[int, ...], ...], seed: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def twins(dtype: torch.dtype, grad_dtype: torch.dtype) -> tuple[list[nn.Parameter], ...]:
    """Returns 16-bit parameters, and float32 parameters with the same values."""
    low = make_params(SHAPES, dtype)
    if grad_dtype != dtype:
        for p in low:
            p.grad_dtype = grad_dtype
    return low, [nn.Parameter(p.detach().float()) for p in low]


def give(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g


@each_16_bit
@pytest.mark.parametrize(
    ("grad32", "kwargs"),
    [
        (False, {}),
        (True, {"amsgrad": True}),
        (False, {"amsgrad": True, "maximize": True}),
        (True, {"state_dtype": BF16}),
        (False, {"state_dtype": BF16, "amsgrad": True}),
    ],
    ids=["plain", "grad32-amsgrad", "amsgrad-maximize", "grad32-bf16state", "bf16state-amsgrad"],
)
def test_fp32_master_is_the_float32_run(
    dtype: torch.dtype, grad32: bool, kwargs: dict[str, Any]
) -> None:
    """After 20 clipped steps the state has the twin's bits; the parameter is the master's cast."""
    grad_dtype = FP32 if grad32 else dtype
    low, wide = twins(dtype, grad_dtype)
    arguments = {"lr": 0.03, "weight_decay": 0.1, "max_grad_norm": 50.0, **kwargs}
    ours = OURS["AdamW"](low, master_weights="fp32", **arguments)
    twin = OURS["AdamW"](wide, **arguments)
    for step in range(20):
        grads = gradients(SHAPES, step, grad_dtype)
        give(low, grads)
        give(wide, [g.float() for g in grads])
        ours.step()
        twin.step()
        assert_same_bits(low, [w.detach().to(dtype) for w in wide])
    assert 0 < float(ours.control.clip_factor) < 1
    assert float(ours.control.grad_norm) == float(twin.control.grad_norm)
    for p, w in zip(low, wide, strict=True):
        state, other = dict(ours.state[p]), twin.state[w]
        assert_same_bits([state.pop("master_weight")], [w])
        assert state.keys() == other.keys()
        for key in state:
            assert state[key].dtype == other[key].dtype
            assert_same_bits([state[key]], [other[key]])


@each_class
@pytest.mark.parametrize("grad32", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"state_dtype": BF16, "amsgrad": True}], ids=str)
def test_remainder_is_the_float32_run_but_for_ties(
    name: str, grad32: bool, kwargs: dict[str, Any]
) -> None:
    """Elements that never reach an upper tie have the twin's bits. At every step the weight is the
    pair's nearest even. Ties are certain to occur: about one in 2**17 element steps."""
    grad_dtype = FP32 if grad32 else BF16
    low, wide = twins(BF16, grad_dtype)
    arguments = {"lr": 0.03, "weight_decay": 0.1, "max_grad_norm": 50.0, **kwargs}
    ours = OURS[name](low, master_weights="remainder", **arguments)
    twin = OURS[name](wide, **arguments)
    nudged = [np.zeros(p.numel(), bool) for p in low]
    for step in range(50):
        grads = gradients(SHAPES, step, grad_dtype)
        give(low, grads)
        give(wide, [g.float() for g in grads])
        ours.step()
        twin.step()
        for i, (p, w) in enumerate(zip(low, wide, strict=True)):
            remainder = ours.state[p]["remainder"]
            assert remainder.dtype == torch.int16
            nudged[i] |= is_upper_tie(words(w))
            pair, untouched = join(p, remainder), ~nudged[i]
            assert (words(p) == round_to_bf16(pair)).all()
            assert (pair[untouched] == words(w)[untouched]).all()
    assert sum(n.sum() for n in nudged) > 0
    for p, w, moved in zip(low, wide, nudged, strict=True):
        for key in ours.state[p].keys() - {"remainder", "step"}:
            mine, theirs = words(ours.state[p][key]), words(twin.state[w][key])
            if name == "AdamW":  # Adam's moments see the weight through its decay
                assert (mine == theirs).all()
            else:
                assert (mine[~moved] == theirs[~moved]).all()


@each_remainder
def test_a_step_splits_what_it_arrives_at_as_documented(kind: str) -> None:
    """A step splits its float32 result as documented, ties included."""
    low = make_params(SHAPES, BF16)
    ours = OURS["AdamW"](low, lr=0.03, master_weights=kind)
    ties = 0
    for step in range(25):
        set_gradients(low, seed=step)
        ours.init_state()
        wide = [nn.Parameter(floats(join(p, ours.state[p][kind])).view_as(p)) for p in low]
        twin = OURS["AdamW"](wide, lr=0.03)
        saved = ours.state_dict()
        plain = {k: {n: t for n, t in s.items() if n != kind} for k, s in
                 saved["state"].items()}  # fmt: skip
        twin.load_state_dict({**saved, "state": plain})
        give(wide, [p.grad.float() for p in low])
        ours.step()
        twin.step()
        for p, w in zip(low, wide, strict=True):
            weight, remainder = SPLIT[kind](words(w))
            ties += int(is_upper_tie(words(w)).sum())
            assert (words(p) == weight).all()
            found = ours.state[p][kind].flatten().numpy().astype(np.int64)
            assert (found == remainder).all()
    assert ties > 0


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
    p = nn.Parameter(weight.clone())
    optimizer = OURS["AdamW"]([p], lr=0.0, weight_decay=0.0, master_weights=kind)
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
    p, state = loaded_and_left_alone(BF16, {"master_weight": master}, master.bfloat16(),
                                     "remainder")  # fmt: skip
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
    _, again = loaded_and_left_alone(
        BF16, {"master_weight": back["master_weight"]}, q.detach(), "remainder"
    )
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
    p, state = loaded_and_left_alone(BF16, entries[source], master.bfloat16(), "remainder8")
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "remainder8"}
    assert_same_bits([p], [master.bfloat16()])
    assert (words(p) == weight).all()
    found = state["remainder8"].numpy().astype(np.int64)
    assert (found == (0 if source is None else remainder)).all()
    for kind, entry in KINDS.items():
        q, other = loaded_and_left_alone(
            BF16, {"remainder8": state["remainder8"]}, p.detach(), kind
        )
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
    p, state = loaded_and_left_alone(dtype, {"master_weight": values}, values.to(dtype), "fp32")
    assert_same_bits([state["master_weight"]], [values])
    assert_same_bits([p], [values.to(dtype)])


@pytest.mark.parametrize(
    ("dtype", "kind"), [(BF16, "fp32"), (FP16, "fp32"), *((BF16, kind) for kind in SPLIT)]
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


# ---- moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [None, "fp32", "remainder", "remainder8"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bf16_moments_are_rounded_from_what_float32_ones_would_be(
    master: str | None, amsgrad: bool
) -> None:
    params, others = make_params(SHAPES, BF16), make_params(SHAPES, BF16)
    kwargs: dict[str, Any] = {"lr": 0.02, "amsgrad": amsgrad, "master_weights": master}
    narrow = OURS["AdamW"](params, state_dtype=BF16, **kwargs)
    for step in range(6):
        wide = OURS["AdamW"](others, state_dtype=FP32, **kwargs)
        wide.load_state_dict(narrow.state_dict())
        set_gradients(params, others, seed=step)
        narrow.step()
        wide.step()
        assert_same_bits(params, others)
        for p, q in zip(params, others, strict=True):
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + amsgrad]:
                assert narrow.state[p][key].dtype == BF16
                assert wide.state[q][key].dtype == FP32
                assert_same_bits([narrow.state[p][key]], [wide.state[q][key].to(BF16)])


# ---- refresh_masters, replaced entries ---------------------------------------------------------

each_kind = pytest.mark.parametrize("kind", KINDS)


def stepped(kind: str | None, dtype: torch.dtype = BF16, **kwargs: Any) -> tuple[Any, Any]:
    params = make_params(SHAPES[:4], dtype)
    optimizer = OURS["AdamW"](params, lr=0.02, master_weights=kind, **kwargs)
    for step in range(2):
        set_gradients(params, seed=step)
        optimizer.step()
    return params, optimizer


def twin_of(optimizer: Any, params: list[nn.Parameter], values: Callable[[Any], Tensor]) -> Any:
    """Returns a float32 optimizer with the optimizer's moments and the given weights."""
    wide = [nn.Parameter(values(p).clone()) for p in params]
    twin = OURS["AdamW"](wide, lr=0.02)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        for name in KINDS.values():
            entry.pop(name, None)
    twin.load_state_dict(saved)
    return wide, twin


def assert_next_step_is_the_twins(params: Any, optimizer: Any, wide: Any, twin: Any) -> None:
    set_gradients(params, seed=9)
    give(wide, [p.grad.float() for p in params])
    optimizer.step()
    twin.step()
    assert_same_bits(params, [w.detach().to(p.dtype) for p, w in zip(params, wide, strict=True)])


@each_kind
def test_refresh_masters(kind: str) -> None:
    """Weights changed from outside count in masters at once, and remainders become 0."""
    params, optimizer = stepped(kind)
    before = [bits(optimizer.state[p][KINDS[kind]]) for p in params]
    with torch.no_grad():
        for p in params:
            p.mul_(1.5)
    optimizer.refresh_masters()
    assert [bits(optimizer.state[p][KINDS[kind]]) for p in params] != before
    wide, twin = twin_of(optimizer, params, lambda p: p.detach().float())
    for p, w in zip(params, wide, strict=True):
        if kind == "fp32":
            assert_same_bits([optimizer.state[p]["master_weight"]], [w])
        else:
            assert (join(p, optimizer.state[p][kind]) == words(w)).all()
    assert_next_step_is_the_twins(params, optimizer, wide, twin)


@each_remainder
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_parameters_that_a_mask_set_to_zero_go_on_from_zero(kind: str, zero: float) -> None:
    """A negative remainder of a zero is ignored, since the joined bits would be a NaN."""
    params, optimizer = stepped(kind)
    entry = KINDS[kind]
    masks = [torch.rand(param.shape) < 0.5 for param in params]
    for param, mask in zip(params, masks, strict=True):
        param.data.masked_fill_(mask, zero)
        assert mask.numel() < 100 or (optimizer.state[param][entry][mask] < 0).any()
    twin, others = copy.deepcopy((optimizer, params))
    for param, mask in zip(others, masks, strict=True):
        remainder = twin.state[param][entry]
        remainder[mask] = remainder[mask].clamp(min=0)
    for run, own in ((optimizer, params), (twin, others)):
        set_gradients(own, seed=7)
        run.step()
    assert not any(param.isnan().any() for param in params)
    assert snapshot(optimizer) == snapshot(twin)


def test_without_refresh_the_old_master_counts() -> None:
    """After writes that torch does not count."""
    params, optimizer = stepped("fp32")
    wide, twin = twin_of(optimizer, params, lambda p: optimizer.state[p]["master_weight"])
    with torch.no_grad():
        for p in params:
            p.data.mul_(1.5)
    assert_next_step_is_the_twins(params, optimizer, wide, twin)


@each_kind
@pytest.mark.parametrize("how", ["entry", "data", "in place"])
def test_a_replaced_master_is_noticed(how: str, kind: str) -> None:
    params, optimizer = stepped(kind)
    held = {p: optimizer.state[p][KINDS[kind]] for p in params}
    other = {p: t * 1.25 if kind == "fp32" else -t.clamp(min=-127) for p, t in held.items()}
    exact = {p: t if kind == "fp32" else floats(join(p, t)).view_as(p) for p, t in other.items()}
    wide, twin = twin_of(optimizer, params, exact.__getitem__)
    for p, master in other.items():
        if how == "entry":
            optimizer.state[p][KINDS[kind]] = master
        elif how == "data":
            held[p].data = master
        else:
            held[p].copy_(master)
    assert_next_step_is_the_twins(params, optimizer, wide, twin)


def test_parameters_of_other_dtypes_have_no_master() -> None:
    """float32 and float64 parameters next to bfloat16 step as without master weights."""
    mixed = [make_params(SHAPES[:2], dtype) for dtype in (BF16, FP32, torch.float64)]
    params = [p for group in mixed for p in group]
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    optimizers = [OURS["AdamW"](params, master_weights="fp32"), OURS["AdamW"](plain)]
    for step in range(3):
        set_gradients(params, plain, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in list(zip(params, plain, strict=True))[2:]:
        assert_same_bits([p], [q])
        assert optimizers[0].state[p].keys() == optimizers[1].state[q].keys()
    assert "master_weight" in optimizers[0].state[params[0]]
