"""Splits a model into pipeline stages, and builds torch's schedule for this rank's stages.

Functions import torch.distributed.pipelining, which imports the compiler: that takes half a second.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchopt_ext.trainer.config import ConfigError, JobConfig, Parallelism, expect_multiple
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.parallelize import layers_of, tied_names

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

__all__ = ["pipeline"]

logger = logging.getLogger(__name__)

LossFunction = Callable[[Tensor, Tensor], Tensor]
ParallelizeFunction = Callable[[nn.Module, DeviceMesh, ParallelDims, JobConfig], nn.Module]
Schedule: TypeAlias = "PipelineScheduleSingle | PipelineScheduleMulti"


def pipeline(
    model: nn.Module,
    world_mesh: DeviceMesh,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: Any,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
) -> tuple[Schedule, list[nn.Module], bool, bool]:
    """Builds this rank's pipeline stages of a model, each parallelized, and their schedule.

    The children of `model` run in order, and `layers`, an nn.ModuleDict, is split. Children before
    `layers` are in the first stage and children after it in the last stage. In other stages they
    are None, which the model's `forward` must skip. Names stay as they are in the whole model.

    Args:
        model: the whole model, on the meta device.
        world_mesh: a mesh with a dimension "pp".
        model_args: not used; part of torchtitan's signature.
        loss_fn: computes the mean loss of a microbatch, from output and labels.

    Returns:
        The schedule, whose `losses` are the microbatches' losses and whose gradients are those of
        the mean loss; this rank's parts; whether the first and the last stage are among them.

    Raises:
        ConfigError: A schedule, split or size does not fit, or two stages would have the same
            parameter. The message says which. All ranks raise.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    config, training = job_config.parallelism, job_config.training
    try:
        schedule_class = get_schedule_class(config.pipeline_parallel_schedule)
    except ValueError as error:
        raise ConfigError(f"parallelism.pipeline_parallel_schedule: {error}") from None
    size = config.pipeline_parallel_microbatch_size
    what = "parallelism.pipeline_parallel_microbatch_size"
    expect_multiple("training.batch_size", training.batch_size, size, what)
    n_microbatches = training.batch_size // size

    split = split_layers(list(layers_of(model)), parallel_dims.pp, schedule_class, config)
    _check_ties(model, split)
    pp_mesh = world_mesh["pp"]
    mine = stages_of_rank(pp_mesh.get_local_rank(), parallel_dims.pp, len(split), config)
    if n_microbatches < len(split):
        logger.warning(
            "%d microbatches in %d pipeline stages leave ranks waiting", n_microbatches, len(split)
        )
    model_parts, stages = [], []
    for index in mine:
        part = stage_module(model, split, index)
        part = parallelize_fn(part, world_mesh, parallel_dims, job_config)
        model_parts.append(part)
        stages.append(PipelineStage(part, index, len(split), device, group=pp_mesh.get_group("pp")))

    def microbatch_loss(pred: Tensor, labels: Tensor) -> Tensor:
        # Returns the loss, with the gradient of its share in the mean. The schedule's own scaling
        # divides all of .grad, so earlier accumulated batches would be divided again.
        loss = loss_fn(pred, labels)
        return loss.detach() + (loss - loss.detach()) / n_microbatches

    many = issubclass(schedule_class, PipelineScheduleMulti)
    try:
        schedule: Schedule = schedule_class(
            stages if many else stages[0],
            n_microbatches=n_microbatches,
            loss_fn=microbatch_loss,
            scale_grads=False,
        )
    except (TypeError, ValueError) as error:  # the class or numbers, the same on all ranks
        raise ConfigError(
            f"training.batch_size {training.batch_size} in microbatches of {what} {size}, with "
            f"schedule {config.pipeline_parallel_schedule}: {error}"
        ) from error
    return schedule, model_parts, mine[0] == 0, len(split) - 1 in mine


def split_layers(
    layers: list[str], ranks: int, schedule_class: type[Schedule], config: Parallelism
) -> list[list[str]]:
    """Returns the names of the layers in each stage.

    Every stage but the first begins at one of `pipeline_parallel_split_points`, "layers.<name>".
    Without split points the stages get equal shares, and the first stages get the remainder. The
    modules before and after the layers count as `pipeline_parallel_first_stage_less_layers` and
    `..._last_stage_less_layers` layers. A share is at most `pipeline_parallel_layers_per_stage`. By
    default each rank gets one stage, or two for schedules with several stages per rank.

    Raises ConfigError if the number of stages does not fit, or a split point is wrong.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    points = config.pipeline_parallel_split_points
    per_stage = config.pipeline_parallel_layers_per_stage
    before = config.pipeline_parallel_first_stage_less_layers
    effective = before + len(layers) + config.pipeline_parallel_last_stage_less_layers
    single = issubclass(schedule_class, PipelineScheduleSingle)
    if points:
        names = [f"layers.{name}" for name in layers]
        positions = [names.index(point) for point in points if point in names]
        if len(positions) < len(points) or positions != sorted(set(positions)):
            raise ConfigError(
                f"parallelism.pipeline_parallel_split_points is {points}, expected names from "
                f"{names} in this order"
            )
        source, bounds = "pipeline_parallel_split_points", [0, *positions, len(layers)]
    else:
        if per_stage is not None and per_stage < 1:
            raise ConfigError(
                f"parallelism.pipeline_parallel_layers_per_stage is {per_stage}, expected 1 or more"
            )
        count = -(-effective // per_stage) if per_stage else ranks * (1 if single else 2)
        share, rest = divmod(effective, count)
        ends = [stage * share + min(stage, rest) - before for stage in range(1, count)]
        source, bounds = "pipeline_parallel_layers_per_stage", [0, *ends, len(layers)]
        if sorted(bounds) != bounds or not share:
            raise ConfigError(
                f"{len(layers)} layers, with parallelism.pipeline_parallel_first_stage_less_layers "
                f"{before} and last_stage_less_layers {effective - before - len(layers)}, do not "
                f"fill {count} pipeline stages"
            )
    stages = len(bounds) - 1
    a_rank = stages // ranks
    v_style = is_v_shaped(config)
    expected = "one" if single else "two" if v_style else "two or more"
    fits = a_rank == 1 if single else a_rank == 2 if v_style else a_rank >= 2
    if stages % ranks or not fits:
        raise ConfigError(
            f"parallelism.{source} makes {stages} pipeline stages on {ranks} ranks, but schedule "
            f"{config.pipeline_parallel_schedule} needs {expected} a rank"
        )
    return [layers[start:end] for start, end in pairwise(bounds)]


def stages_of_rank(rank: int, ranks: int, stages: int, config: Parallelism) -> tuple[int, ...]:
    """Returns a rank's stages: every `ranks`-th, or for V-shaped schedules one from each end."""
    return (rank, stages - 1 - rank) if is_v_shaped(config) else tuple(range(rank, stages, ranks))


def is_v_shaped(config: Parallelism) -> bool:
    """Returns whether rank 0 has the first stage and the last."""
    return config.pipeline_parallel_schedule.lower() in ("zbvzerobubble", "dualpipev")


def _stage_of(name: str, children: list[str], split: list[list[str]]) -> int:
    """Returns the stage of a parameter or module, by its name and those of the model's children."""
    child, _, rest = name.partition(".")
    if child == "layers":
        layer = rest.partition(".")[0]
        return next(index for index, layers in enumerate(split) if layer in layers)
    return 0 if child in children[: children.index("layers")] else len(split) - 1


def _check_ties(model: nn.Module, split: list[list[str]]) -> None:
    """Rejects a parameter with names in several stages: each stage would train its own copy."""
    children = [name for name, _ in model.named_children()]
    for names in tied_names(model):
        if len({_stage_of(name, children, split) for name in names}) > 1:
            raise ConfigError(
                f"{' and '.join(names)} are one parameter of {type(model).__name__}, but in "
                "different pipeline stages: use parallelism.pipeline_parallel_degree 1"
            )


def stage_module(model: nn.Module, split: list[list[str]], index: int) -> nn.Module:
    """Returns a copy of the model with only one stage's part."""
    if names := [name for name, _ in model.named_parameters(recurse=False)]:
        raise ValueError(f"{type(model).__name__} has {names} itself, outside of stages' modules")
    part = copy.deepcopy(model)
    children = [name for name, _ in part.named_children()]
    for name in children:
        if name != "layers" and _stage_of(name, children, split) != index:
            setattr(part, name, None)
    layers = layers_of(part)
    for name in list(layers):
        if name not in split[index]:
            del layers[name]
    return part
