"""Fixtures shared by all Python tests."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext.state import host_memory, storage

# Inductor's cache ignores the instruction set: code for another CPU would not compile.
CACHE = f"inductor-{torch.backends.cpu.get_cpu_capability()}"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), CACHE)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def params_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the memory of parameters stand for a GPU's, beside which states need not lie."""
    monkeypatch.setattr(host_memory, "ACCELERATORS", {"cuda", "cpu"})
    monkeypatch.setattr(storage, "ACCELERATORS", {"cuda", "cpu"})


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Initializes a process group with this process as its only rank."""
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


@pytest.fixture
def second_of_two_ranks() -> Iterator[DeviceMesh]:
    """Makes this process the second of two ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
