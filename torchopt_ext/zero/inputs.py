"""What a sharded optimizer accepts: arguments, optimizer classes and owners."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.state.entries import REQUIRED


def check_choices(
    partition: str,
    sharded_gradients: bool,
    overlap_with_ddp: bool,
    elementwise: bool,
    bucket_elements: int | None,
    params_per_rank: Sequence[Sequence[Tensor]] | None,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raises ValueError for unknown choices, and for choices that exclude or need each other."""
    balanced, owners = partition == "balanced", params_per_rank is not None
    if partition not in ("greedy", "balanced"):
        raise ValueError(f"Invalid partition: {partition!r}, not 'greedy' or 'balanced'")
    if balanced and (overlap_with_ddp or owners):
        raise ValueError(
            "overlap_with_ddp and params_per_rank give whole parameters to ranks, "
            "partition='balanced' divides them: choose one"
        )
    if overlap_with_ddp and owners:
        raise ValueError("overlap_with_ddp=True gives DDP's buckets to ranks, not params_per_rank")
    for name, value in (
        ("sharded_gradients", sharded_gradients or None),
        ("elementwise", elementwise or None),
        ("bucket_elements", bucket_elements),
    ):
        if value is not None and not balanced:
            raise ValueError(f"{name}={value} needs partition='balanced'")
    if overlap_with_ddp and len(groups) != 1:
        raise ValueError("overlap_with_ddp=True supports one param group only")
    if owners and len(groups) != 1:
        raise RuntimeError("`params_per_rank` only supports a single parameter group")


def check_elementwise(optimizer_class: Any) -> None:
    """Raises ValueError unless the class is known to treat every element separately.

    An element-wise optimizer may step any part of a parameter. Subclasses of torch's classes are
    rejected, because they may do anything.
    """
    fused = isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer)
    if not fused and optimizer_class not in REQUIRED:
        known = ", ".join(cls.__name__ for cls in REQUIRED)
        raise ValueError(
            f"partition='balanced' divides parameters among ranks, which suits FusedOptimizer, "
            f"{known}; {optimizer_class} may look at whole parameters. If it does not, say so with "
            f"elementwise=True"
        )


def check_owners(
    params_per_rank: Sequence[Sequence[Tensor]], params: Sequence[Tensor], world_size: int
) -> None:
    """Raises ValueError unless every rank has a list, and each parameter at most one owner."""
    if len(params_per_rank) != world_size:
        raise ValueError("`params_per_rank` must have length equal to the world size")
    owned = list(chain(*params_per_rank))
    if not set(params).issuperset(owned):
        raise ValueError(
            "Passing a new parameter in `params_per_rank` that was not passed into the "
            "ZeroRedundancyOptimizer constructor"
        )
    if len(set(owned)) != len(owned):
        raise ValueError("`params_per_rank` has a parameter twice")


def _plain(value: Any) -> Any:
    """Returns a value that ranks compare: a plain value itself, and the type of any other."""
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    plain = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    return value if plain else type(value).__qualname__


def describe_arguments(
    optimizer_class: Any,
    params_per_rank: Sequence[Sequence[Tensor]] | None,
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    **arguments: Any,
) -> list[str]:
    """Describes the arguments and settings that must be the same on all ranks, one in a line."""
    name = getattr(optimizer_class, "__qualname__", type(optimizer_class).__qualname__)
    params = chain(*(group["params"] for group in groups))
    number = {param: i for i, param in enumerate(params)}
    owned = [[number.get(p) for p in own] for own in params_per_rank or ()]
    arguments |= {"optimizer_class": name, "params_per_rank": owned}
    found = [f"{key}={value}" for key, value in arguments.items()]
    found += [f"{key}={_plain(value)}" for key, value in sorted(defaults.items())]
    return found + [
        f"{key}={_plain(group[key])} in group {number}"
        for number, group in enumerate(groups)
        for key in sorted(group.keys() - {"params", "param_names"})
    ]
