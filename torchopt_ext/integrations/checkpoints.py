"""Lets torchtitan 0.2's and 0.3's CheckpointManager load our containers with our loader."""

import functools
from typing import Any

from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.statedict import dcp


def patch_dcp_load(module: Any) -> None:
    """Replaces ``dcp_load`` of the CheckpointManager in one of torchtitan's modules.

    torchtitan's loader demands every entry of a container. Ours checks all before anything changes,
    loads existing entries, and makes entries that torch does not save, such as masters. Masters of
    weights that are loaded without optimizers, as from a seed checkpoint, are made anew.
    """
    manager, key = module.CheckpointManager, module.OPTIMIZER
    stock = manager.dcp_load

    @functools.wraps(stock)
    def dcp_load(
        self: Any, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any
    ) -> None:
        # torchtitan puts a model's entries beside the other states.
        only_weights = key not in state_dict and not state_dict.keys() <= self.states.keys()
        if isinstance(state_dict.get(key), OptimizersContainer):
            dcp.load({key: state_dict[key]}, checkpoint_id=checkpoint_id)
            state_dict = {k: v for k, v in state_dict.items() if k != key}
        stock(self, state_dict, checkpoint_id, *args, **kwargs)
        container = self.states.get(key)
        if only_weights and isinstance(container, OptimizersContainer):
            container.refresh_masters()

    manager.dcp_load = dcp_load
