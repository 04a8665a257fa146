"""Hooks of torch.optim.Optimizer around a wrapper and the optimizer in it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from torchopt_ext import _C

Step = TypeVar("Step", bound=Callable[..., Any])


def with_step_hooks(step: Step) -> Step:
    """``step`` within its hooks and a profiler's record, as torch wraps it.

    torch (torch/optim/optimizer.py, profile_hook_step) makes the record even if nobody observes
    it, which takes a twentieth of a step over 2,000 small tensors; here only if somebody does.
    Where torch has wrapped a subclass's own ``step``, hooks have fired before that calls this one.
    """
    by_torch: Any = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost: Any = type(self).step
        if outermost is not wrapper and getattr(outermost, "__code__", None) is by_torch.__code__:
            return step(self, *args, **kwargs)
        if (
            args  # a closure may do anything
            or kwargs
            or torch.compiler.is_compiling()
            or _C.observed()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        ):
            return by_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch patches no step that says so
    return cast("Step", wrapper)


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
