"""Devices, process groups, seeds, contexts and replica groups, on one process."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext import _torch
from torchopt_ext.trainer import distributed, process
from torchopt_ext.trainer.checkpoint_states import generator_states
from torchopt_ext.trainer.config import ActivationCheckpoint, JobConfig
from torchopt_ext.trainer.forward_pass import maybe_enable_amp
from torchopt_ext.trainer.ft import FTManager
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.parallelize import checkpoint_activations, parallelize
from torchopt_ext.trainer.process import StopOnSignal

CPU = torch.device("cpu")


def on_cpu() -> JobConfig:
    config = JobConfig()
    config.training.device = "cpu"
    return config


def dims_of(*degrees: int) -> ParallelDims:
    size = abs(math.prod(degrees))
    return ParallelDims(*degrees, world_size=size, enable_loss_parallel=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParallelDims]:
    """Makes the group of a job that torchrun did not start."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores them
        monkeypatch.delenv(name)
    assert distributed.init_distributed(on_cpu()) == CPU
    yield dims_of(1, -1, 1, 1, 1)
    dist.destroy_process_group()


def test_a_job_without_torchrun_is_a_group_of_one(alone: ParallelDims) -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert distributed.mean_and_max(torch.tensor(2.5), alone.build_mesh("cpu")) == (2.5, 2.5)


def test_groups_of_several_dimensions_get_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        dims = dims_of(2, 2, 1, 2, 1)
        mesh = dims.build_mesh("cpu")
        calls = []
        monkeypatch.setattr(_torch, "set_group_timeout", lambda *call: calls.append(call))
        distributed.set_pg_timeouts(timedelta(seconds=7), mesh, dims.meshes)
        names = ("dp", "dp_shard_cp", "dp_cp", "tp", "dp_replicate")
        groups = {dims.get_mesh(name).get_group() for name in names}
        groups.update(dims.fsdp_mesh(mesh).get_all_groups())
        assert groups | {None} <= {group for _, group in calls}
        assert len(calls) == len(set(calls))
        assert {timeout for timeout, _ in calls} == {timedelta(seconds=7)}
    finally:
        dist.destroy_process_group()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig()

    def gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    gpus(0)
    assert distributed.choose_device(config) == CPU
    config.training.device = "cuda"
    with pytest.raises(ValueError, match=r"device is 'cuda', .* LOCAL_RANK 0 needs 1 GPUs, but 0"):
        distributed.choose_device(config)
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for device in ("auto", "cuda"):
        config.training.device = device
        assert distributed.choose_device(config) == torch.device("cuda", 1)
    assert distributed.choose_device(on_cpu()) == CPU


@pytest.mark.parametrize("seed", [0, 1234, 2**64 - 1])
def test_seeds(alone: ParallelDims, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "")
    mesh = alone.build_mesh("cpu")
    distributed.set_determinism(mesh, CPU, seed)
    drawn, others = torch.rand(3), generator_states()
    assert torch.initial_seed() == seed
    assert os.environ["PYTHONHASHSEED"] == str(seed % 2**32)
    torch.manual_seed(seed)  # the seed of rank 0 applies unchanged
    random.random()
    distributed.set_determinism(mesh, CPU)
    assert torch.equal(torch.rand(3), drawn)
    now = generator_states()
    assert all(now[name] == others[name] for name in others if name != "cpu")


def test_deterministic(alone: ParallelDims, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
    mesh, cudnn = alone.build_mesh("cpu"), SimpleNamespace()
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)  # torch's tests may have frozen its flags
    try:
        distributed.set_determinism(mesh, CPU, 1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert cudnn == SimpleNamespace(deterministic=True, benchmark=False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


class Event:
    """The event of a GPU whose work ends when waited for."""

    waited: ClassVar[list[int]] = []
    numbers = itertools.count(1)

    def record(self) -> None:
        self.number = next(self.numbers)

    def synchronize(self) -> None:
        self.waited.append(self.number)


@pytest.mark.parametrize(("device", "last", "waited"), [("cpu", 3, []), ("cuda", 4, [1, 2])])
def test_no_host_is_past_the_step_after_which_all_stop(
    device: str, last: int, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU each host waits for the step before the last started step."""
    store = dist.HashStore()
    monkeypatch.setattr(process, "default_store", lambda: store)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waited", [])
    stopped, other = (StopOnSignal(torch.device(device)) for _ in range(2))
    assert [stopped.last_step(step) for step in (1, 2)] == [None, None]
    stopped.received = True
    assert stopped.last_step(3) == last
    assert Event.waited == waited
    assert other.last_step(3) == last


@pytest.mark.parametrize(
    ("degrees", "dtype", "kind"),
    [
        ((1, 1, 1, 1, 1), "bfloat16", torch.autocast),
        ((2, 1, 1, 1, 1), "bfloat16", torch.autocast),
        ((2, 1, 1, 1, 1), "float32", nullcontext),
        ((1, 2, 1, 1, 1), "bfloat16", nullcontext),
        ((1, 1, 2, 1, 1), "bfloat16", nullcontext),
        ((1, 1, 1, 2, 1), "bfloat16", nullcontext),
        ((1, 1, 1, 1, 2), "bfloat16", nullcontext),
    ],
)
def test_autocast(
    degrees: tuple[int, ...], dtype: str, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    context = maybe_enable_amp(dims_of(*degrees), dtype, "cpu")
    assert type(context) is kind
    for _ in range(2):  # one step each
        with context:
            assert torch.is_autocast_enabled("cpu") == (kind is torch.autocast)
    assert ("tensor and pipeline parallel" in caplog.text) == (max(degrees[3:]) > 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(4)})


@pytest.mark.parametrize(
    ("mode", "option", "checkpointed"),
    [
        ("none", "2", []),
        ("full", "2", [0, 1, 2, 3]),
        ("selective", "op", [0, 1, 2, 3]),
        ("selective", "1", [0, 1, 2, 3]),
        ("selective", "2", [1, 3]),
        ("selective", "3", [2]),
        *(("selective", wrong, None) for wrong in ("0", "-1", "ops", "")),
    ],
)
def test_checkpointed_layers(mode: Any, option: str, checkpointed: list[int] | None) -> None:
    model = Model()
    before = list(model.state_dict())
    config = ActivationCheckpoint(mode=mode, selective_ac_option=option)
    if checkpointed is None:
        with pytest.raises(ValueError, match=f"selective_ac_option is '{option}', expected 'op'"):
            checkpoint_activations(model, config)
        return
    checkpoint_activations(model, config)
    assert [i for i in range(4) if "forward" in vars(model.layers[str(i)])] == checkpointed
    assert list(model.state_dict()) == before


@pytest.mark.parametrize(
    ("degrees", "settings", "message"),
    [
        ((1, 1, 1, 2, 1), {}, r"tensor_parallel_degree is 2, but Model's TrainSpec .* no tp_plan"),
        ((2, 1, 1, 1, 2), {}, r"replicate_degree is 2 .* DDP supports neither: use"),
        ((1, 1, 1, 1, 1), {"enable_cpu_offload": True}, "cpu_offload has no effect without FSDP"),
        ((1, 1, 1, 2, 1), {"seq_len": 31}, "training.seq_len is 31, expected a multiple of"),
        ((1, 1, 1, 2, 1), {"validated": 31}, "validation.seq_len is 31, expected a multiple of"),
    ],
)
def test_settings_that_do_not_go_together(
    degrees: tuple[int, ...], settings: dict[str, Any], message: str
) -> None:
    config, mesh = on_cpu(), None
    config.validation.enable = True
    config.validation.seq_len = settings.pop("validated", 32)
    vars(config.training).update(settings)
    plan: Any = {"tp_plan": lambda *_: {}} if "seq_len" in message else {}
    with pytest.raises(ValueError, match=message):
        parallelize(Model(), mesh, dims_of(*degrees), config, **plan)  # type: ignore[arg-type]


# ---- replica groups ------------------------------------------------------------------------------


class Peer:
    """A torchft.Manager whose one other replica group has given tensors, in the order of calls."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def allreduce(self, tensor: Tensor) -> Any:
        tensor.copy_((tensor + self.tensors.pop(0)) / 2)
        return SimpleNamespace(wait=lambda: None)


def test_gradients_that_groups_lack_count_as_zeros() -> None:
    """The other group lacks the third gradient, this group the second, and both the fourth."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
    for param, value in zip(model, (1.0, None, 100.0, None), strict=True):
        param.grad = None if value is None else torch.full((2,), value)
    peers = [torch.full((2,), value) for value in (3.0, 20.0, 0.0, 0.0)]
    peer = Peer([torch.tensor([1.0, 1.0, 0.0, 0.0]), *peers])
    FTManager(peer, 2).average_gradients([model])
    averages = [None if p.grad is None else p.grad.tolist() for p in model]
    assert averages == [[2.0, 2.0], [10.0, 10.0], [50.0, 50.0], None]
    assert peer.tensors == []
