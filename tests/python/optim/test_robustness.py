"""Conditions around a step: swapped and freed memory, lazy gradients, threads, partial failures."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.optim import gradients
from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.functional import functional_optim_map


def stepped(model: nn.Module, **kwargs: Any) -> FusedAdamW:
    optimizer = FusedAdamW(model.parameters(), lr=0.1, **kwargs)
    backward(model)
    optimizer.step()
    return optimizer


def backward(model: nn.Module) -> None:
    weight = next(model.parameters())
    model(torch.ones(2, weight.shape[1], dtype=weight.dtype)).sum().backward()


def test_module_may_swap_its_parameters_after_a_step() -> None:
    model = nn.Linear(4, 3)
    optimizer = stepped(model)
    optimizer.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    backward(model)
    optimizer.step()
    assert not torch.equal(model.weight, torch.ones(3, 4))


def test_cycle_through_the_optimizer_is_collected() -> None:
    model = nn.Linear(4, 3)
    optimizer = stepped(model)
    model.weight.owner = optimizer
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_step_keeps_no_gradient_alive() -> None:
    param = nn.Parameter(torch.ones(100))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(100)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = ("x", 0.9)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.step()
    freed = weakref.ref(param.grad)
    optimizer.zero_grad()
    gc.collect()
    assert freed() is None


def test_gradient_without_memory_is_refused() -> None:
    param = nn.Parameter(torch.ones(5))
    optimizer = FusedAdamW([("weight", param)])
    param.grad = torch.ones(5)
    param.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"gradient 0 \('weight'\).*freed"):
        optimizer.step()


def test_amsgrad_switched_at_run_time() -> None:
    param, reference = (nn.Parameter(torch.full((70,), 0.5)) for _ in range(2))
    ours = FusedAdamW([param], amsgrad=True)
    torchs = torch.optim.AdamW([reference], amsgrad=True)
    for step in range(4):
        for p, optimizer in ((param, ours), (reference, torchs)):
            p.grad = torch.full((70,), 1.0 / (step + 1) ** 2)
            optimizer.param_groups[0]["amsgrad"] = step < 2
            optimizer.step()
    torch.testing.assert_close(param, reference, rtol=1e-6, atol=1e-7)


def test_load_hook_may_mend_a_state_dict() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(2, 3)
    optimizer.step()
    saved = optimizer.state_dict()
    moments = ("exp_avg", "exp_avg_sq")
    transposed = {k: v.t() if k in moments else v for k, v in saved["state"][0].items()}

    def mend(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        mended = {k: v.t() if k in moments else v for k, v in given["state"][0].items()}
        return {**given, "state": {0: mended}}

    optimizer.register_load_state_dict_pre_hook(mend)
    optimizer.load_state_dict({**saved, "state": {0: transposed}})
    assert optimizer.state[param]["exp_avg"].shape == (2, 3)


def test_moment_transposed_in_place_is_put_right() -> None:
    param, reference = (nn.Parameter(torch.arange(9.0).view(3, 3)) for _ in range(2))
    optimizers = [FusedAdamW([p], lr=0.1) for p in (param, reference)]
    for _ in range(3):
        for p, optimizer in zip((param, reference), optimizers, strict=True):
            p.grad = torch.arange(9.0).view(3, 3) + p.detach()
            optimizer.step()
        optimizers[0].state[param]["exp_avg"].t_().t_()
        moment = optimizers[0].state[param]["exp_avg_sq"]
        values = moment.clone()
        moment.t_()  # the same memory in another order
        moment.copy_(values)
    assert torch.equal(param, reference)


def made_in_inference_mode(start: Tensor) -> nn.Parameter:
    """Returns a parameter without a version counter, which is no inference tensor any more."""
    with torch.inference_mode():
        param = nn.Parameter(torch.empty_like(start))
    param.data = torch.empty_strided(start.size(), start.stride(), dtype=start.dtype)
    param.data.copy_(start)
    assert not param.is_inference()
    return param


STEPS_OF_ONE: dict[str, Callable[[nn.Parameter], Any]] = {
    "fused": lambda p: FusedAdamW([p], max_grad_norm=1.0, write_back_gradients=True),
    "masters": lambda p: FusedAdamW([p], master_weights="fp32"),
    "over torch's": lambda p: FSDPadaptOptimizer(torch.optim.AdamW([p])),
    "in backward": lambda p: OptimizersInBackwardContainer([nn.ParameterList([p])], FusedAdamW, {}),
    "balanced": lambda p: ZeroRedundancyOptimizer([p], FusedAdamW, partition="balanced"),
    "whole": lambda p: ZeroRedundancyOptimizer([p], FusedAdamW, parameters_as_bucket_view=True),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", STEPS_OF_ONE)
@pytest.mark.parametrize("dense", [True, False])
def test_parameters_made_in_inference_mode(kind: str, dense: bool) -> None:
    dtype = torch.bfloat16 if kind in ("masters", "over torch's") else torch.float32
    start = torch.ones(8, 8, dtype=dtype)
    if not dense and kind in ("fused", "masters"):
        start = torch.ones(8, 16, dtype=dtype)[:, :8]
    param, reference = made_in_inference_mode(start), nn.Parameter(start.clone())
    optimizers = [STEPS_OF_ONE[kind](p) for p in (param, reference)]
    for _ in range(2):
        for p, optimizer in zip((param, reference), optimizers, strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(param, reference)
    assert not torch.equal(param, start)


def test_control_may_be_read_in_inference_mode_first() -> None:
    param = nn.Parameter(torch.ones(5))
    optimizer = FusedAdamW([param], max_grad_norm=1.0)
    with torch.inference_mode():
        assert optimizer.control.steps == 0
    param.grad = torch.ones(5)
    optimizer.step()
    assert optimizer.control.steps == 1


@pytest.mark.parametrize("name", ["allows_mutation", "_end_use"])
def test_an_interrupted_step_may_be_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = nn.Linear(4, 3)
    optimizer = stepped(model)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torchopt_ext.optim.step"], name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.step()
    assert optimizer.control.steps == (2 if name == "allows_mutation" else 3)


def test_a_first_step_without_memory_may_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdamW([weight], master_weights="fp32")
    functional = functional_optim_map[FusedAdamW]([weight])
    steps = (optimizer.step, lambda: functional.step([weight.grad]))
    with monkeypatch.context() as patch:
        patch.setattr("torchopt_ext.optim.param_states.fit_master", lambda *_: bytes(1 << 62))
        for step in steps:
            with pytest.raises((MemoryError, OverflowError)):
                step()
    assert optimizer.state[weight] == {}
    for step in steps:
        step()
    assert optimizer.control.steps == functional.state[weight]["step"] == 1


ON_HOST_CUDA = "/host_cuda/" in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not ON_HOST_CUDA, reason="needs make test-host-cuda")
@pytest.mark.parametrize("norm", [{}, {"max_grad_norm": 1.0}])
def test_a_device_without_memory_for_one_of_several_plans(norm: dict[str, float]) -> None:
    for tables in range(20):
        parts = [nn.Linear(4, 3), nn.Linear(4, 3)]
        params = [param for part in parts for param in part.parameters()]
        container = OptimizersContainer(parts, FusedAdamW, {"lr": 0.1, **norm})
        for part in parts:
            backward(part)
        before = [param.detach().clone() for param in params]
        os.environ["HOST_CUDA_TABLES"] = str(tables)
        try:
            container.step()
        except torch.OutOfMemoryError:
            assert all(map(torch.equal, params, before))
            assert not any(state["step"] for state in container.state.values())
        else:
            assert tables >= 4
            return
        finally:
            del os.environ["HOST_CUDA_TABLES"]


@pytest.mark.parametrize("size", [1000, 5_000_000])
def test_another_thread_may_replace_state_during_a_step(size: int) -> None:
    params = [nn.Parameter(torch.ones(size)) for _ in range(2)]
    optimizer = FusedAdamW(params, max_grad_norm=1.0)
    for param in params:
        param.grad = torch.ones(size)
    optimizer.step()
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
    assert all(param.isfinite().all() for param in params)


def test_threads_stepping_one_optimizer_do_not_corrupt_it() -> None:
    params = [nn.Parameter(torch.ones(1000)) for _ in range(10)]
    optimizer = FusedAdamW(params)
    for param in params:
        param.grad = torch.ones(1000)
    done: list[bool] = []
    refused: list[str] = []

    def run() -> None:
        for _ in range(100):
            try:
                optimizer.step()
                done.append(True)
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another thread" in message for message in refused)
    assert done and all(optimizer.state[p]["step"] <= len(done) for p in params)
    optimizer.step()


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_second_thread_is_refused_while_gradients_are_summed(
    max_grad_norm: float | None, one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts() -> list[Any]:
        whole = DTensor.from_local(torch.ones(70), one_rank, [Replicate()])
        return [nn.Parameter(whole), nn.Parameter(torch.ones(70))]

    def set_both(partial: Any, plain: Any) -> None:
        partial.grad = DTensor.from_local(torch.full((70,), 2.0), one_rank, [Partial()])
        plain.grad = torch.full((70,), 3.0)

    params, reference = parts(), parts()
    optimizer, alone = (FusedAdamW(ps, max_grad_norm=max_grad_norm) for ps in (params, reference))
    reduce, refused = gradients.all_reduce_coalesced, []

    def step_too() -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            refused.append(str(error))

    def reduce_while_another_steps(*args: Any) -> Any:
        thread = threading.Thread(target=step_too)
        thread.start()
        thread.join()
        return reduce(*args)

    for _ in range(2):  # the first step builds the plan
        set_both(*reference)
        alone.step()
        set_both(*params)
        with monkeypatch.context() as patch:
            patch.setattr(gradients, "all_reduce_coalesced", reduce_while_another_steps)
            optimizer.step()
    assert len(refused) == 2 and all("another thread" in message for message in refused)
    assert torch.equal(params[0].to_local(), reference[0].to_local())
    assert torch.equal(params[1], reference[1])


def test_a_parameter_whose_value_no_rank_has_is_rejected(one_rank: DeviceMesh) -> None:
    """A frozen one is not: a step leaves it as it is."""
    partial = nn.Parameter(DTensor.from_local(torch.ones(3), one_rank, [Partial()]))
    plain = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"parameter 1 .* has placements \(Partial\(sum\),\)"):
        FusedAdamW([plain, partial])
    partial.requires_grad_(False)
    optimizer = FusedAdamW([plain, partial], max_grad_norm=1.0)
    for _ in range(2):
        plain.grad = torch.ones(3)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())  # the next step builds a plan
    assert float(optimizer.control.grad_norm) == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda optimizer, param: optimizer.param_groups[0].update(lr=torch.ones(2)),
        lambda optimizer, param: optimizer.state[param]["step"].fill_(float("nan")),
        lambda optimizer, param: param.grad.untyped_storage().resize_(0),
    ],
    ids=["lr", "step", "gradient"],
)
def test_joint_step_changes_no_part_when_one_cannot_be_stepped(spoil: Any) -> None:
    parts = [nn.Linear(4, 3), nn.Linear(4, 3)]
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 0.1, "max_grad_norm": 1.0})
    for part in parts:
        backward(part)
    container.step()
    spoil(container.optimizers[1], parts[1].weight)
    before: list[Tensor] = [p.detach().clone() for part in parts for p in part.parameters()]
    with pytest.raises((RuntimeError, ValueError)):
        container.step()
    after = [p for part in parts for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert container.optimizers[0].control.steps == 1


class Mine(FusedAdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("cls", [Mine, FusedAdamW])
def test_joint_step_refuses_a_step_that_is_overridden_or_replaced(cls: Any) -> None:
    parts = [nn.Linear(4, 3), nn.Linear(4, 3)]
    container = OptimizersContainer(parts, cls, {"max_grad_norm": 1.0})
    if cls is FusedAdamW:
        container.optimizers[1].step = lambda: None
    for part in parts:
        backward(part)
    with pytest.raises(TypeError, match=f"{cls.__name__} overrides or replaces step"):
        container.step()
    container.optimizers[0].max_grad_norm = container.optimizers[1].max_grad_norm = None
    container.step()
    assert [len(opt.state) for opt in container.optimizers] == [2, 2 if cls is Mine else 0]


def test_a_learning_rate_may_drop_the_state_that_a_step_reads() -> None:
    """A group's value whose conversion to a float clears the state leaves the step complete."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 64)) for _ in range(50)]
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    ours, plain = FusedAdamW(params, lr=1e-2), FusedAdamW(twins, lr=1e-2)
    reused = []

    class Rate:
        def __float__(self) -> float:
            ours.state.clear()
            reused.extend(torch.full((8, 64), 7.0) for _ in range(150))
            return 1e-2

    for rate in (1e-2, Rate()):
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn(8, 64)
            twin.grad = param.grad.clone()
        ours.param_groups[0]["lr"] = rate
        ours.step()
        plain.step()
    assert all(map(torch.equal, params, twins))
    assert all(bool((tensor == 7).all()) for tensor in reused)
