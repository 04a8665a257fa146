"""Cases of the sharded step, run on every rank by test_zero_sharded.py.

Gradients are small integers, so averages over ranks are exact, and every world size, partition and
way to reduce must end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import digest, run_cases
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

# Long rows that blocks cut, short rows, channels last, scalars, more ranks than rows, and an empty
# tensor in a group, and so a bucket, of its own.
SHAPES = [
    (3, 9000), (70, 100), (5,), (333,), (8, 4, 3, 3), (), (2, 3, 5000), (40, 7), (1, 130), (0, 4)
]  # fmt: skip
STEPS = 6
OVERFLOW_STEP = 3


class Model(torch.nn.Module):
    """Parameters whose gradients are the tensors given to ``forward``."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList()
        for shape in SHAPES:
            weight = torch.randn(shape)
            if len(shape) == 4:
                weight = weight.to(memory_format=torch.channels_last)
            self.weights.append(torch.nn.Parameter(weight.to(dtype)))

    def forward(self, grads: list[Tensor | None]) -> Tensor:
        used = [(w * g).sum() for w, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack(used).sum()


def gradients(model: Model, step: int, rank: int, world_size: int) -> list[Tensor | None]:
    """Returns a rank's gradients. The mean over ranks is the same for every world size."""
    generator = torch.Generator().manual_seed(step)
    found: list[Tensor | None] = []
    for weight in model.weights:
        mean = torch.randint(-4, 5, weight.shape, generator=generator)
        sign = 0 if world_size % 2 and rank == world_size - 1 else 1 - 2 * (rank % 2)
        found.append((mean + sign).to(weight.dtype))
    if step == OVERFLOW_STEP and rank == 0:
        last = found[-2]
        assert last is not None
        last[0, -1] = float("nan")
    return found


def mean(model: Model, step: int, world_size: int) -> list[Tensor | None]:
    """Returns the average of all ranks' gradients."""
    ranks = [gradients(model, step, rank, world_size) for rank in range(world_size)]
    return [
        (torch.stack([g for g in same if g is not None]).double().sum(0) / world_size).to(w.dtype)
        for same, w in zip(zip(*ranks, strict=True), model.weights, strict=True)
    ]


def settings(held: str) -> tuple[torch.dtype, dict[str, Any]]:
    common: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 20.0, "skip_nonfinite": True}
    if held == "fp32":
        return torch.float32, common
    if held == "stochastic":
        return torch.bfloat16, common | {"stochastic_rounding": True, "rounding_seed": 7}
    if held == "int8":
        return torch.bfloat16, common | {"master_weights": "remainder8", "state_dtype": "int8"}
    return torch.bfloat16, common | {"master_weights": {"master": "fp32"}.get(held, held)}


def outcome(model: Model, optimizer: Any, norms: list[float]) -> dict[str, Any]:
    state = optimizer.state_dict()["state"] if isinstance(optimizer, FusedAdamW) else None
    if state is None:
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    entries = [state[i][name] for i in sorted(state) for name in sorted(state[i])]
    return {
        "params": digest(list(model.parameters())),
        "local": {"state": digest(entries), "entries": len(entries)},
        "norms": [norm.hex() for norm in norms],
        "strides": [list(p.stride()) for p in model.parameters()],
    }


def build(model: Model, held: str, partition: str, how: str = "averaged") -> Any:
    kwargs = settings(held)[1]
    groups: list[dict[str, Any]] = [
        {"params": list(model.weights)[:4], "weight_decay": 0.1},
        {"params": list(model.weights)[4:-1], "weight_decay": 0.0},
        {"params": list(model.weights)[-1:], "weight_decay": 0.2},
    ]
    if partition == "none":
        return FusedAdamW(groups, **kwargs)
    if partition == "balanced":
        kwargs |= {"bucket_elements": 1 << 12, "sharded_gradients": how == "sharded"}
    return ZeroRedundancyOptimizer(groups, FusedAdamW, partition=partition, **kwargs)


def train(held: str, partition: str, how: str = "averaged", passes: int = 1) -> dict[str, Any]:
    """Trains with gradients averaged by ``how``. "gathered" gathers parameters as on NCCL."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model(settings(held)[0])
    optimizer = build(model, held, partition, how)
    if how == "gathered":
        optimizer.partition.gathers = True  # as on NCCL
    run: Any = model
    if how in ("ddp", "hook"):
        run = DDP(model, gradient_as_bucket_view=how == "hook")
        if how == "hook":
            run.register_comm_hook(None, reduce_scatter_hook(optimizer))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            draw = step + 100 * number
            if how in ("averaged", "gathered"):
                run(mean(model, draw, size)).backward()
            else:
                run(gradients(model, draw, rank, size)).backward()
        if how == "sharded":
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        norms.append(float(optimizer.control.grad_norm))
    return outcome(model, optimizer, norms)


def frozen_and_unused(partition: str, how: str) -> dict[str, Any]:
    """Trains with parameters that are frozen, thawed, and unused on all ranks in some steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model()
    model.weights[1].requires_grad_(False)
    optimizer = build(model, "fp32", partition, how)
    norms = []
    for step in range(STEPS):
        if step == 2:
            model.weights[1].requires_grad_(True)
        if step == 4:
            model.weights[0].requires_grad_(False)
        optimizer.zero_grad()
        grads = gradients(model, step, rank, size) if how == "sharded" else mean(model, step, size)
        for i, weight in enumerate(model.weights):
            if not weight.requires_grad or (i == 3 and step % 2):
                grads[i] = None
        model(grads).backward()
        optimizer.step()
        norms.append(float(optimizer.control.grad_norm))
    return outcome(model, optimizer, norms)


def scaled(partition: str, how: str) -> dict[str, Any]:
    """Trains under our scaler. Its scale is a power of two and backs off after the overflow."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model()
    optimizer = build(model, "fp32", partition, how)
    run: Any = model
    if how == "hook":
        run = DDP(model)
        run.register_comm_hook(None, reduce_scatter_hook(optimizer))
    scaler = GradScaler("cpu", init_scale=64.0)
    refused = ""
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = mean(model, step, size) if how == "averaged" else gradients(model, step, rank, size)
        scaler.scale(run(grads)).backward()
        if how != "averaged":
            try:
                scaler.unscale_(optimizer)
            except RuntimeError as error:
                refused = str(error)
        scaler.step(optimizer)
        scaler.update()
        norms.append(float(optimizer.control.grad_norm))
    if how != "averaged":
        stock = torch.amp.GradScaler("cpu", init_scale=1.0)
        stock.scale(torch.zeros(()))
        try:
            stock.step(optimizer)
        except RuntimeError as error:
            refused += str(error)
    result = outcome(model, optimizer, norms)
    return result | {"scale": scaler.get_scale(), "refused": refused}


def unused_on_one_rank() -> dict[str, Any]:
    """Steps with a parameter that only the last rank uses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model()
    optimizer = build(model, "fp32", "balanced", "sharded")
    grads = gradients(model, 0, rank, size)
    if rank != size - 1:
        grads[2] = None
    model(grads).backward()
    optimizer.step()
    moved = (model.weights[2] != Model().weights[2]).all()
    return {"moved": bool(moved), "params": digest(list(model.parameters()))}


def lazily() -> dict[str, Any]:
    """Trains with parameters that arrive during the next forward. The state dict waits for them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(70, 70) for _ in range(3)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), FusedAdamW, partition="balanced", bucket_elements=64, lr=0.1
    )
    optimizer.overlap_forward(*model)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 70), 0.1 * step)).sum().backward()
        optimizer.step()
    under_way = len(optimizer.partition._updates_in_flight)
    params = digest(list(model.state_dict().values()))
    return {"params": params, "under_way": under_way > 0 or dist.get_world_size() == 1}


def complex_norms(partition: str) -> dict[str, Any]:
    """Returns norms of gradients whose rows have 31, 40 or 63 complex numbers, or are cut."""
    norms = []
    for shape in ((301, 31), (301, 40), (301, 63), (3, 9001)):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.complex64))
        optimizer: Any = FusedAdamW([param], max_grad_norm=1.0)
        if partition != "none":
            optimizer = ZeroRedundancyOptimizer(
                [param], FusedAdamW, partition=partition, max_grad_norm=1.0,
                bucket_elements=64 if partition == "balanced" else None,
            )  # fmt: skip
        for _ in range(20):
            param.grad = torch.randn_like(param)
            optimizer.step()
            norms.append(float(optimizer.control.grad_norm).hex())
    return {"norms": norms}


def shares() -> dict[str, Any]:
    """Returns the elements and bytes of state that this rank holds."""
    model = Model()
    optimizer = build(model, "fp32", "balanced")
    model(gradients(model, 0, 0, 1)).backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for n, t in state.items() if n != "step"]
    return {
        "local": {
            "elements": sum(t.numel() for t in held) // 2,
            "storage": sum(t.untyped_storage().nbytes() for t in held),
            "windows": [b.window for b in optimizer.partition.all_buckets],
        },
        "total": sum(p.numel() for p in model.parameters()),
        "aligned": all(p.data_ptr() % 64 == 0 for p in model.parameters()),
    }


WAYS = {
    "none": ("averaged",),
    "greedy": ("averaged", "ddp"),
    "balanced": ("averaged", "gathered", "ddp", "hook", "sharded"),
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "unused on one rank": unused_on_one_rank, "lazily": lazily, "shares": shares
    }  # fmt: skip
    for partition, ways in WAYS.items():
        found[f"complex: {partition}"] = partial(complex_norms, partition)
        for how in ways:
            way = f"{partition}, {how}"
            for held in ("fp32", "master", "remainder", "stochastic", "int8"):
                found[f"{held}: {way}"] = partial(train, held, partition, how)
            if how in ("averaged", "sharded"):
                found[f"frozen: {way}"] = partial(frozen_and_unused, partition, how)
            if how in ("averaged", "sharded", "hook"):
                found[f"scaled: {way}"] = partial(scaled, partition, how)
                found[f"twice: {way}"] = partial(train, "fp32", partition, how, passes=2)
    return found


if __name__ == "__main__":
    run_cases(cases)
