"""Every algorithm, in every way to hold weights and state: bits, resuming, overflow, telemetry."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from torchopt_ext import digest

from ...support import oracle
from ...support.compare import assert_same_bits, bits, contents, difference, snapshot, unchanged
from ...support.problems import (
    copy_params,
    make_params,
    params_of,
    set_gradients,
    through_file,
    train,
)
from ...support.ways import BF16, KINDS, WAYS, each_kind_and_way

# One element, none, odd sizes, more than a tile (512), and more than a chunk (32,768).
SHAPES = ((3, 4), (7,), (), (0, 2), (2, 1031), (1, 33_003))
FEW = ((3, 4), (2, 130), ())
OPTIONS: dict[str, dict[str, Any]] = {
    "coupled": {"weight_decay": 0.1, "decoupled_weight_decay": False, "max_grad_norm": 50.0},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    "cautious, tensor lr": {
        "weight_decay": 0.5, "decoupled_weight_decay": True, "cautious_weight_decay": True,
        "decay_follows_lr": 0.3, "max_grad_norm": 1.0, "lr": torch.tensor(0.02),
    },
}  # fmt: skip
REMAINDERS = ("master_weight", "remainder", "remainder8")


def algorithm_of(kind: str) -> str:
    return kind.split(",")[0].lower()


def stored(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Returns the exact weight that parameter and state hold."""
    if "master_weight" in state:
        return state["master_weight"]
    for kind in {"remainder", "remainder8"} & state.keys():
        return oracle.floats(oracle.join(param, state[kind])).view(param.shape)
    return param.detach()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("kind", "way"), [(k, w) for k in KINDS for w in WAYS if not WAYS[w].is_quantized]
)
def test_bits_of_steps(kind: str, way: str, options: str) -> None:
    """Parameters, masters and states are those of docs/numerics.md."""
    if kind.startswith(("AdamW", "Muon")) and options == "coupled":
        pytest.skip(f"Fused{kind} is decoupled")
    more = {"lr": 0.02, "rounding_seed": 2**64 - 3, **OPTIONS[options]}
    if kind.startswith("Muon"):
        del more["decoupled_weight_decay"]
    params, optimizer = WAYS[way].build(kind, shapes=SHAPES, **more)
    group = optimizer.param_groups[0]
    optimizer.init_state()
    names = [k for k in optimizer.state[params[0]] if k not in ("step", *REMAINDERS)]
    held = [
        oracle.Held(algorithm_of(kind), p, len(names), i, rounding_seed=2**64 - 3,
                    **WAYS[way].options)
        for i, p in enumerate(params)
    ]  # fmt: skip
    for seed in range(3):
        set_gradients(params, seed=seed)
        group["lr"] = group["lr"] * (1.0, 0.5, 3.0)[seed]
        optimizer.step()
        numbers = {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()}
        for one, p in zip(held, params, strict=True):
            one.step(numbers, p.grad, float(optimizer.control.grad_factor))
            state = optimizer.state[p]
            assert_same_bits([p], [one.param])
            assert_same_bits([stored(p, state).to(one.wide)], [one.weight])
            for name, expected in zip(names, one.states, strict=True):
                by_row = name == "second_momentum_buffer"
                dtype = torch.float32 if by_row else one.state_dtype
                assert state[name].dtype == dtype
                assert_same_bits([state[name]], [expected.to(dtype)])
    assert ("max_grad_norm" in more) == (float(optimizer.control.clip_factor) < 1)


@each_kind_and_way
def test_saving_and_copying(kind: str, way: str) -> None:
    """A load keeps dtypes and shares no memory, and every copy continues with the same bits."""
    more: dict[str, Any] = {"lr": 0.02, "max_grad_norm": 3.0}
    params, optimizer = WAYS[way].build(kind, shapes=FEW, **more)
    train(optimizer, range(2))
    saved = through_file(optimizer.state_dict())
    before = contents(saved)
    _, loaded = WAYS[way].build(kind, copy_params(params), **more | {"lr": 1.0})
    loaded.load_state_dict(saved)
    assert not memory_of(saved["state"]) & memory_of(loaded.state)
    shapes = [tuple(p.shape) for p in params]
    late, after_model = WAYS[way].build(kind, make_params(shapes, WAYS[way].dtype, seed=9), **more)
    train(after_model, [7])
    after_model.load_state_dict(saved)
    with torch.no_grad():  # a remainder refers to the parameter as it is when a step begins
        for p, q in zip(late, params, strict=True):
            p.copy_(q)
    optimizer.state["another library's"] = 3
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded, after_model]
    before_step = snapshot(optimizer)
    for other in others:
        assert snapshot(other) == before_step
        train(other, [2, 3])
    assert snapshot(optimizer) == before_step  # no copy shares state
    train(optimizer, [2, 3])
    assert [snapshot(other) == snapshot(optimizer) for other in others] == [True] * 4
    assert not difference(contents(saved), before)
    assert snapshot(optimizer) != before_step


def memory_of(state: Any) -> set[int]:
    tensors = [t for entry in state.values() for t in entry.values() if t.numel()]
    return {t.untyped_storage().data_ptr() for t in tensors}


@each_kind_and_way
def test_an_overflow_changes_nothing(kind: str, way: str) -> None:
    """In any element, also in the first step; later steps are as if it had not been."""
    more: dict[str, Any] = {"lr": 0.02, "skip_nonfinite": True}
    runs = [WAYS[way].build(kind, shapes=FEW, **more) for _ in range(2)]
    (params, optimizer), (_, other) = runs
    optimizer.init_state()
    skipped = 0
    for step in range(2):
        before = snapshot(optimizer)
        for p in params:
            for at in {0, p.numel() // 2, p.numel() - 1}:
                set_gradients(params, seed=50)
                p.grad.view(-1)[at] = (math.nan, math.inf, -math.inf)[skipped % 3]
                optimizer.step()
                skipped += 1
                assert snapshot(optimizer) == before, at
        train(optimizer, [step])
        train(other, [step])
        assert snapshot(optimizer) == snapshot(other) != before
    assert float(optimizer.control.skipped_steps) == skipped


@each_kind_and_way
def test_tracking_and_threads_change_no_bit(kind: str, way: str) -> None:
    """Nor does write-back, whose gradients and the telemetry do not depend on them either."""
    runs, seen = [], []
    for track, threads in ((False, 2), (True, 2), (True, 1), (True, 5), (("norms",), 2)):
        torch.set_num_threads(threads)
        options = {"track": track, "max_grad_norm": 3.0, "write_back_gradients": True}
        params, optimizer = WAYS[way].build(kind, shapes=(*SHAPES, (5, 130)), lr=0.02, **options)
        train(optimizer, range(2))
        runs.append((snapshot(optimizer), [bits(p.grad) for p in params]))
        if track is True:
            telemetry = optimizer.telemetry
            seen.append([telemetry.grad_norms.tolist(), telemetry.update_norms.tolist(),
                         telemetry.lost_updates.tolist()])  # fmt: skip
    assert [run == runs[0] for run in runs] == [True] * 5
    assert seen[0] == seen[1] == seen[2]


@each_kind_and_way
def test_telemetry_and_digest(kind: str, way: str) -> None:
    """Norms are of unscaled, unclipped gradients and of stored updates."""
    shapes = (*SHAPES, (5, 130))
    params, optimizer = WAYS[way].build(kind, shapes=shapes, lr=0.02, max_grad_norm=3.0, track=True)
    optimizer.init_state()
    scale = 2.0**6
    for seed in range(2):
        set_gradients(params, seed=seed, scale=scale)
        before = [stored(p, optimizer.state[p]).double().clone() for p in params]
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        optimizer.step()
    telemetry = optimizer.telemetry
    moved = [stored(p, optimizer.state[p]) - b for p, b in zip(params, before, strict=True)]
    for actual, tensors, rtol in (
        (telemetry.grad_norms, [p.grad.double() / scale for p in params], 1e-13),
        (telemetry.update_norms, moved, 1e-6),
    ):
        expected = torch.stack([t.double().norm() for t in tensors])
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=0)
    total = telemetry.grad_norms.norm()
    torch.testing.assert_close(total, optimizer.control.grad_norm, rtol=1e-13, atol=0)
    assert telemetry.names == [str(i) for i in range(len(params))]
    assert [d % 2**64 for d in digest(optimizer).tolist()] == [
        oracle.digest(i, p, optimizer.state[p]) for i, p in enumerate(params)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_another_optimizers_bits_are_seen(kind: str) -> None:
    """What the other tests compare by: a flipped bit anywhere is a difference."""
    _, optimizer = WAYS["bf16, master"].build(kind)
    train(optimizer, [0])
    for p in params_of(optimizer):
        for tensor in (p.detach(), p.grad, *optimizer.state[p].values()):
            with pytest.raises(AssertionError, match="other values"), unchanged(optimizer):
                tensor.view(-1).view(torch.uint8)[0] ^= 1
    assert optimizer.state[params_of(optimizer)[0]]["master_weight"].to(BF16).dtype == BF16
