"""Hooks of torch.optim.Optimizer around a wrapper and the optimizer in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


@contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """For the inner optimizer's step: hooks on all optimizers have seen the wrapper's."""
    registered: list[Any] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    before = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(registered, before, strict=True):
            hooks.update(kept)


def run_state_dict_pre_hooks(optimizer: Optimizer) -> None:
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def run_state_dict_post_hooks(optimizer: Optimizer, result: dict[str, Any]) -> dict[str, Any]:
    """The state dict as its hooks leave it."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        hooked = hook(optimizer, result)
        result = result if hooked is None else hooked
    return result


def run_load_state_dict_pre_hooks(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """The state dict to load, as its hooks leave it; the one that was given stays."""
    state_dict = state_dict.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        hooked = hook(optimizer, state_dict)
        state_dict = state_dict if hooked is None else hooked
    return state_dict


def run_load_state_dict_post_hooks(optimizer: Optimizer) -> None:
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
