"""Cases of test_workers.py: steps in backward, and deferred clipping, on two ranks."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.compare import assert_same
from tests.support.ranks import full_tensor, gathered, run_cases
from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.containers.deferred_clipping import defer_clipping
from torchopt_ext.integrations.torchtitan_clipping import take_over, watch

MAX_NORM, STEPS = 0.1, 3


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def weights(module):
    return [full_tensor(param) for param in module.parameters()]


def loss_of(module, seed):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return module(torch.randn(4, 6, generator=generator)).square().sum()


def container_of(module, in_backward, backwards=1, **options):
    options = {"lr": 1e-2, **options}
    if not in_backward:
        return OptimizersContainer([module], FusedAdamW, options)
    return OptimizersInBackwardContainer(
        [module], FusedAdamW, options, backwards_per_step=backwards
    )


# ---- steps in backward ---------------------------------------------------------------------------


@contextlib.contextmanager
def unsynchronised(module, when):
    """Turns off gradient synchronization if `when`, as accumulation does before the last batch."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not when)
    with module.no_sync() if when and hasattr(module, "no_sync") else contextlib.nullcontext():
        yield


def train(wrap, part_of, in_backward, microbatches, **options):
    wrapped = wrap(model())
    # FSDP2 calls the hooks only after it has reduced the gradients.
    backwards = 1 if isinstance(wrapped, FSDPModule) else microbatches
    container = container_of(part_of(wrapped), in_backward, backwards, **options)
    for step in range(STEPS):
        for microbatch in range(microbatches):
            with unsynchronised(wrapped, microbatch < microbatches - 1):
                loss_of(wrapped, microbatches * step + microbatch).backward()
        if in_backward:
            assert all(param.grad is None for param in wrapped.parameters())
        container.step()
        container.zero_grad()
    return weights(wrapped)


def compared(wrap, part_of=lambda m: m, microbatches=1, **options):
    """The weights are equal bitwise. torchtitan steps before DDP has reduced: its ranks diverge."""
    expected, found = (train(wrap, part_of, how, microbatches, **options) for how in (False, True))
    assert_same(found, expected)
    assert max((a - b).abs().max() for a, b in zip(found, weights(model()), strict=True)) > 1e-3
    of_rank = [w.tolist() for w in found]
    assert gathered(of_rank) == [of_rank] * 2


def wrapped_later():
    """A step without DDP, with the same data on all ranks, comes before training with DDP."""
    results = []
    for in_backward in (True, False):
        module = model()
        container = container_of(module, in_backward)
        for forward in (module, None, None):
            wrapped = forward or DistributedDataParallel(module)
            inputs = torch.ones(1, 6) * (1 if forward else 1 + dist.get_rank())
            wrapped(inputs).square().sum().backward()
            container.step()
            container.zero_grad()
        results.append(weights(module))
    assert_same(*results)


def sharded(module, whole=True):
    """Without ``whole`` each layer is an FSDP root: the first reduces when backward has ended."""
    for layer in (module[0], module[2]):
        fully_shard(layer)
    return fully_shard(module) if whole else module


class UsedByRank(nn.Module):
    """A model whose first layer is trained by one rank only, by the other rank in the next call."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.calls = layers, dist.get_rank()

    def forward(self, x):
        self.calls += 1
        hidden = self.layers[0](x)
        return self.layers[1:](hidden.detach() if self.calls % 2 else hidden)


def used_by_rank(module):
    return DistributedDataParallel(UsedByRank(module), find_unused_parameters=True)


def clipped_before_step():
    """torch's operators on DTensors raise no version counter of the local gradients."""
    results = []
    for in_backward in (True, False):
        torch.manual_seed(0)
        module = fully_shard(nn.Sequential(nn.Linear(1024, 1024, bias=False)))
        container = container_of(module, in_backward, None, max_grad_norm=MAX_NORM)
        module(torch.ones(1, 1024)).square().sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        container.step()
        assert abs(float(container.control.grad_norm) - 0.01) < 1e-6
        results.append(weights(module))
    assert_same(*results)


# ---- deferred clipping ---------------------------------------------------------------------------


def values():
    """Yields values and gradients of four parameters, equal in total in all layouts."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(4, 6, generator=generator) for _ in range(2)] for _ in range(4)]


def parameters_on(how):
    """Returns parameters with gradients in a layout, and the stages' mesh."""
    mesh = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    params = []
    for i, pair in enumerate(values()):
        layouts = {
            "rows": (mesh, [Shard(0)]),
            "expert parallel": (other, [Shard(1), Shard(0)]) if i % 2 else (mesh, [Shard(0)]),
            "tensor parallel": (mesh, [Replicate() if i % 2 else Shard(1)]),
        }
        if how == "stages" and i % 2 != dist.get_rank():
            continue
        if layout := layouts.get(how):
            pair = [distribute_tensor(tensor, *layout) for tensor in pair]
        params.append(nn.Parameter(pair[0]))
        params[-1].grad = pair[1]
    return params, mesh if how == "stages" else None


def deferred(how):
    """torchtitan's clipping call and a step equal bitwise a step under `max_grad_norm`.

    The norm covers all gradients of all meshes and stages.
    """
    titan = SimpleNamespace(clip_grad_norm_=None)
    take_over(titan)
    results, norm = [], None
    for options in ({}, {"max_grad_norm": MAX_NORM}):
        params, stages = parameters_on(how)
        part = nn.ParameterList(params)
        if options:
            options["process_group"] = stages and stages.get_group()
        container = container_of(part, False, **options)
        if not options:
            defer_clipping(container)
            watch(container)
            experts = how == "expert parallel"
            norm = titan.clip_grad_norm_(params, MAX_NORM, pp_mesh=stages, ep_enabled=experts)
        container.step()
        results.append(weights(part))
    expected = torch.cat([gradient.flatten() for _, gradient in values()]).double().norm()
    assert_same(*results)
    assert abs(float(norm) / float(expected) - 1) < 1e-14
    assert container.control.clip_factor < 1
    whole = container_of(nn.ParameterList(parameters_on("plain")[0]), False, max_grad_norm=MAX_NORM)
    whole.step()
    assert how != "stages" or container.control.clip_factor.equal(whole.control.clip_factor)


def unfit(when):
    """Rank 1 has a gradient on another mesh: all ranks raise in clipping, and none hangs.

    If it fails in the step, after all ranks clipped, no rank waits, and the next step is right.
    """
    params, _ = parameters_on("rows")
    gradient, other = params[0].grad, init_device_mesh("cpu", (1, 2))
    container = container_of(nn.ParameterList(params), False)
    clipping, rejects = defer_clipping(container), dist.get_rank() == 1
    norm = clipping.clip(MAX_NORM) if when == "step" else None
    if rejects:
        rows = torch.zeros(2, 6)
        params[0].grad = DTensor.from_local(rows, other, [Replicate(), Shard(0)], run_check=False)
    if when == "clipping":
        message = "a gradient is placed" if rejects else "rank 1 rejected the step"
        with pytest.raises(RuntimeError, match=message):
            clipping.clip(MAX_NORM)
        return
    with (
        pytest.raises(RuntimeError, match="a gradient is placed")
        if rejects
        else (contextlib.nullcontext())
    ):
        container.step()
    params[0].grad = gradient
    assert clipping.clip(MAX_NORM).equal(norm)
    container.step()


def cases():
    made = {"wrapped later": wrapped_later, "clipped by torch before step()": clipped_before_step}
    ddp = DistributedDataParallel
    for name, options in {"": {}, " clipped": {"max_grad_norm": MAX_NORM}}.items():
        made |= {
            f"ddp{name}": partial(compared, ddp, **options),
            f"inner module of ddp{name}": partial(compared, ddp, lambda m: m.module, **options),
            f"replicate{name}": partial(compared, replicate, **options),
            f"ddp, accumulated{name}": partial(compared, ddp, microbatches=3, **options),
            f"ddp, used by rank{name}": partial(compared, used_by_rank, **options),
            f"fsdp, several roots{name}": partial(
                compared, partial(sharded, whole=False), **options
            ),
            f"fsdp{name}": partial(compared, sharded, **options),
            f"fsdp, accumulated{name}": partial(compared, sharded, microbatches=3, **options),
        }
    for how in ("plain", "rows", "expert parallel", "tensor parallel", "stages"):
        made[f"deferred, {how}"] = partial(deferred, how)
    for when in ("clipping", "step"):
        made[f"deferred, rejected in {when}"] = partial(unfit, when)
    return made


if __name__ == "__main__":
    run_cases(cases)
