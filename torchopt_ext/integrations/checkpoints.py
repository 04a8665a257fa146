"""Lets torchtitan's CheckpointManager, of 0.2 and 0.3, load our containers by our own loader."""

import functools
from collections.abc import Callable
from typing import Any

from torchopt_ext.statedict import dcp


def load_ours(manager: Any, key: str, is_ours: Callable[[Any], bool]) -> None:
    """Replaces ``dcp_load`` of the class ``manager``.

    torchtitan's demands every entry that a container has; ours checks all before anything changes,
    makes what torch's optimizers do not save, such as masters, and loads what is there.

    Args:
        key: of the container in the state dict.
        is_ours: whether our loader is to load an object at that key.
    """
    stock = manager.dcp_load

    @functools.wraps(stock)
    def dcp_load(
        self: Any, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any
    ) -> None:
        if is_ours(state_dict.get(key)):
            dcp.load({key: state_dict[key]}, checkpoint_id=checkpoint_id)
            state_dict = {k: v for k, v in state_dict.items() if k != key}
        stock(self, state_dict, checkpoint_id, *args, **kwargs)

    manager.dcp_load = dcp_load
