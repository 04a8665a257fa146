"""Cases of test_workers.py: moving averages of weights are those of one process, to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from tests.support.compare import assert_same_bits
from tests.support.ranks import full_tensor, gathered, run_cases
from torchopt_ext import FusedAdamW, FusedMuon, ZeroRedundancyOptimizer
from torchopt_ext.statedict.dcp import load

OPTIONS: dict[str, Any] = {"lr": 0.05, "max_grad_norm": 0.5, "ema_decay": 0.8}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16 averages": (torch.float32, {"ema_dtype": "bf16", "rounding_seed": 7}),
    "remainder, 8 bits": (
        torch.bfloat16,
        {"master_weights": "remainder", "state_dtype": "int8", "fp32_moments": ()},
    ),
}


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(130, 70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)


def groups_of(model: nn.Module, cls: Any) -> Any:
    params = [*model.named_parameters()]
    if cls is not FusedMuon:
        return params
    matrices, vectors = ([(n, p) for n, p in params if p.dim() == d] for d in (2, 1))
    return [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Columns of every matrix on each rank; a test of the optimizer, so forward gathers them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):  # type: ignore[index]
        for name, p in [*layer.named_parameters()]:
            placement = Shard(1) if p.dim() == 2 else Replicate()
            layer.register_parameter(
                name, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
            )
    return model


def train(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    """All ranks have one batch, so that their mean gradient is that of one process."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            placed = hasattr(p, "device_mesh")
            p.grad = (
                distribute_tensor(gradient, p.device_mesh, p.placements) if placed else gradient
            )
        optimizer.step()
        optimizer.zero_grad()


def whole(values: Any) -> list[Tensor]:
    return [full_tensor(value).detach().clone() for value in values]


def averages(optimizer: Any, params: Any) -> list[Tensor]:
    return [optimizer.state[p]["ema_weight"] for p in params]


def assert_as_in_one_process(
    shard: Callable[[nn.Module], nn.Module], way: str, build: Callable[..., Any], cls: Any
) -> None:
    dtype, options = WAYS[way]
    alone = model_of(dtype)
    one = cls(groups_of(alone, cls), **OPTIONS, **options)

    def built() -> tuple[nn.Module, Any]:
        model = shard(model_of(dtype))
        return model, build(groups_of(model, cls), **OPTIONS, **options)

    model, optimizer = built()
    for run in ((alone, one), (model, optimizer)):
        train(*run, 0, 1)
    assert_same_bits(whole(model.parameters()), whole(alone.parameters()))
    held = averages(one, alone.parameters())
    expected = [average.to(dtype) for average in held]
    with optimizer.ema_weights():
        assert_same_bits(whole(model.parameters()), expected)
    assert_same_bits(whole(model.parameters()), whole(alone.parameters()))
    with suppress(KeyError), optimizer.ema_weights():
        raise KeyError
    assert_same_bits(whole(model.parameters()), whole(alone.parameters()))
    folder = gathered(tempfile.mkdtemp())[0]
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    other, resumed = built()
    load({"model": other, "optimizer": resumed}, checkpoint_id=folder)
    for run in ((alone, one), (model, optimizer), (other, resumed)):
        train(*run, 2)
    expected = [average.to(dtype) for average in averages(one, alone.parameters())]
    for each, its in ((model, optimizer), (other, resumed)):
        assert_same_bits(whole(each.parameters()), whole(alone.parameters()))
        with its.ema_weights():
            assert_same_bits(whole(each.parameters()), expected)


def assert_whole_averages_load() -> None:
    """A whole average is cut to this rank's shard."""
    model = fsdp2(model_of(torch.float32))
    optimizer = FusedAdamW(model.named_parameters(), **OPTIONS)
    source = {name: torch.randn(p.shape) for name, p in model_of(torch.float32).named_parameters()}
    source = {name: gathered(value)[0] for name, value in source.items()}
    optimizer.load_ema(source)
    assert_same_bits(whole(averages(optimizer, model.parameters())), source.values())


def sources(model: nn.Module) -> dict[str, tuple[Any, list[Tensor]]]:
    """State dicts of averages, the same on all ranks, and the averages in them."""
    generator = torch.Generator().manual_seed(5)
    shapes = [p.shape for p in model.parameters()]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    named = dict(zip(dict(model.named_parameters()), made, strict=True))
    torchs = AveragedModel(model_of(torch.float32))
    torchs.module.load_state_dict(named)
    return {
        "name": (named, made),
        "AveragedModel": (torchs.state_dict(), made),
        "diffusers": ({"decay": 0.9, "shadow_params": made}, made),
    }


def assert_averages_of_others_load(partition: str, way: str) -> None:
    """Each rank cuts its parts out of whole averages, and goes on as one process does."""
    dtype, options = WAYS[way]
    for name, (source, expected) in sources(model_of(dtype)).items():
        alone, model = model_of(dtype), model_of(dtype)
        one = FusedAdamW(alone.named_parameters(), **OPTIONS, **options)
        optimizer = ZeroRedundancyOptimizer(
            model.named_parameters() if name == "name" else model.parameters(),
            optimizer_class=FusedAdamW, partition=partition, **OPTIONS, **options,
        )  # fmt: skip
        for run in ((alone, one), (model, optimizer)):
            train(*run, 0)
        one.load_ema(source)
        optimizer.load_ema(source, None if name == "name" else model)
        held = averages(one, alone.parameters())
        assert_same_bits(held, [e.to(a.dtype) for e, a in zip(expected, held, strict=True)])
        with optimizer.ema_weights():
            assert_same_bits(model.parameters(), [average.to(dtype) for average in held])
        for run in ((alone, one), (model, optimizer)):
            train(*run, 1)
        averaged = [average.to(dtype) for average in averages(one, alone.parameters())]
        with optimizer.ema_weights():
            assert_same_bits(model.parameters(), averaged)


def assert_a_misfit_on_one_rank_changes_none(partition: str) -> None:
    model = model_of(torch.float32)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), optimizer_class=FusedAdamW, partition=partition, **OPTIONS
    )
    train(model, optimizer, 0)
    source, _ = sources(model)["name"]
    if dist.get_rank() == 1:
        source["0.bias"] = torch.zeros(3)
    kept = {p: state["ema_weight"].clone() for p, state in optimizer.state.items() if state}
    with pytest.raises(ValueError, match=r"0.bias has shape \(3,\)"):
        optimizer.load_ema(source)
    assert_same_bits([optimizer.state[p]["ema_weight"] for p in kept], kept.values())


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {"whole averages": assert_whole_averages_load}
    for way in WAYS:
        for shard in (fsdp2, tensor_parallel):
            if shard is tensor_parallel and way == "remainder, 8 bits":
                continue  # columns end inside a group: one process has other scales
            run = partial(assert_as_in_one_process, shard, way, FusedAdamW, FusedAdamW)
            found[f"{shard.__name__}, {way}"] = run
        for partition in ("greedy", "balanced"):
            build = partial(
                ZeroRedundancyOptimizer, optimizer_class=FusedAdamW, partition=partition
            )
            run = partial(assert_as_in_one_process, lambda model: model, way, build, FusedAdamW)
            found[f"zero {partition}, {way}"] = run
    for partition in ("greedy", "balanced"):
        found[f"zero {partition}, misfit"] = partial(
            assert_a_misfit_on_one_rank_changes_none, partition
        )
        for way in WAYS:
            run = partial(assert_averages_of_others_load, partition, way)
            found[f"zero {partition}, averages of others, {way}"] = run
    muon = partial(assert_as_in_one_process, fsdp2, "fp32", FusedMuon, FusedMuon)
    return found | {"fsdp2, Muon": muon}


if __name__ == "__main__":
    run_cases(cases)
