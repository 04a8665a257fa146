"""Cases of test_workers.py: one decision of all ranks, and the bits of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import torchopt_ext
from tests.support.problems import make_params
from tests.support.ranks import digest, full_tensor, gathered, run_cases
from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, GradScaler, ZeroRedundancyOptimizer
from torchopt_ext._torch import default_store
from torchopt_ext.containers import build_optimizers

Result = dict[str, Any]
Placements = Callable[[int], list[Placement]]

BF16 = torch.bfloat16
MAX_NORM = 0.5
# uneven rows, rows of one element, fewer rows than ranks, several chunks, three dimensions
SHAPES = [(7, 100), (51,), (1, 130), (9, 9000), (3, 5), (4, 6, 33)]
STEPS = 4
HELD = ("params", "state")
SCALARS = ("grad_norm", "clip_factor")


def values(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Returns tensors that are the same on every rank."""
    return [p.detach() for p in make_params(SHAPES, dtype, seed)]


GRADIENTS = range(1, STEPS + 1)  # seeds


def line(size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))


def train_on(
    optimizer: Any,
    params: Sequence[Tensor],
    placed: Callable[[Tensor, int], Tensor],
    numbers: Sequence[int] = range(len(SHAPES)),
) -> None:
    """Makes all steps. ``numbers`` are the parameters' among all of them."""
    for seed in GRADIENTS:
        gradients = values(seed=seed)
        for number, param in zip(numbers, params, strict=True):
            param.grad = placed(gradients[number], number)
        optimizer.step()


def describe(optimizer: Any) -> Result:
    """Returns the exact scalars of the last step, and hashes of full parameters and states."""
    names = ("grad_norm", "clip_factor", "found_inf", "skipped_steps")
    result: Result = {n: float(getattr(optimizer.control, n)).hex() for n in names}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    result["params"] = [digest([full_tensor(p)]) for p in params]
    result["state"] = [
        {k: digest([full_tensor(v)]) for k, v in sorted(optimizer.state[p].items())} for p in params
    ]
    return result


def seen(optimizer: FusedAdamW) -> Result:
    """Returns the telemetry of this rank's shards."""
    telemetry = optimizer.telemetry
    return {
        "digests": [d % 2**64 for d in torchopt_ext.digest(optimizer).tolist()],
        "lost": telemetry.lost_updates.tolist(),
        "grad_squares": telemetry.grad_norms.square().tolist(),
        "update_squares": telemetry.update_norms.square().tolist(),
    }


def train(
    place: Placements | None,
    dtype: torch.dtype = torch.float32,
    mesh: DeviceMesh | None = None,
    clip: bool = True,
    resume: bool = False,
    **kwargs: Any,
) -> Result:
    """Takes all steps on plain tensors or DTensors. `resume` uses a new optimizer halfway."""
    mesh = mesh or line(dist.get_world_size())

    def placed(tensor: Tensor, i: int) -> Tensor:
        return tensor if place is None else distribute_tensor(tensor, mesh, place(i))

    params = [nn.Parameter(placed(v, i)) for i, v in enumerate(values(dtype))]
    kwargs |= {"lr": 0.01, "track": True} | ({"max_grad_norm": MAX_NORM} if clip else {})
    optimizer = FusedAdamW(params, **kwargs)
    for seed in GRADIENTS:
        if resume and seed == GRADIENTS[STEPS // 2]:
            saved = optimizer.state_dict()
            optimizer = FusedAdamW(params, **kwargs)
            optimizer.load_state_dict(saved)
        for i, (p, gradient) in enumerate(zip(params, values(dtype, seed), strict=True)):
            p.grad = placed(gradient, i)
        optimizer.step()
    return {**describe(optimizer), "local": seen(optimizer)}


def assert_same(
    sharded: Result, whole: Result, fields: Sequence[str] = (*SCALARS, *HELD), adds_up: bool = False
) -> None:
    """Asserts that all ranks have the bits of one process after clipped steps.

    Args:
        adds_up: also compares what the ranks see: digests modulo 2**64 and counts add up exactly,
            squares of norms up to rounding.
    """
    agreed = {k: v for k, v in sharded.items() if k != "local"}
    assert gathered(agreed) == [agreed] * dist.get_world_size()
    assert SCALARS[1] not in fields or 0 < float.fromhex(whole["clip_factor"]) < 1
    assert {field: sharded[field] for field in fields} == {field: whole[field] for field in fields}
    if not adds_up:
        return
    mine, exact = gathered(sharded["local"]), whole["local"]
    digests = [sum(pair) % 2**64 for pair in zip(*[m["digests"] for m in mine], strict=True)]
    assert digests == exact["digests"]
    assert len(set(digests)) == len(digests)
    assert [sum(pair) for pair in zip(*[m["lost"] for m in mine], strict=True)] == exact["lost"]
    for squares in ("grad_squares", "update_squares"):
        summed = [sum(pair) for pair in zip(*[m[squares] for m in mine], strict=True)]
        assert summed == pytest.approx(exact[squares], rel=1e-12)
        assert min(summed) > 0


@functools.cache
def unsharded(held: str = "", clip: bool = True) -> Result:
    return train(None, clip=clip, **MASTERS[held])


def rows(_: int) -> list[Placement]:
    return [Shard(0)]


def last_dimension(i: int) -> list[Placement]:
    return [Shard(len(SHAPES[i]) - 1)]


def mixed(i: int) -> list[Placement]:
    """Returns rows, columns and replicas in turn, as tensor parallelism places parameters."""
    return [([Shard(0), Shard(len(SHAPES[i]) - 1), Replicate()])[i % 3]]


def replicated(_: int) -> list[Placement]:
    return [Replicate()]


def mixed_rows(i: int) -> list[Placement]:
    return [Shard(0) if i % 2 else Replicate()]


def hybrid(shape: tuple[int, int]) -> None:
    """Trains with HSDP: replicas over the first mesh dimension, row shards over the second."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    assert_same(train(lambda _: [Replicate(), Shard(0)], mesh=mesh), unsharded())


def replicas_and_rows() -> None:
    """A replicated parameter has the digest of the unsharded parameter on every rank."""
    found, whole = train(mixed_rows), unsharded()
    assert_same(found, whole)
    local, digests = found["local"]["digests"], whole["local"]["digests"]
    assert local[::2] == digests[::2]


def rows_columns_and_replicas() -> None:
    """The norms agree to 2**-50, because shards cut the sum of squares differently."""
    found, expected = (float.fromhex(of["grad_norm"]) for of in (train(mixed), unsharded()))
    assert abs(found - expected) <= 2**-50 * expected


def ways_to_hold_weights_differ() -> None:
    """At least three of the four ways give different weights, so other cases are not empty."""
    params = [tuple(unsharded(held)["params"]) for held in MASTERS]
    assert len(set(params[1:])) >= 3
    assert params[0] not in params[1:]


def two_meshes() -> None:
    """Steps parameters of a one-dimensional and a two-dimensional mesh with a single norm."""
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "other"))
    where: list[tuple[DeviceMesh, list[Placement]] | None] = [
        (line(), [Shard(0)]), (grid, [Shard(0), Replicate()]), (line(), [Replicate()]),
        (grid, [Shard(0), Shard(0)]), None, (grid, [Replicate(), Shard(0)]),
    ]  # fmt: skip

    def placed(tensor: Tensor, i: int) -> Tensor:
        at = where[i]
        return tensor if at is None else distribute_tensor(tensor, *at)

    params = [nn.Parameter(placed(v, i)) for i, v in enumerate(values())]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM)
    train_on(optimizer, params, placed)
    assert_same(describe(optimizer), unsharded())


# ---- parameters that other ranks do not have -----------------------------------------------------


def assert_together(optimizer: Any, mine: Sequence[int]) -> None:
    """Compares the results of all ranks, each of which holds some of the parameters."""
    found = describe(optimizer)
    for kind in HELD:
        owned = gathered(dict(zip(mine, found[kind], strict=True)))
        by_index = {i: held for rank in owned for i, held in rank.items()}
        found[kind] = [by_index[i] for i in range(len(SHAPES))]
    assert_same(found, unsharded())


def process_group() -> None:
    """Steps different parameters on each rank, as under ZeRO. The group sums the squares."""
    mine = range(dist.get_rank(), len(SHAPES), dist.get_world_size())
    params = [nn.Parameter(values()[i]) for i in mine]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM, process_group=dist.group.WORLD)
    train_on(optimizer, params, lambda gradient, _: gradient, mine)
    assert_together(optimizer, mine)


def pipeline_stages(*, one_rank_mesh: bool = False) -> None:
    """Two stages of two ranks each: some parameters are sharded over a stage, some replicated.

    build_optimizers takes the stages' group from torchtitan's parallel dimensions.

    Args:
        one_rank_mesh: splits a stage by tensor parallelism. FSDP's mesh then has one rank, and some
            parameters are on this mesh alone.
    """
    names = ("pp", "fsdp", "tp")
    mesh = init_device_mesh("cpu", (2, 1, 2) if one_rank_mesh else (2, 2, 1), mesh_dim_names=names)
    dims = SimpleNamespace(pp_enabled=True, ep_enabled=False, get_mesh=mesh.__getitem__)
    config = SimpleNamespace(
        name="AdamW", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01,
        implementation="fused", early_step_in_backward=False, max_grad_norm=MAX_NORM,
    )  # fmt: skip
    mine = range(mesh["pp"].get_local_rank(), len(SHAPES), 2)

    def placed(value: Tensor, i: int) -> Tensor:
        if i == 2:
            return value
        if one_rank_mesh and i not in (1, 4):
            return distribute_tensor(value, mesh["fsdp", "tp"], [Shard(0), Shard(0)])
        return distribute_tensor(value, mesh["fsdp"], [Shard(0)])

    part = nn.ParameterList(nn.Parameter(placed(values()[i], i)) for i in mine)
    container = build_optimizers([part], config, dims)
    train_on(container, list(part), placed, mine)
    assert_together(container, mine)


def rank_without_gradients() -> None:
    """A rank without gradients gets the norm of the rank that has gradients."""
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = FusedAdamW([p], max_grad_norm=MAX_NORM, process_group=dist.group.WORLD)
    if dist.get_rank() == 0:
        p.grad = torch.ones(3, 4)
    optimizer.step()
    assert float(optimizer.control.grad_norm) == 12**0.5


def unfrozen_late() -> None:
    """Unfreezes a parameter of another mesh, of which only rank 0 has a gradient; freezes it again.

    The norm is the root of 8 elements of 1, and of 4 in rank 0's rows of the late parameter.
    """
    grid = init_device_mesh("cpu", (2, 1))
    ones = partial(distribute_tensor, torch.ones(4, 2))
    spread = partial(ones, line(), [Shard(0)]), partial(ones, grid, [Shard(0), Replicate()])
    always, late = (nn.Parameter(make()) for make in spread)
    late.requires_grad_(False)
    optimizer = FusedAdamW([late, always], lr=0.01, max_grad_norm=MAX_NORM)
    norms = []
    for step in range(4):
        always.grad, late.grad = (make() for make in spread)
        late.requires_grad_(step in (1, 2))
        if step not in (1, 2) or dist.get_rank() == 1:
            late.grad = None
        if step == 3:  # builds a new plan
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        norms.append(float(optimizer.control.grad_norm))
    assert [norm**2 for norm in norms] == pytest.approx([8, 12, 12, 8], rel=1e-12)
    assert (late in optimizer.state) == (dist.get_rank() == 0)


# ---- one rank overflows --------------------------------------------------------------------------


def scaled(params: Sequence[Any], optimizer: FusedAdamW, backward: Callable[[int, float], None],
           unscale: bool = False, scaler_class: Any = GradScaler) -> None:  # fmt: skip
    """Takes eight steps with a scaler. In 2 and 5 one rank's shard has a non-finite element: both
    ranks skip and back off."""
    scaler = scaler_class("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.scale(torch.ones(1))
    scales, moved = [], []
    for step in range(8):
        backward(step, scaler.get_scale())
        bad = {2: 1, 5: 0}.get(step)
        if bad == dist.get_rank():
            gradient = params[0].grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[-1] = math.inf if step == 2 else math.nan
        before = [digest([full_tensor(p)]) for p in params]
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append([digest([full_tensor(p)]) for p in params] != before)
    exponents = [10, 11, 10, 10, 11, 10, 10, 11]  # grows after every second good step in a row
    assert scales == [2.0**e for e in exponents]
    assert moved == [step not in (2, 5) for step in range(8)]
    assert {float(optimizer.state[p]["step"]) for p in params} == {6.0}


def overflow_in_process_group() -> None:
    """Steps different parameters on each rank, as under ZeRO."""
    params = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7))]
    optimizer = FusedAdamW(params, lr=0.01, process_group=dist.group.WORLD)

    def backward(step: int, scale: float) -> None:
        for p in params:
            p.grad = torch.full_like(p, scale * (step + 1) * (1 + dist.get_rank()))

    scaled(params, optimizer, backward)


def overflow_in_shards(unscale: bool = False, scaler_class: Any = GradScaler) -> None:
    params = [nn.Parameter(distribute_tensor(v, line(), [Shard(0)])) for v in values()]
    optimizer = FusedAdamW(params, lr=0.01)

    def backward(step: int, scale: float) -> None:
        for p, gradient in zip(params, values(seed=GRADIENTS[step % STEPS]), strict=True):
            p.grad = distribute_tensor(gradient * scale, line(), [Shard(0)])

    scaled(params, optimizer, backward, unscale, scaler_class)


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def sharded_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Returns an FSDP2 model that reduces by sums, because gloo has no averages."""
    model = small_model(dtype)
    for module in (model[0], model[2], model):
        fully_shard(module).set_force_sum_reduction_for_comms(True)
    return model


def stock_scaler_with_plain_shards() -> None:
    """Steps with the overflow flag of torch's scaler, which covers this rank only."""
    p = nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([p], process_group=dist.group.WORLD)
    p.grad = torch.ones(4)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    with pytest.raises(RuntimeError, match=r"use torchopt_ext\.GradScaler"):
        optimizer.step()
    assert p.eq(1).all()


def first_generation_of_fsdp(original: bool) -> None:
    """FSDP1's flat shards need a process group for the norm, and have FSDP1's norm with it."""
    model = FullyShardedDataParallel(
        small_model(), device_id=torch.device("cpu"), use_orig_params=original
    )
    model(torch.full((2, 5), dist.get_rank() + 1.0)).sum().backward()
    with pytest.raises(ValueError, match=r"'\d' is flattened by .* pass process_group="):
        FusedAdamW(model.parameters(), max_grad_norm=MAX_NORM).step()
    around = FSDPadaptOptimizer(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"'\d' is flattened by .* pass process_group="):
        around.step()
    group = dist.group.WORLD
    optimizer = FusedAdamW(model.parameters(), max_grad_norm=MAX_NORM, process_group=group)
    optimizer.step()
    assert optimizer.control.grad_norm.item() == pytest.approx(model.clip_grad_norm_(1.0).item())
    if not original:
        with pytest.raises(ValueError, match=r"flattened by .* shards it already"):
            ZeroRedundancyOptimizer(model.parameters(), FusedAdamW)


# ---- FSDP2 in 16 bit -----------------------------------------------------------------------------


def model_run(sharded: bool, **kwargs: Any) -> Result:
    """Trains on the same data on both ranks: reduced gradients equal one process's exactly."""
    model = sharded_model(BF16) if sharded else small_model(BF16)
    optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=0.05, track=True, **kwargs)
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).to(BF16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(data).float().square().mean().backward()
        optimizer.step()
    return {**describe(optimizer), "local": seen(optimizer)}


# ---- gradients placed otherwise ------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += "c10d" in name and "wait" not in name and "wrap" not in name
        return func(*args, **(kwargs or {}))


def eighths(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns numbers with few bits, whose sums are exact."""
    return torch.randint(-64, 64, shape, generator=generator) / 8


@functools.cache
def summed_gradients() -> Result:
    return partial_gradients(None)


def partial_gradients(place: Placements | None, numbers: int = 1) -> Result:
    """Steps with gradients that are sums over ranks. A rank's part alone is another gradient.

    Any number of replicas' gradients takes one collective, and one more to agree on overflow.
    """
    generator = torch.Generator().manual_seed(3)
    values = [eighths(shape, generator) for shape in SHAPES * numbers]
    parts = [[eighths(v.shape, generator) for v in values] for _ in range(2)]
    mesh = init_device_mesh("cpu", (2,))
    if place is None:
        params = [nn.Parameter(v) for v in values]
    else:
        params = [
            nn.Parameter(distribute_tensor(v, mesh, place(i % len(SHAPES))))
            for i, v in enumerate(values)
        ]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM)
    for _ in range(2):
        for i, p in enumerate(params):
            if place is None:
                p.grad = parts[0][i] + parts[1][i]
            else:
                mine = parts[dist.get_rank()][i]
                p.grad = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
        with Collectives() as collectives:
            optimizer.step()
    if place is not None:
        assert place is mixed_rows or collectives.count == 2
        if numbers == 1:
            assert_same(describe(optimizer), summed_gradients())
    return describe(optimizer)


def largest_gradients() -> None:
    """Steps with a Partial gradient that is not a sum."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    optimizer = FusedAdamW([p], max_grad_norm=1.0)
    mine = torch.full((4,), 1.0 + dist.get_rank())
    p.grad = DTensor.from_local(mine, mesh, [Partial("max")], run_check=False)
    optimizer.step()
    assert float(optimizer.control.grad_norm) == 4.0  # that of a sum would be 6


def written_back(gradient: list[Placement]) -> None:
    """Writes back a sharded gradient. One that must be redistributed first is rejected."""
    mesh = line()
    p = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]))
    optimizer = FusedAdamW([p], lr=0.01, max_grad_norm=1.0, write_back_gradients=True)
    p.grad = distribute_tensor(torch.ones(4, 6), mesh, gradient)
    if gradient == [Replicate()]:
        with pytest.raises(RuntimeError, match=r"is redistributed .* and cannot be written back"):
            optimizer.step()
        assert not full_tensor(p).any()
    else:
        optimizer.step()
        assert float(full_tensor(p.grad).norm()) == pytest.approx(1.0, rel=1e-5)
        assert full_tensor(p).any()


def resharded_gradients() -> None:
    """Steps parameters sharded by rows. Gradients are sharded by columns or replicated."""
    params = [nn.Parameter(distribute_tensor(v, line(), [Shard(0)])) for v in values()]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM, track=True)

    def placed(gradient: Tensor, i: int) -> Tensor:
        return distribute_tensor(gradient, line(), last_dimension(i) if i % 2 else [Replicate()])

    train_on(optimizer, params, placed)
    assert_same(describe(optimizer), unsharded())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def sequence_parallel() -> None:
    """A block under tensor parallelism trains like one process, up to rounding."""
    parallel, single = block_run(True), block_run(False)
    assert any("Partial" in kind for kind in parallel["kinds"])
    assert any("Shard(dim=1)" in kind for kind in parallel["kinds"])
    assert 0 < single["clip_factor"] < 1
    assert parallel["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
    for mine, theirs in zip(parallel["values"], single["values"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def block_run(parallel: bool) -> Result:
    """Trains a transformer block. Its norm's weight is Replicate and has Partial gradients."""
    torch.manual_seed(0)
    model = Block()
    mesh = init_device_mesh("cpu", (2,))
    if parallel:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        distribute_module(model, mesh)
    optimizer = FusedAdamW(model.parameters(), lr=0.05, max_grad_norm=0.01)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    kinds: list[str] = []
    for _ in range(3):
        optimizer.zero_grad()
        given = distribute_tensor(x, mesh, [Shard(1)]) if parallel else x
        out = model(given)
        out = out.full_tensor() if isinstance(out, DTensor) else out
        out.square().mean().backward()
        kinds = [str(getattr(p.grad, "placements", "")) for p in model.parameters()]
        optimizer.step()
    return {
        "kinds": kinds,
        "grad_norm": float(optimizer.control.grad_norm),
        "clip_factor": float(optimizer.control.clip_factor),
        "values": [full_tensor(p).flatten().tolist() for p in model.parameters()],
    }


def unfinished_gradients(wrapped: bool) -> None:
    """Rank 0 steps while the all-reduce of its gradient still waits for rank 1, and waits, too."""
    value = torch.ones(3, 4)
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]) if wrapped else value)
    optimizer = FusedAdamW([p], lr=0.1, max_grad_norm=1.0)
    mine = torch.full((3, 4), 1.0 if dist.get_rank() == 0 else -3.0)  # the sum has another sign
    if dist.get_rank() == 1:
        default_store().wait([f"steps {wrapped}"])
    gradient = funcol.all_reduce(mine, "sum", dist.group.WORLD)
    assert type(gradient).__name__ == "AsyncCollectiveTensor"
    if wrapped:
        gradient = DTensor.from_local(gradient, mesh, [Replicate()], run_check=False)
    p.grad = gradient
    default_store().set(f"steps {wrapped}", "now")
    optimizer.step()
    assert float(optimizer.control.grad_norm) == pytest.approx(2 * 12**0.5)  # 12 times 1 - 3
    assert full_tensor(p)[0, 0] > 1


MASTERS: dict[str, dict[str, Any]] = {
    "": {},
    "master": {"dtype": BF16, "master_weights": "fp32"},
    "remainder": {"dtype": BF16, "master_weights": "remainder"},
    "stochastic": {"dtype": BF16, "stochastic_rounding": True, "rounding_seed": 11},
    "stochastic remainder8": {
        "dtype": BF16, "master_weights": "remainder8", "stochastic_rounding": True,
    },
    "stochastic moments": {
        "dtype": BF16, "master_weights": "remainder", "state_dtype": BF16,
        "stochastic_rounding": True, "amsgrad": True,
    },
}  # fmt: skip


def rows_of(held: str) -> None:
    assert_same(train(rows, **MASTERS[held]), unsharded(held), adds_up=True)
    assert_same(train(rows, resume=True, **MASTERS[held]), unsharded(held))


def random_rounding(held: str) -> None:
    """Random bits belong to an element of the parameter, also in a split by columns."""
    for place in (rows, last_dimension):
        found = train(place, clip=False, **MASTERS[held])
        assert_same(found, unsharded(held, False), HELD, adds_up=place is last_dimension)


def boxes(held: str) -> None:
    """Random bits and digests belong to an element of the parameter, also in a shard that is cut in
    two dimensions of experts, as expert parallelism with FSDP on their hidden dimension does."""
    mesh = init_device_mesh("cpu", (2, 2))

    def place(i: int) -> list[Placement]:
        last = len(SHAPES[i]) - 1
        return [Shard(max(0, last - 1)), Shard(last)]

    found = train(place, mesh=mesh, clip=False, **MASTERS[held])
    assert_same(found, unsharded(held, False), HELD, adds_up=True)


def under_fsdp(held: str) -> None:
    kwargs = {name: value for name, value in MASTERS[held].items() if name != "dtype"}
    assert_same(model_run(True, **kwargs), model_run(False, **kwargs), adds_up=True)


def cases() -> dict[str, Callable[[], Any]]:
    if dist.get_world_size() == 4:
        return {
            "pipeline stages": pipeline_stages,
            "pipeline stages, one-rank mesh": lambda: pipeline_stages(one_rank_mesh=True),
            **{f"boxes {held}": partial(boxes, held) for held in MASTERS},
        }
    found: dict[str, Callable[[], Any]] = {
        "process group": process_group,
        "rank without gradients": rank_without_gradients,
        "unfrozen late": unfrozen_late,
        "rows": lambda: rows_of(""),
        "mixed rows": replicas_and_rows,
        "replicas in a group": lambda: assert_same(
            train(mixed_rows, process_group=dist.group.WORLD), unsharded()
        ),
        "mixed": rows_columns_and_replicas,
        "ways to hold weights": ways_to_hold_weights_differ,
        "hybrid 2x1": lambda: hybrid((2, 1)),
        "hybrid 1x2": lambda: hybrid((1, 2)),
        "two meshes": two_meshes,
        "overflow process group": overflow_in_process_group,
        "overflow rows": overflow_in_shards,
        "overflow rows, stock scaler": lambda: overflow_in_shards(False, torch.amp.GradScaler),
        "overflow rows, sharded scaler": lambda: overflow_in_shards(False, ShardedGradScaler),
        "overflow rows, unscaled before": lambda: overflow_in_shards(True),
        "fsdp 1": lambda: first_generation_of_fsdp(False),
        "fsdp 1, original parameters": lambda: first_generation_of_fsdp(True),
        "stock scaler, plain shards": stock_scaler_with_plain_shards,
        "partial, replicated": lambda: partial_gradients(replicated),
        "partial, mixed rows": lambda: partial_gradients(mixed_rows),
        "partial, many": lambda: partial_gradients(replicated, numbers=5),
        "resharded gradients": resharded_gradients,
        "largest gradients": largest_gradients,
        "written back": lambda: written_back([Shard(0)]),
        "written back, resharded": lambda: written_back([Replicate()]),
        "sequence parallel": sequence_parallel,
        "unfinished": lambda: unfinished_gradients(False),
        "unfinished in a DTensor": lambda: unfinished_gradients(True),
    }
    for held in list(MASTERS)[1:]:
        for call in (rows_of, random_rounding, under_fsdp):
            found[f"{call.__name__} {held}"] = partial(call, held)
    return found


if __name__ == "__main__":
    run_cases(cases)
