"""Muon with other algorithms in one object: one norm, one decision, one schedule, one scaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchopt_ext import FusedAdam, FusedAdamW, FusedMuon, FusedOptimizer, FusedSGD, GradScaler

from ...support.compare import assert_same_bits, snapshot
from ...support.problems import copy_params, make_params, set_gradients, train
from ...support.ways import WAYS, hybrid


def test_one_norm_and_one_factor_for_all_algorithms() -> None:
    """Of the raw gradients, as torch's function clips them."""
    params, clipped = hybrid(max_grad_norm=0.5)
    others, plain = hybrid()
    for seed in range(3):
        set_gradients(params, others, seed=seed, scale=10.0)
        norm = torch.nn.utils.clip_grad_norm_(others, 0.5)
        clipped.step()
        plain.step()
        torch.testing.assert_close(clipped.control.grad_norm, norm.double(), rtol=1e-6, atol=0)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_clipping_does_not_shrink_the_orthogonalized_update() -> None:
    """deepspeedai/DeepSpeed#7713: it was clipped instead, which divided the step by up to 86."""
    (param,) = make_params([(16, 24)])
    before = param.detach().clone()
    optimizer = FusedMuon([param], lr=0.02, weight_decay=0.0, max_grad_norm=1e-3)
    train(optimizer, [0])
    singular = torch.linalg.svdvals((param.detach() - before) / 0.02)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


def test_a_skipped_step_changes_nothing() -> None:
    params, optimizer = hybrid(skip_nonfinite=True)
    train(optimizer, [0])
    assert float(optimizer.control.orthogonalized) == 2
    before = snapshot(optimizer)
    set_gradients(params, seed=1)
    params[2].grad[1] = math.nan
    optimizer.step()
    assert snapshot(optimizer) == before
    assert float(optimizer.control.orthogonalized) == 0
    train(optimizer, [2])
    assert float(optimizer.control.orthogonalized) == 2


def test_matrices_are_counted_once_a_step() -> None:
    """Of gradients that are there, whatever the accumulation; other groups are not counted."""
    params, optimizer = hybrid()
    for present, expected in ((2, 2), (1, 1), (0, 0)):
        for p in params:
            p.grad = None
        for p in params[:present]:
            for _ in range(3):  # accumulated
                (p.square().sum()).backward()
        optimizer.step()
        assert float(optimizer.control.orthogonalized) == expected


def test_a_gradient_scaler_sees_one_optimizer() -> None:
    params, optimizer = hybrid()
    others, plain = hybrid()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        set_gradients(params, seed=seed, scale=2.0**10)
        set_gradients(others, seed=seed)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_groups_are_as_optimizers_of_their_own() -> None:
    params, optimizer = hybrid()
    others = copy_params(params)
    separate = [
        FusedMuon(others[:2], lr=0.02),
        FusedAdamW(others[2:3], lr=0.02, weight_decay=0.1),
        FusedOptimizer(others[3:4], algorithm="lion", lr=0.02, weight_decay=0.1),
        FusedAdam(others[4:5], lr=0.02, weight_decay=0.1),
        FusedSGD(others[5:], lr=0.02, weight_decay=0.1, momentum=0.9),
    ]
    for seed in range(3):
        set_gradients(params, others, seed=seed)
        optimizer.step()
        for each in separate:
            each.step()
    assert_same_bits(params, others)


def test_muon_beside_another_default() -> None:
    """A group of Muon in any fused optimizer."""
    params, muon = make_params([(16, 24)]), make_params([(16, 24)])
    optimizer = FusedAdamW([{"params": params, "algorithm": "muon"}], lr=0.02, weight_decay=0.1)
    other = FusedMuon(muon, lr=0.02)
    for each in (optimizer, other):
        train(each, range(2))
    assert_same_bits(params, muon)


def test_the_schedule_moves_every_groups_rate() -> None:
    """tenstorrent/tt-metal#56027: the schedule moved one of two learning rates."""
    params, optimizer = hybrid(weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    train(optimizer, [0])
    scheduler.step()
    before = [p.detach().clone() for p in params]
    train(optimizer, [1])
    assert_same_bits(before, params)


@pytest.mark.parametrize("way", ["fp32", "bf16, master", "bf16, remainder, int8"])
def test_the_order_of_parameters_and_groups_does_not_matter(way: str) -> None:
    """Equal shapes then have other neighbours in a batch, and squares are added in another order.

    Nothing but the order differs, so that the bits are the same.
    """
    shapes = [(8, 64), (64, 8), (8, 64), (9, 5), (8, 64), (5,), (7, 64), (3,), (70,)]
    params, others = (make_params(shapes, WAYS[way].dtype) for _ in range(2))

    def build(params: list[Any], order: int) -> FusedMuon:
        algorithms = ("muon", params[:5]), ("adamw", params[5:7]), ("lion", params[7:])
        groups = [{"params": its[::order], "algorithm": name} for name, its in algorithms]
        return FusedMuon(groups[::order], lr=0.02, max_grad_norm=0.5, **WAYS[way].options)

    optimizers = build(params, 1), build(others, -1)
    for seed in range(3):
        set_gradients(params, others, seed=seed)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(params, others)
    for p, q in zip(params, others, strict=True):
        assert_same_bits(optimizers[0].state[p].values(), optimizers[1].state[q].values())
    assert_same_bits(*([o.control.grad_norm] for o in optimizers))
