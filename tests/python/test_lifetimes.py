"""Optimizers that are built, trained and dropped leave nothing behind."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, lr_scheduler

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, GradScaler
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)
from torchopt_ext.optim import fused_step
from torchopt_ext.zero import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    reduce_scatter_hook,
)

TIMES = 3  # trainings on a fresh model and on a kept model

Make = Callable[[nn.Sequential], tuple[nn.Module, Any]]  # the module that runs, and its optimizer


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    gc.collect()
    gc.freeze()  # ignore what other tests left behind
    yield
    gc.unfreeze()
    dist.destroy_process_group()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def plain(**options: Any) -> Make:
    return lambda model: (model, FusedAdamW(model.parameters(), **options))


def container(kind: Any, optimizer: Any, **options: Any) -> Make:
    return lambda model: (model, kind([model], optimizer, {"lr": 1e-3, **options}))


def scheduled(model: nn.Sequential) -> tuple[nn.Module, Any]:
    optimizers = OptimizersContainer([model], FusedAdamW, {"lr": 1e-3})
    optimizers.schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0)  # type: ignore[attr-defined]
    for optimizer in optimizers.optimizers:
        lr_scheduler.StepLR(optimizer, 1)
    return model, optimizers


def adapted(base: Any, **options: Any) -> Make:
    def make(model: nn.Sequential) -> tuple[nn.Module, Any]:
        model = model.bfloat16()
        return model, FSDPadaptOptimizer(base(model.parameters(), **options))

    return make


def zero(optimizer: Any = FusedAdamW, lazily: bool = False, **options: Any) -> Make:
    def make(model: nn.Sequential) -> tuple[nn.Module, Any]:
        sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer, lr=1e-3, **options)
        if lazily:
            sharded.overlap_forward(*model)
        return model, sharded

    return make


def hooked(hook: Callable[[DDP, Any], Any], **options: Any) -> Make:
    def make(model: nn.Sequential) -> tuple[nn.Module, Any]:
        ddp = DDP(model)
        sharded = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=1e-3, **options)
        ddp.register_comm_hook(None, hook(ddp, sharded))
        return ddp, sharded

    return make


def averaging(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


BALANCED = {"partition": "balanced", "bucket_elements": 64}
KINDS: dict[str, Make] = {
    "plain": plain(),
    "norm": plain(max_grad_norm=1.0, skip_nonfinite=True, track=True),
    "container": container(OptimizersContainer, FusedAdamW),
    "container AdamW": container(OptimizersContainer, AdamW),
    "schedulers": scheduled,
    "in backward": container(OptimizersInBackwardContainer, FusedAdamW),
    "in backward AdamW": container(OptimizersInBackwardContainer, AdamW),
    "FSDP fused": adapted(FusedAdamW),
    "FSDP AdamW": adapted(AdamW),
    "greedy": zero(),
    "greedy AdamW": zero(AdamW),
    "bucket view": zero(parameters_as_bucket_view=True),
    "balanced": zero(**BALANCED),
    "sharded": zero(sharded_gradients=True, **BALANCED),
    "lazily": zero(lazily=True, **BALANCED),
    "reduce-scatter": hooked(lambda _, sharded: reduce_scatter_hook(sharded), **BALANCED),
    "overlap": hooked(
        lambda ddp, sharded: hook_with_zero_step(averaging, ddp, sharded), overlap_with_ddp=True
    ),
}


def alive() -> dict[str, int]:
    """Counts Python objects by type, bytes of tensors, descriptors, threads and process groups."""
    gc.collect()
    objects = gc.get_objects()
    counts = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in objects)
    tensors = [o for o in objects if issubclass(type(o), Tensor) and o.layout is torch.strided]
    counts["bytes"] = sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()
    )
    counts["descriptors"] = len(os.listdir("/proc/self/fd"))
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["groups"] = len(dist.distributed_c10d._world.pg_map)
    return dict(counts)  # the garbage collector does not track this dict


def train(kind: str, model: nn.Sequential, make: Make | None = None) -> tuple[nn.Module, Any]:
    run, optimizer = (make or KINDS[kind])(model)
    scaler = GradScaler("cpu", enabled=kind == "norm")
    for _ in range(3 if kind == "overlap" else 1):
        optimizer.zero_grad()
        loss = run(torch.ones(1, 8).to(model[0].weight.dtype)).sum()
        if kind.startswith("FSDP"):
            optimizer.backward(loss)
        else:
            scaler.scale(loss).backward()
        if kind != "overlap":
            scaler.step(optimizer)
            scaler.update()
    return run, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(kind: str) -> None:
    """Repeated training leaks nothing, whether the model is dropped or kept."""
    kept = layers()

    def rounds(times: int) -> dict[str, int]:
        for _ in range(times):
            train(kind, kept)
            train(kind, layers())
        kept.zero_grad()
        return alive()

    rounds(3)
    counts = [rounds(2), rounds(TIMES), rounds(TIMES)]
    # A leak grows every round. A single growth may come from another test in this process.
    grown = {}
    for name in counts[-1]:
        first, second, third = (count.get(name, 0) for count in counts)
        if min(third - second, second - first) >= TIMES:
            grown[name] = (first, second, third)
    assert grown == {}


def inner(optimizer: Any) -> list[Any]:
    """Returns the optimizers with state that are in an optimizer, or the optimizer itself."""
    parts = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optim", optimizer)]
    return [p for part in parts for p in (inner(part) if part is not optimizer else [part])]


def memory(optimizer: Any) -> list[StorageWeakRef]:
    """Returns weak references to the memory of an optimizer's state."""
    entries = [entry for optim in inner(optimizer) for entry in optim.state.values()]
    tensors = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
    assert tensors
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def offload(optimizer: Any) -> None:
    for optim in inner(optimizer):
        for entry in optim.state.values():
            entry.update({k: v.clone() for k, v in entry.items() if isinstance(v, Tensor)})


def clear(optimizer: Any) -> None:
    for optim in inner(optimizer):
        optim.state.clear()


WITH_OPTIONS: dict[str, Make] = {
    "track": plain(track=True),
    "int8": lambda model: plain(state_dtype="int8", fp32_moments=[model[0].weight])(model),
    **{
        kind: lambda model, kind=kind: plain(master_weights=kind)(model.bfloat16())
        for kind in ("fp32", "remainder", "remainder8")
    },
}


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("drop", [offload, clear])
@pytest.mark.parametrize("kind", KINDS | WITH_OPTIONS)
def test_state_that_a_user_drops_is_freed_at_once(kind: str, drop: Callable[[Any], None]) -> None:
    """Also a second time without a step in between, as by programs that reload before a step."""
    _kept = train(kind, layers(), (KINDS | WITH_OPTIONS)[kind])
    for _ in range(1 if drop is clear else 2):
        dropped = memory(_kept[1])
        drop(_kept[1])
        assert [reference.expired() for reference in dropped] == [True] * len(dropped)


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("kind", ["plain", "norm", "FSDP fused", *WITH_OPTIONS])
def test_parameters_that_a_user_drops_are_freed_at_once(kind: str) -> None:
    """Densification replaces parameters and moves their state (gsplat's relocation)."""
    model = layers()
    optimizer = train(kind, model, (KINDS | WITH_OPTIONS)[kind])[1]
    optimizer.zero_grad()
    group, state = optimizer.param_groups[0], optimizer.state
    dropped = [weakref.ref(param) for param in group["params"]]
    for i, old in enumerate(list(group["params"])):
        entry = state.pop(old)
        new = group["params"][i] = nn.Parameter(torch.cat([old.detach()] * 2))
        state[new] = {k: torch.cat([v] * 2) if v.dim() else v for k, v in entry.items()}
    del model, old
    assert [reference() is None for reference in dropped] == [True] * len(dropped)


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("kind", ["alone", "norm", "joint", "two plans", "rejected"])
def test_a_step_keeps_no_gradient(kind: str) -> None:
    options: Any = {"max_grad_norm": 1.0} if kind in ("norm", "joint") else {}
    dtypes = (torch.float32, torch.float64) if kind == "two plans" else (torch.float32,) * 2
    optimizers = [FusedAdamW(layers().to(dtype).parameters(), **options) for dtype in dtypes]
    stepped = optimizers[:1] if kind in ("alone", "norm") else optimizers
    params = [p for o in stepped for group in o.param_groups for p in group["params"]]
    for count in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        if kind == "rejected" and count:
            stepped[1].param_groups[0]["betas"] = ("x", 0.9)
            with pytest.raises(TypeError):
                fused_step(stepped)
        else:
            fused_step(stepped)
    references = [weakref.ref(p.grad) for p in params]
    for optimizer in stepped:
        optimizer.zero_grad()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_cycle_through_the_optimizer_is_collected() -> None:
    model = layers()
    model[0].weight.owner = train("plain", model)[1]
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


def test_a_model_whose_parameters_arrive_late_can_be_saved() -> None:
    model = layers()
    _, optimizer = zero(lazily=True, **BALANCED)(model)
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(torch.ones(1, 8)), model(torch.ones(1, 8)))
    del optimizer
    assert not any(child._forward_pre_hooks for child in model)
