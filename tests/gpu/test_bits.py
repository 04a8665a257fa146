"""A step on the GPU gives the bits of a step on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchopt_ext
from torchopt_ext import FusedAdamW, digest, ops

from .support import SHAPES, bits, carved, everything, make_params, marks, on, set_gradients

pytestmark = marks

RANDOM = {"stochastic_rounding": True, "rounding_seed": 3}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32, amsgrad": (torch.float32, {"amsgrad": True}),
    "fp32, bf16 moments": (torch.float32, {"state_dtype": torch.bfloat16}),
    "fp32, bf16 gradients": (torch.float32, {"amsgrad": True}),
    "fp64": (torch.float64, {}),
    "complex64": (torch.complex64, {"amsgrad": True}),
    "complex128": (torch.complex128, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16, random": (torch.bfloat16, RANDOM),
    "bf16, master": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16, remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16, 8-bit remainder": (torch.bfloat16, {"master_weights": "remainder8"}),
    "bf16, random 8-bit remainder": (torch.bfloat16, {"master_weights": "remainder8", **RANDOM}),
    "bf16, remainder, random bf16 moments": (
        torch.bfloat16,
        {"master_weights": "remainder", "state_dtype": torch.bfloat16, **RANDOM},
    ),
    "fp32, 8-bit moments": (torch.float32, {"state_dtype": torch.int8}),
    "bf16, 8-bit moments": (torch.bfloat16, {"state_dtype": torch.int8}),
    "bf16, 8-bit moments, 8-bit remainder": (
        torch.bfloat16,
        {"state_dtype": torch.int8, "master_weights": "remainder8"},
    ),
    "bf16, random 8-bit moments": (torch.bfloat16, {"state_dtype": torch.int8, **RANDOM}),
    "bf16, random 8-bit moments, master": (
        torch.bfloat16,
        {"state_dtype": torch.int8, "master_weights": "fp32", "amsgrad": False, **RANDOM},
    ),
    "fp16": (torch.float16, {}),
    "fp16, master": (torch.float16, {"master_weights": "fp32", "amsgrad": True}),
}


@pytest.mark.parametrize("extras", [False, True], ids=["", "tracked"])
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_the_cpus(way: str, extras: bool) -> None:
    dtype, kwargs = WAYS[way]
    kwargs = {"max_grad_norm": 0.5, **kwargs}
    if extras:
        kwargs |= {"track": True, "write_back_gradients": True}
    found = {}
    for device in ("cpu", "cuda"):
        params = make_params(device, dtype)
        for p in params:
            p.grad_dtype = torch.bfloat16 if "bf16 gradients" in way else dtype
        optimizer = FusedAdamW(params, lr=1e-2, weight_decay=0.1, **kwargs)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        found[device] = everything(params, optimizer)
        found[device].append(bits(optimizer.control.grad_norm))
        found[device].append(bits(digest(optimizer)))
        if extras:
            seen = optimizer.telemetry
            reported = (seen.grad_norms, seen.update_norms, seen.lost_updates)
            found[device] += [bits(tensor) for tensor in reported]
            found[device] += [bits(p.grad) for p in params if p.grad is not None]
    assert found["cpu"] == found["cuda"]


def test_more_tensors_and_groups_than_a_launch_takes() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(t) for t in on(device, carved([(3,)] * 4000, torch.float32, 0))]
        groups: list[dict[str, Any]] = [
            {"params": params[i::70], "lr": 1e-3 * (1 + i)} for i in range(70)
        ]
        groups[1]["lr"] = torch.tensor(2e-3, dtype=torch.float64, device=device)
        groups[2]["lr"] = torch.tensor(3e-3)  # on the CPU
        optimizer = FusedAdamW(groups, max_grad_norm=1.0)
        set_gradients(params, 0)
        optimizer.step()
        found[device] = everything(params, optimizer)
    assert found["cpu"] == found["cuda"]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_changes_nothing(bad: float) -> None:
    params = make_params("cuda")
    optimizer = FusedAdamW(params, max_grad_norm=1.0, skip_nonfinite=True)
    set_gradients(params, 0)
    optimizer.step()
    before = everything(params, optimizer)
    set_gradients(params, 1)
    last = params[-1].grad
    assert last is not None
    last[-1, -1] = bad
    optimizer.step()
    assert everything(params, optimizer) == before
    assert float(optimizer.control.found_inf) == 1.0


def test_scaler_gives_the_cpus_scales_and_bits() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        params = make_params(device)
        optimizer = FusedAdamW(params, lr=1e-2, max_grad_norm=0.5)
        scaler = torchopt_ext.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        scales = []
        for step, overflow in enumerate([False, True, False, False, True, False]):
            scale = scaler.get_scale()
            scaler.scale(torch.ones((), device=device))  # creates the scale's tensor
            set_gradients(params, step, scale)
            if overflow:
                first = params[0].grad
                assert first is not None
                first[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found[device] = [*everything(params, optimizer), scales]
    assert found["cpu"] == found["cuda"]


def test_schedule_on_the_device_gives_the_cpus_bits() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        params = make_params(device)
        optimizer = FusedAdamW(params, lr=1e-2)
        optimizer.set_schedule(warmup_steps=2, stable_steps=1, decay_steps=3, decay_type="cosine")
        for step in range(6):
            set_gradients(params, step)
            optimizer.step()
        found[device] = everything(params, optimizer)
    assert found["cpu"] == found["cuda"]


@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_copy_gives_the_cpus_bits(unscale: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    pairs = [(a, b) for a in dtypes for b in dtypes] + [(torch.float64, torch.float64)]
    for to_dtype, from_dtype in pairs:
        found = {}
        for device in ("cpu", "cuda"):
            sources = on(device, carved(SHAPES, from_dtype, seed=3))
            to = on(device, carved(SHAPES, to_dtype, seed=4))
            control = ops.new_control(device, grad_factor=0.3)
            ops.scaled_copy_(to, sources, control, unscale=unscale)
            ops.scaled_copy_(to, to, control, unscale=unscale)
            before = [bits(x) for x in to]
            control[ops.CONTROL_FIELDS.index("skip")] = 1.0
            ops.scaled_copy_(to, sources, control, unscale=unscale)
            assert [bits(x) for x in to] == before
            found[device] = before
        assert found["cpu"] == found["cuda"]
