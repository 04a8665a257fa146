"""One rank of tests/distributed/test_process_group_norm.py; writes what it saw as JSON.

Usage: torchrun ... norm_worker.py FOLDER
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import build_optimizers

Result = dict[str, Any]

MAX_NORM = 0.5
# uneven rows, rows of one element, more ranks than rows, blocks that a split by columns cuts
SHAPES = [(7, 100), (50,), (1, 130), (4, 9000), (3, 5)]


def make(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The same parameters, and gradients for three steps, on every rank."""
    generator = torch.Generator().manual_seed(0)

    def randn() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]

    return randn(), [randn() for _ in range(3)]


def digest(tensors: list[Tensor]) -> list[str]:
    flat = [t.detach().contiguous().flatten() for t in tensors]
    return [t.view(torch.uint8).numpy().tobytes().hex()[-4000:] for t in flat]


def describe(optimizer: FusedAdamW, whole: list[Tensor]) -> Result:
    """The last decision, exactly, and the bits of whole parameters."""
    control = optimizer.control
    names = ("grad_norm", "clip_factor", "found_inf", "skipped_steps")
    return {**{n: float(getattr(control, n)).hex() for n in names}, "params": digest(whole)}


def unsharded(dtype: torch.dtype = torch.float32) -> Result:
    """What one process does with everything."""
    values, gradients = make(dtype)
    params = [nn.Parameter(v) for v in values]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM)
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            p.grad = gradient
        optimizer.step()
    return describe(optimizer, params)


def torchs_norm() -> Result:
    params = [nn.Parameter(v) for v in make()[0]]
    for p, gradient in zip(params, make()[1][2], strict=True):
        p.grad = gradient
    return {"grad_norm": float(nn.utils.clip_grad_norm_(params, MAX_NORM)).hex()}


def process_group() -> Result:
    """Each rank owns some of the tensors, as under ZeRO; the group sums the squares."""
    values, gradients = make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(values), world_size)
    params = [nn.Parameter(values[i]) for i in mine]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM, process_group=dist.group.WORLD)
    for step in gradients:
        for i, p in zip(mine, params, strict=True):
            p.grad = step[i]
        optimizer.step()
    owned: list[Any] = [None] * world_size
    dist.all_gather_object(owned, dict(zip(mine, digest(params), strict=True)))
    result = describe(optimizer, [])
    result["params"] = [({**owned[0], **owned[1]})[i] for i in range(len(values))]
    return result


def skip_together() -> Result:
    """A NaN on one rank: no rank changes a byte or counts the step."""
    values, gradients = make()
    params = [nn.Parameter(v) for v in values]
    optimizer = FusedAdamW(params, skip_nonfinite=True, process_group=dist.group.WORLD)
    for p, gradient in zip(params, gradients[0], strict=True):
        p.grad = gradient
    optimizer.step()
    before = describe(optimizer, params)["params"]
    if dist.get_rank() == 1:
        params[0].grad[2, 3] = math.nan
    optimizer.step()
    after = describe(optimizer, params)
    steps = [float(optimizer.state[p]["step"]) for p in params]
    return {"unchanged": after["params"] == before, "steps": steps, **after}


def rank_without_gradients() -> Result:
    """One rank has nothing to add in this step, the other waits for it."""
    values, gradients = make()
    params = [nn.Parameter(v) for v in values]
    optimizer = FusedAdamW(params, max_grad_norm=MAX_NORM, process_group=dist.group.WORLD)
    if dist.get_rank() == 0:
        for p, gradient in zip(params, gradients[2], strict=True):
            p.grad = gradient
    optimizer.step()
    return describe(optimizer, [])


def sharded(
    placement: Callable[[int], Placement],
    dtype: torch.dtype = torch.float32,
    gradient_placement: Placement | None = None,
) -> Result:
    """DTensor parameters and gradients; the norm is over the mesh without being asked for."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, gradients = make(dtype)
    placements = [placement(i) for i in range(len(values))]
    params = [
        nn.Parameter(distribute_tensor(v, mesh, [p]))
        for v, p in zip(values, placements, strict=True)
    ]
    optimizer = FusedAdamW(params, lr=0.01, max_grad_norm=MAX_NORM)
    for step in gradients:
        for p, gradient, where in zip(params, step, placements, strict=True):
            if gradient_placement is None:
                p.grad = distribute_tensor(gradient, mesh, [where])
            else:  # every rank holds half of the sum: exact in floating point
                half = gradient / dist.get_world_size()
                p.grad = DTensor.from_local(half, mesh, [gradient_placement], run_check=False)
        optimizer.step()
    whole = [p.full_tensor() for p in params]
    state = optimizer.state[params[0]]
    return {
        **describe(optimizer, whole),
        "state_is_sharded": isinstance(state["exp_avg"], DTensor)
        and state["exp_avg"].placements == params[0].placements,
        "steps": [float(optimizer.state[p]["step"]) for p in params],
    }


def columns(index: int) -> Placement:
    return Shard(1) if len(SHAPES[index]) == 2 else Shard(0)


def pipeline_stages() -> Result:
    """Two stages of two ranks each: some parameters are sharded over a stage, some replicated.

    build_optimizers takes the stages' group from torchtitan's parallel dimensions.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    dims = SimpleNamespace(pp_enabled=True, ep_enabled=False, get_mesh=mesh.__getitem__)
    config = SimpleNamespace(
        name="AdamW", lr=0.01, beta2=0.999, eps=1e-8, weight_decay=0.01, implementation="fused",
        early_step_in_backward=False, max_grad_norm=MAX_NORM,
    )  # fmt: skip
    values, gradients = make()
    mine = range(mesh["pp"].get_local_rank(), len(values), 2)

    def placed(value: Tensor, i: int) -> Tensor:
        return value if i == 2 else distribute_tensor(value, mesh["fsdp"], [Shard(0)])

    part = nn.ParameterList(nn.Parameter(placed(values[i], i)) for i in mine)
    container = build_optimizers([part], config, dims)
    for step in gradients:
        for i, p in zip(mine, part, strict=True):
            p.grad = placed(step[i], i)
        container.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in part]
    owned: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(owned, dict(zip(mine, digest(whole), strict=True)))
    stages = {**owned[0], **owned[2]}
    return describe(container, []) | {"params": [stages[i] for i in range(len(values))]}


FOUR_RANKS: dict[str, Callable[[], Result]] = {
    "unsharded": unsharded,
    "pipeline stages": pipeline_stages,
}
CASES: dict[str, Callable[[], Result]] = {
    "unsharded": unsharded,
    "unsharded bfloat16": lambda: unsharded(torch.bfloat16),
    "torch": torchs_norm,
    "process group": process_group,
    "skip together": skip_together,
    "rank without gradients": rank_without_gradients,
    "rows": lambda: sharded(lambda _: Shard(0)),
    "rows bfloat16": lambda: sharded(lambda _: Shard(0), torch.bfloat16),
    "replicated": lambda: sharded(lambda _: Replicate()),
    "columns": lambda: sharded(columns),
    "mixed": lambda: sharded(lambda i: Shard(0) if i % 2 else Replicate()),
    "partial gradients": lambda: sharded(lambda _: Replicate(), gradient_placement=Partial()),
    "partial gradients of rows": lambda: sharded(lambda _: Shard(0), gradient_placement=Partial()),
}


if __name__ == "__main__":
    run_cases(lambda: FOUR_RANKS if dist.get_world_size() == 4 else CASES)
