"""FSDPadaptOptimizer and offloading on a GPU: the CPU's bits, no waiting, freed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.mixed_precision import (
    load_fsdp_optimizer,
    offload,
    offload_fsdp_optimizer,
    optimizer_on_device,
)

from .support import bits, make_params, marks, set_gradients

pytestmark = marks

DYNAMIC = {"initial_scale": 4.0, "growth_interval": 2, "hysteresis": 1, "dtype": torch.float16}
BASES: dict[str, Callable[[Any], Optimizer]] = {
    "fused": FusedAdamW,
    "adamw": lambda params: AdamW(params, fused=True),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
}
every_base = pytest.mark.parametrize("base", BASES)


def job(device: str, base: str) -> tuple[list[nn.Parameter], FSDPadaptOptimizer]:
    params = make_params(device, torch.bfloat16)
    return params, FSDPadaptOptimizer(BASES[base](params), grad_scal_cfg=DYNAMIC)


def step(params: list[nn.Parameter], optimizer: FSDPadaptOptimizer, seed: int) -> Any:
    set_gradients(params, seed, scale=4.0)
    optimizer._scaled = True
    if seed == 2:
        assert params[0].grad is not None
        params[0].grad[0, 0] = float("nan")
    return optimizer.step()


def content(optimizer: FSDPadaptOptimizer) -> list[bytes]:
    states = optimizer.state_dict(snapshot=True)
    weights = [w for own in states["flat_fp32_weights"].values() for w in own]
    state = states["base_optim_states"]["state"]
    moments = [v for _, entry in sorted(state.items()) for v in entry.values() if v is not None]
    params = [p for own in optimizer.params_by_group for p in own]
    return [bits(t) for t in (*params, *weights, *moments) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("base", ["fused", "sgd"])
def test_the_cpus_bits(base: str) -> None:
    on_gpu, on_cpu = job("cuda", base), job("cpu", base)
    for seed in range(6):
        assert bool(step(*on_gpu, seed)) == bool(step(*on_cpu, seed)) == (seed != 2)
    assert content(on_gpu[1]) == content(on_cpu[1])
    assert on_gpu[1].loss_scale.item() == on_cpu[1].loss_scale.item()


@pytest.mark.parametrize("base", ["fused", "adamw"])
def test_a_step_does_not_wait_for_the_device(base: str) -> None:
    params, optimizer = job("cuda", base)
    for seed in range(2):
        step(params, optimizer, seed)
    set_gradients(params, 5)
    optimizer._scaled = True
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = optimizer.step(wait=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result is None  # only the device knows
    assert optimizer.skipped_steps.item() == 0


@every_base
def test_a_skipped_step_changes_nothing(base: str) -> None:
    params, optimizer = job("cuda", base)
    for seed in range(2):
        step(params, optimizer, seed)
    before = content(optimizer)
    assert not step(params, optimizer, 2)
    assert content(optimizer) == before
    assert optimizer.skipped_steps.item() == 1


@every_base
def test_offloading_frees_memory_and_changes_no_bit(base: str) -> None:
    params, optimizer = job("cuda", base)
    others, plain = job("cuda", base)
    for seed in range(4):
        step(params, optimizer, seed)
        step(others, plain, seed)
        held = [t for kind in offload.KINDS for t in offload.tensors_of(optimizer, kind)]
        moving = sum(t.nbytes for t in held if t.is_cuda and t.numel() > 1)
        before = torch.cuda.memory_allocated()
        offload_fsdp_optimizer(optimizer)
        assert before - torch.cuda.memory_allocated() >= 0.9 * moving
        assert all(t.is_cpu and t.is_pinned() for t in held if t.numel() > 1)
        offload_fsdp_optimizer(optimizer)
        if seed % 2:  # or the step loads the state
            load_fsdp_optimizer(optimizer)
    load_fsdp_optimizer(optimizer)
    assert content(optimizer) == content(plain)


@every_base
def test_offloading_keeps_the_streams_order(base: str) -> None:
    """The bits are right if the device is far behind the host when the state is moved."""
    moved, plain = job("cuda", base), job("cuda", base)
    for seed in (0, 1, 3, 4):
        for params, optimizer in (moved, plain):
            set_gradients(params, seed, scale=4.0)
            optimizer._scaled = True
            torch.cuda._sleep(20_000_000)
            optimizer.step(wait=False)
        offload_fsdp_optimizer(moved[1], empty_cache=False)
        if seed % 2:  # or the step loads the state
            load_fsdp_optimizer(moved[1])
    load_fsdp_optimizer(moved[1])
    assert content(moved[1]) == content(plain[1])


@every_base
def test_state_dicts_while_copies_are_under_way(base: str) -> None:
    params, optimizer = job("cuda", base)
    step(params, optimizer, 0)
    expected = content(optimizer)
    offload_fsdp_optimizer(optimizer, empty_cache=False)
    states = optimizer.state_dict(snapshot=True)
    assert content(optimizer) == expected
    with optimizer_on_device(optimizer):
        step(params, optimizer, 1)
    optimizer.load_state_dict(states)
    assert content(optimizer) == expected


def test_an_optimizer_of_torch_alone() -> None:
    params = make_params("cuda")
    optimizer = AdamW(params)
    set_gradients(params, 0)
    optimizer.step()
    offload_fsdp_optimizer(optimizer)
    every = [value for entry in optimizer.state.values() for value in entry.values()]
    assert all(value.is_cpu for value in every if value.numel() > 1)
    optimizer.step()
    moments = [e["exp_avg"] for e in optimizer.state.values() if e["exp_avg"].numel() > 1]
    assert all(moment.is_cuda for moment in moments)
