"""Functions on process groups for the Trainer: start, seeds, timeouts, reductions.

The functions are those of torchtitan 0.1 (torchtitan/distributed/utils.py), for any device.
"""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from torchopt_ext import _torch
from torchopt_ext.trainer.config import ConfigError, JobConfig

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# ---- start ---------------------------------------------------------------------------------------


def choose_device(job_config: JobConfig) -> torch.device:
    """Returns this process's device for `training.device`: a GPU by LOCAL_RANK, or the CPU."""
    kind = job_config.training.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"training.device is {job_config.training.device!r}, and LOCAL_RANK {index} needs "
            f"{index + 1} GPUs, but {count} can be used"
        )
    return torch.device("cuda", index)


def init_distributed(job_config: JobConfig) -> torch.device:
    """Initializes the default process group. Returns this rank's device; a GPU becomes current.

    The backend is gloo on a CPU and NCCL on GPUs. If CPU offload or asynchronous checkpoints need
    gloo on GPUs, it is added for CPU tensors. Without torchrun the group has one rank.
    """
    device = choose_device(job_config)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        # Port 0: any free port. No other process has to know it.
        os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        checkpoint = job_config.checkpoint
        saves_async = checkpoint.enable_checkpoint and checkpoint.async_mode != "disabled"
        on_host = job_config.training.enable_cpu_offload or saves_async
        backend = "cpu:gloo,cuda:nccl" if on_host else "nccl"
        _record_collectives(job_config)
    timeout = timedelta(seconds=job_config.comm.init_timeout_seconds)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # When torchrun restarts ranks, its store (dynamic_rendezvous.py) keeps the addresses of the
    # previous ranks, to which gloo would connect.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt_{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return device


def _record_collectives(job_config: JobConfig) -> None:
    """Sets up NCCL's flight recorder, which dumps the last collectives after a timeout."""
    comm = job_config.comm
    # 3: the watchdog lets the recorder finish its dump (pytorch issue 121055).
    settings = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": str(comm.trace_buf_size),
    }
    if comm.trace_buf_size > 0:
        folder = os.path.join(job_config.job.dump_folder, comm.save_traces_folder)
        os.makedirs(folder, exist_ok=True)
        settings["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        settings["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(folder, comm.save_traces_file_prefix)
    for name, value in settings.items():
        if os.environ.get(name, value) != value:
            logger.warning("%s=%s becomes %s", name, os.environ[name], value)
        os.environ[name] = value


def set_determinism(
    world_mesh: DeviceMesh,
    device: torch.device,
    seed: int | None = None,
    deterministic: bool = False,
) -> None:
    """Seeds all ranks with the same seed, by default rank 0's. Each stage adds its index to it."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # use_deterministic_algorithms needs it
    if seed is None:
        # Shifted to int64, which NCCL sends: a seed has 64 bits without sign.
        shared = torch.tensor(torch.initial_seed() - (1 << 63), device=device)
        dist.broadcast(shared, src=0)
        seed = int(shared.item()) + (1 << 63)
    names = world_mesh.mesh_dim_names or ()
    if "pp" in names:
        seed += world_mesh.get_local_rank("pp")
    seed %= 1 << 64
    seed_generators(seed)
    os.environ["PYTHONHASHSEED"] = str(seed % (1 << 32))  # for child processes
    same = tuple(name for name in names if name != "pp")
    if same and device.type != "cpu":
        _torch.seed_dtensors(seed, world_mesh[same])


def seed_generators(seed: int, seed_torch: Callable[[int], Any] = torch.manual_seed) -> None:
    """Seeds torch's, Python's and, if it is imported, numpy's random numbers."""
    seed_torch(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def set_pg_timeouts(
    timeout: timedelta, world_mesh: DeviceMesh, more: Iterable[DeviceMesh] = ()
) -> None:
    """Sets the timeout of the default process group and the meshes' groups. All ranks call it.

    Waits first for ranks that are late within the old timeout.
    """
    if world_mesh.device_type == "cuda":
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
    else:
        dist.barrier()
    groups = [group for mesh in (world_mesh, *more) for group in mesh.get_all_groups()]
    for group in (None, *dict.fromkeys(groups)):
        _torch.set_group_timeout(timeout, group)


# ---- reductions ----------------------------------------------------------------------------------


def mean_and_max(value: Tensor, mesh: DeviceMesh) -> tuple[float, float]:
    """Reduces a 0-dim tensor over a 1-dim mesh. Waits for the device."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    mine = value.detach().double()  # in which sums of fp32 are exact enough
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine, group=mesh.get_group())
    values = torch.stack(every)
    return float(values.mean()), float(values.max())


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, pp_mesh: DeviceMesh | None = None
) -> Tensor:
    """Clips gradients of torch's optimizers, by the norm over all stages, which it returns."""
    params = list(parameters)
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor) and any(place.is_partial() for place in grad.placements):
            # Sequence parallelism leaves partial sums over ranks, and torch 2.11 then scales a copy
            # instead of the gradient.
            assert isinstance(param, DTensor)
            param.grad = grad.redistribute(placements=param.placements)
    grads = [p.grad for p in params if p.grad is not None]
    norm = nn.utils.get_total_norm(grads, foreach=True)
    if isinstance(norm, DTensor):  # sum the ranks' parts
        norm = norm.full_tensor()
    if pp_mesh is not None:
        if not grads:  # get_total_norm's 0 is on the CPU
            norm = norm.to(pp_mesh.device_type)
        # The norm of the stages' norms, in float64, which also holds squares of fp32 values.
        square = norm.double().square()
        dist.all_reduce(square, group=pp_mesh.get_group())
        norm = square.sqrt().to(norm.dtype)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=True)
    return norm
