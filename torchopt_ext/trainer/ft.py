"""Fault tolerance by torchft: the manager of this replica group, and its share of the data."""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch import nn

from torchopt_ext.optim.local import local_gradients
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.extras import import_extra


class FTManager:
    """torchft's Manager, or nothing.

    Args:
        manager: torchft's; None: not fault tolerant.
        group_size, replica_id: how many replica groups share the data, and which one this is.
    """

    def __init__(self, manager: Any, group_size: int = 1, replica_id: int = 0) -> None:
        self._manager = manager
        self.group_size, self.replica_id = group_size, replica_id

    @property
    def enabled(self) -> bool:
        return self._manager is not None

    @property
    def manager(self) -> Any:
        """torchft's Manager.

        Raises:
            RuntimeError: not fault tolerant.
        """
        if self._manager is None:
            raise RuntimeError("fault_tolerance.enable is false, so there is no torchft.Manager")
        return self._manager

    def get_dp_info(self, dp_degree: int, dp_rank: int) -> tuple[int, int]:
        """Degree and rank by which data is divided: replica groups read different data, too."""
        if not self.enabled:
            return dp_degree, dp_rank
        return dp_degree * self.group_size, dp_degree * self.replica_id + dp_rank

    def average_gradients(self, model_parts: Iterable[nn.Module]) -> None:
        """Averages gradients over the replica groups of this step, after backward.

        The ranks of a group hold the same parts of the model in each group. torchft notes an error
        of communication, and the step is not committed.
        """
        if not self.enabled:
            return
        params = [p for part in model_parts for p in part.parameters() if p.grad is not None]
        for work in [
            self.manager.allreduce(grad) for grad in local_gradients(params, written=True)
        ]:
            work.wait()


def init_ft_manager(job_config: JobConfig) -> FTManager:
    """The manager that `[fault_tolerance]` asks for.

    Raises:
        ImportError: fault tolerance without torchft.
        ValueError: a group size or replica id out of range; an unknown process group; not started
            by torchrun.
    """
    config = job_config.fault_tolerance
    if not config.enable:
        return FTManager(None)
    if config.group_size < 1 or not 0 <= config.replica_id < config.group_size:
        raise ConfigError(
            f"fault_tolerance.replica_id is {config.replica_id} of group_size "
            f"{config.group_size}, expected 0 <= replica_id < group_size"
        )
    if config.process_group not in ("gloo", "nccl"):
        raise ConfigError(
            f"fault_tolerance.process_group is {config.process_group!r}, expected 'gloo' or 'nccl'"
        )
    if os.environ.get("MASTER_PORT", "0") == "0":
        raise ConfigError("fault_tolerance.enable needs torchrun, whose store torchft uses")
    torchft = import_extra("torchft", "fault_tolerance.enable")
    kinds = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
    timeout = timedelta(milliseconds=config.process_group_timeout_ms)
    manager = torchft.Manager(
        pg=kinds[config.process_group](timeout=timeout),
        min_replica_size=config.min_replica_size,
        load_state_dict=None,  # the checkpoint manager says what, once there is something
        state_dict=None,
        # A quorum beside forward would read the model's state while FSDP2 has gathered parameters.
        use_async_quorum=False,
        replica_id=f"torchopt_ext_ft_{config.replica_id}",
    )
    return FTManager(manager, config.group_size, config.replica_id)
