"""Cases of test_workers.py: steps in backward, and deferred clipping, on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import difference, full_tensor, gathered, run_cases
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.containers.deferred_clipping import defer_clipping
from torchopt_ext.integrations.torchtitan_clipping import take_over, watch

MAX_NORM, STEPS = 0.1, 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [full_tensor(param) for param in module.parameters()]


def loss_of(module: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return module(torch.randn(4, 6, generator=generator)).square().sum()


@contextlib.contextmanager
def unsynchronised(module: Any, when: bool) -> Any:
    """Turns off gradient synchronization if `when`, as accumulation does before the last batch."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not when)
    if when and isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    else:
        yield


def train(
    wrap: Callable[[nn.Module], nn.Module],
    part_of: Callable[[nn.Module], nn.Module],
    in_backward: bool,
    microbatches: int,
    **kwargs: Any,
) -> list[torch.Tensor]:
    wrapped = wrap(model())
    parts, kwargs = [part_of(wrapped)], {"lr": 1e-2, **kwargs}
    # FSDP2 calls the hooks only after it has reduced the gradients.
    backwards = 1 if isinstance(wrapped, FSDPModule) else microbatches
    container = (
        OptimizersInBackwardContainer(parts, FusedAdamW, kwargs, backwards_per_step=backwards)
        if in_backward
        else OptimizersContainer(parts, FusedAdamW, kwargs)
    )
    for step in range(STEPS):
        for microbatch in range(microbatches):
            with unsynchronised(wrapped, microbatch < microbatches - 1):
                loss_of(wrapped, microbatches * step + microbatch).backward()
        if in_backward:
            assert all(param.grad is None for param in wrapped.parameters())
        container.step()
        container.zero_grad()
    return weights(wrapped)


def compared(wrap: Any, part_of: Any = lambda m: m, microbatches: int = 1, **kwargs: Any) -> None:
    """The weights are equal bitwise. torchtitan steps before DDP has reduced: its ranks diverge."""
    expected = train(wrap, part_of, False, microbatches, **kwargs)
    found = train(wrap, part_of, True, microbatches, **kwargs)
    assert difference(found, expected) == ""
    assert max((a - b).abs().max() for a, b in zip(found, weights(model()), strict=True)) > 1e-3
    values = [w.tolist() for w in found]
    assert gathered(values) == [values] * 2


def wrapped_later() -> None:
    assert difference(trained_and_wrapped(True), trained_and_wrapped(False)) == ""


def trained_and_wrapped(in_backward: bool) -> list[torch.Tensor]:
    """Takes a step without DDP, with the same data on all ranks, and then trains with DDP."""
    module = model()
    cls = OptimizersInBackwardContainer if in_backward else OptimizersContainer
    container = cls([module], FusedAdamW, {"lr": 1e-2})
    for forward in (module, None, None):
        wrapped = forward or DistributedDataParallel(module)
        inputs = torch.ones(1, 6) * (1 if forward else 1 + dist.get_rank())
        wrapped(inputs).square().sum().backward()
        container.step()
        container.zero_grad()
    return weights(module)


def sharded(module: nn.Module) -> nn.Module:
    for layer in (module[0], module[2]):  # type: ignore[index]
        fully_shard(layer)
    return fully_shard(module)


def sharded_apart(module: nn.Module) -> nn.Module:
    """Makes each layer an FSDP root. The first layer reduces only when backward has ended."""
    fully_shard(module[0])  # type: ignore[index]
    fully_shard(module[2])  # type: ignore[index]
    return module


class UsedByRank(nn.Module):
    """A model whose first layer is trained by one rank only, by the other rank in the next call."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers, self.calls = layers, dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.layers[0](x)
        return self.layers[1:](hidden.detach() if self.calls % 2 else hidden)


def parameters_on(how: str) -> tuple[list[nn.Parameter], Any]:
    """Returns parameters with gradients, equal in total in all layouts, and the stages' mesh."""
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    params = []
    for i in range(4):
        value, grad = (torch.randn(4, 6, generator=generator) for _ in range(2))
        layouts = {
            "plain": None,
            "rows": (mesh, [Shard(0)]),
            "expert parallel": (other, [Shard(1), Shard(0)]) if i % 2 else (mesh, [Shard(0)]),
            "tensor parallel": (mesh, [Replicate() if i % 2 else Shard(1)]),
            "stages": None,
        }
        if how == "stages" and i % 2 != dist.get_rank():
            continue
        if (layout := layouts[how]) is None:
            param = nn.Parameter(value)
            param.grad = grad
        else:
            param = nn.Parameter(distribute_tensor(value, *layout))
            param.grad = distribute_tensor(grad, *layout)
        params.append(param)
    return params, mesh if how == "stages" else None


def deferred(how: str) -> None:
    """torchtitan's clipping call and a step equal bitwise a step under `max_grad_norm`.

    The norm covers all gradients of all meshes and stages.
    """
    titan = SimpleNamespace(clip_grad_norm_=None)
    take_over(titan)
    results: list[Any] = []
    norm = 0.0
    for defers in (True, False):
        params, stages = parameters_on(how)
        part = nn.ParameterList(params)
        kwargs: dict[str, Any] = {"lr": 1e-2}
        if not defers:
            kwargs["max_grad_norm"] = MAX_NORM
            kwargs["process_group"] = stages and stages.get_group()
        container = OptimizersContainer([part], FusedAdamW, kwargs)
        if defers:
            defer_clipping(container)
            watch(container)
            norm = float(
                titan.clip_grad_norm_(params, MAX_NORM, pp_mesh=stages, ep_enabled=how[0] == "e")
            )
        container.step()
        results.append(weights(part))
    generator = torch.Generator().manual_seed(0)
    all_values = [torch.randn(4, 6, generator=generator) for _ in range(8)]
    expected = torch.cat([v.flatten() for v in all_values[1::2]]).double().norm()
    assert difference(results[0], results[1]) == ""
    assert abs(norm / float(expected) - 1) < 1e-14
    assert container.control.clip_factor < 1
    if how == "stages":
        part = nn.ParameterList(parameters_on("plain")[0])
        whole = OptimizersContainer([part], FusedAdamW, {"max_grad_norm": MAX_NORM})
        whole.step()
        assert container.control.clip_factor.equal(whole.control.clip_factor)


def rejected() -> None:
    """Clips while rank 1 has a gradient on another mesh: all ranks raise, and none hangs."""
    params, _ = parameters_on("rows")
    other = init_device_mesh("cpu", (1, 2))
    container = OptimizersContainer([nn.ParameterList(params)], FusedAdamW, {})
    clipping = defer_clipping(container)
    if dist.get_rank() == 1:
        rows = torch.zeros(2, 6)
        params[0].grad = DTensor.from_local(rows, other, [Replicate(), Shard(0)], run_check=False)
    rejects = dist.get_rank() == 1
    message = "a gradient is placed" if rejects else "rank 1 rejected the step"
    with pytest.raises(RuntimeError, match=message):
        clipping.clip(MAX_NORM)


def failed_after_clipping() -> None:
    """Rank 1's step fails after all ranks clipped: no rank waits, and the next step is right."""
    params, _ = parameters_on("rows")
    gradient = params[0].grad
    other = init_device_mesh("cpu", (1, 2))
    container = OptimizersContainer([nn.ParameterList(params)], FusedAdamW, {})
    clipping = defer_clipping(container)
    norm = clipping.clip(MAX_NORM)
    if dist.get_rank() == 1:
        rows = torch.zeros(2, 6)
        params[0].grad = DTensor.from_local(rows, other, [Replicate(), Shard(0)], run_check=False)
        with pytest.raises(RuntimeError, match="a gradient is placed"):
            container.step()
    else:
        container.step()
    params[0].grad = gradient
    assert clipping.clip(MAX_NORM).equal(norm)
    container.step()


def clipped_by_torch(in_backward: bool) -> tuple[float, list[torch.Tensor]]:
    """torch's operators on DTensors raise no version counter of the local gradients."""
    torch.manual_seed(0)
    module = fully_shard(nn.Sequential(nn.Linear(1024, 1024, bias=False)))
    options = {"lr": 1e-2, "max_grad_norm": MAX_NORM}
    container = (
        OptimizersInBackwardContainer([module], FusedAdamW, options, backwards_per_step=None)
        if in_backward
        else OptimizersContainer([module], FusedAdamW, options)
    )
    module(torch.ones(1, 1024)).square().sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    container.step()
    return float(container.control.grad_norm), weights(module)


def clipped_before_step() -> None:
    norm, found = clipped_by_torch(True)
    assert abs(norm - 0.01) < 1e-6
    assert difference(found, clipped_by_torch(False)[1]) == ""


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {"wrapped later": wrapped_later}
    ddp, inner = DistributedDataParallel, lambda m: m.module
    for name, kwargs in {"": {}, " clipped": {"max_grad_norm": MAX_NORM}}.items():
        found[f"ddp{name}"] = lambda k=kwargs: compared(ddp, **k)
        found[f"inner module of ddp{name}"] = lambda k=kwargs: compared(ddp, inner, **k)
        found[f"replicate{name}"] = lambda k=kwargs: compared(replicate, **k)
        found[f"ddp, accumulated{name}"] = lambda k=kwargs: compared(ddp, microbatches=3, **k)
        found[f"ddp, used by rank{name}"] = lambda k=kwargs: compared(
            lambda m: ddp(UsedByRank(m), find_unused_parameters=True), **k
        )
        found[f"fsdp, several roots{name}"] = lambda k=kwargs: compared(sharded_apart, **k)
        found[f"fsdp{name}"] = lambda k=kwargs: compared(sharded, **k)
        found[f"fsdp, accumulated{name}"] = lambda k=kwargs: compared(sharded, microbatches=3, **k)
    for how in ("plain", "rows", "expert parallel", "tensor parallel", "stages"):
        found[f"deferred, {how}"] = lambda h=how: deferred(h)
    found["fsdp, clipped by torch before step()"] = clipped_before_step
    found["deferred, rejected"] = rejected
    found["deferred, failed after clipping"] = failed_after_clipping
    return found


if __name__ == "__main__":
    run_cases(cases)
