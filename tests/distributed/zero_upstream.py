"""Runs torch's own tests of ZeroRedundancyOptimizer on the CPU, with our class in its place.

    TORCH_ZERO_TEST=.../test_zero_redundancy_optimizer.py python tests/distributed/zero_upstream.py

The file is test/distributed/optim/test_zero_redundancy_optimizer.py of the torch version in use. It
needs expecttest and numpy. RANKS is the world size (default 4), START is "spawn" or "fork", STOCK=1
keeps torch's class. The arguments are unittest's.

Test processes import this module again, so the module replaces classes at import. On the CPU torch
skips its overlap tests and the tests marked for GPUs. Here they run. The tests of model parallelism
need two devices in each process and are left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook as hooks
import torch.distributed.optim as optim
import torch.testing._internal.common_distributed as common

from torchopt_ext import zero


def unmarked(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Replaces a decorator with arguments that would skip a test."""
    return lambda test: test


torch.cpu.device_count = lambda: int(os.environ.get("RANKS", "4"))
common.skip_if_no_gpu = lambda test: test
common.requires_accelerator_dist_backend = unmarked
if os.environ.get("STOCK") != "1":
    optim.ZeroRedundancyOptimizer = zero.ZeroRedundancyOptimizer  # type: ignore[misc, assignment]
    hooks.hook_with_zero_step = zero.hook_with_zero_step  # type: ignore[assignment]
    hooks.hook_with_zero_step_interleaved = (  # type: ignore[assignment]
        zero.hook_with_zero_step_interleaved
    )

spec = importlib.util.spec_from_file_location("upstream", os.environ["TORCH_ZERO_TEST"])
assert spec is not None and spec.loader is not None
upstream: Any = importlib.util.module_from_spec(spec)
sys.modules["upstream"] = upstream
spec.loader.exec_module(upstream)


class Started:
    """Starts the ranks as START says."""

    def _spawn_processes(self: Any) -> None:
        if os.environ.get("START", "spawn") == "fork":
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
        else:
            super()._spawn_processes()  # type: ignore[misc]


class TestSingleRank(Started, upstream.TestZeroRedundancyOptimizerSingleRank):
    pass


class TestDistributed(Started, upstream.TestZeroRedundancyOptimizerDistributed):
    test_zero_model_parallel_parameters_as_bucket_view_False = None
    test_zero_model_parallel_parameters_as_bucket_view_True = None


if __name__ == "__main__":
    upstream.run_tests()
