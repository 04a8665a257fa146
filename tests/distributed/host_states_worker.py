"""Cases of test_workers.py: states on the host under FSDP2 and ZeRO.

The memory of parameters stands for a GPU's (tests/python/optim/test_states_on_host.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from tests.support.compare import assert_same_bits
from tests.support.late_stream import LateStreams
from tests.support.ranks import gathered, run_cases
from torchopt_ext import FusedAdamW, FusedMuon, ZeroRedundancyOptimizer
from torchopt_ext.optim import host_steps, norm, rejection
from torchopt_ext.state.host_memory import ACCELERATORS, is_on_host
from torchopt_ext.statedict.dcp import load

OPTIONS: dict[str, Any] = {"lr": 0.05, "max_grad_norm": 0.5, "master_weights": "remainder"}


def model_of(shards: bool, dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(130, 70), nn.Tanh(), nn.Linear(70, 3)]
    model = nn.Sequential(*layers).to(dtype)
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return model


def groups_of(model: nn.Module, cls: Any) -> Any:
    params = [*model.parameters()]
    if cls is not FusedMuon:
        return params
    matrices, vectors = ([p for p in params if p.dim() == n] for n in (2, 1))
    return [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]


def train(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.randn(8, 130, dtype=dtype)).square().mean().backward()


def on_host(optimizer: Any) -> list[bool]:
    return [
        is_on_host(state[name])
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_codes", "momentum_buffer", "remainder")
        if name in state
    ]


def assert_same_run(
    shards: bool,
    build: Callable[..., Any],
    reads: Callable[..., None],
    cls: type = FusedAdamW,
    **paths: str,
) -> None:
    """Same bits as beside the parameters, also after a checkpoint crosses, in either direction."""
    models = [model_of(shards) for _ in range(2)]
    places: list[dict[str, Any]] = [{}, {"state_device": "cpu", **paths}]
    runs = [
        (model, build(groups_of(model, cls), **OPTIONS, **place))
        for model, place in zip(models, places, strict=True)
    ]
    for run in runs:
        train(*run, 0, 1)
    assert_same_bits(models[0].parameters(), models[1].parameters())
    held = on_host(getattr(runs[1][1], "optim", runs[1][1]))
    assert all(held) and any(gathered(bool(held)))
    for place, (source, saved) in zip(reversed(places), runs, strict=True):
        folder = gathered(tempfile.mkdtemp())[0]
        dcp.save({"model": source, "optimizer": saved}, checkpoint_id=folder)
        other = model_of(shards)
        resumed = build(groups_of(other, cls), **OPTIONS, **place)
        reads(other, resumed, folder)
        train(other, resumed, 2, 3)
        train(source, saved, 2, 3)
        assert_same_bits(other.parameters(), source.parameters())
        assert any(gathered(any(on_host(getattr(resumed, "optim", resumed))))) == bool(place)


def read(model: nn.Module, optimizer: Any, folder: str) -> None:
    load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def read_into_states(model: nn.Module, optimizer: Any, folder: str) -> None:
    """As torch's functions do: the states are in the memory that dcp.load fills."""
    read(model, optimizer, folder)
    kept = {k: v for s in optimizer.state.values() for k, v in s.items() if k == "exp_avg"}
    saved = get_optimizer_state_dict(model, optimizer)
    assert {is_on_host(v) for v in kept.values()} == {
        is_on_host(entry["exp_avg"]) for entry in saved["state"].values()
    }


@contextmanager
def nccl_only() -> Iterator[list[Tensor]]:
    """Makes ranks seem to communicate by NCCL, which sends what is on a GPU; yields what is sent.

    What moves to a GPU for that is a copy.
    """
    on_gpu: list[Tensor] = []
    all_reduce = dist.all_reduce

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        assert device.type == "cuda"
        on_gpu.append(tensor.clone())
        return on_gpu[-1]

    def sends(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not any(tensor is each for each in on_gpu):
            raise RuntimeError("No backend type associated with device type cpu")
        return all_reduce(tensor, *args, **kwargs)

    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(norm, "moved", moved),
        mock.patch.object(rejection, "moved", moved),
        mock.patch.object(dist, "all_reduce", sends),
    ):
        yield on_gpu


def clips_on_the_cpu(only_nccl: bool) -> None:
    """FSDP2's CPUOffloadPolicy: weights, gradients and states are on the CPU of both ranks.

    The weights are those of torch's clip_grad_norm_ and AdamW, and state_device does nothing.
    """
    ACCELERATORS.discard("cpu")
    policy = CPUOffloadPolicy(pin_memory=False)
    ours, theirs = (model_of(True, torch.float32, offload_policy=policy) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    optimizer = FusedAdamW(ours.parameters(), max_grad_norm=0.5, state_device="cpu", **settings)
    torchs = torch.optim.AdamW(theirs.parameters(), **settings)
    norms = []
    for seed in range(5):
        for model in (ours, theirs):
            torch.manual_seed(10 * seed + dist.get_rank())
            backward(model)
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).full_tensor().item())
        torchs.step()
        with nccl_only() if only_nccl else nullcontext([]) as sent:
            optimizer.step()
        assert bool(sent) == only_nccl
        assert abs(optimizer.control.grad_norm.item() - norms[-1]) <= 1e-6 * norms[-1]
        for each in (optimizer, torchs):
            each.zero_grad()
    assert max(norms) > 0.5  # some step clips
    assert optimizer.host_bytes == 0
    for weight, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-6)
        state = optimizer.state[weight]
        assert {state[name].to_local().device.type for name in ("exp_avg", "exp_avg_sq")} == {"cpu"}


def cases() -> dict[str, Callable[[], None]]:
    ACCELERATORS.add("cpu")
    host_steps.SideStream = LateStreams()  # type: ignore[assignment, misc]
    found: dict[str, Callable[[], None]] = {
        "fsdp2": partial(assert_same_run, True, FusedAdamW, read_into_states),
        "fsdp2, 8 bits": partial(
            assert_same_run, True, partial(FusedAdamW, state_dtype="int8", fp32_moments=()), read
        ),
        "fsdp2, stepped on the host": partial(
            assert_same_run, True, FusedAdamW, read, offload_step="host"
        ),
        "zero, stepped on the host": partial(
            assert_same_run,
            False,
            partial(ZeroRedundancyOptimizer, optimizer_class=FusedAdamW, partition="balanced"),
            read,
            offload_step="host",
        ),
    }
    for partition in ("greedy", "balanced"):
        for cls in (FusedAdamW, FusedMuon):
            build = partial(ZeroRedundancyOptimizer, optimizer_class=cls, partition=partition)
            name = f"zero {partition}, {cls.__name__}"
            found[name] = partial(assert_same_run, False, build, read, cls)
    # Last, as they leave only real GPUs.
    found["CPUOffloadPolicy"] = partial(clips_on_the_cpu, False)
    found["CPUOffloadPolicy, NCCL"] = partial(clips_on_the_cpu, True)
    return found


if __name__ == "__main__":
    run_cases(cases)
