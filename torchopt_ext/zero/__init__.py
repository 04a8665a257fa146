"""ZeroRedundancyOptimizer and the DDP hooks that step it inside the backward pass."""

from torchopt_ext.zero.checkpoint import load_sharded, sharded_state_dict
from torchopt_ext.zero.hooks import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from torchopt_ext.zero.optimizer import ZeroRedundancyOptimizer

__all__ = [
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "load_sharded",
    "reduce_scatter_hook",
    "sharded_state_dict",
]
