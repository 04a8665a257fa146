"""Fault tolerance by torchft: the manager of this replica group, and its share of the data."""

import importlib
from typing import Any

from torchopt_ext.trainer.config import JobConfig


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


def init_ft_manager(job_config: JobConfig) -> FTManager:
    """The manager that `[fault_tolerance]` asks for.

    Raises:
        ImportError: fault tolerance without torchft.
        ValueError: a group size or replica id out of range.
    """
    config = job_config.fault_tolerance
    if not config.enable:
        return FTManager(None)
    if config.group_size < 1 or not 0 <= config.replica_id < config.group_size:
        raise ValueError(
            f"fault_tolerance.replica_id is {config.replica_id} of group_size "
            f"{config.group_size}, expected 0 <= replica_id < group_size"
        )
    try:
        torchft = importlib.import_module("torchft")
    except ImportError as error:
        raise ImportError("fault_tolerance.enable needs torchft: pip install torchft") from error
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        min_replica_size=config.min_replica_size,
        load_state_dict=None,  # the checkpoint manager says what, once there is something
        state_dict=None,
        use_async_quorum=True,
        replica_id=f"torchopt_ext_ft_{config.replica_id}",
    )
    return FTManager(manager, config.group_size, config.replica_id)
