"""FSDPadaptOptimizer around a fused base whose states lie on the host: same bits as beside."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedLion
from torchopt_ext.mixed_precision import (
    FSDPadaptOptimizer,
    load_checkpoint,
    offload_fsdp_optimizer,
    optimizer_on_device,
    save_checkpoint,
)

from ...support.compare import snapshot
from ...support.host_states import addresses, count_locks, let_offloading_move, places
from ...support.problems import make_params, through_file

pytestmark = pytest.mark.usefixtures("params_on_gpu")

SHAPES = ((3, 4), (7,), (), (2, 70), (1, 5017))
SCALER = {"initial_scale": 2.0**8, "growth_interval": 3, "hysteresis": 1}
BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "masters by default": (FusedAdamW, {}),
    "remainder": (FusedAdamW, {"master_weights": "remainder"}),
    "8 bits": (
        FusedAdamW,
        {"master_weights": "remainder8", "state_dtype": "int8", "fp32_moments": ()},
    ),
    "lion": (FusedLion, {"state_dtype": "bf16"}),
}
each_base = pytest.mark.parametrize("base", BASES)


def job(base: str, **options: Any) -> FSDPadaptOptimizer:
    cls, held = BASES[base]
    params = make_params(SHAPES, torch.bfloat16)
    inner = cls(params, lr=0.02, **held, **options)
    return FSDPadaptOptimizer(inner, grad_scal_cfg=SCALER, clip_grad_norm=0.5)


def both(base: str, **options: Any) -> tuple[FSDPadaptOptimizer, FSDPadaptOptimizer]:
    return job(base), job(base, state_device="cpu", **options)


def train(optimizer: Any, seeds: Any) -> None:
    """Makes steps. That of seed 2 overflows."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        params = [param for group in optimizer.params_by_group for param in group]
        loss = torch.zeros(())
        for param in params:
            factors = torch.randn(param.shape, generator=generator)
            loss = loss + (param.float() * factors).sum()
        optimizer.backward(loss * (torch.inf if seed == 2 else 1.0))
        assert optimizer.step() == (seed != 2)


@each_base
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_same_bits_and_never_beside_the_parameters(
    base: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory is locked before the first step, that of masters, too."""
    beside, on_host = both(base, state_fraction=fraction)
    locks = count_locks(monkeypatch)
    held = []
    for seed in range(5):
        for optimizer in (beside, on_host):
            train(optimizer, [seed])
        held.append(addresses([on_host]))
        if fraction == 1.0:
            assert all(its == {True} for its in places([on_host]).values())
    assert held == held[:1] * 5 and held[0] and not locks
    assert snapshot(on_host) == snapshot(beside)
    assert on_host.grad_norm == beside.grad_norm and on_host.skipped_steps == 1
    assert on_host.host_bytes > 0 == beside.host_bytes


@each_base
def test_moved_between_steps(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after offload_fsdp_optimizer, whose state the next step would bring back."""
    let_offloading_move(monkeypatch)
    draw = random.Random(2)
    beside, on_host = both(base)
    for seed in range(8):
        place = draw.choice(["cpu", "cuda"])
        on_host.move_state(place)
        for optimizer in (beside, on_host):
            train(optimizer, [seed])
        assert (on_host.host_bytes > 0) == (place == "cpu")
        if place == "cuda":
            offload_fsdp_optimizer(on_host)
            assert on_host.host_bytes > 0
    assert snapshot(on_host) == snapshot(beside)


def test_no_more_is_locked_than_the_states_take() -> None:
    """The wrapper adds masters, with which moments are fp32."""
    optimizer = job("masters by default", state_device="cpu")
    reserved = optimizer.optim._storage.host._reserved.values()
    elements = sum(param.numel() for param in optimizer.params_by_group[0])
    assert sum(memory.nbytes for memory in reserved) == 12 * elements
    train(optimizer, range(1))
    assert not reserved and optimizer.host_bytes == 12 * elements


@each_base
@pytest.mark.parametrize("steps", [0, 3])
def test_state_dicts_cross(base: str, steps: int) -> None:
    for source, target in (both(base), reversed(both(base))):
        train(source, range(4))
        train(target, range(10, 10 + steps))
        target.load_state_dict(through_file(source.state_dict()))
        for optimizer in (source, target):
            train(optimizer, range(4, 6))
        assert snapshot(source) == snapshot(target)
        on_host = max(source, target, key=lambda optimizer: optimizer.host_bytes)
        assert all(its == {True} for its in places([on_host]).values())


def test_a_later_load_locks_once_for_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, on_host = both("masters by default")
    for optimizer in (beside, on_host):
        train(optimizer, range(2))
    locks = count_locks(monkeypatch)
    on_host.load_state_dict(through_file(beside.state_dict()))
    train(on_host, range(3, 4))
    assert locks == [len(SHAPES)] * 3


@each_base
def test_checkpoints_cross(base: str, tmp_path: Path, one_rank: None) -> None:
    for source, target in (both(base), reversed(both(base))):
        train(source, range(4))
        save_checkpoint(source, str(tmp_path / "optimizer"))
        load_checkpoint(target, str(tmp_path / "optimizer"))
        for optimizer in (source, target):
            train(optimizer, range(4, 6))
        assert snapshot(source) == snapshot(target)


@each_base
def test_weights_that_are_written_and_copies(base: str) -> None:
    optimizers = both(base)
    for optimizer in optimizers:
        train(optimizer, range(2))
        first = optimizer.params_by_group[0][0]
        with torch.no_grad():
            first.mul_(1.5)
        train(optimizer, range(3, 4))
        first.data.mul_(0.5)
        optimizer.refresh_masters()
        train(optimizer, range(4, 5))
    copies = [copy.deepcopy(optimizers[1]), pickle.loads(pickle.dumps(optimizers[1]))]
    every = [*optimizers, *copies]
    for optimizer in every:
        train(optimizer, range(5, 6))
    assert all(snapshot(optimizer) == snapshot(optimizers[0]) for optimizer in every)
    assert {optimizer.host_bytes for optimizer in copies} == {optimizers[1].host_bytes}


def test_offloading_is_rejected_before_the_block_runs() -> None:
    """The states are on the host already."""
    optimizer = job("remainder", state_device="cpu")
    train(optimizer, range(1))
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="state_device='cpu'"):
        offload_fsdp_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="state_device='cpu'"), optimizer_on_device(optimizer):
        pytest.fail("the block ran")
    assert snapshot(optimizer) == before


def test_other_bases_have_no_place_for_states() -> None:
    optimizer = FSDPadaptOptimizer(torch.optim.AdamW([nn.Parameter(torch.ones(3))]))
    with pytest.raises(TypeError, match="a AdamW steps states beside its parameters"):
        optimizer.move_state("cpu")


def test_a_move_during_a_step_is_rejected() -> None:
    optimizer = job("remainder", state_device="cpu")
    optimizer.register_step_post_hook(lambda *_: optimizer.move_state("cuda"))
    with pytest.raises(RuntimeError, match="a step of this optimizer is under way"):
        train(optimizer, range(1))
    assert all(its == {True} for its in places([optimizer]).values())
