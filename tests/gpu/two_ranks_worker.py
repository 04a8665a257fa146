"""One of two ranks that share a GPU. Usage: two_ranks_worker.py RANK STORE DEVICE

NCCL needs a GPU for each rank, so the group is gloo. Each case must end with the CPU's bits.
"""

from __future__ import annotations

import datetime
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import bits, everything, make_params, set_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torchopt_ext import FusedAdamW
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

STEPS, NAN_STEP = 4, 1
Params = Sequence[nn.Parameter]
CLIPPED: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.5, "skip_nonfinite": True}


def give(params: Params, step: int) -> None:
    """Sets gradients that differ between the ranks, one of them NaN in NAN_STEP on rank 1."""
    set_gradients(params, 10 * step + dist.get_rank())
    if step == NAN_STEP and dist.get_rank() == 1:
        assert params[0].grad is not None
        params[0].grad[0, 0] = float("nan")


def control_of(optimizer: Any) -> list[bytes]:
    names = ("steps", "skipped_steps", "grad_norm", "loss_scale")
    return [bits(getattr(optimizer.control, name)) for name in names]


def group(device: str) -> list[bytes]:
    params = make_params(device)
    optimizer = FusedAdamW(params, process_group=dist.group.WORLD, **CLIPPED)
    for step in range(STEPS):
        give(params, step)
        optimizer.step()
    return everything(params, optimizer) + control_of(optimizer)


def mesh(device: str) -> list[bytes]:
    ranks = init_device_mesh(device, (2,))
    whole = [p for p in make_params(device) if p.dim() == 2]
    params = [nn.Parameter(distribute_tensor(p.detach(), ranks, [Shard(0)])) for p in whole]
    optimizer = FusedAdamW(params, **CLIPPED)
    for step in range(STEPS):
        set_gradients(whole, step)
        for param, plain in zip(params, whole, strict=True):
            param.grad = distribute_tensor(plain.grad, ranks, [Shard(0)])
        if step == NAN_STEP and dist.get_rank() == 1:
            params[0].grad.to_local()[0, 0] = float("nan")
        optimizer.step()
    return [bits(p.to_local()) for p in params] + control_of(optimizer)


class Weighted(nn.Module):
    """Its parameters' gradients are the tensors given to ``forward``."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def zero(device: str, partition: str, how: str, dtype: torch.dtype = torch.float32) -> list[bytes]:
    params = [p for p in make_params(device, dtype) if p.numel() > 0]
    options = {"sharded_gradients": True} if how == "hooks" else {}
    masters = {"master_weights": "remainder"} if dtype is torch.bfloat16 else {}
    optimizer = ZeroRedundancyOptimizer(
        params, FusedAdamW, partition=partition, **options, **masters, **CLIPPED
    )
    model: nn.Module = Weighted(params)
    if how != "hooks":
        model = DDP(model)
    if how == "comm hook":
        model.register_comm_hook(None, reduce_scatter_hook(optimizer))
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    for step in range(STEPS):
        optimizer.zero_grad()
        give(twins, step)
        model([twin.grad for twin in twins]).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    kept = [bits(entry[name]) for entry in state.values() for name in sorted(entry)]
    return [bits(p) for p in params] + kept + control_of(optimizer.optim)


def adapted(device: str) -> list[bytes]:
    params = make_params(device, torch.bfloat16)
    optimizer = FSDPadaptOptimizer(
        FusedAdamW(params, lr=1e-2),
        process_group=dist.group.WORLD,
        clip_grad_norm=0.5,
        grad_scal_cfg={"initial_scale": 4.0},
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        give(twins, step)
        optimizer.backward(Weighted(params)([twin.grad for twin in twins]))
        optimizer.step()
    return [bits(p) for p in params]


def rejected(device: str) -> None:
    """Rank 1 rejects a step. Rank 0 learns of it in this step or in the next, which both make."""
    params = make_params(device)
    optimizer = FusedAdamW(params, process_group=dist.group.WORLD, **CLIPPED)
    optimizer.set_loss_scale(8.0)
    before = [bits(p) for p in params]
    set_gradients(params, 0)
    heard = None
    if device == "cuda":
        torch.cuda._sleep(100_000_000)
    if dist.get_rank() == 1:
        params[1].grad = params[1].grad.to_sparse()
        with pytest.raises(RuntimeError):
            optimizer.step()
    else:
        try:
            optimizer.step()
        except RuntimeError as error:
            heard = error
    assert [bits(p) for p in params] == before
    for step in (1, 2):
        set_gradients(params, step)
        try:
            optimizer.step()
        except RuntimeError as error:
            assert heard is None
            heard = error
        assert (heard is not None) == (dist.get_rank() == 0), step
    if dist.get_rank() == 0:
        assert "rank 1 rejected the step" in str(heard)
    assert [bits(p) for p in params] != before
    steps, skipped = (float(getattr(optimizer.control, n)) for n in ("steps", "skipped_steps"))
    counted = device == "cuda"  # the CPU raises before it counts
    assert (steps, skipped) == (2.0 + counted, counted)
    assert float(optimizer.control.loss_scale) == (4.0 if counted else 8.0)


def rejected_by_zero(device: str, sharded: bool) -> None:
    """All ranks raise in the rejected step, keep their weights, and make the next step."""
    params = [p for p in make_params(device) if p.numel() > 0]
    optimizer = ZeroRedundancyOptimizer(
        params, FusedAdamW, partition="balanced", sharded_gradients=sharded, **CLIPPED
    )
    model = Weighted(params)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    before = [bits(p) for p in params]
    for step in range(2):
        optimizer.zero_grad()
        set_gradients(twins, step)
        model([twin.grad for twin in twins]).backward()
        if step == 0:
            wrong = dist.get_rank() == 1
            with pytest.raises((RuntimeError, TypeError)):
                optimizer.step(nonsense=True) if wrong else optimizer.step()
            assert [bits(p) for p in params] == before
        else:
            optimizer.step()
    assert [bits(p) for p in params] != before


def cases() -> dict[str, Callable[[str], Any]]:
    found: dict[str, Callable[[str], Any]] = {
        "group": group,
        "mesh": mesh,
        "FSDPadaptOptimizer": adapted,
        "rejected": rejected,
        "rejected by ZeRO": functools.partial(rejected_by_zero, sharded=False),
        "rejected by sharded ZeRO": functools.partial(rejected_by_zero, sharded=True),
    }
    for partition, how in (
        ("greedy", "ddp"),
        ("balanced", "ddp"),
        ("balanced", "hooks"),
        ("balanced", "comm hook"),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{partition}, {how}, {dtype}"] = functools.partial(
                zero, partition=partition, how=how, dtype=dtype
            )
    return found


def main() -> None:
    rank, store, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    wrong = []
    for name, case in cases().items():
        try:
            if case("cpu") != case(device):
                wrong.append(f"{name}: other bits than on the CPU")
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        dist.barrier()
    dist.destroy_process_group()
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
