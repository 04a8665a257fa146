"""What a sharded optimizer accepts: parameters, arguments, optimizer classes and owners."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.norm import is_flattened
from torchopt_ext.state.entries import REQUIRED
from torchopt_ext.state.params import named_group_params, named_params


class Parameters:
    """The parameters in a sharded optimizer's groups.

    Attributes:
        parameter_names: names by group, if the groups have no ``param_names``: set by containers.
    """

    parameter_names: Sequence[Sequence[str]] = ()

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def called(self, param: Tensor) -> str:
        """Returns what messages call a parameter: its name if the user gave one, and its shape."""
        shape = f"of shape {tuple(param.shape)}"
        for number, (name, other) in enumerate(named_params(self)):
            if other is param:
                return f"parameter {name or number!r} {shape}"
        return f"a parameter {shape}"

    def describe(self) -> list[str]:
        """Describes each parameter in one line, equal on all ranks that hold the same model."""
        return [
            f"{name!r}: " * bool(name)
            + f"{param.dtype} {tuple(param.shape)} with strides {param.stride()}, "
            + ("trainable" if param.requires_grad else "frozen")
            + f", in group {number}"
            for number, _, name, param in named_group_params(self)
        ]

    def check_dense(self, allow_mixed_dtypes: bool) -> None:
        """Raises ValueError for sparse parameters, DTensors, memory that parameters share, and
        dtypes that differ unless allowed."""
        params = named_params(self)
        names = [f"parameter {name or number!r}" for number, (name, _) in enumerate(params)]
        dtype = params[0][1].dtype
        for what, (_, param) in zip(names, params, strict=True):
            if param.layout is not torch.strided:
                raise ValueError(f"{what} has layout {param.layout}, expected a dense one")
            if hasattr(param, "placements"):
                raise ValueError(
                    f"{what} is a DTensor, which is sharded already: step it with FusedAdamW"
                )
            if is_flattened(param):
                raise ValueError(
                    f"{what} is flattened by FullyShardedDataParallel, which shards it already: "
                    f"step it with FusedAdamW"
                )
            if param.dtype != dtype and not allow_mixed_dtypes:
                raise ValueError(
                    f"{what} has dtype {param.dtype}, {names[0]} {dtype}: "
                    f"allow_mixed_dtypes=True shards each dtype by itself"
                )
        self.check_untied(ValueError)

    def check_untied(self, error: type[Exception] = RuntimeError) -> None:
        """Raises ``error`` if parameters share memory: owners would not see both updates.

        Raises:
            RuntimeError: elements of a parameter may share memory, as of an expanded one.
        """
        params = [param for _, param in named_params(self)]
        if (found := _C.shared_memory(params)) is None:
            return
        one, two = (self.called(params[which]) for which in sorted(found))
        raise error(
            f"{one} and {two} share memory, but each is sharded by itself: tie them as one "
            f"Parameter object, or give each memory of its own"
        )

    def check_frozen(self, frozen: Iterable[Tensor]) -> None:
        """Raises RuntimeError if a parameter that was frozen at every step has a gradient.

        Its owner would apply the gradient. Other ranks cannot know: they may have no gradient.
        """
        for param in frozen:
            if param.grad is not None:
                raise RuntimeError(
                    f"{self.called(param)} has a gradient, but it was frozen in every step, so the "
                    f"other ranks expect no update: freeze it after the step, or clear its gradient"
                )


def check_choices(
    groups: Sequence[Any],
    partition: str,
    overlap_with_ddp: bool,
    params_per_rank: Sequence[Sequence[Tensor]] | None,
    **of_balanced: Any,
) -> None:
    """Raises ValueError for unknown choices, and for choices that exclude or need each other."""
    has_owners = params_per_rank is not None
    if partition not in ("greedy", "balanced"):
        raise ValueError(f"Invalid partition: {partition!r}, not 'greedy' or 'balanced'")
    if partition == "balanced" and (overlap_with_ddp or has_owners):
        raise ValueError(
            "overlap_with_ddp and params_per_rank give whole parameters to ranks, "
            "partition='balanced' divides them: choose one"
        )
    if overlap_with_ddp and has_owners:
        raise ValueError("overlap_with_ddp=True gives DDP's buckets to ranks, not params_per_rank")
    for name, value in of_balanced.items():
        if partition != "balanced" and value is not None and value is not False:
            raise ValueError(f"{name}={value} needs partition='balanced'")
    if overlap_with_ddp and len(groups) != 1:
        raise ValueError("overlap_with_ddp=True supports one param group only")
    if has_owners and len(groups) != 1:
        raise RuntimeError("`params_per_rank` only supports a single parameter group")


def is_fused(optimizer_class: Any) -> bool:
    return isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer)


def check_elementwise(optimizer_class: Any) -> None:
    """Raises ValueError unless the class is known to treat every element separately.

    Subclasses of torch's classes are rejected, because they may do anything.
    """
    if not is_fused(optimizer_class) and optimizer_class not in REQUIRED:
        names = ", ".join(cls.__name__ for cls in REQUIRED)
        raise ValueError(
            f"partition='balanced' divides parameters among ranks, which suits FusedOptimizer, "
            f"{names}; {optimizer_class} may look at whole parameters. If it does not, say so with "
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
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    optimizer_class: Any,
    params_per_rank: Sequence[Sequence[Tensor]] | None,
    **arguments: Any,
) -> list[str]:
    """Describes the arguments and settings that must be the same on all ranks, one in a line."""
    name = getattr(optimizer_class, "__qualname__", type(optimizer_class).__qualname__)
    index = {p: i for i, p in enumerate(chain(*(group["params"] for group in groups)))}
    owned = [[index.get(p) for p in of_rank] for of_rank in params_per_rank or ()]
    arguments |= {"optimizer_class": name, "params_per_rank": owned}
    return [
        *(f"{key}={value}" for key, value in arguments.items()),
        *(f"{key}={_plain(value)}" for key, value in sorted(defaults.items())),
        *(
            f"{key}={_plain(group[key])} in group {number}"
            for number, group in enumerate(groups)
            for key in sorted(group.keys() - {"params", "param_names"})
        ),
    ]
