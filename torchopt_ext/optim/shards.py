"""FSDP2's shards: masters, 16-bit copies and gathered parameters follow what changes them."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchopt_ext import _C
from torchopt_ext._torch import (
    fsdp_modules,
    fsdp_params,
    is_dtensor,
    optimizer_writes_copies,
    register_copy_invalidation_hook,
)
from torchopt_ext.state.params import params_of

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_weights(params: Iterable[Tensor]) -> None:
    """Counts, from now on, steps of other optimizers, and state dicts of modules under FSDP2."""
    register_copy_invalidation_hook(_count_step)
    if any(map(is_dtensor, params)):
        for module in fsdp_modules():
            if module not in _watched:
                _watched.add(module)
                module.register_state_dict_post_hook(_count_aliases)


def reshard(params: Iterable[Tensor]) -> None:
    """Frees gathered parameters, which the next forward would use although shards have changed.

    FSDP2 keeps them after a forward without backward, as of validation, where modules reshard after
    backward only. The root does by default.
    """
    if sharded := {id(param) for param in params if is_dtensor(param)}:
        for module in fsdp_modules():
            if not sharded.isdisjoint(id(each.sharded_param) for each in fsdp_params(module)):
                module.reshard()


def _count_step(optimizer: Any, *_: Any) -> None:
    """Counts a step: torch's fused kernels, and foreach functions on DTensors, count no change."""
    if not optimizer_writes_copies(optimizer):
        _C.increment_versions(params_of(optimizer))


def _count_aliases(module: Any, *_: Any) -> None:
    """Counts a state dict: its tensors share the shards' memory, but not their counters."""
    _C.increment_versions([param.sharded_param for param in fsdp_params(module)])
