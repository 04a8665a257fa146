"""Weights by parameter or name, from which masters are set."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.entries import tensor_problem, unwrapped
from torchopt_ext.state.local import shard_of
from torchopt_ext.state.storage import SIXTEEN_BIT, is_steppable
from torchopt_ext.statedict.loaded import raise_problems


def read_weights(
    weights: Mapping[Any, Any], named: Iterable[tuple[str, Tensor]], keeps: Callable[[Tensor], bool]
) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of parameters and their float32 weights, placed as parameters.

    Args:
        weights: by parameter or name. Other names are ignored, so a model's whole state dict will
            do, also a compiled model's. A plain tensor for a DTensor is the whole weight.
        named: an optimizer's parameters, "" if it knows no name.
        keeps: whether a parameter has a master; ``weights`` must have all trained ones of these.

    Raises:
        TypeError: ``weights`` is not a mapping.
        ValueError: weights are missing or do not fit; the message lists the problems.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"got {type(weights).__name__}, expected weights by parameter or name")
    pairs, problems, params = [], [], set()
    of_name = {unwrapped(key): value for key, value in weights.items() if isinstance(key, str)}
    for number, (name, param) in enumerate(named):
        what = repr(name) if name else f"parameter {number}, of which the optimizer has no name,"
        params.add(param)
        if not is_steppable(param):
            continue
        by_name = weights.get(name, of_name.get(unwrapped(name))) if name else None
        weight = weights.get(param, by_name)
        exact = param.requires_grad and param.dtype in SIXTEEN_BIT
        if weight is None:
            if exact and keeps(param):
                problems.append(f"{what} is missing")
            continue
        whole = isinstance(weight, Tensor) and weight.shape == param.shape
        if is_dtensor(param) and not is_dtensor(weight) and whole:
            weight = shard_of(weight, param)
        same = not exact and isinstance(weight, Tensor) and weight.dtype == param.dtype
        if problem := tensor_problem(weight, param, param.dtype if same else torch.float32):
            problems.append(f"{what} {problem}")
        elif exact and not keeps(param):
            problems.append(f"{what} has no master weight, which master_weights= would give it")
        pairs.append((param, weight))
    strangers = [key for key in weights if isinstance(key, Tensor) and key not in params]
    problems += [f"a {tuple(key.shape)} tensor is none of the parameters" for key in strangers]
    if weights and params and not pairs and not problems:
        names = sorted(map(str, weights))
        problems.append(f"no parameter's name is among {names[:3]}: build the optimizer with names")
    raise_problems(problems, what="from_")
    return pairs
