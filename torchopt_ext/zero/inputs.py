"""What a sharded optimizer accepts as parameters."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def listed(params: Any) -> tuple[list[Any], list[Tensor]]:
    """The constructor's ``params`` as a list, and every parameter in it.

    Args:
        params: tensors, (name, tensor) pairs, or dicts with such under "params".

    Raises:
        TypeError: not an iterable of one of these.
        ValueError: empty, or a dict without "params".
    """
    if isinstance(params, Tensor):
        raise TypeError(
            f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}"
        )
    if not isinstance(params, Iterable):
        raise TypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got "
            f"{torch.typename(params)}"
        )
    given = list(params)
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    if all(isinstance(item, dict) for item in given):
        given = [dict(group) for group in given]
        for group in given:
            if "params" not in group:
                raise ValueError(
                    "Each parameter group passed-in via `params` must have a 'params' key mapping "
                    "to the parameters in the group"
                )
            inner = group["params"]
            group["params"] = inner if isinstance(inner, Tensor | set) else list(inner)
        params = [param for group in given for param in tensors_of(group["params"])]
        if not params:
            raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
        return given, params
    if any(isinstance(item, dict) for item in given):
        raise TypeError("`params` argument should be an iterable of Tensors or dicts, not of both")
    return given, tensors_of(given)


def tensors_of(items: Any) -> list[Tensor]:
    """The tensors among tensors or (name, tensor) pairs.

    Raises:
        TypeError: anything else; says what and where.
    """
    found = []
    for index, item in enumerate([items] if isinstance(items, Tensor) else items):
        tensor = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"`params` argument should be an iterable of Tensors or dicts; item {index} is "
                f"{torch.typename(item)}"
            )
        found.append(tensor)
    return found


def check_owners(
    params_per_rank: Sequence[Sequence[Tensor]], params: Sequence[Tensor], world_size: int
) -> None:
    """Raises ValueError unless every rank has a list, and each parameter at most one owner."""
    if len(params_per_rank) != world_size:
        raise ValueError("`params_per_rank` must have length equal to the world size")
    known, seen = set(params), set()
    for param in chain(*params_per_rank):
        if param not in known:
            raise ValueError(
                "Passing a new parameter in `params_per_rank` that was not passed into the "
                "ZeroRedundancyOptimizer constructor"
            )
        if param in seen:
            raise ValueError("`params_per_rank` has a parameter twice")
        seen.add(param)


def check_dense(params: list[Tensor], allow_mixed_dtypes: bool) -> None:
    """Raises ValueError for sparse parameters, DTensors, and dtypes that differ unless allowed."""
    for index, param in enumerate(params):
        if param.layout is not torch.strided:
            raise ValueError(
                f"ZeroRedundancyOptimizer only supports using the same dense type for all "
                f"parameters but parameter {index} is {torch.typename(param)} ({param.layout})"
            )
        if hasattr(param, "placements"):
            raise ValueError(
                f"parameter {index} is a DTensor, which is sharded already: step it with FusedAdamW"
            )
        if param.dtype != params[0].dtype and not allow_mixed_dtypes:
            raise ValueError(
                f"ZeroRedundancyOptimizer only supports using the same dense type for all "
                f"parameters but got both {params[0].dtype} and {param.dtype} (parameter {index}); "
                f"allow_mixed_dtypes=True shards each dtype by itself"
            )


def described(groups: list[dict[str, Any]]) -> list[str]:
    """One line for each parameter, equal on all ranks that hold the same model."""
    lines = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            lines.append(
                f"{name!r}: " * bool(name)
                + f"{param.dtype} {tuple(param.shape)} with strides {param.stride()}, "
                + ("trainable" if param.requires_grad else "frozen")
                + f", in group {number}"
            )
    return lines
