"""Cases of test_workers.py: ranks of a group act at different times, or not at all.

Every rank asserts that it ends where an optimizer over all ranks' data ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from zero_common import furthest, layers

from tests.support.ranks import run_cases
from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.zero import ZeroRedundancyOptimizer, hook_with_zero_step, reduce_scatter_hook

BALANCED = {"partition": "balanced", "bucket_elements": 64}
SHARDED = {**BALANCED, "sharded_gradients": True}
ROUNDING = 1e-6  # from averages of equal gradients, and from other orders of summing


def adam(params: Any, optimizer: Any = FusedAdamW, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(params, optimizer, lr=1e-2, **options)


def state_off(zero: Any, plain: Any) -> float:
    zero.consolidate_state_dict()
    if dist.get_rank():
        return 0.0
    found, expected = zero.state_dict()["state"], plain.state_dict()["state"]
    return max(
        float((found[i][name] - value).abs().max())
        for i, entry in expected.items()
        for name, value in entry.items()
    )


# ---- reentrant activation checkpointing ----------------------------------------------------------


def in_segments(run: Callable[[nn.Sequential, Tensor, int], Tensor], used: int) -> None:
    """Each of three backward passes in two steps reduces every bucket once.

    Segments have another length on every rank. The last rank uses only ``used`` layers.
    """
    model, twin, rank = layers(7), layers(7), dist.get_rank()
    zero = adam(model.parameters(), **SHARDED)
    plain = FusedAdamW(twin.parameters(), lr=1e-2)
    last = dist.get_world_size() - 1
    data = torch.ones(2, 70)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as reductions:
        for passes in (2, 1):
            zero.zero_grad()
            plain.zero_grad()
            for _ in range(passes):
                x = data.clone().requires_grad_()
                run(model[:used] if rank == last else model, x, rank).square().mean().backward()
                for r in range(last + 1):
                    of_rank = twin[:used] if r == last else twin
                    (of_rank(data).square().mean() / (last + 1)).backward()
            zero.step()
            plain.step()
    assert furthest(model, twin) <= ROUNDING
    assert reductions.call_count == 3 * len(zero.partition.all_buckets) > 3 * 7


def segments(model: nn.Sequential, x: Tensor, rank: int) -> Tensor:
    """Segments of rank + 1 layers. No parameter gets its gradient in the outermost graph task."""
    for start in range(0, len(model), rank + 1):
        x = checkpoint(model[start : start + rank + 1], x, use_reentrant=True)
    return x


def nested(model: nn.Sequential, x: Tensor, rank: int) -> Tensor:
    """A segment, with segments inside on odd ranks. The first and last layer are outside."""
    inner = (lambda x: segments(model[1:-1], x, 0)) if rank % 2 else model[1:-1]
    return model[-1](checkpoint(inner, model[0](x), use_reentrant=True))


# ---- several optimizers --------------------------------------------------------------------------


def used_by(models: Sequence[nn.Sequential], rank: int) -> nn.Sequential:
    """Returns the models in another order on even ranks, and without last layers on odd ranks."""
    return nn.Sequential(*([model[:-1] for model in models] if rank % 2 else models[::-1]))


def other_orders() -> None:
    """Two optimizers get other gradients in another order on odd ranks; before, one had a pass.

    The first one, which no other can precede, reduces during the pass.
    """
    gc.collect()  # an optimizer of another case may be the group's first
    both, twins = (layers(4), layers(4)), (layers(4), layers(4))
    zeros = [adam(model.parameters(), torch.optim.SGD, **SHARDED) for model in both]
    plain = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=1e-2)
    data, size = torch.ones(2, 70), dist.get_world_size()
    for now in (slice(1), slice(1, 2), slice(2)):
        used_by(both[now], dist.get_rank())(data).square().mean().backward()
        for rank in range(size):
            (used_by(twins[now], rank)(data).square().mean() / size).backward()
        for optimizer in (*zeros, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert [zero.partition.reducer.early for zero in zeros] == [True, False]
    assert max(map(furthest, both, twins)) <= ROUNDING


def dropped_on_even_ranks() -> None:
    """Odd ranks still hold an older optimizer. DDP communicates in the same group in backward."""
    older = [adam(layers(1).parameters(), **SHARDED)]
    if dist.get_rank() % 2 == 0:
        older.clear()
        gc.collect()
    model, twin = layers(3), layers(3)
    zero, plain = adam(model.parameters(), **BALANCED), FusedAdamW(twin.parameters(), lr=1e-2)
    ddp = DDP(model, find_unused_parameters=True, bucket_cap_mb=0.01)
    ddp.register_comm_hook(None, reduce_scatter_hook(zero))
    for _ in range(3):
        for each, optimizer in ((ddp, zero), (twin, plain)):
            each(torch.ones(2, 70)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not zero.partition.reducer.early or not older
        older.clear()
        gc.collect()
    assert zero.partition.reducer.early
    assert furthest(model, twin) <= ROUNDING


def backward(run: nn.Module, extra: Tensor, ranks: Sequence[int]) -> None:
    """Makes the backward pass of each rank's data, weighted equally."""
    for rank in ranks:
        loss = run(torch.full((2, 70), rank + 1.0)).square().mean() + (rank + 1) * extra.sum()
        (loss / len(ranks)).backward()


# ---- groups --------------------------------------------------------------------------------------


def subgroups() -> None:
    """The hook averages over DDP's ranks: an optimizer of other ranks is rejected."""
    rank = dist.get_rank()
    pair = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    model, twin = layers(2), layers(2)
    zero = adam(model.parameters(), process_group=pair, **BALANCED)
    for ddp in (None, DDP(model)):
        with pytest.raises(ValueError, match=r"optimizer's ranks \[\d, \d\], DDP averages over"):
            reduce_scatter_hook(zero, ddp)
    run, extra = DDP(model, process_group=pair), torch.zeros(1, requires_grad=True)
    run.register_comm_hook(None, reduce_scatter_hook(zero, run))
    plain = FusedAdamW(twin.parameters(), lr=1e-2)
    for _ in range(3):
        backward(run, extra, [rank])
        backward(twin, extra, [rank - rank % 2, rank - rank % 2 + 1])
        for optimizer in (zero, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(model, twin) <= ROUNDING


# ---- uneven inputs -------------------------------------------------------------------------------


def uneven(
    optimizer: Any = FusedAdamW,
    hook: bool = False,
    scaler: Any = None,
    overlap: bool = False,
    **options: Any,
) -> None:
    """Rank r has r batches more than rank 0, so Adam steps while some ranks are out of data.

    Under a scaler the last rank's last batch overflows. A large eps makes Adam depend on the scale.
    With overlap, ranks are out of data before DDP has its final buckets, and only then steps begin.
    """
    fewest, idle = (0, 2) if overlap else (2, 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, twin = layers(2), layers(2)
    ddp = DDP(model, bucket_cap_mb=0.01)
    scale = (scaler or GradScaler)("cpu", init_scale=2.0**10, enabled=scaler is not None)
    eps = 1.0 if scaler else 1e-8
    zero = adam(model.parameters(), optimizer, eps=eps, overlap_with_ddp=overlap, **options)
    if overlap:
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    if hook:
        ddp.register_comm_hook(None, reduce_scatter_hook(zero))
    plain = optimizer(twin.parameters(), lr=1e-2, eps=eps)

    def batch(step: int, of_rank: int) -> Tensor:
        overflows = scaler is not None and step == size
        return torch.full((1, 70), 1e30 if overflows else 0.1 * (step + 1) * (of_rank + 1))

    with Join([ddp, zero]):
        for step in range(fewest + rank):
            zero.zero_grad()
            scale.scale(ddp(batch(step, rank)).square().mean()).backward()
            scale.step(zero)
            scale.update()
    for step in range(idle, fewest - 1 + size - (scaler is not None)):
        plain.zero_grad()
        for r in range(size):
            if step < fewest + r:
                (twin(batch(step, r)).square().mean() / size).backward()
        plain.step()
    assert max(furthest(model, twin), state_off(zero, plain)) <= ROUNDING


def wide_gradients() -> None:
    """Rank 0, which owns a bf16 parameter and is out of data, steps with fp32 gradients."""
    param = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    zero = adam([param])
    for _ in range(2):
        zero.zero_grad()
        with Join([zero]):
            for _ in range(dist.get_rank() + 1):
                param.grad = torch.full((70,), 1 + 2**-12)
                zero.step()
        assert param.grad.dtype == torch.float32
        assert (param.grad == 1 + 2**-12).all()


def left_out() -> None:
    """Trains in DDP's own Join context, which does not include the optimizer: all ranks raise."""
    ddp = DDP(layers(2))
    zero = adam(ddp.parameters(), **BALANCED)
    ddp.register_comm_hook(None, reduce_scatter_hook(zero))
    message = "rank 0 rejected the step" if dist.get_rank() else r"use Join\(\[ddp, optimizer\]\)"

    def train() -> None:
        with ddp.join():
            for _ in range(dist.get_rank() + 1):
                zero.zero_grad()
                ddp(torch.ones(2, 70)).sum().backward()
                zero.step()

    with pytest.raises(RuntimeError, match=message):
        train()


def ended_early() -> None:
    """All ranks raise in a Join context that rank 0's lack of data ends. Then they may clip."""
    model = layers(1)
    zero = adam(model.parameters())

    def step() -> None:
        model(torch.ones(2, 70)).sum().backward()
        zero.step()

    def train() -> None:
        with Join([zero], throw_on_early_termination=True):
            for _ in range(dist.get_rank() + 1):
                step()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert zero.clip_grad_norm_(1.0).item() == pytest.approx((70 * 70 + 70) ** 0.5)
    step()


def sharded_join() -> None:
    with pytest.raises(RuntimeError, match="use DDP, with reduce_scatter_hook"):
        Join([adam(layers(1).parameters(), **SHARDED)])


def cases() -> dict[str, Callable[[], None]]:
    return {
        "segments": lambda: in_segments(segments, 7),
        "segments, unused": lambda: in_segments(segments, 5),
        "nested": lambda: in_segments(nested, 7),
        "nested, unused": lambda: in_segments(nested, 5),
        "other orders": other_orders,
        "dropped on even ranks": dropped_on_even_ranks,
        "subgroups": subgroups,
        "uneven greedy": uneven,
        "uneven AdamW": lambda: uneven(torch.optim.AdamW),
        "uneven bucket view": lambda: uneven(parameters_as_bucket_view=True),
        "uneven balanced": lambda: uneven(**BALANCED),
        "uneven overlap": lambda: uneven(overlap=True),
        "uneven hook": lambda: uneven(hook=True, **BALANCED),
        "uneven scaled": lambda: uneven(scaler=GradScaler),
        "uneven scaled by torch": lambda: uneven(scaler=torch.amp.GradScaler, **BALANCED),
        "uneven scaled hook": lambda: uneven(scaler=GradScaler, hook=True, **BALANCED),
        "left out": left_out,
        "ended early": ended_early,
        "wide gradients": wide_gradients,
        "sharded join": sharded_join,
    }


if __name__ == "__main__":
    run_cases(cases)
