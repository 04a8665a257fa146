"""A step does not wait for the device, has few launches, and works in CUDA graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchopt_ext import FusedAdamW, ops

from .support import (
    SHAPES,
    bits,
    carved,
    everything,
    make_params,
    marks,
    on,
    set_gradients,
    step_by_graph,
)

pytestmark = marks


def lr_tensor(value: float = 1e-2) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


def warmed_up(**kwargs: Any) -> tuple[list[nn.Parameter], FusedAdamW]:
    params = make_params("cuda")
    optimizer = FusedAdamW(params, **{"lr": lr_tensor(), "max_grad_norm": 1.0, **kwargs})
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("kwargs", [{}, {"skip_nonfinite": True}, {"track": True}])
def test_a_step_does_not_wait_for_the_device(kwargs: dict[str, Any]) -> None:
    params, optimizer = warmed_up(**kwargs)
    step_without_waiting(params, optimizer)


def step_without_waiting(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Makes a step, and raises if it waits for the device."""
    set_gradients(params, 2)  # elsewhere in memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def calls_of(call: Callable[[], object]) -> dict[str, int]:
    """Returns the number of calls of each CUDA function."""
    for _ in range(2):  # the first time starts the profiler
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            call()
    return {event.key: event.count for event in profiled.key_averages()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_has_at_most_four_launches(dtype: torch.dtype) -> None:
    params = make_params("cuda", dtype)
    masters = None if dtype is torch.float32 else "remainder"
    optimizer = FusedAdamW(params, max_grad_norm=1.0, master_weights=masters)
    set_gradients(params, 0)
    optimizer.step()
    calls = calls_of(optimizer.step)
    launches = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    assert 0 < launches <= 4, calls
    assert "cudaStreamSynchronize" not in calls


def test_a_steady_step_allocates_nothing() -> None:
    params, optimizer = warmed_up(track=True)
    set_gradients(params, 3)
    optimizer.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        optimizer.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def change(lr: torch.Tensor, params: list[nn.Parameter], step: int) -> None:
    """Overwrites the learning rate and the gradients in place."""
    lr.fill_(1e-2 / (1 + step))
    kept = [p.grad for p in params]
    set_gradients(params, step)
    for param, grad in zip(params, kept, strict=True):
        assert grad is not None and param.grad is not None
        grad.copy_(param.grad)
        param.grad = grad


@pytest.mark.parametrize("kwargs", [{}, {"track": True}], ids=["", "tracked"])
def test_a_captured_step_gives_the_bits_of_eager_ones(kwargs: dict[str, Any]) -> None:
    lr, eager_lr = lr_tensor(), lr_tensor()
    params, optimizer = warmed_up(lr=lr, **kwargs)
    eager_params, eager = warmed_up(lr=eager_lr, **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert everything(params, optimizer) == everything(eager_params, eager)  # not run yet
    for step in range(20):
        change(lr, params, step)
        change(eager_lr, eager_params, step)
        graph.replay()
        eager.step()
        if step % 7 == 3:  # an eager step in between, with gradients elsewhere in memory
            kept = [p.grad for p in params]
            set_gradients(params, 50 + step)
            optimizer.step()
            for param, grad in zip(params, kept, strict=True):
                param.grad = grad
            kept = [p.grad for p in eager_params]
            set_gradients(eager_params, 50 + step)
            eager.step()
            for param, grad in zip(eager_params, kept, strict=True):
                param.grad = grad
    assert everything(params, optimizer) == everything(eager_params, eager)


def test_a_step_without_some_gradients_can_be_captured() -> None:
    """A gradient may vanish just before the capture, and an eager step may follow the replay."""
    found = []
    for captured in (False, True):
        params = make_params("cuda")
        optimizer = FusedAdamW(params, lr=lr_tensor(), max_grad_norm=1.0)
        optimizer.init_state()
        set_gradients(params, 0)
        optimizer.step()  # the control block is copied from the host
        params[0].grad = None
        if captured:
            step_by_graph(optimizer)
        else:
            optimizer.step()
        optimizer.step()
        found.append(everything(params, optimizer))
    assert found[0] == found[1]


def test_captured_operators_are_replayed_when_their_call_is_long_over() -> None:
    """A replay must not read tables from freed memory, which holds other data by then."""
    gradients = on("cuda", carved(SHAPES, torch.float32, 5))
    accumulator = ops.new_accumulator("cuda")
    ops.grad_sumsq_(gradients, accumulator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulator.zero_()
        ops.grad_sumsq_(gradients, accumulator)
    for size in range(20):
        torch.full((1 << size,), 7, dtype=torch.uint8).pin_memory()
    for _ in range(3):
        for gradient in gradients:
            gradient.mul_(0.5)
        graph.replay()
        expected = ops.new_accumulator("cuda")
        ops.grad_sumsq_(gradients, expected)
        assert bits(accumulator) == bits(expected)


def test_a_graphs_tables_are_freed_with_it() -> None:
    gradients = on("cuda", carved([(100,)] * 1000, torch.float32, 5))
    accumulator = ops.new_accumulator("cuda")

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.grad_sumsq_(gradients, accumulator)

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        ops.grad_sumsq_(gradients, accumulator)  # frees what graphs gave back
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def settled(most: int) -> int:
        """Polls, because CUDA frees a graph's objects on a thread that nobody can wait for."""
        for _ in range(50):
            if (found := allocated()) <= most:
                break
            time.sleep(0.1)
        return found

    capture()
    before = settled(0)
    for _ in range(5):
        capture()
    assert settled(before) <= before


def test_more_operators_are_captured_than_the_pool_has_streams() -> None:
    """The tables are uploaded on another stream than the captured stream."""
    gradients = on("cuda", carved([(100,)] * 10, torch.float32, 5))
    accumulator, expected = ops.new_accumulator("cuda"), ops.new_accumulator("cuda")
    ops.grad_sumsq_(gradients, accumulator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulator.zero_()
        for _ in range(70):
            ops.grad_sumsq_(gradients, accumulator)
    graph.replay()
    for _ in range(70):
        ops.grad_sumsq_(gradients, expected)
    assert bits(accumulator) == bits(expected)


def test_a_step_runs_on_the_current_stream() -> None:
    params, optimizer = warmed_up()
    other_params, other = warmed_up()
    set_gradients(params, 4)
    set_gradients(other_params, 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for grad in (p.grad for p in params):
            assert grad is not None
            grad.mul_(0.5)  # the step sees this only in the stream's order
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    for grad in (p.grad for p in other_params):
        assert grad is not None
        grad.mul_(0.5)
    other.step()
    assert everything(params, optimizer) == everything(other_params, other)
