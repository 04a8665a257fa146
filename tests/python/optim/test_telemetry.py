"""What a tracked step reports of lost updates, and when. test_every_way.py has the norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW

from ...support.compare import assert_same
from ...support.problems import make_params, set_gradients, train
from ...support.ways import BF16, FP32, FP64, WAYS

SHAPES = ((3, 4), (7,), (), (0, 2), (2, 1031), (1, 33_003))


def test_lost_updates_are_those_a_float32_run_would_have_made() -> None:
    """Counts elements whose bfloat16 weight stays while a float32 run would change it."""
    params = make_params(SHAPES, BF16)
    optimizer = FusedAdamW(params, lr=2e-3, weight_decay=0.0, track=True)
    for seed in range(3):
        set_gradients(params, seed=seed)
        before = [p.detach().clone() for p in params]
        wide = [nn.Parameter(p.detach().float()) for p in params]
        twin = FusedAdamW(wide, lr=2e-3, weight_decay=0.0)
        twin.load_state_dict(optimizer.state_dict())
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
        twin.step()
        expected = [
            int(((p == b) & (w != b.float())).sum())
            for p, b, w in zip(params, before, wide, strict=True)
        ]
        assert optimizer.telemetry.lost_updates.tolist() == expected
        assert 0 < expected[-1] < params[-1].numel()


@pytest.mark.parametrize(
    ("way", "lr", "lost"),
    [
        ("fp32", 1e-3, 0),
        ("fp32", 1e-9, 1000),
        ("fp64", 1e-9, 0),
        ("bf16", 1e-5, 1000),
        ("bf16, master", 1e-5, 0),
        ("bf16, remainder", 1e-5, 0),
    ],
)
def test_lost_updates(way: str, lr: float, lost: int) -> None:
    (param,), optimizer = WAYS[way].build(shapes=((1000,),), lr=lr, weight_decay=0.0, track=True)
    param.data.fill_(1.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.telemetry.lost_updates.tolist() == [lost]


@pytest.mark.parametrize(("weight_decay", "lost"), [(0.0, 0), (1e-9, 900)])
def test_updates_of_zero_and_by_decay_alone(weight_decay: float, lost: int) -> None:
    """An update of zero is not lost, but a decay that is too small is."""
    (param,) = make_params(((1000,),))
    optimizer = FusedAdamW([param], weight_decay=weight_decay, track=True)
    param.data[:100] = 0.0
    param.grad = torch.zeros(1000)
    optimizer.step()
    assert optimizer.telemetry.lost_updates.tolist() == [lost]


def test_without_tracking_there_is_none() -> None:
    for track, message in ((False, "no telemetry"), (True, "first step")):
        optimizer = FusedAdamW(make_params(), track=track)
        with pytest.raises(RuntimeError, match=message):
            _ = optimizer.telemetry
    optimizer = FusedAdamW(make_params(), track=("norms",))
    train(optimizer, [0])
    assert optimizer.telemetry.update_norms.any()
    with pytest.raises(RuntimeError, match="'lost_updates' was not tracked"):
        _ = optimizer.telemetry.lost_updates


def test_a_skipped_step_leaves_what_the_last_one_saw() -> None:
    optimizer = FusedAdamW(make_params(SHAPES), skip_nonfinite=True, track=True)
    train(optimizer, [0])
    before = vars(optimizer.telemetry)
    train(optimizer, [1], scale=math.nan)
    assert_same(vars(optimizer.telemetry), before)


def test_parameters_without_gradient_or_state() -> None:
    """One with state has zeros, one without is left out; names stay those of the step."""
    params = make_params(((3,), (4,), (5,)))
    named = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
    optimizer = FusedAdamW([{"params": named[:2]}, {"params": named[2:]}], track=True)
    optimizer.step()
    assert optimizer.telemetry.names == []
    set_gradients(params)
    params[1].grad = None
    optimizer.step()
    seen = optimizer.telemetry
    expected = torch.stack([params[i].grad.double().norm() for i in (0, 2)])
    torch.testing.assert_close(seen.grad_norms, expected, rtol=1e-13, atol=0)
    optimizer.init_state()
    assert optimizer.telemetry.names == seen.names == ["layer0.weight", "layer2.weight"]
    optimizer.step()
    seen = optimizer.telemetry
    assert seen.names == [name for name, _ in named]
    assert seen.grad_norms[1] == seen.update_norms[1] == seen.lost_updates[1] == 0
    optimizer.state.clear()
    assert optimizer.telemetry.names == seen.names


def test_mixed_dtypes_in_one_optimizer() -> None:
    """Values follow the order of the param groups, whichever kernels run."""
    params = [p for dtype in (BF16, FP32, FP64) for p in make_params(((40,), (600,)), dtype)]
    params = params[::2] + params[1::2]
    optimizer = FusedAdamW(params, track=True, master_weights="remainder")
    train(optimizer, [0])
    expected = torch.stack([p.grad.double().norm() for p in params])
    torch.testing.assert_close(optimizer.telemetry.grad_norms, expected, rtol=1e-13, atol=0)
