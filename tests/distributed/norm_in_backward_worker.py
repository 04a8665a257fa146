"""Cases of test_workers.py: a norm measured in backward has the bits of the step's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import digest, gathered, run_cases
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext import FusedAdamW, norm_hook
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim import norm_in_backward
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

Result = dict[str, Any]

OPTIONS: dict[str, Any] = {"lr": 0.01, "max_grad_norm": 0.5, "skip_nonfinite": True}
STEPS = 4
measured: list[int] = []


class Count(norm_in_backward.NormInBackward):
    """Records for each norm how many gradients the step does not measure again."""

    def known(self, positions: Any) -> Any:
        found = super().known(positions)
        measured.append(len(found.positions))
        return found


def loss(module: nn.Module, step: int, first_only: bool = False) -> Tensor:
    """Returns the loss of a batch that differs on every rank."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return module(torch.randn(10, 256, generator=generator), first_only).square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(256, 256)
        self.conv = nn.Conv1d(1, 96, 201)  # rows of 201, 77 KB
        self.second = nn.Linear(256, 300)
        self.unused = nn.Parameter(torch.ones(200, 200))

    def forward(self, x: Tensor, first_only: bool) -> Tensor:
        x = self.first(x)
        if first_only:
            return x
        return self.second(x).flatten(1)[:, :200] * self.conv(x.unsqueeze(1)).mean()


def run(
    wrap: Callable[[nn.Module, bool], tuple[nn.Module, Any]],
    early: bool,
    *,
    backwards: int = 1,
    each: Callable[[nn.Module, int], None] = lambda *_: None,
    synced: bool = True,
) -> Result:
    measured.clear()
    plain = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, optimizer = wrap(plain, early)
        norms = []
        for step in range(STEPS):
            for i in range(backwards):
                if hasattr(module, "require_backward_grad_sync"):
                    module.require_backward_grad_sync = synced or i == backwards - 1
                loss(module, 10 * step + i, first_only=step == 1).backward()
            each(plain, step)
            optimizer.step()
            control = getattr(optimizer, "optim", optimizer).control
            norms.append(float(control.grad_norm).hex())
            optimizer.zero_grad()
    params = list(plain.parameters())
    return {
        "norms": norms,
        "params": digest(getattr(p, "_local_tensor", p) for p in params),
        "counts": list(measured),
        "warned": any("norm_in_backward" in str(w.message) for w in caught),
    }


def compare(wrap: Any, is_measured: bool = True, **kwargs: Any) -> None:
    found, expected = run(wrap, True, **kwargs), run(wrap, False, **kwargs)
    for result in (found, expected):
        assert gathered(result["norms"]) == [result["norms"]] * 2
    assert found["norms"] == expected["norms"] and "nan" not in found["norms"]
    assert found["params"] == expected["params"]
    assert found["warned"] == ("each" in kwargs and kwargs["each"] is scale)
    assert any(found["counts"]) == is_measured, found["counts"]
    assert not is_measured or found["counts"][-1] >= 1


def ddp(hook: Any = allreduce_hook, measures: bool = True, **options: Any) -> Any:
    def wrap(plain: nn.Module, early: bool) -> tuple[nn.Module, Any]:
        module = DistributedDataParallel(plain, find_unused_parameters=True, **options)
        optimizer = FusedAdamW(plain.parameters(), **OPTIONS, norm_in_backward=early)
        module.register_comm_hook(None, norm_hook(optimizer, hook) if early and measures else hook)
        return module, optimizer

    return wrap


def fsdp(mesh_shape: tuple[int, ...]) -> Any:
    def wrap(plain: nn.Module, early: bool) -> tuple[nn.Module, Any]:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for part in (plain.first, plain.second, plain):  # type: ignore[attr-defined]
            fully_shard(part, mesh=mesh)
        options = {**OPTIONS, "norm_in_backward": early}
        return plain, OptimizersContainer([plain], FusedAdamW, options)

    return wrap


def zero(by_hook: bool) -> Any:
    def wrap(plain: nn.Module, early: bool) -> tuple[nn.Module, Any]:
        made = ZeroRedundancyOptimizer(
            plain.parameters(),
            FusedAdamW,
            partition="balanced",
            sharded_gradients=not by_hook,
            bucket_elements=40_000,
            norm_in_backward=early,
            **OPTIONS,
        )
        if not by_hook:
            return plain, made
        module = DistributedDataParallel(plain, find_unused_parameters=True)
        module.register_comm_hook(None, reduce_scatter_hook(made))
        return module, made

    return wrap


def scale(plain: nn.Module, step: int) -> None:
    plain.first.weight.grad.mul_(0.5)  # type: ignore[attr-defined]


def reduced_by_hand(plain: nn.Module, early: bool) -> tuple[nn.Module, Any]:
    return plain, FusedAdamW(plain.parameters(), **OPTIONS, norm_in_backward=early)


def sum_over_ranks(plain: nn.Module, step: int) -> None:
    for param in plain.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)


def cases() -> dict[str, Callable[[], None]]:
    norm_in_backward.MEASURED_BYTES = 1 << 16
    norm_in_backward.CACHED_BYTES["cpu"] = 1
    from torchopt_ext.optim import fused_adam

    fused_adam.NormInBackward = Count  # type: ignore[misc]
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "ddp": (ddp(), {}),
        "ddp, views": (ddp(gradient_as_bucket_view=True), {}),
        "ddp, small buckets": (ddp(bucket_cap_mb=0.1), {}),
        "ddp, compressed": (ddp(bf16_compress_hook), {}),
        "ddp, micro-batches": (ddp(), {"backwards": 2}),
        "ddp, no sync": (ddp(gradient_as_bucket_view=True), {"backwards": 2, "synced": False}),
        "ddp, changed": (ddp(), {"each": scale, "is_measured": False}),
        "ddp without": (
            ddp(measures=False, gradient_as_bucket_view=True), {"is_measured": False}
        ),
        "by hand": (reduced_by_hand, {"each": sum_over_ranks, "is_measured": False}),
        "fsdp": (fsdp((2,)), {}),
        "fsdp, micro-batches": (fsdp((2,)), {"backwards": 2}),
        "fsdp, changed": (fsdp((2,)), {"each": scale, "is_measured": False}),
        "hsdp": (fsdp((2, 1)), {}),
        "zero": (zero(False), {}),
        "zero, micro-batches": (zero(False), {"backwards": 2}),
        "zero, hook": (zero(True), {}),
    }  # fmt: skip
    return {name: partial(compare, wrap, **kwargs) for name, (wrap, kwargs) in ways.items()}


if __name__ == "__main__":
    run_cases(cases)
