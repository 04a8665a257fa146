"""States in page-locked memory of the host: same bits, where they lie, and what moves them.

The memory of parameters stands for a GPU's. In `make test-host-cuda` the CUDA back end makes the
steps, and the host's memory can then be accessed only by its kernels.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves

from torchopt_ext import _C, FusedAdamW, FusedMuon
from torchopt_ext.mixed_precision.offload import offload_fsdp_optimizer
from torchopt_ext.optim import host_steps
from torchopt_ext.state.host_memory import is_on_host

from ...support.compare import assert_same_bits, bits, snapshot
from ...support.host_states import BESIDE, addresses, count_locks, places
from ...support.problems import (
    clip_skip_or_leave_out,
    make_params,
    set_gradients,
    through_file,
    train,
)
from ...support.ways import BF16, WAYS, each_kind_and_way, each_way

pytestmark = pytest.mark.usefixtures("params_on_gpu")
SHAPES = ((3, 4), (7,), (), (0, 2), (2, 1031), (130, 65), (1, 33_003))
HOST_CUDA = re.search(r"\S*/host_cuda/\S*", Path("/proc/self/maps").read_text())
needs_host_cuda = pytest.mark.skipif(not HOST_CUDA, reason="make test-host-cuda")


@contextmanager
def only_kernels_access_it(only_copies: bool = False) -> Iterator[None]:
    """Makes any other access to the host's memory a fault, where the CUDA back end runs.

    Args:
        only_copies: an access of kernels, too, but not one of copy engines.
    """
    library = ctypes.CDLL(HOST_CUDA[0]) if HOST_CUDA else None
    if library:
        library.host_cuda_protect(2 if only_copies else 1)
    try:
        yield
    finally:
        if library:
            library.host_cuda_protect(0)


def step(optimizer: Any) -> None:
    optimizer.init_state()  # copies weights to masters
    with only_kernels_access_it():
        optimizer.step()


STAGED = ((40, 5_000), (300_000,), (1, 33_003), (130, 65), (2, 1031), (7,), (), (0, 2), (9, 7_777))


@pytest.mark.parametrize("bucket", [1, 700_000, 64 << 20])
@each_kind_and_way
def test_staged(kind: str, way: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any size of the buckets gives the same bits; kernels do not access the host's memory."""
    monkeypatch.setattr(host_steps, "_BUCKET", bucket)
    options = {"max_grad_norm": 1.0, "skip_nonfinite": True, "rounding_seed": 3, "ema_decay": 0.9}
    usual = WAYS[way].build(kind, shapes=STAGED, **options)
    staged = WAYS[way].build(
        kind, shapes=STAGED, **options, state_device="cpu", state_fraction=0.95,
        offload_step="staged",
    )  # fmt: skip
    assert staged[1].offload_path == "staged"
    for seed in range(4):
        clip_skip_or_leave_out(*usual, seed)
        staged[1].init_state()
        with only_kernels_access_it(only_copies=not kind.startswith("Muon")):
            clip_skip_or_leave_out(*staged, seed)
    assert snapshot(usual[1]) == snapshot(staged[1])
    assert staged[1].control.skipped_steps == 1


def both(way: str, kind: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    """Returns an optimizer with states beside the parameters, and one with ``options``."""
    more = {"lr": 0.02, "max_grad_norm": 3.0, "skip_nonfinite": True, "rounding_seed": 5}
    _, beside = WAYS[way].build(kind, shapes=SHAPES, **more)
    _, on_host = WAYS[way].build(kind, shapes=SHAPES, **more, state_device="cpu", **options)
    return beside, on_host


def assert_same_steps(beside: Any, on_host: Any, moves: Callable[[], None] = lambda: None) -> None:
    for seed in range(4):
        moves()
        for optimizer in (beside, on_host):
            params = optimizer.param_groups[0]["params"]
            set_gradients(params, seed=seed)
            if seed == 2:
                params[0].grad.view(-1)[0] = torch.nan
            if seed == 3:
                params[1].grad = None
        beside.step()
        step(on_host)
    assert snapshot(on_host) == snapshot(beside)
    assert on_host.control.grad_norm == beside.control.grad_norm
    assert on_host.control.skipped_steps == 1


@pytest.mark.parametrize("fraction", [1.0, 0.3])
@each_kind_and_way
def test_same_bits(kind: str, way: str, fraction: float) -> None:
    beside, on_host = both(way, kind, state_fraction=fraction)
    assert_same_steps(beside, on_host)
    where = [its for its in places([on_host]).values() if its]
    if not where:
        return  # plain SGD
    assert all(len(its) == 1 for its in where)
    assert {True} in where
    assert ({False} in where) == (fraction < 1.0)
    for state in on_host.state.values():
        assert not any(is_on_host(v) for k, v in state.items() if BESIDE.fullmatch(k))


@each_way
def test_same_bits_tracked_and_moved_at_random(way: str) -> None:
    draw = random.Random(3)
    beside, on_host = both(way, track=True)

    def move() -> None:
        on_host.move_state(draw.choice(["cpu", "cuda", None, torch.device("cpu")]))

    assert_same_steps(beside, on_host, move)


def test_fraction_keeps_the_first_states_beside() -> None:
    params = make_params([(100, 10)] * 10)
    optimizer = FusedAdamW(params, state_device="cpu", state_fraction=0.65)
    train(optimizer, range(1))
    assert [its == {True} for its in places([optimizer]).values()] == [False] * 3 + [True] * 7


def test_memory_is_locked_in_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One allocation for each entry; the first step takes none."""
    calls: list[int] = []
    carve = _C.carve

    def counted(like: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(like))
        return carve(like, *args, **kwargs)

    monkeypatch.setattr(_C, "carve", counted)
    params = make_params(SHAPES, BF16)
    optimizer = FusedAdamW(params, master_weights="fp32", state_device="cpu")
    assert calls == [len(SHAPES)] * 3
    optimizer.add_param_group({"params": make_params([(4, 4)], BF16)})
    assert calls == [len(SHAPES)] * 3 + [1] * 3
    train(optimizer, range(2))
    assert len(calls) == 6
    assert optimizer.host_bytes == 12 * sum(p.numel() for p in [*params, torch.empty(4, 4)])


@needs_host_cuda
def test_an_optimizer_without_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_CUDA_NO_LOCKS", "1")
    with pytest.raises(RuntimeError, match=r"cannot lock \d+ bytes"):
        FusedAdamW(make_params([(3, 4)]), state_device="cpu")
    optimizer = FusedAdamW(make_params([(3, 4)]))
    train(optimizer, range(1))
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="cannot lock"):
        optimizer.move_state("cpu")
    assert snapshot(optimizer) == before and optimizer.host_bytes == 0
    train(optimizer, range(1))


def test_on_the_cpu_states_are_where_they_are(
    params_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same script runs without a GPU."""
    monkeypatch.undo()
    optimizer = FusedAdamW(make_params(SHAPES), state_device="cpu", state_fraction=0.5)
    train(optimizer, range(1))
    optimizer.move_state("cpu")
    optimizer.move_state("cuda")
    assert optimizer.host_bytes == 0


@each_way
def test_state_dicts_cross(way: str) -> None:
    """A run saved with its states on the host continues beside the parameters, and back."""
    beside, on_host = both(way)
    for optimizer in (beside, on_host):
        train(optimizer, range(2))
    saved = through_file(on_host.state_dict())
    for source, options in ((on_host, {}), (beside, {"state_device": "cpu"})):
        params = [nn.Parameter(p.detach().clone()) for p in source.param_groups[0]["params"]]
        more = {"lr": 0.02, "max_grad_norm": 3.0, "skip_nonfinite": True, "rounding_seed": 5}
        _, resumed = WAYS[way].build(params=params, **more, **options)
        resumed.load_state_dict(through_file(source.state_dict()))
        train(resumed, range(2, 4))
        if source is on_host:
            others = snapshot(resumed)
        assert (resumed.host_bytes > 0) == bool(options)
    train(on_host, range(2, 4))
    assert others == snapshot(on_host) == snapshot(resumed)
    assert through_file(saved).keys() == {"state", "param_groups"}


def test_loading_fills_the_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source = both("bf16, master")[1]
    train(source, range(2))
    saved = through_file(source.state_dict())
    target = both("bf16, master")[1]
    monkeypatch.setattr(_C, "carve", None)  # no further memory
    target.load_state_dict(saved)
    assert all(its == {True} for its in places([target]).values())
    for p, q in zip(*(o.param_groups[0]["params"] for o in (source, target)), strict=True):
        q.data.copy_(p)
    train(source, range(2, 4))
    train(target, range(2, 4))
    assert snapshot(source) == snapshot(target)


def raise_error(_: Any) -> None:
    raise ValueError("a hook")


@pytest.mark.parametrize("what", ["a failing hook", "an earlier dict", "a shallow copy"])
def test_loading_overwrites_nothing(what: str) -> None:
    """Former states remain for what still refers to them."""
    other = both("bf16, master")[0]
    train(other, range(3))
    optimizers = both("bf16, master")
    for optimizer in optimizers:
        train(optimizer, range(2))
        saved = optimizer.state_dict()
        if what == "a shallow copy":
            copy.copy(optimizer).load_state_dict(other.state_dict())
        elif what == "an earlier dict":
            optimizer.load_state_dict(other.state_dict())
            optimizer.load_state_dict(saved)
        else:
            handle = optimizer.register_load_state_dict_post_hook(raise_error)
            with pytest.raises(ValueError, match="a hook"):
                optimizer.load_state_dict(other.state_dict())
            handle.remove()
        train(optimizer, range(2, 4))
    assert snapshot(optimizers[0]) == snapshot(optimizers[1])
    assert all(its == {True} for its in places(optimizers[1:]).values())


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8", "fp32_moments": ()},
                                     {"state_fraction": 0.4}])  # fmt: skip
def test_torchs_functions_see_one_device(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """set_optimizer_state_dict rejects a dict with tensors on two (_load_optim_state_dict)."""
    model = nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 3)).bfloat16()
    build = partial(FusedAdamW, [*model.parameters()], state_device="cpu", **options)
    optimizer = build(master_weights="remainder")
    train(optimizer, range(2))
    whole = StateDictOptions(full_state_dict=True)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
    resumed = build(master_weights="remainder")
    resumed.init_state()
    seen: set[bool] = set()
    gather = torch_state_dict._get_optim_state_dict

    def spy(*args: Any, **kwargs: Any) -> Any:
        found = gather(*args, **kwargs)
        tensors = [t for t in tree_leaves(found["state"]) if isinstance(t, torch.Tensor)]
        seen.update(is_on_host(t) for t in tensors if t.dim())
        return found

    monkeypatch.setattr(torch_state_dict, "_get_optim_state_dict", spy)
    set_optimizer_state_dict(model, resumed, saved, options=whole)
    assert seen == {False}
    weights = [p.detach().clone() for p in model.parameters()]
    train(optimizer, range(2, 4))
    expected = snapshot(optimizer)
    for p, weight in zip(model.parameters(), weights, strict=True):
        p.data.copy_(weight)
    train(resumed, range(2, 4))
    assert snapshot(resumed) == expected


def test_memory_that_is_not_needed_is_freed() -> None:
    optimizer = both("bf16, master")[1]
    host = optimizer._storage.host
    reserved = [weakref.ref(memory) for memory in host._reserved.values()]
    optimizer.move_state(None)
    assert all(ref() is None for ref in reserved)
    optimizer.move_state("cpu")
    assert len(host._reserved) == len(reserved)
    params = optimizer.param_groups[0]["params"]
    params[0] = nn.Parameter(params[0].detach().clone())
    train(optimizer, range(1))
    assert not host._reserved


def test_loading_states_that_change_places() -> None:
    """A dict may hold the optimizer's own tensors for other parameters."""
    params = make_params([(5, 5), (5, 5)])
    optimizer = FusedAdamW(params, state_device="cpu")
    train(optimizer, range(1))
    expected = [bits(optimizer.state[p]["exp_avg"]) for p in params]
    saved = optimizer.state_dict()
    saved["state"] = {0: saved["state"][1], 1: saved["state"][0]}
    optimizer.load_state_dict(saved)
    assert [bits(optimizer.state[p]["exp_avg"]) for p in reversed(params)] == expected


@each_way
def test_scaling_before_the_first_step_takes_no_memory(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, on_host = both(way)
    locks = count_locks(monkeypatch)
    for optimizer in (beside, on_host):
        params = optimizer.param_groups[0]["params"]
        optimizer.scale_(params[4], torch.tensor([0.5, 2.0]))
        train(optimizer, range(2))
    assert snapshot(beside) == snapshot(on_host)
    assert not locks


@needs_host_cuda
@pytest.mark.parametrize("captured", [True, False])
def test_a_graph_keeps_the_memory_of_states(captured: bool) -> None:
    """A replay accesses it when the optimizer is gone."""
    assert HOST_CUDA is not None
    library = ctypes.CDLL(HOST_CUDA[0])
    optimizer = both("bf16, master")[1]
    train(optimizer, range(1))
    held = addresses([optimizer])
    library.host_cuda_capture(captured)
    train(optimizer, range(1, 2))
    library.host_cuda_capture(0)
    del optimizer
    gc.collect()

    def exists() -> set[bool]:
        views = [(ctypes.c_char * 1).from_address(place) for place in held]
        return {is_on_host(torch.frombuffer(view, dtype=torch.uint8)) for view in views}

    assert exists() == {captured}
    library.host_cuda_destroy_graph()
    assert exists() == {False}


@needs_host_cuda
@pytest.mark.parametrize("way", ["fp32", "bf16, remainder8, int8, random"])
def test_few_blocks_step_states_on_the_host(way: str) -> None:
    """They wait for the link, and leave multiprocessors to the next forward."""
    assert HOST_CUDA is not None
    library = ctypes.CDLL(HOST_CUDA[0])
    shapes = ((1_000, 1_024), (900_000,), (7,), (33, 65))
    grids = []
    for options in ({}, {"state_device": "cpu"}):
        params, optimizer = WAYS[way].build("AdamW", shapes=shapes, **options)
        set_gradients(params, seed=1)
        library.host_cuda_largest_grid()
        optimizer.step()
        grids.append(library.host_cuda_largest_grid())
    assert grids[1] <= 64 + len(shapes) < grids[0]


@needs_host_cuda
def test_other_threads_run_while_pages_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_CUDA_LOCK_MS", "300")
    ticks: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    FusedAdamW(make_params([(3, 4)]), state_device="cpu")  # locks twice
    end = time.monotonic()
    ended.set()
    thread.join()
    assert len([t for t in ticks if begin < t < end]) > 5


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize("way", ["fp32", "bf16, master", "bf16, remainder8, int8, random"])
def test_muon_with_adamw(algorithm: str, way: str) -> None:
    """deepspeedai/DeepSpeed#8463: with states on the host, training diverged."""
    optimizers = []
    for options in ({}, {"state_device": "cpu"}, {"state_device": "cpu", "state_fraction": 0.5}):
        params = make_params([(8, 80), (80, 8), (64,), (16, 64)], WAYS[way].dtype)
        groups = [
            {"params": params[:2], "algorithm": algorithm},
            {"params": params[2:], "algorithm": "adamw"},
        ]
        optimizers.append(FusedMuon(groups, max_grad_norm=1.0, **WAYS[way].options, **options))
        for seed in range(3):
            set_gradients(params, seed=seed)
            step(optimizers[-1])
    assert_same_bits(*([p for g in o.param_groups for p in g["params"]] for o in optimizers[:2]))
    assert snapshot(optimizers[0]) == snapshot(optimizers[1]) == snapshot(optimizers[2])
    assert optimizers[1].host_bytes > optimizers[2].host_bytes > 0


def test_frozen_parameters_get_memory_when_they_train() -> None:
    beside, on_host = both("fp32")
    for optimizer in (beside, on_host):
        params = optimizer.param_groups[0]["params"]
        params[0].requires_grad_(False)
        train(optimizer, range(1), params=params[1:])
        params[0].requires_grad_(True)
        train(optimizer, range(1, 3))
    assert snapshot(beside) == snapshot(on_host)


def test_other_places_are_rejected() -> None:
    optimizer = both("fp32")[1]
    train(optimizer, range(1))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="Invalid state_device: 'meta'"):
        optimizer.move_state("meta")
    with pytest.raises(RuntimeError, match="state_device='cpu'"):
        offload_fsdp_optimizer(optimizer)
    assert snapshot(optimizer) == before
