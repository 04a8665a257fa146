"""Parallelizes a model with torch's tensor parallelism, FSDP2, HSDP or DDP, and initializes it.

Tied parameters stay tied.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchopt_ext import _torch
from torchopt_ext.fsdp import keep_low_precision_shards
from torchopt_ext.state.entries import unwrapped
from torchopt_ext.trainer.config import (
    ActivationCheckpoint,
    ConfigError,
    JobConfig,
    as_config_error,
    expect_multiple,
)
from torchopt_ext.trainer.distributed import DTYPES
from torchopt_ext.trainer.parallel_dims import ParallelDims

__all__ = ["parallelize"]

logger = logging.getLogger(__name__)

TensorParallelPlan = Callable[[nn.Module, bool], Mapping[str, ParallelStyle]]
"""A function from a model, and whether the loss is computed in parts, to torch's plan."""


def parallelize(
    model: nn.Module,
    world_mesh: DeviceMesh,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    *,
    tp_plan: TensorParallelPlan | None = None,
) -> nn.Module:
    """Parallelizes a model, or a pipeline stage's part, as the job asks. Returns the model.

    The order is: tensor parallelism, activation checkpointing, torch.compile, FSDP2 or DDP. The
    names of modules and parameters stay as they are.

    Args:
        model: on the meta device, or where it trains; `model.layers` is an nn.ModuleDict of the
            repeated blocks, each of which is checkpointed, compiled and sharded separately.
        world_mesh: the mesh of `ParallelDims.build_mesh`.
        tp_plan: the plan for tensor parallelism.

    Raises:
        ConfigError: Settings cannot be combined. The message says which.
    """
    config = job_config.parallelism
    if config.enable_compiled_autograd and parallel_dims.world_size > 1:
        raise ConfigError(
            "parallelism.enable_compiled_autograd needs one rank, but there are "
            f"{parallel_dims.world_size}: torch cannot trace what DDP, FSDP2 and tensor parallel "
            "do in backward"
        )
    if job_config.training.enable_cpu_offload and not parallel_dims.fsdp_enabled:
        raise ConfigError(
            "training.enable_cpu_offload has no effect without FSDP: "
            f"parallelism.data_parallel_shard_degree is {parallel_dims.dp_shard}"
        )
    if parallel_dims.tp_enabled:
        if tp_plan is None:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree is {parallel_dims.tp}, but "
                f"{type(model).__name__}'s TrainSpec gives parallelize no tp_plan"
            )
        lengths = {"training": job_config.training.seq_len}
        if job_config.validation.enable:
            lengths["validation"] = job_config.validation.seq_len
        for section, length in lengths.items():
            what = "parallelism.tensor_parallel_degree"
            expect_multiple(f"{section}.seq_len", length, parallel_dims.tp, what)
        plan = tp_plan(model, parallel_dims.loss_parallel_enabled)
        ties = tied_names(model)
        parallelize_module(model, world_mesh["tp"], dict(plan))
        tie(model, ties)  # parallelize_module makes a separate parameter for each name
    checkpoint_activations(model, job_config.activation_checkpoint)
    if job_config.training.compile:
        for block in layers_of(model).values():
            # Only forward: FSDP's hooks on the module break graphs, and a wrapper would rename.
            block.forward = torch.compile(block.forward, fullgraph=True)
    if parallel_dims.fsdp_enabled:
        shard(model, parallel_dims.fsdp_mesh(world_mesh), parallel_dims, job_config)
    elif parallel_dims.dp_replicate_enabled:
        if parallel_dims.tp_enabled or parallel_dims.pp_enabled:
            raise ConfigError(
                f"parallelism.data_parallel_replicate_degree is {parallel_dims.dp_replicate} with "
                f"tensor_parallel_degree {parallel_dims.tp} and pipeline_parallel_degree "
                f"{parallel_dims.pp}, but DDP supports neither: use data_parallel_shard_degree"
            )
        # DDP orders its buckets by the first backward of a process, so three or more ranks would
        # sum the first step after a start in another order. It keeps the first buckets if it looks
        # for unused parameters.
        fixed_buckets = job_config.training.deterministic
        _torch.replicate(
            model,
            device_mesh=world_mesh["dp_replicate"],
            bucket_cap_mb=100,
            find_unused_parameters=fixed_buckets,
        )
    return model


def layers_of(model: nn.Module) -> nn.ModuleDict:
    """Returns the repeated blocks of a model."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict):
        raise TypeError(
            f"{type(model).__name__}.layers is {type(layers).__name__}, expected nn.ModuleDict"
        )
    return layers


# ---- activation checkpointing --------------------------------------------------------------------


def checkpoint_activations(model: nn.Module, config: ActivationCheckpoint) -> None:
    """Recomputes activations in backward: all, those of every n-th layer, or all but costly ones.

    "op" saves outputs of `_torch.ops_worth_saving`, but only of every second matrix product.
    """
    option = config.selective_ac_option
    if config.mode == "none":
        return
    options: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("preserve_rng_state", "determinism_check", "debug", "early_stop")
    }
    every = 1
    if config.mode == "selective":
        if option == "op":
            options["context_fn"] = _save_costly_ops
        elif option.isdigit() and int(option) > 0:
            every = int(option)
        else:
            raise ConfigError(
                f"activation_checkpoint.selective_ac_option is {option!r}, expected 'op' or a "
                "positive integer"
            )

    # torch's checkpoint_wrapper would put a module around each block, which renames parameters. A
    # function that all blocks share is compiled once.
    def forward(block: nn.Module, *args: Any) -> Any:
        return checkpoint(type(block).forward, block, *args, use_reentrant=False, **options)

    for number, block in enumerate(layers_of(model).values(), start=1):
        if number % every == 0:
            block.forward = MethodType(forward, block)


def _save_costly_ops() -> Any:
    """Returns the contexts of the forward pass and the recomputation of one block.

    As in torchtitan (models/llama3/infra/parallelize.py), every second product is recomputed.
    """
    worth_saving, products = _torch.ops_worth_saving(), {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        save = op in worth_saving
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            save = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


# ---- data parallel -------------------------------------------------------------------------------


def shard(
    model: nn.Module, mesh: DeviceMesh, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Applies FSDP2 (1-dim mesh) or HSDP (2-dim mesh) to each layer, then to the rest."""
    training = job_config.training
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
    )
    offload = OffloadPolicy()
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    apply = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)

    policy = job_config.parallelism.fsdp_reshard_after_forward
    blocks = list(layers_of(model).values())
    for block in blocks:
        reshard = policy == "always"
        if policy == "default":
            # A pipeline would gather a layer again in every microbatch, and backward begins with
            # the last layer.
            reshard = not parallel_dims.pp_enabled and block is not blocks[-1]
        apply(block, reshard_after_forward=reshard)
    apply(model, reshard_after_forward=not parallel_dims.pp_enabled)
    if mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no AVG


def set_gradient_sync(model_parts: list[nn.Module], on: bool) -> None:
    """Sets whether the next backward passes reduce gradients over data-parallel ranks."""
    for part in model_parts:
        # fully_shard and replicate add the method.
        if set_sync := getattr(part, "set_requires_gradient_sync", None):
            set_sync(on)


# ---- initial weights -----------------------------------------------------------------------------


def tied_names(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Sets all names of each group to the parameter of the group's first name."""
    for first, *others in ties:
        param = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            placed = [getattr(p, "placements", None) for p in (param, other)]
            if placed[0] != placed[1]:
                raise ConfigError(
                    f"{first} and {name} are one parameter, which the tensor parallel plan divides "
                    f"by {placed[0]} and by {placed[1]}"
                )
            if other is not param:
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, param)


@torch.no_grad()
def init_parts(
    model_parts: list[nn.Module], ties: list[list[str]], job_config: JobConfig, device: torch.device
) -> None:
    """Allocates the parts, calls their `init_weights`, and sets them to training mode.

    `ties` are :func:`tied_names` of the model before it was split and parallelized.
    """
    offload = job_config.training.enable_cpu_offload
    seeding = job_config.checkpoint.create_seed_checkpoint  # one process without FSDP
    for part in model_parts:
        kept = tied_names(part)
        part.to_empty(device="cpu" if offload or seeding else device.type)
        tie(part, kept)  # to_empty makes a separate parameter for each name
        part.init_weights(buffer_device=device if offload else None)  # type: ignore[operator]
        named = {unwrapped(n): p for n, p in part.named_parameters(remove_duplicate=False)}
        for names in ties:
            if len({named[name] for name in map(unwrapped, names) if name in named}) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are one parameter of the model, of which "
                    "parallelize_fn has made several, as FSDP does of one in several layers"
                )
        part.train()
        if job_config.parallelism.fsdp_keep_low_precision_shards and not seeding:
            with as_config_error():
                keep_low_precision_shards(part)
