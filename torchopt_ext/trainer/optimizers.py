"""Builds a job's optimizers, which clip in their step if they can."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext import containers
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.build import (
    FUSED,
    choice_of_params,
    common_arguments,
    fused_options,
    reject_ineffective,
    warn_of_lost_updates,
)
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.fp32_moments import fp32_params, is_8_bit
from torchopt_ext.optim.groups import KINDS, expect_found, params_matching
from torchopt_ext.state.collective import all_gather_json, fail_together
from torchopt_ext.state.entries import unwrapped
from torchopt_ext.trainer.config import ConfigError, JobConfig, as_config_error, expect_multiple
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.zero_container import ZeroOptimizersContainer


def gradient_accumulation_steps(job_config: JobConfig, dp_degree: int) -> int:
    """Returns the number of local batches in one step."""
    training = job_config.training
    if training.global_batch_size < 0:
        return 1
    at_once = training.batch_size * dp_degree
    what = f"training.batch_size {training.batch_size} x {dp_degree} data-parallel ranks"
    expect_multiple("training.global_batch_size", training.global_batch_size, at_once, what)
    return training.global_batch_size // at_once


@as_config_error()
def build_optimizers(
    model_parts: list[nn.Module], job_config: JobConfig, ft_manager: Any = None
) -> OptimizersContainer[Any]:
    """Builds a job's optimizers. torchopt_ext's clip to `training.max_norm` in their step.

    In a pipeline `build_for_stage` rejects settings without effect.
    """
    config = SimpleNamespace(**vars(job_config.optimizer))
    if config.implementation == "fused":
        config.max_grad_norm = job_config.training.max_norm
    else:
        if config.early_step_in_backward and (
            config.skip_nonfinite or job_config.training.max_norm < math.inf
        ):
            # No gradients are left when torch's clipping would measure them.
            raise ConfigError(
                f"optimizer.implementation {config.implementation!r} with early_step_in_backward "
                "neither clips nor skips: set training.max_norm = inf and "
                "optimizer.skip_nonfinite = false, or use 'fused'"
            )
        config.skip_nonfinite = False  # the Trainer decides by the norm of torch's clipping
        if job_config.parallelism.fsdp_keep_low_precision_shards:
            raise ConfigError(
                "parallelism.fsdp_keep_low_precision_shards has no effect with "
                f"optimizer.implementation {config.implementation!r}: 'fused' writes them"
            )
    if config.early_step_in_backward:
        dims = ParallelDims.of(job_config.parallelism, dist.get_world_size())
        dp_degree = dims.dp_replicate * dims.dp_shard
        config.backwards_per_step = gradient_accumulation_steps(job_config, dp_degree)
    partition = job_config.parallelism.zero
    if partition == "none":
        stages = job_config.parallelism.pipeline_parallel_degree > 1
        no_group = SimpleNamespace(get_group=lambda: None)  # build_for_stage sets it later
        kinds = SimpleNamespace(pp_enabled=stages, ep_enabled=False, get_mesh=lambda _: no_group)
        return containers.build_optimizers(model_parts, config, kinds, ft_manager)
    dims = ParallelDims.of(job_config.parallelism, dist.get_world_size())
    needed = {  # by one process for each whole replica, all of which stay until the end
        "optimizer.implementation": (config.implementation, "fused"),
        "optimizer.early_step_in_backward": (config.early_step_in_backward, False),
        "parallelism.data_parallel_shard_degree": (dims.dp_shard, 1),
        "parallelism.tensor_parallel_degree": (dims.tp, 1),
        "parallelism.pipeline_parallel_degree": (dims.pp, 1),
        "fault_tolerance.enable": (ft_manager is not None and ft_manager.enabled, False),
    }
    for name, (value, expected) in needed.items():
        if value != expected:
            raise ConfigError(
                f"parallelism.zero is {partition!r}, which needs {name} {expected!r}, found "
                f"{value!r}"
            )
    options = fused_options(config)
    params = [param for part in model_parts for param in part.parameters()]
    reject_ineffective(options, params)
    warn_of_lost_updates(options, params)
    arguments = options | common_arguments(config)
    return ZeroOptimizersContainer(
        *(model_parts, FUSED[config.name], arguments),
        partition=partition,
        **choice_of_params(config),
    )


def clips_in_step(optimizers: OptimizersContainer[Any]) -> bool:
    """Returns whether the optimizers clip in their step, whatever the configuration says.

    A TrainSpec may build other optimizers. ZeroRedundancyOptimizer's inner optimizer is `optim`.
    """
    stepping = [getattr(optimizer, "optim", optimizer) for optimizer in optimizers]
    return all(
        isinstance(one, FusedOptimizer) and one.max_grad_norm is not None for one in stepping
    )


def build_for_stage(
    build: Callable[[], OptimizersContainer[Any]], job_config: JobConfig, process_group: Any
) -> OptimizersContainer[Any]:
    """Builds the optimizers of one pipeline stage. All stages clip and skip by one norm.

    Raises ConfigError on all ranks, also for a setting that has no effect in any stage.
    """
    with as_config_error(), fail_together(process_group):
        optimizers = build()
    for optimizer in optimizers:
        if isinstance(optimizer, FusedOptimizer):
            optimizer.process_group = process_group
    dtypes = [
        (unwrapped(name), str(param.dtype).removeprefix("torch."))
        for part in optimizers.model_parts
        for name, param in part.named_parameters(remove_duplicate=False)
        if param.requires_grad
    ]
    every = all_gather_json(dtypes, process_group, "comparing pipeline stages")
    named = [
        (name, nn.Parameter(torch.empty(0, dtype=getattr(torch, dtype))))
        for of_stage in every
        for name, dtype in of_stage
    ]
    if not named:
        raise ConfigError("no parameter of the model is trainable")
    with as_config_error():
        patterns = [name for name in job_config.optimizer.no_decay if name not in KINDS]
        patterns += job_config.optimizer.lr_multipliers
        patterns += job_config.optimizer.muon + job_config.optimizer.adamw
        names = {param: [name] for name, param in named}
        expect_found([p for p in patterns if not params_matching(p, names)], dict(named))
        reject_ineffective(optimizers.defaults, [param for _, param in named])
        if is_8_bit(optimizers.defaults.get("state_dtype")):
            # A stage does not know whether a pattern is found in another stage.
            fp32_params(named, vars(job_config.optimizer)["fp32_moments"], embeddings=())
    return optimizers
