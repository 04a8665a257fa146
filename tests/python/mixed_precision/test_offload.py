"""Offloading, with part of the host memory in place of a device.

tests/gpu/test_mixed_precision.py covers streams and pinned memory, which need a GPU.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import _C, FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    load_fsdp_optimizer,
    offload,
    offload_fsdp_optimizer,
    optimizer_on_device,
)
from torchopt_ext.state.host_memory import is_on_host

from ...support.compare import unchanged


def scheduled(params: Any) -> FusedAdamW:
    optimizer = FusedAdamW(params)
    optimizer.set_schedule(warmup_steps=9, stable_steps=9, decay_steps=9)
    return optimizer


BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": FusedAdamW,
    "scheduled": scheduled,
    "remainder": lambda params: FusedAdamW(params, master_weights="remainder"),
    "remainder8": lambda params: FusedAdamW(params, master_weights="remainder8"),
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
every_base = pytest.mark.parametrize("base", BASES)
SHAPES = [(40, 30), (7,), (3, 5, 2)]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Memory that offloading keeps counts as host, all other memory as device."""
    host: set[int] = set()  # addresses
    kept_init = offload._Kept.__init__

    def init(self: Any, tensors: Any) -> None:
        kept_init(self, tensors)
        host.update(memory.data_ptr() for memory in self.memory)

    monkeypatch.setattr(offload._Kept, "__init__", init)
    monkeypatch.setattr(
        offload, "is_on_device", lambda t: t.numel() > 1 and t.data_ptr() not in host
    )
    return host


def job(base: str) -> tuple[list[nn.Parameter], FSDPadaptOptimizer]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    return params, FSDPadaptOptimizer(BASES[base](params))


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def held(optimizer: Any, *kinds: str) -> list[Tensor]:
    """Returns the tensors that offloading moves."""
    every = [t for kind in kinds or offload.KINDS for t in offload.tensors_of(optimizer, kind)]
    return [t for t in every if t.numel() > 1]


def values(optimizer: Any) -> list[Tensor]:
    return [t.detach().clone() for t in held(optimizer)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.equal(y) for x, y in zip(a, b, strict=True))


def all_on_host(optimizer: Any, host: set[int]) -> bool:
    """Returns whether all that offloading moves is on the host; asserts that all is on one side."""
    sides = {t.data_ptr() in host for t in held(optimizer)}
    assert len(sides) == 1
    return sides.pop()


@every_base
@pytest.mark.parametrize("include", [("states", "masters"), ("states",), {"masters"}], ids=str)
def test_state_moves_and_comes_back(device: set[int], base: str, include: Any) -> None:
    """Values and tensor objects stay the same; doing it twice does nothing."""
    params, optimizer = job(base)
    step(params, optimizer, 0)
    objects = held(optimizer)
    with unchanged(optimizer):
        assert not all_on_host(optimizer, device)
        for _ in range(2):
            offload_fsdp_optimizer(optimizer, include=include, empty_cache=False)
            for kind in offload.KINDS:
                assert {t.data_ptr() in device for t in held(optimizer, kind)} <= {kind in include}
        offload_fsdp_optimizer(optimizer)  # moves the rest
        assert all_on_host(optimizer, device)
        load_fsdp_optimizer(optimizer)
        assert not all_on_host(optimizer, device)
    assert all(a is b for a, b in zip(held(optimizer), objects, strict=True))


@every_base
@pytest.mark.parametrize("how", ["context", "step", "nested contexts"])
def test_training_with_a_cycle_after_every_step_is_as_without(
    device: set[int], base: str, how: str
) -> None:
    params, optimizer = job(base)
    others, plain = job(base)
    for seed in range(5):
        if how == "step":  # a step brings the state back first
            step(params, optimizer, seed)
            assert not all_on_host(optimizer, device)
            offload_fsdp_optimizer(optimizer)
        else:
            with optimizer_on_device(optimizer):
                if how == "nested contexts" and seed:
                    with optimizer_on_device(optimizer):
                        pass
                    assert not all_on_host(optimizer, device)
                step(params, optimizer, seed)
        assert all_on_host(optimizer, device)
        step(others, plain, seed)
    assert equal(values(optimizer), values(plain))
    assert equal([p.detach() for p in params], [p.detach() for p in others])


class Wrapper(torch.optim.Optimizer):
    """Holds an optimizer as Accelerate and Lightning do, without its own state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapper_and_memory_that_runs_out_on_the_way_back(
    device: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework's wrapper is looked through, and state on the host stays known."""
    params, optimizer = job("fused")
    step(params, optimizer, 0)

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with unchanged(optimizer):
        offload_fsdp_optimizer(Wrapper(optimizer))
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty_like", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                load_fsdp_optimizer(optimizer)
        assert all_on_host(optimizer, device)
        load_fsdp_optimizer(Wrapper(optimizer))
        assert not all_on_host(optimizer, device)


def test_host_memory_is_kept_and_of_exact_size(device: set[int]) -> None:
    """Cycles reuse host buffers, whose sizes are not rounded to powers of two."""
    params, optimizer = job("fused")
    addresses: list[list[int]] = []
    for seed in range(3):
        step(params, optimizer, seed)
        offload_fsdp_optimizer(optimizer)
        addresses.append([t.data_ptr() for t in held(optimizer)])
    assert addresses[0] == addresses[1] == addresses[2]
    kept = [k.memory for k in offload._offloader_of(optimizer)._kept.values()]
    spans = [m[-1].data_ptr() + m[-1].nbytes - m[0].data_ptr() for m in kept]
    assert sum(spans) <= sum((t.nbytes + 127) // 128 * 128 for t in held(optimizer))


@pytest.mark.parametrize("locks", [True, False])
def test_host_memory_is_locked_if_the_driver_agrees(
    device: set[int], locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve = _C.carve

    def refuses(*args: Any, stepped_on: Any = None, **kwargs: Any) -> Any:
        if stepped_on is not None:
            raise RuntimeError("cannot lock")
        return carve(*args, **kwargs)

    if not locks:
        monkeypatch.setattr(_C, "carve", refuses)
    params, optimizer = job("fused")
    step(params, optimizer, 0)
    before = values(optimizer)
    offload_fsdp_optimizer(optimizer)
    assert [is_on_host(t) for t in held(optimizer)] == [locks] * 9
    assert equal(values(optimizer), before)
    step(params, optimizer, 1)
    assert not any(is_on_host(t) for t in held(optimizer))


@every_base
def test_state_dicts_while_offloaded(device: set[int], base: str) -> None:
    """A state dict saves only its own bytes, and loads."""
    params, optimizer = job(base)
    step(params, optimizer, 0)
    offload_fsdp_optimizer(optimizer)
    states = optimizer.state_dict(snapshot=True)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    bytes_of_tensors = sum(t.nbytes for t in held(optimizer))
    assert len(file.getvalue()) < 3 * bytes_of_tensors + 30_000
    step(params, optimizer, 1)
    expected = values(optimizer)
    offload_fsdp_optimizer(optimizer)
    optimizer.load_state_dict(states)
    step(params, optimizer, 1)
    assert equal(values(optimizer), expected)
    offload_fsdp_optimizer(optimizer)
    assert all_on_host(optimizer, device)


def test_an_optimizer_of_torch_alone(device: set[int]) -> None:
    """Any optimizer is moved by its state, and gets no empty entries."""
    params = [nn.Parameter(torch.randn(20)) for _ in range(3)]
    optimizer = torch.optim.AdamW(params)
    step(params[:1], optimizer, 0)
    offload_fsdp_optimizer(optimizer)
    assert len(optimizer.state) == 1
    assert all_on_host(optimizer, device)
    optimizer.step()
    assert not all_on_host(optimizer, device)
    assert not any(p.data_ptr() in device for p in params)


def test_a_container(device: set[int]) -> None:
    """Its state dict stays as it is, and loading it brings the state back."""
    model = nn.Linear(6, 5)
    params, container = [*model.parameters()], OptimizersContainer([model], FusedAdamW, {})
    step(params, container, 0)
    before = values(container)
    offload_fsdp_optimizer(container)
    states = container.state_dict()
    step(params, container, 1)
    offload_fsdp_optimizer(container)
    container.load_state_dict(states)
    assert not all_on_host(container, device)
    assert equal(values(container), before)


def test_an_offloaded_optimizer_is_let_go_of() -> None:
    params, optimizer = job("fused")
    step(params, optimizer, 0)
    offload_fsdp_optimizer(optimizer)
    kept = weakref.ref(offload._offloader_of(optimizer))
    del params, optimizer
    gc.collect()
    assert kept() is None


@every_base
def test_without_a_device_nothing_moves(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    params, optimizer = job(base)
    step(params, optimizer, 0)
    places = [t.data_ptr() for t in held(optimizer)]
    with unchanged(optimizer):
        load_fsdp_optimizer(optimizer)
        for _ in range(2):
            offload_fsdp_optimizer(optimizer)
            offload_fsdp_optimizer(optimizer, include={"masters"}, empty_cache=False)
            load_fsdp_optimizer(optimizer)
    assert [t.data_ptr() for t in held(optimizer)] == places


@every_base
def test_other_calls_while_offloaded(device: set[int], base: str) -> None:
    """Refreshed masters, a new group and copies work as without offloading."""
    pairs = []
    for offloaded in (True, False):
        params, optimizer = job(base)
        step(params, optimizer, 0)
        if offloaded:
            offload_fsdp_optimizer(optimizer)
        with torch.no_grad():
            for p in params:
                p.mul_(1.5)
        optimizer.refresh_masters()
        assert not (offloaded and all_on_host(optimizer, device))
        params.append(nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
        optimizer.add_param_group({"params": params[-1:], "lr": 0.02})
        step(params, optimizer, 1)
        if offloaded:
            offload_fsdp_optimizer(optimizer)
        pairs.append((params, optimizer))
    assert equal(values(pairs[0][1]), values(pairs[1][1]))
    copies = [copy.deepcopy(pairs[0]), pickle.loads(pickle.dumps(pairs[0]))]
    for pair in (*copies, pairs[1]):
        step(*pair, 2)
        assert equal(values(pair[1]), values(copies[0][1]))


# ---- what is rejected ----------------------------------------------------------------------------


def in_context(optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
    with optimizer_on_device(optimizer, **kwargs):
        pass


each_call = pytest.mark.parametrize("call", [offload_fsdp_optimizer, in_context])


@each_call
@pytest.mark.parametrize(
    "include", [("moments",), "states", ("states", "master"), ["states", 3], (None,)], ids=str
)
def test_an_unknown_kind(call: Callable[..., Any], include: Any) -> None:
    """The error names `include`, even with nothing to move, before a context's body runs."""
    for optimizer in (job("fused")[1], torch.optim.AdamW([torch.ones(3)])):
        with pytest.raises((TypeError, ValueError), match="include"):
            call(optimizer, include=include)


@pytest.mark.parametrize("call", [offload_fsdp_optimizer, in_context, load_fsdp_optimizer])
@pytest.mark.parametrize("wrong", [None, nn.Linear(2, 2), torch.optim.SGD])
def test_what_is_no_optimizer(call: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got "):
        call(wrong)


@each_call
@pytest.mark.parametrize("base", ["fused", "sgd"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_offload_during_a_step(base: str, when: str, call: Callable[..., Any]) -> None:
    """An offload in a step hook raises, and the failed step has ended by then."""
    params, optimizer = job(base)
    step(params, optimizer, 0)
    register = getattr(optimizer, f"register_step_{when}_hook")
    handle = register(lambda optimizer, *_: call(optimizer))
    before = values(optimizer)
    with pytest.raises(RuntimeError, match="step"):
        step(params, optimizer, 1)
    assert equal(values(optimizer), before) == (when == "pre")
    handle.remove()
    before = values(optimizer)
    call(optimizer)
    load_fsdp_optimizer(optimizer)
    assert equal(values(optimizer), before)
    step(params, optimizer, 2)


def test_an_error_inside_a_context_comes_out(device: set[int]) -> None:
    params, optimizer = job("fused")
    step(params, optimizer, 0)
    with pytest.raises(KeyError, match="mine"), optimizer_on_device(optimizer):
        raise KeyError("mine")
    assert all_on_host(optimizer, device)
    step(params, optimizer, 1)
