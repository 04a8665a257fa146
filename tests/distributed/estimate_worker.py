"""Cases of test_workers.py: the estimates of optim/estimate.py equal what two ranks allocate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import run_cases
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torchopt_ext import FusedAdamW
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.state.entries import MOMENTS
from torchopt_ext.state.quantized import CODES, SCALES
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

BUCKET = 3000
EIGHT_BITS: dict[str, dict[str, Any]] = {"int8": {}, "int8 every matrix": {"fp32_moments": ()}}
MASTERS = {"fp32": "master_weight", "remainder": "remainder", "remainder8": "remainder8"}


def build(dtype: torch.dtype) -> nn.Sequential:
    """Returns a model with odd sizes, a tensor above a bucket, a frozen tensor, an embedding."""
    torch.manual_seed(0)
    linear = nn.Linear(70, 111), nn.Linear(111, 70), nn.Linear(70, 7)
    model = nn.Sequential(nn.Embedding(5, 70), *linear).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def allocated(tensors: Iterable[Tensor | None]) -> int:
    """Returns the bytes of the tensors' storages and counts a shared storage once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = own(tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def held(sharding: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """A rank holds after a step what was estimated."""
    model = build(dtype)
    params = list(model.parameters())
    with torch.device("meta"):
        meta = build(dtype)
    bucket = BUCKET if sharding in ("balanced", "zero2") else None
    ranks = estimate(
        meta.named_parameters(),
        sharding=sharding,
        world_size=dist.get_world_size(),
        bucket_elements=bucket,
        **options,
    )
    if sharding == "fsdp":
        fully_shard(model)
        params = list(model.parameters())
        optimizer = local = FusedAdamW(params, max_grad_norm=1.0, **options)
    elif sharding == "ddp":
        optimizer = local = FusedAdamW(params, max_grad_norm=1.0, **options)
    else:
        cut = {} if bucket is None else {"partition": "balanced", "bucket_elements": bucket}
        optimizer = ZeroRedundancyOptimizer(
            params,
            FusedAdamW,
            sharded_gradients=sharding == "zero2",
            max_grad_norm=1.0,
            **cut,
            **options,
        )
        local = optimizer.optim
    run: nn.Module = model
    if sharding in ("ddp", "zero1", "balanced"):
        run = DDP(model, gradient_as_bucket_view=True)
    buckets: list[Tensor] = []  # DDP keeps them; the hook leaves no gradient in p.grad
    if sharding == "balanced":
        reduce_scatter = reduce_scatter_hook(optimizer)
        # DDP compares annotations of a hook that has any.
        run.register_comm_hook(
            None, lambda _, bucket: buckets.append(bucket.buffer()) or reduce_scatter(_, bucket)
        )
    run(torch.randint(5, (5,))).square().mean().backward()
    optimizer.step()
    states = list(local.state.values())
    moments = [
        state[name] for state in states for name in (*MOMENTS, *CODES, *SCALES) if name in state
    ]
    masters = [state[name] for state in states for name in MASTERS.values() if name in state]
    gradients = [*buckets, *(p.grad for p in params)]
    if sharding in ("balanced", "zero2"):
        gradients += [p.grad for group in local.param_groups for p in group["params"]]
    estimated = ranks[dist.get_rank()]
    assert allocated(params) == estimated.weights
    assert allocated(gradients) == estimated.gradients
    assert sum(own(t).nbytes for t in masters) == estimated.masters
    assert sum(own(t).nbytes for t in moments) == estimated.moments
    # Small tensors' moments begin at multiples of 64 bytes. A cut one becomes up to three.
    assert 0 <= allocated(moments) - estimated.moments <= 64 * 2 * 21
    assert estimated.steps <= 4 * len(states) <= 3 * estimated.steps


def cases() -> dict[str, Callable[[], None]]:
    bf16 = torch.bfloat16
    made: dict[str, Callable[[], None]] = {}
    for sharding in ("ddp", "zero1", "balanced", "zero2", "fsdp"):
        made[sharding] = functools.partial(held, sharding)
        made[f"{sharding} fp32"] = functools.partial(held, sharding, bf16, master_weights="fp32")
    made["zero2 remainder"] = functools.partial(
        held, "zero2", bf16, master_weights="remainder", state_dtype=bf16
    )
    for sharding in ("ddp", "zero1", "fsdp"):
        for name, chosen in EIGHT_BITS.items():
            made[f"{sharding} {name}"] = functools.partial(
                held, sharding, bf16, master_weights="remainder8", state_dtype="int8", **chosen
            )
    return made


if __name__ == "__main__":
    run_cases(cases)
