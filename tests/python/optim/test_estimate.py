"""optim/estimate.py matches the tables of docs/step.md and docs/zero.md, and real allocations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD, ops, param_groups
from torchopt_ext.optim.estimate import SHARDINGS, estimate, unevenness

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(300, 70), (5,), (2000,), (1, 3, 4), ()]


def tensors(dtype: torch.dtype, device: str = "meta") -> list[Tensor]:
    return [torch.zeros(s, dtype=dtype, device=device, requires_grad=True) for s in SHAPES]


COUNT = sum(p.numel() for p in tensors(F32))


@pytest.mark.parametrize(
    ("dtype", "options", "held", "moved"),
    [  # docs/step.md, "Which weights, which moments"; held counts masters and moments
        (F32, {}, 8, 4 + 28),
        (BF16, {"master_weights": "fp32"}, 12, 2 + 28),
        (F16, {"master_weights": "fp32"}, 12, 2 + 28),
        (F16, {"master_weights": "remainder"}, 4, 2 + 14),
        (BF16, {"master_weights": "remainder"}, 10, 2 + 26),
        (BF16, {"master_weights": "remainder8"}, 9, 2 + 24),
        (BF16, {"master_weights": "remainder", "state_dtype": BF16}, 6, 2 + 18),
        (BF16, {}, 4, 2 + 14),
        (F32, {"norm": False}, 8, 28),
        (F32, {"amsgrad": True}, 12, 4 + 36),
        (F32, {"state_dtype": BF16}, 4, 4 + 20),
        (F32, {"grad_dtype": BF16}, 8, 2 + 26),
        (F32, {"algorithm": "lion"}, 4, 4 + 20),
        (BF16, {"algorithm": "lion", "master_weights": "fp32"}, 8, 2 + 20),
        (F32, {"algorithm": "sgd", "momentum": 0.9}, 4, 4 + 20),
        (F32, {"algorithm": "sgd"}, 0, 4 + 12),
    ],
)
def test_bytes_of_an_element(
    dtype: torch.dtype, options: dict[str, Any], held: int, moved: int
) -> None:
    (rank,) = estimate(tensors(dtype), **options)
    assert rank.masters + rank.moments == held * COUNT
    assert rank.moved == moved * COUNT
    assert rank.gradients == options.get("grad_dtype", dtype).itemsize * COUNT
    assert rank.steps == 4 * len(SHAPES)
    total = rank.weights + rank.gradients + rank.masters + rank.moments + rank.steps
    assert rank.held == total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"state_dtype": BF16},
        *({"master_weights": kind} for kind in ("fp32", "remainder", "remainder8")),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLion, FusedSGD])
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}], ids=["", "momentum"])
def test_a_step_allocates_what_was_estimated(
    kind: Any, dtype: torch.dtype, options: dict[str, Any], momentum: dict[str, float]
) -> None:
    if (momentum and kind is not FusedSGD) or ("amsgrad" in options and kind is not FusedAdamW):
        with pytest.raises(TypeError, match=r"has no argument '(amsgrad|momentum)'"):
            kind.estimate(tensors(dtype), **options, **momentum)
        return
    options = options | momentum
    params = tensors(dtype, "cpu")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = kind(params, **options)
    optimizer.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
    }
    (rank,) = kind.estimate(params, **options)
    expected = rank.masters + rank.moments + rank.steps
    assert expected <= sum(storages.values()) <= expected + 64 * 3 * len(params)


@pytest.mark.parametrize("world", [2, 8])
def test_traffic_is_that_of_the_tables(world: int) -> None:
    """Matches docs/zero.md, Traffic: FSDP gathers weights twice and reduces gradients once."""
    units = {"ddp": 2, "zero1": 3, "balanced": 2, "zero2": 2, "fsdp": 3}
    for sharding, count in units.items():
        ranks = estimate(tensors(F32), sharding=sharding, world_size=world)
        assert {rank.sent for rank in ranks} == {count * 4 * COUNT * (world - 1) // world}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world", [1, 3, 64])
def test_every_element_is_stepped_once(sharding: str, world: int) -> None:
    params = tensors(F32)
    params[0].requires_grad_(False)
    ranks = estimate(params, sharding=sharding, world_size=world, bucket_elements=500)
    copies = world if sharding == "ddp" else 1
    assert len(ranks) == world
    trained = COUNT - params[0].numel()
    assert sum(rank.elements for rank in ranks) == copies * trained
    assert sum(rank.moments for rank in ranks) == 8 * copies * trained
    least = COUNT * 4 // (world if sharding == "fsdp" else 1)
    assert all(rank.weights >= least for rank in ranks)


def test_greedy_is_as_uneven_as_the_largest_tensor_makes_it() -> None:
    params = [torch.empty(n, device="meta", requires_grad=True) for n in (60, 20, 20)]
    shares = [rank.elements for rank in estimate(params, sharding="zero1", world_size=2)]
    assert shares == [60, 40]
    assert unevenness(shares) == pytest.approx(0.2)


@pytest.mark.parametrize("world", [2, 5])
def test_equal_buckets_are_cut_as_the_partition_cuts_them(world: int) -> None:
    shapes = [(3000, 1024)] * 7 + [(100,)]
    params = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    rows = [p.numel() // p.shape[0] for p in params]
    plan = ops.partition_balanced([p.numel() for p in params], rows, world)
    assert len(plan.cuts) == 3
    shares = [hi - lo for cuts in plan.cuts for lo, hi in itertools.pairwise(cuts)]
    padding = sum(plan.lengths) - sum(p.numel() for p in params)
    ranks = estimate(params, sharding="zero2", world_size=world)
    assert padding == 0
    assert [rank.elements for rank in ranks] == [sum(shares[n::world]) for n in range(world)]


def test_wrong_arguments_are_rejected() -> None:
    params = tensors(F16)
    for options, problem in (
        ({"sharding": "zero3"}, "zero3"),
        ({"world_size": 0}, "world_size: 0"),
        ({"master_weights": "fp64"}, "fp64"),
        ({"state_dtype": "int8", "amsgrad": True}, "amsgrad is not supported with 8-bit moments"),
        ({"state_dtype": F16}, "float16"),
    ):
        with pytest.raises(ValueError, match=problem):
            estimate(params, **options)


def test_param_groups_are_counted_as_their_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 64), torch.nn.Linear(64, 8))
    options: dict[str, Any] = {"state_dtype": "int8", "fp32_moments": ["^1.weight"]}
    expected = FusedAdamW.estimate(model.named_parameters(), **options)
    named = list(model.named_parameters())
    for groups in (param_groups(model), [{"params": named[:1]}, {"params": named[1:]}]):
        assert FusedAdamW.estimate(groups, **options) == expected
    assert FusedAdamW.estimate([{"params": named[0][1]}]) == FusedAdamW.estimate(named[:1])


def test_a_module_is_no_list_of_parameters() -> None:
    with pytest.raises(TypeError, match="params is of type Linear, expected its parameters"):
        estimate(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
