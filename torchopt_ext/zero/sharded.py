"""The attributes of ZeroRedundancyOptimizer that the other modules of this package use."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchopt_ext.optim.rejection import Verdict
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.whole import WholeTensors


class ShardedOptimizer:
    """The base class of ZeroRedundancyOptimizer, which declares its attributes.

    Attributes:
        optim: the local optimizer, which steps this rank's part.
        parts: the partition: who owns what.
        _all_params: the parameters in the order of the groups.
        _consolidated: the state gathered from all ranks, until the next step.
    """

    optim: Any
    ranks: Ranks
    parts: WholeTensors | BalancedBuckets
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    process_group: Any
    _all_params: list[Tensor]
    _consolidated: tuple[Any, ...] | None
    _default_device: Any
    _optim_constructor: Any
    _optim_defaults: dict[str, Any]
    _overlap_with_ddp: bool
    step: Callable[..., Any]
    _take_gradients: Callable[..., Any]
    verdict: Verdict
