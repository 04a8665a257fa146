"""Warns of parameters that were cast to 16 bits after their optimizer had been built."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchopt_ext.state.params import named_params
from torchopt_ext.state.storage import SIXTEEN_BIT


def fp32_places(groups: Iterable[Mapping[str, Any]]) -> list[list[bool]]:
    """Returns which parameters are float32, by group and position: wrappers replace parameters."""
    return [[param.dtype == torch.float32 for param in group["params"]] for group in groups]


def warn_of_casts(optimizer: Any) -> None:
    """Warns, once, if trained parameters have 16 bits that had 32 when the optimizer got them."""
    cast, names = [], iter(named_params(optimizer))
    for group, places in zip(optimizer.param_groups, optimizer._were_fp32, strict=False):
        named = [next(names) for _ in group["params"]]
        if len(named) == len(places):
            cast += [
                name
                for (name, param), was in zip(named, places, strict=True)
                if was and param.requires_grad and param.dtype in SIXTEEN_BIT
            ]
    if not cast:
        return
    optimizer._were_fp32 = ()  # also if the warning is an error
    options, kind = optimizer.options, type(optimizer).__name__
    such = f", such as {cast[0]!r}," if cast[0] else ""
    text = (
        f"{len(cast)} float32 parameters{such} were cast to 16 bits after {kind} had been built, "
        f"and lost their low bits"
    )
    if options.master_weights is None and not options.stochastic_rounding:
        text += ". Without master weights, updates that are small beside a weight are lost, too"
    warnings.warn(
        f"{text}: cast the model first, and then build {kind}(..., master_weights='remainder') or "
        f"with 'fp32'; refresh_masters(from_=...) takes the low bits of the float32 weights",
        stacklevel=2,
    )
