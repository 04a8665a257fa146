"""Fault tolerance with torchft: this replica group's manager, and its share of the data."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.gradients import local_gradients
from torchopt_ext.state.local import local_tensor
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.extras import import_extra


@dataclass(eq=False)
class FTManager:
    """torchft's Manager, or None without fault tolerance.

    Attributes:
        group_size, replica_id: number of replica groups that share the data, and this one's index.
    """

    manager: Any
    group_size: int = 1
    replica_id: int = 0

    @property
    def enabled(self) -> bool:
        return self.manager is not None

    def get_dp_info(self, dp_degree: int, dp_rank: int) -> tuple[int, int]:
        """Returns the degree and rank that divide data. Replica groups also read different data."""
        return dp_degree * self.group_size, dp_degree * self.replica_id + dp_rank

    def average_gradients(self, model_parts: Iterable[nn.Module]) -> None:
        """Averages gradients over the replica groups of this step, after backward.

        A gradient that a group does not have counts as zeros there; one that no group has stays
        None. torchft records an error of communication, and the step is then not committed.
        """
        if not self.enabled:
            return
        params = [p for part in model_parts for p in part.parameters() if p.requires_grad]
        if not params:
            return
        missing = [i for i, p in enumerate(params) if p.grad is None]
        present = torch.ones(len(params), device=local_tensor(params[0]).device)
        present[missing] = 0.0
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype or p.dtype)
            elif is_dtensor(p) and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
        averaged = [present, *local_gradients(params, written=True)]
        try:
            for work in [self.manager.allreduce(tensor) for tensor in averaged]:
                work.wait()
        finally:
            for i in missing:
                if not present[i]:
                    params[i].grad = None


def init_ft_manager(job_config: JobConfig) -> FTManager:
    """Builds the manager that `[fault_tolerance]` asks for."""
    config = job_config.fault_tolerance
    if not config.enable:
        return FTManager(None)
    if config.group_size < 1 or not 0 <= config.replica_id < config.group_size:
        raise ConfigError(
            f"fault_tolerance.replica_id is {config.replica_id} of group_size "
            f"{config.group_size}, expected 0 <= replica_id < group_size"
        )
    if os.environ.get("MASTER_PORT", "0") == "0":
        raise ConfigError("fault_tolerance.enable needs torchrun, whose store torchft uses")
    torchft = import_extra("torchft", "fault_tolerance.enable")
    kinds = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
    timeout = timedelta(milliseconds=config.process_group_timeout_ms)
    # Rank 0 of a group writes its manager's address into torchrun's store, and the others read it.
    # The store outlives a restart of the ranks, so they wait, or would read the address before.
    if dist.get_rank() != 0:
        dist.barrier()
    try:
        manager = torchft.Manager(
            pg=kinds[config.process_group](timeout=timeout),
            min_replica_size=config.min_replica_size,
            load_state_dict=None,  # the checkpoint manager sets both functions later
            state_dict=None,
            # A quorum during forward would read the model's state while FSDP2 has gathered
            # parameters.
            use_async_quorum=False,
            replica_id=f"torchopt_ext_ft_{config.replica_id}",
        )
    finally:
        if dist.get_rank() == 0:
            dist.barrier()
    return FTManager(manager, config.group_size, config.replica_id)
