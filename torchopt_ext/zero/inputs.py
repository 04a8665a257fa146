"""What a sharded optimizer accepts: arguments, optimizer classes, parameters and owners."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.local import is_flattened
from torchopt_ext.optim.state import named_group_params
from torchopt_ext.statedict.entries import REQUIRED


def check_choices(
    partition: str,
    sharded_gradients: bool,
    overlap_with_ddp: bool,
    elementwise: bool,
    bucket_elements: int | None,
    *,
    owners: bool,
    groups: int,
) -> None:
    """Raises ValueError for unknown choices, and for choices that exclude or need each other.

    ``owners`` is whether ``params_per_rank`` is given, ``groups`` the number of param groups.
    """
    balanced = partition == "balanced"
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
    if overlap_with_ddp and groups != 1:
        raise ValueError("overlap_with_ddp=True supports one param group only")


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


def check_dense(params: Sequence[Tensor], allow_mixed_dtypes: bool) -> None:
    """Raises ValueError for sparse parameters, DTensors, memory that parameters share, and dtypes
    that differ unless allowed."""
    for index, param in enumerate(params):
        if param.layout is not torch.strided:
            raise ValueError(f"parameter {index} has layout {param.layout}, expected a dense one")
        if hasattr(param, "placements"):
            raise ValueError(
                f"parameter {index} is a DTensor, which is sharded already: step it with FusedAdamW"
            )
        if is_flattened(param):
            raise ValueError(
                f"parameter {index} is flattened by FullyShardedDataParallel, which shards it "
                f"already: step it with FusedAdamW"
            )
        if param.dtype != params[0].dtype and not allow_mixed_dtypes:
            raise ValueError(
                f"parameter {index} has dtype {param.dtype}, parameter 0 {params[0].dtype}: "
                f"allow_mixed_dtypes=True shards each dtype by itself"
            )
    check_untied(params)


def check_untied(params: Sequence[Tensor], error: type[Exception] = ValueError) -> None:
    """Raises ``error`` if parameters share memory: an owner would not see the other's update."""
    spans = sorted(
        (str(p.device), p.data_ptr(), p.nbytes if p.is_contiguous() else 1, tuple(p.shape))
        for p in params
        if p.numel() and not p.is_meta
    )
    for (device, start, nbytes, shape), (other, after, _, next_shape) in pairwise(spans):
        if device == other and after < start + nbytes:
            raise error(
                f"two parameters, of shapes {shape} and {next_shape}, share memory, but each is "
                f"sharded by itself: tie them as one Parameter object, or give each memory of its "
                f"own"
            )


def check_frozen(params: Sequence[Tensor], world_size: int) -> None:
    """Raises RuntimeError if a parameter that was frozen at every step has a gradient.

    Its owner would apply the gradient. The other ranks cannot know: they may have no gradient.
    """
    for param in params:
        if world_size > 1 and param.grad is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has a gradient, but it was frozen in "
                f"every step, so the other ranks expect no update: freeze it after the step, or "
                f"clear its gradient"
            )


def describe_params(optimizer: Any) -> list[str]:
    """Describes each parameter in one line, equal on all ranks that hold the same model."""
    return [
        f"{name!r}: " * bool(name)
        + f"{param.dtype} {tuple(param.shape)} with strides {param.stride()}, "
        + ("trainable" if param.requires_grad else "frozen")
        + f", in group {number}"
        for number, _, name, param in named_group_params(optimizer)
    ]


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
