"""optim/estimate.py matches the tables of docs/memory.md, docs/zero*.md and real allocations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from torchopt_ext import (
    FusedAdamW,
    FusedMuon,
    FusedOptimizer,
    FusedSGD,
    muon_groups,
    ops,
    param_groups,
)
from torchopt_ext.optim.estimate import SHARDINGS, estimate, unevenness

from ...support.ways import WAYS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(300, 70), (5,), (2000,), (1, 3, 4), ()]


def tensors(dtype: torch.dtype, device: str = "meta") -> list[Tensor]:
    return [torch.zeros(s, dtype=dtype, device=device, requires_grad=True) for s in SHAPES]


COUNT = sum(p.numel() for p in tensors(F32))


@pytest.mark.parametrize(
    ("dtype", "options", "held", "moved"),
    [  # docs/memory.md, "The settings"; held counts masters and moments
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
        (F32, {"ema_decay": 0.9}, 8, 4 + 28 + 12),
        (BF16, {"ema_decay": 0.9, "ema_dtype": "bf16"}, 4, 2 + 14 + 6),
        (BF16, {"ema_decay": 0.9, "master_weights": "fp32"}, 12, 2 + 28 + 12),
        (BF16, {"ema_decay": 0.9, "master_weights": "remainder"}, 10, 2 + 26 + 12),
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
    width = (2 if "ema_dtype" in options else 4) if "ema_decay" in options else 0
    assert rank.averages == width * COUNT
    states = rank.masters + rank.moments + rank.averages + rank.steps
    assert rank.held == rank.weights + rank.gradients + states


@pytest.mark.parametrize("world", [2, 8])
def test_traffic_is_that_of_the_tables(world: int) -> None:
    """Matches zero_details.md, Traffic: FSDP gathers weights twice and reduces gradients once."""
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


# ---- Muon, and groups of several algorithms ------------------------------------------------------
GROUPS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "muon": ({"algorithm": "muon"}, [(96, 70), (3, 8, 64)]),
    "normuon": ({"algorithm": "normuon"}, [(70, 96), (64,) * 2, (3, 8, 65)]),
    "normuon of convolutions": (
        {"algorithm": "muon", "beta2": 0.9, "flatten": True}, [(6, 5, 3, 3), (64, 64, 2)],
    ),
    "adamw": ({"algorithm": "adamw"}, [(96, 70), (70,)]),
    "amsgrad": ({"algorithm": "adam", "amsgrad": True}, [(4, 65)]),
    "lion": ({"algorithm": "lion"}, [(96, 70), (5,)]),
    "sgd": ({"algorithm": "sgd"}, [(96, 70)]),
    "momentum": ({"algorithm": "sgd", "momentum": 0.9}, [(96, 70), (9,)]),
}  # fmt: skip


def groups(dtype: torch.dtype, device: str, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    made = {
        name: {"params": [nn.Parameter(torch.zeros(s, dtype=dtype, device=device)) for s in shapes]}
        | keys
        for name, (keys, shapes) in GROUPS.items()
    }
    return [group for name, group in made.items() if name not in without]


@pytest.mark.parametrize("cls", [FusedAdamW, FusedMuon, FusedSGD])
@pytest.mark.parametrize(
    "way",
    [
        *("fp32", "fp32, bf16 state", "fp32, int8", "bf16", "bf16, master", "bf16, remainder"),
        *("bf16, remainder8", "bf16, master, bf16 state"),
    ],
)
@pytest.mark.parametrize("eight_bits", [False, True], ids=["", "int8"])
def test_groups_of_several_algorithms_hold_what_was_estimated(
    cls: Any, way: str, eight_bits: bool
) -> None:
    dtype, options = WAYS[way].dtype, WAYS[way].options
    if eight_bits:
        options = options | {"state_dtype": "int8", "fp32_moments": ()}
    without = ("amsgrad",) if options.get("state_dtype") == "int8" else ()
    optimizer = cls(groups(dtype, "cpu", without), **options)
    optimizer.init_state()
    held, storages = {"masters": 0, "moments": 0, "steps": 0}, {}
    for state in optimizer.state.values():
        for name, value in state.items():
            kind = "masters" if name.startswith(("master", "remainder")) else "moments"
            held["steps" if name == "step" else kind] += value.nbytes
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    assert sum(storages.values()) <= sum(held.values()) + 64 * 3 * len(optimizer.state)
    (rank,) = cls.estimate(groups(dtype, "meta", without), **options)
    assert {name: getattr(rank, name) for name in held} == held
    assert estimate(optimizer.param_groups, **options) == [rank]


def test_each_group_counts_by_itself() -> None:
    """Every figure but what is sent is the sum over the groups; with one rank nothing is sent."""
    together, alone = groups(F32, "meta"), groups(F32, "meta")
    (rank,) = FusedOptimizer.estimate(together, state_device="cpu")
    parts = [estimate([group], state_device="cpu")[0] for group in alone]
    assert all(rank.host_step)
    for name in vars(rank):
        figures = [getattr(part, name) for part in parts]
        if name == "host_step":
            assert rank.host_step == tuple(map(sum, zip(*figures, strict=True)))
        else:
            assert getattr(rank, name) == sum(figures)


@pytest.mark.parametrize("sharding", ["balanced", "zero2"])
def test_each_group_has_its_own_buckets(sharding: str) -> None:
    """As zero/balanced.py lays them: what a rank holds is the sum over the groups."""
    options: dict[str, Any] = {"sharding": sharding, "world_size": 3, "bucket_elements": 500}
    given = [{"params": tensors(F32)[:2]}, {"params": tensors(F32)[2:], "algorithm": "lion"}]
    alone = [estimate([group], **options) for group in given]
    for rank, *parts in zip(estimate(given, **options), *alone, strict=True):
        for name in ("elements", "weights", "gradients", "moments", "moved"):
            assert getattr(rank, name) == sum(getattr(part, name) for part in parts)


def test_a_group_has_the_defaults_of_its_algorithm_beside_the_optimizers() -> None:
    """As in an optimizer: other groups do not get its momentum, groups of its algorithm do."""
    matrix, other = (torch.empty(64, 64, device="meta", requires_grad=True) for _ in range(2))
    for keys, own, states in (
        ({}, {"algorithm": "sgd", "momentum": 0.9}, 2),
        ({"algorithm": "sgd"}, {"algorithm": "sgd", "momentum": 0.9}, 2),
        ({"algorithm": "sgd"}, {"algorithm": "muon", "momentum": 0.9}, 1),
        ({"algorithm": "adam"}, {"algorithm": "adamw", "amsgrad": True}, 6),
        ({"algorithm": "lion"}, {"algorithm": "adamw", "amsgrad": True}, 4),
        ({"kind": "muon"}, {"algorithm": "adamw"}, 3),
        ({"use_muon": False}, {"algorithm": "muon"}, 3),
    ):
        given = [{"params": [matrix]}, {"params": [other], **keys}]
        (rank,) = estimate(given, **own)
        assert rank.moments == states * 4 * 64 * 64, (keys, own)
    (rank,) = FusedMuon.estimate([{"params": [matrix]}], beta2=0.9)
    assert rank.moments == 4 * 64 * 64 + 4 * 64


@pytest.mark.parametrize(
    ("dtype", "options", "moved"),
    [  # docs/algorithms.md: direction and momentum beside weight and gradient
        (F32, {}, 4 + 28),
        (F32, {"norm": False}, 28),
        (BF16, {"master_weights": "remainder8", "state_dtype": BF16}, 2 + 20),
        (F32, {"orthogonalize_dtype": BF16}, 4 + 24),
        (BF16, {"master_weights": "remainder", "orthogonalize_dtype": BF16}, 2 + 22),
        (
            BF16,  # 4 bytes of a scale for 64 elements are read and written
            {"master_weights": "remainder8", "state_dtype": "int8", "orthogonalize_dtype": BF16},
            2 + 14 + 2 * 4 / 64,
        ),
        (torch.float64, {"orthogonalize_dtype": BF16}, 8 + 56),
    ],
)
def test_muon_moves_the_direction_twice(
    dtype: torch.dtype, options: dict[str, Any], moved: float
) -> None:
    matrix = torch.empty(40, 128, dtype=dtype, device="meta", requires_grad=True)
    (rank,) = FusedMuon.estimate([matrix], **options)
    assert rank.moved == moved * matrix.numel()


def multiplied(blocks: list[tuple[int, int]], steps: int = 5) -> int:
    """Returns what torch counts for its own Newton-Schulz iterations (torch/optim/_muon.py)."""
    with FlopCounterMode(display=False) as counter:
        for block in blocks:
            x = torch.empty(min(block), max(block), device="meta")
            for _ in range(steps):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram), x)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("shape", "keys", "blocks", "steps"),
    [
        ((24, 40), {}, [(24, 40)], 5),
        ((40, 24), {}, [(24, 40)], 5),
        ((40, 24), {"ns_steps": 3}, [(24, 40)], 3),
        ((40, 24), {"ns_steps": 0}, [], 0),
        ((40, 24), {"ns_coefficients": "deepseek_v4"}, [(24, 40)], 10),
        ((40, 24), {"num_heads": 4}, [(10, 24)] * 4, 5),
        ((40, 24), {"num_heads": 4, "head_dim": 1}, [(40, 6)] * 4, 5),
        ((40, 24), {"split_sizes": [8, 32]}, [(8, 24), (32, 24)], 5),
        ((3, 40, 24), {}, [(40, 24)] * 3, 5),
        ((3, 40, 24), {"num_heads": 2}, [(20, 24)] * 6, 5),
        ((3, 40, 24), {"flatten": True}, [(3, 960)], 5),
        ((8, 4, 3, 3), {"flatten": True}, [(8, 36)], 5),
        ((0, 5), {}, [], 5),
        ((40, 24), {"orthogonalize": torch.clone}, [], 5),
        ((40, 24), {"algorithm": "normuon"}, [(40, 24)], 5),
        ((40, 24), {"algorithm": "adamw"}, [], 5),
    ],
)
def test_newton_schulz_takes_what_torch_counts(
    shape: tuple[int, ...], keys: dict[str, Any], blocks: list[tuple[int, int]], steps: int
) -> None:
    for device in ("cpu", "meta"):
        param = torch.empty(shape, device=device, requires_grad=True)
        (rank,) = FusedMuon.estimate([{"params": [("w", param)], **keys}])
        assert rank.newton_schulz_flops == multiplied(blocks, steps)


def gpt() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    model = nn.ModuleDict({"embed": nn.Embedding(100, 16)})
    model["layers"] = nn.ModuleList(Block() for _ in range(3))
    model["head"] = nn.Linear(16, 100)
    return model


def test_groups_of_a_model_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        on_meta = gpt()
    for options in ({}, {"sharding": "zero1", "world_size": 4}, {"state_dtype": "int8"}):
        ranks = FusedMuon.estimate(muon_groups(on_meta, quiet=True), **options)
        assert ranks == FusedMuon.estimate(muon_groups(gpt(), quiet=True), **options)
        everyone = sum(rank.newton_schulz_flops for rank in ranks)
        assert everyone == multiplied([(16, 64)] * 6)
    assert {rank.newton_schulz_flops for rank in estimate(gpt().parameters())} == {0}
    replicas = FusedMuon.estimate(muon_groups(on_meta, quiet=True), world_size=3)
    assert [rank.newton_schulz_flops for rank in replicas] == [everyone] * 3


def test_stacks_of_matrices_are_sharded_by_matrix() -> None:
    stack = torch.empty(5, 24, 40, device="meta", requires_grad=True)
    ranks = FusedMuon.estimate([stack], algorithm="normuon", sharding="fsdp", world_size=3)
    for rank, count in zip(ranks, (2, 2, 1), strict=True):
        assert rank.newton_schulz_flops == multiplied([(24, 40)] * count)
        assert rank.moments == 4 * count * (24 * 40 + 24)


def test_sharded_parameters_are_counted_whole() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = nn.ParameterDict({"stack": torch.zeros(5, 24, 40), "wq": torch.zeros(9, 24)})
        groups = [{"params": p, "algorithm": "normuon"} for p in model.values()]
        options: dict[str, Any] = {"sharding": "fsdp", "world_size": 2}
        stack, both = estimate(groups[:1], **options), estimate(groups)
        fully_shard(model)
        sharded = [{"params": p, "algorithm": "normuon"} for p in model.values()]
        assert all(isinstance(group["params"], DTensor) for group in sharded)
        assert estimate(sharded[:1], **options) == stack
        assert estimate(sharded) == both
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_shardings_that_cut_matrices(sharding: str) -> None:
    matrix = torch.empty(64, 64, device="meta", requires_grad=True)
    given = [{"params": [("wq", matrix)], "algorithm": "muon"}]
    (rank,) = estimate(given, sharding=sharding)  # one rank has all of it
    assert rank.newton_schulz_flops == multiplied([(64, 64)])
    if sharding in ("ddp", "zero1"):
        assert len(estimate(given, sharding=sharding, world_size=2)) == 2
        return
    # Owners orthogonalize: each matrix one of two ranks.
    ranks = muon = estimate(given, sharding=sharding, world_size=2)
    assert sorted(r.newton_schulz_flops for r in ranks) == [0, multiplied([(64, 64)])]
    adamw = estimate([matrix], sharding=sharding, world_size=2)
    assert ranks[0].sent - adamw[0].sent == 2 * 4 * 64 * 64 // 2 // 2  # to the owner and back
    experts = torch.empty(2, 64, 64, device="meta", requires_grad=True)
    ranks = FusedMuon.estimate([experts], sharding=sharding, world_size=2)
    assert [rank.newton_schulz_flops for rank in ranks] == [multiplied([(64, 64)])] * 2
    given[0]["algorithm"] = "normuon"
    rows = estimate(given, sharding=sharding, world_size=2)
    assert [rank.moments - 4 * 32 for rank in rows] == [rank.moments for rank in muon]
    assert rows[0].sent - adamw[0].sent == 2 * (4 * 64 * 64 + 4 * 64) // 2 // 2


def test_what_an_optimizer_rejects_is_rejected() -> None:
    model = gpt()
    matrix = nn.Parameter(torch.empty(64, 64))
    for given, options, error, problem in (
        (model.named_parameters(), {}, ValueError, "'embed.weight' .* is the weight of an embedd"),
        ([("norm", nn.Parameter(torch.ones(3)))], {}, ValueError, r"'norm' has shape \(3,\)"),
        ([{"params": matrix, "num_heads": 7}], {}, ValueError, "has 64 rows, num_heads 7 do not"),
        ([{"params": matrix, "amsgrad": True}], {}, TypeError, "of 'muon' has no argument 'amsg"),
        ([{"params": matrix, "algorithm": "muno"}], {}, ValueError, "did you mean 'muon'"),
        ([matrix], {"ns_step": 3}, TypeError, "has no argument 'ns_step'; did you mean 'ns_steps'"),
        ([matrix], {"ns_steps": -3}, ValueError, "ns_steps is -3"),
        (
            [{"params": matrix, "algorithm": "adam", "amsgrad": True}],
            {"state_dtype": "int8"},
            ValueError,
            "amsgrad is not supported with 8-bit moments",
        ),
    ):
        params: Any = given
        with pytest.raises(error, match=problem):
            FusedMuon.estimate(params, **options)
