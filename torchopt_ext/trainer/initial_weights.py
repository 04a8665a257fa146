"""Allocates and initializes the model parts' weights. Tied parameters stay tied."""

import torch
from torch import nn

from torchopt_ext.fsdp import keep_low_precision_shards
from torchopt_ext.state.entries import unwrapped
from torchopt_ext.trainer.config import ConfigError, JobConfig, as_config_error


def tied_names(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Sets all names of each group to the parameter of the group's first name.

    Raises:
        ConfigError: Tensor parallelism has sharded the group's parameters in different ways.
    """
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
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, param)


@torch.no_grad()
def init_parts(
    model_parts: list[nn.Module], ties: list[list[str]], job_config: JobConfig, device: torch.device
) -> None:
    """Allocates the parts, calls their `init_weights`, and sets them to training mode.

    Args:
        ties: :func:`tied_names` of the model before it was split and parallelized.

    Raises:
        ConfigError: A tied parameter was split, or shards cannot be kept in low precision.
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
