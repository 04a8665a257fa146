"""Checks of arguments. The messages name the argument and show its value."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def expect_numbers(**values: Any) -> None:
    """Rejects values that are not one number, such as ``1e-3``, which YAML reads as a string."""
    for name, value in values.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name} is {value!r:.200}, expected a number")
        if isinstance(value, Tensor) and value.numel() != 1:  # torch.optim.Adam's message
            raise ValueError(f"Tensor {name} must be 1-element, but has shape {[*value.shape]}")


def expect_counts(**values: Any) -> None:
    """Rejects values that are not integers of 64 bits, signed or unsigned."""
    for name, value in values.items():
        try:
            count = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r:.200}, expected an integer") from None
        if not -(2**63) <= count < 2**64:
            raise ValueError(f"{name} is {count}, expected an integer of 64 bits")


def expect_bools(**values: Any) -> None:
    """Rejects values that do not equal True or False, such as "no", which counts as true."""
    for name, value in values.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r:.200}, expected a bool")


@contextmanager
def restored_if_raised(groups: Iterable[Any], optimizer: Any = None) -> Iterator[None]:
    """Undoes what torch writes to a caller's group dicts, if an error follows.

    torch adds all defaults (torch/optim/optimizer.py, add_param_group), which a second call with
    other arguments would take for the caller's. Also removes the groups that an optimizer got.
    """
    held = [] if optimizer is None else optimizer.param_groups
    count = len(held)
    given = [] if isinstance(groups, Tensor) else [g for g in groups if isinstance(g, dict)]
    for group in given:
        if isinstance(params := group.get("params"), Iterator):
            group["params"] = list(params)  # can be read again
    before = [group.copy() for group in given]
    try:
        yield
    except BaseException:
        del held[count:]
        for group, own in zip(given, before, strict=True):
            group.clear()
            group.update(own)
        raise


@contextmanager
def having_defaults(optimizer: Optimizer, defaults: dict[str, Any]) -> Iterator[None]:
    """Lets torch give a new param group these defaults, instead of the optimizer's."""
    kept, optimizer.defaults = optimizer.defaults, defaults
    try:
        yield
    finally:
        optimizer.defaults = kept


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside the wrappers of Accelerate, Lightning and Fabric.

    Lightning's and Fabric's wrappers pass isinstance checks, but what is set on them, such as a
    scale or a threshold, does not reach the optimizer.
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer) or inner is optimizer:
        return optimizer
    return inner_optimizer(inner)


def expect_params(params: Any) -> None:
    """Rejects what is neither parameters nor param groups, such as a model or a dict."""
    is_model = isinstance(params, torch.nn.Module)
    is_dict = isinstance(params, Mapping)
    if not is_model and not is_dict and isinstance(params, Iterable):
        return
    what = getattr(params, "__qualname__", f"{params!r:.200}")
    what = f"a {type(params).__name__} module" if is_model else what
    what = f"of type {type(params).__name__}" if is_dict else what
    hint = "model.parameters()" if is_model or callable(params) else "a list"
    if is_dict and "params" not in params:
        hint = "model.named_parameters()"
    raise TypeError(f"params is {what}, expected parameters or param groups, such as {hint}")


def expect_group(process_group: Any, name: str = "process_group") -> None:
    """Rejects values that are neither None nor a process group, such as a mesh dimension's name."""
    if process_group is None or isinstance(process_group, torch.distributed.ProcessGroup):
        return
    raise TypeError(
        f"{name} is {process_group!r:.200}, expected a torch.distributed.ProcessGroup that "
        f"has this rank"
    )
