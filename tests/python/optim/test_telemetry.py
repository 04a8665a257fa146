"""A tracked step reports norms and lost updates, and changes no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .independent import floats, join, words
from .subject import OURS, make_params, set_gradients, snapshot

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# One element, none, odd sizes, more than a tile (512), and more than a chunk (32,768).
SHAPES = ((3, 4), (7,), (), (0, 2), (2, 1031), (1, 33_003))

WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "fp32 amsgrad": (FP32, {"amsgrad": True}),
    "fp32 bf16 moments": (FP32, {"state_dtype": BF16}),
    "fp64": (FP64, {}),
    "bf16": (BF16, {}),
    "bf16 stochastic": (BF16, {"stochastic_rounding": True, "amsgrad": True}),
    "bf16 master": (BF16, {"master_weights": "fp32"}),
    "bf16 remainder": (BF16, {"master_weights": "remainder", "state_dtype": BF16}),
    "bf16 remainder8": (BF16, {"master_weights": "remainder8"}),
    "fp16": (FP16, {}),
    "fp16 master": (FP16, {"master_weights": "fp32", "amsgrad": True}),
}
each_way = pytest.mark.parametrize("way", WAYS)


def build(way: str, shapes: Any = SHAPES, **more: Any) -> tuple[list[nn.Parameter], Any]:
    dtype, kwargs = WAYS[way]
    params = make_params(shapes, dtype)
    kwargs = {"lr": 0.02, "max_grad_norm": 3.0, "track": True, **kwargs, **more}
    return params, OURS["AdamW"](params, **kwargs)


def stored(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Returns the exact stored weight in float64."""
    if "master_weight" in state:
        return state["master_weight"].double()
    for kind in {"remainder", "remainder8"} & state.keys():
        return floats(join(p, state[kind])).view(p.shape).double()
    return p.detach().double()


def norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double().norm() for t in tensors])


@each_way
@pytest.mark.parametrize("scale", [None, 2.0**6])
def test_norms_and_names(way: str, scale: float | None) -> None:
    """Norms are of unscaled, unclipped gradients and stored updates."""
    params, optimizer = build(way)
    optimizer.init_state()
    for step in range(3):
        set_gradients(params, seed=step, scale=scale or 1.0)
        before = [stored(p, optimizer.state[p]).clone() for p in params]
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        optimizer.step()
        assert float(optimizer.control.clip_factor) < 1
        seen = optimizer.telemetry
        expected = norms([p.grad for p in params]) / (scale or 1.0)
        torch.testing.assert_close(seen.grad_norms, expected, rtol=1e-13, atol=0)
        after = [stored(p, optimizer.state[p]) for p in params]
        moved = norms([a - b for a, b in zip(after, before, strict=True)])
        torch.testing.assert_close(seen.update_norms, moved, rtol=1e-6, atol=0)
    assert seen.names == [str(i) for i in range(len(params))]
    total = seen.grad_norms.norm()
    torch.testing.assert_close(total, optimizer.control.grad_norm, rtol=1e-13, atol=0)


@each_way
def test_tracking_changes_no_bit(way: str) -> None:
    """Holds with clipping and write-back, below and above the elements of a chunk."""
    runs = []
    for track in (False, True):
        params, optimizer = build(way, track=track, write_back_gradients=True)
        for step in range(4):
            set_gradients(params, seed=step)
            optimizer.step()
        runs.append((snapshot(optimizer), [words(p.grad).tolist() for p in params]))
    assert runs[0] == runs[1]


@each_way
def test_threads_do_not_matter(way: str) -> None:
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        params, optimizer = build(way)
        for step in range(2):
            set_gradients(params, seed=step)
            optimizer.step()
        seen = optimizer.telemetry
        found.append([seen.grad_norms.tolist(), seen.update_norms.tolist(),
                      seen.lost_updates.tolist()])  # fmt: skip
    assert found[0] == found[1] == found[2]


# ---- lost updates --------------------------------------------------------------------------------


def test_lost_updates_are_those_a_float32_run_would_have_made() -> None:
    """Counts elements whose bfloat16 weight stays while a float32 run would change it."""
    params, optimizer = build("bf16", lr=2e-3, weight_decay=0.0, max_grad_norm=None)
    for step in range(3):
        set_gradients(params, seed=step)
        before = [p.detach().clone() for p in params]
        wide = [nn.Parameter(p.detach().float()) for p in params]
        twin = OURS["AdamW"](wide, lr=2e-3, weight_decay=0.0)
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
        ("bf16 master", 1e-5, 0),
        ("bf16 remainder", 1e-5, 0),
    ],
)
def test_lost_updates(way: str, lr: float, lost: int) -> None:
    params, optimizer = build(way, shapes=((1000,),), lr=lr, weight_decay=0.0)
    params[0].data.fill_(1.0)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert optimizer.telemetry.lost_updates.tolist() == [lost]


def test_an_update_of_zero_is_not_lost() -> None:
    params, optimizer = build("fp32", shapes=((1000,),), weight_decay=0.0)
    params[0].grad = torch.zeros(1000)
    params[0].grad[:10] = 1.0
    optimizer.step()
    assert optimizer.telemetry.lost_updates.tolist() == [0]
    # Weight decay alone is an update, which is lost where it is too small.
    params, optimizer = build("fp32", shapes=((1000,),), weight_decay=1e-9)
    params[0].grad = torch.zeros(1000)
    params[0].data[:100] = 0.0
    optimizer.step()
    assert optimizer.telemetry.lost_updates.tolist() == [900]


# ---- when and of what ----------------------------------------------------------------------------


def test_without_tracking_there_is_none() -> None:
    params, optimizer = build("fp32", track=False)
    set_gradients(params)
    optimizer.step()
    with pytest.raises(RuntimeError, match="no telemetry"):
        _ = optimizer.telemetry
    _, optimizer = build("fp32")
    with pytest.raises(RuntimeError, match="first step"):
        _ = optimizer.telemetry
    params, optimizer = build("fp32", track=("norms",))
    set_gradients(params)
    optimizer.step()
    assert optimizer.telemetry.update_norms.any()
    with pytest.raises(RuntimeError, match="'lost_updates' was not tracked"):
        _ = optimizer.telemetry.lost_updates


def test_a_skipped_step_leaves_what_the_last_one_saw() -> None:
    params, optimizer = build("bf16 remainder", skip_nonfinite=True)
    set_gradients(params)
    optimizer.step()
    seen = optimizer.telemetry
    before = [t.tolist() for t in (seen.grad_norms, seen.update_norms)]
    set_gradients(params, seed=1)
    params[-1].grad[0, -1] = math.nan
    optimizer.step()
    seen = optimizer.telemetry
    assert [t.tolist() for t in (seen.grad_norms, seen.update_norms)] == before


def test_a_parameter_without_gradient_has_zeros() -> None:
    params, optimizer = build("fp32", shapes=((3, 4), (7,)))
    for step in range(2):
        set_gradients(params, seed=step)
        params[1].grad = params[1].grad if step == 0 else None
        optimizer.step()
    seen = optimizer.telemetry
    assert seen.grad_norms[1] == seen.update_norms[1] == 0
    assert seen.lost_updates[1] == 0


def test_parameters_without_state_are_left_out_and_names_are_theirs() -> None:
    params = make_params(((3,), (4,), (5,)))
    named = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
    optimizer = OURS["AdamW"]([{"params": named[:2]}, {"params": named[2:]}], track=True)
    set_gradients(params)
    params[1].grad = None
    optimizer.step()
    seen = optimizer.telemetry
    assert seen.names == ["layer0.weight", "layer2.weight"]
    expected = norms([params[0].grad, params[2].grad])
    torch.testing.assert_close(seen.grad_norms, expected, rtol=1e-13, atol=0)


def test_mixed_dtypes_in_one_optimizer() -> None:
    """Values follow the order of the param groups, whichever kernels run."""
    params = [p for dtype in (BF16, FP32, FP64) for p in make_params(((40,), (600,)), dtype)]
    params = params[::2] + params[1::2]
    optimizer = OURS["AdamW"](params, track=True, master_weights="remainder")
    set_gradients(params)
    optimizer.step()
    seen = optimizer.telemetry
    expected = norms([p.grad for p in params])
    torch.testing.assert_close(seen.grad_norms, expected, rtol=1e-13, atol=0)


def test_a_first_step_without_gradients() -> None:
    """Parts of the plan may be empty at the first step."""
    params = make_params(SHAPES, FP32)
    optimizer = OURS["AdamW"](params, track=True)
    optimizer.step()
    assert optimizer.telemetry.names == []
    for _ in range(2):
        set_gradients(params)
        optimizer.step()
    assert len(optimizer.telemetry.names) == len(params)
