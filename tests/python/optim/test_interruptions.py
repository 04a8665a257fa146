"""A step that is interrupted, finds no memory, or meets another thread is whole or not made."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim import gradients, param_states

from ...support.compare import assert_same_bits, unchanged
from ...support.problems import make_params, params_of, set_gradients, train

ON_HOST_CUDA = "/host_cuda/" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["allows_mutation", "_end_use"])
def test_an_interrupted_step_may_be_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    optimizer = FusedAdamW(make_params())
    train(optimizer, [0])
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torchopt_ext.optim.step"], name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.step()
    assert optimizer.control.steps == (2 if name == "allows_mutation" else 3)


def test_a_first_step_without_memory_may_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (weight,) = make_params([(3,)], torch.bfloat16)
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdamW([weight], master_weights="fp32")
    with monkeypatch.context() as patch:
        patch.setattr("torchopt_ext.optim.param_states.fit_master", lambda *_: bytes(1 << 62))
        with unchanged(optimizer), pytest.raises((MemoryError, OverflowError)):
            optimizer.step()
    optimizer.step()
    assert optimizer.control.steps == 1


@pytest.mark.skipif(not ON_HOST_CUDA, reason="needs make test-host-cuda")
@pytest.mark.parametrize("norm", [{}, {"max_grad_norm": 1.0}])
def test_a_device_without_memory_for_one_of_several_plans(norm: dict[str, float]) -> None:
    for tables in range(20):
        parts = [nn.Linear(4, 3), nn.Linear(4, 3)]
        container = OptimizersContainer(parts, FusedAdamW, {"lr": 0.1, **norm})
        params = [param for part in parts for param in part.parameters()]
        set_gradients(params)
        before = [param.detach().clone() for param in params]
        os.environ["HOST_CUDA_TABLES"] = str(tables)
        try:
            container.step()
        except torch.OutOfMemoryError:
            assert_same_bits(params, before)
            assert not any(state["step"] for state in container.state.values())
        else:
            assert tables >= 4
            return
        finally:
            del os.environ["HOST_CUDA_TABLES"]


@pytest.mark.parametrize("size", [1000, 5_000_000])
def test_another_thread_may_replace_state_during_a_step(size: int) -> None:
    optimizer = FusedAdamW(make_params([(size,)] * 2), max_grad_norm=1.0)
    train(optimizer, [0])
    ended = threading.Event()

    def replace() -> None:
        while not ended.is_set():
            for entry in optimizer.state.values():
                entry["exp_avg"] = entry["exp_avg"].clone()

    thread = threading.Thread(target=replace)
    thread.start()
    for _ in range(20):
        optimizer.step()
    ended.set()
    thread.join()
    assert all(param.isfinite().all() for param in params_of(optimizer))


def test_state_replaced_while_a_plan_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = (FusedAdamW(make_params([(1000,)] * 2)) for _ in range(2))
    for optimizer in (ours, plain):
        train(optimizer, [0])
        for state in optimizer.state.values():  # so that the next step builds a plan
            state["exp_avg"] = state["exp_avg"].clone()
    build = param_states.OptimizerPlan

    def replace_and_build(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        for state in ours.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        return build(*args, **options)

    monkeypatch.setattr(param_states, "OptimizerPlan", replace_and_build)
    for optimizer in (ours, plain):
        train(optimizer, [1])
    assert param_states.OptimizerPlan is build
    assert_same_bits(params_of(ours), params_of(plain))
    assert_same_bits(*([state["exp_avg"] for state in o.state.values()] for o in (ours, plain)))


def test_threads_stepping_one_optimizer_do_not_corrupt_it() -> None:
    optimizer = FusedAdamW(make_params([(1000,)] * 10))
    set_gradients(params_of(optimizer))
    steps: list[bool] = []
    rejected: list[str] = []

    def run() -> None:
        for _ in range(100):
            try:
                optimizer.step()
                steps.append(True)
            except RuntimeError as error:
                rejected.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another thread" in message for message in rejected)
    assert steps and all(s["step"] <= len(steps) for s in optimizer.state.values())
    optimizer.step()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_second_thread_is_rejected_while_gradients_are_summed(
    max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def build() -> tuple[list[Any], FusedAdamW]:
        whole = DTensor.from_local(torch.ones(70), mesh, [Replicate()])
        params: list[Any] = [nn.Parameter(whole), nn.Parameter(torch.ones(70))]
        return params, FusedAdamW(params, max_grad_norm=max_grad_norm)

    (params, optimizer), (expected, alone) = build(), build()
    reduce, rejected = gradients.all_reduce_coalesced, []

    def step_too() -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            rejected.append(str(error))

    def reduce_while_another_steps(*args: Any) -> Any:
        thread = threading.Thread(target=step_too)
        thread.start()
        thread.join()
        return reduce(*args)

    for _ in range(2):  # the first step builds the plan
        for partial, plain in (expected, params):
            partial.grad = DTensor.from_local(torch.full((70,), 2.0), mesh, [Partial()])
            plain.grad = torch.full((70,), 3.0)
        alone.step()
        with monkeypatch.context() as patch:
            patch.setattr(gradients, "all_reduce_coalesced", reduce_while_another_steps)
            optimizer.step()
    assert len(rejected) == 2 and all("another thread" in message for message in rejected)
    assert_same_bits(params, expected)


def test_a_learning_rate_may_drop_the_state_that_a_step_reads() -> None:
    """A group's value whose conversion to a float clears the state leaves the step complete."""
    ours, plain = (FusedAdamW(make_params([(8, 64)] * 50), lr=1e-2) for _ in range(2))
    reused: list[torch.Tensor] = []

    class Rate:
        def __float__(self) -> float:
            ours.state.clear()
            reused.extend(torch.full((8, 64), 7.0) for _ in range(150))
            return 1e-2

    for seed, rate in enumerate((1e-2, Rate())):
        ours.param_groups[0]["lr"] = rate
        for optimizer in (ours, plain):
            train(optimizer, [seed])
    assert_same_bits(params_of(ours), params_of(plain))
    assert all(bool((tensor == 7).all()) for tensor in reused)
