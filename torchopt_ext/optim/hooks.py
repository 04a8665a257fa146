"""Hooks of torch.optim.Optimizer around a wrapper and the optimizer in it.

A step fires global step hooks once, with the object on which ``step`` was called. Every optimizer
that takes part fires its own hooks once, also where a subclass's ``step`` calls ``super().step()``.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from torchopt_ext import _C, _torch
from torchopt_ext.optim.context import StepContext, amp_attributes, amp_context

Step = TypeVar("Step", bound=Callable[..., Any])


def hooked_step(step: Step) -> Step:
    """Wraps ``step`` in its hooks and a profiler's record, as torch does, once in nested calls.

    ``self._context`` holds the step's context while it is under way: what :func:`step_in` has
    given, so that neither a subclass's ``step`` nor a patch of it needs an argument for it.

    torch (torch/optim/optimizer.py, profile_hook_step) makes the record even if nobody observes
    it, which takes a twentieth of a step over 2,000 small tensors; here only if somebody does.
    """
    by_torch = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._context is not None:  # a subclass has called super().step()
            return step(self, *args, **kwargs)
        self._context = amp_context(self) if self._given is None else self._given
        try:
            if self._context.inner:
                return with_own_hooks(self, step, args, kwargs)
            if (
                args  # a closure may do anything
                or kwargs
                or _torch.has_global_step_hooks()
                or _observed(self)
            ):
                return by_torch(self, *args, **kwargs)
            return step(self)
        finally:
            self._context = None

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch patches no step that says so
    return cast("Step", _torch.run_eagerly(wrapper))


class HookedStep:
    """Applies :func:`hooked_step` to the ``step`` of every subclass, also one from a mixin."""

    _context: StepContext | None = None  # of the step under way
    _given: StepContext | None = None  # for the next step

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):
            cls.step = hooked_step(vars(cls)["step"])  # type: ignore[attr-defined]
        cls._wrap_step()

    @classmethod
    def _wrap_step(cls) -> None:
        step: Any = getattr(cls, "step", None)
        if step is not None and not getattr(step, "hooked", False):
            cls.step = hooked_step(step)  # type: ignore[attr-defined]

    def _patch_step_function(self) -> None:
        """Called by torch's constructor, which would wrap a step put on the class since then."""
        self._wrap_step()
        super()._patch_step_function()  # type: ignore[misc]


def step_in(optimizer: HookedStep, context: StepContext, *args: Any, **kwargs: Any) -> Any:
    """``optimizer.step(...)`` with what the step must know besides gradients."""
    hooked: Any = optimizer
    hooked._given = context
    try:
        return hooked.step(*args, **kwargs)
    finally:
        hooked._given = None


def inner_step(optimizer: Any, context: StepContext, *args: Any, **kwargs: Any) -> Any:
    """``optimizer.step(...)`` as a part of another optimizer's step: fires no global hooks.

    The tables of global hooks stay as they are, since other threads' optimizers use them: of
    torch's optimizers, what torch has wrapped in hooks is called. A ``step`` that somebody has
    put on the object itself is called as it is.
    """
    if isinstance(optimizer, HookedStep):
        return step_in(optimizer, replace(context, inner=True), *args, **kwargs)
    patch = vars(optimizer).get("step")
    with amp_attributes(optimizer, context):
        # Learning-rate schedulers patch it as well, to note its calls.
        if patch is not None and getattr(patch, "__wrapped__", None) is not type(optimizer).step:
            return optimizer.step(*args, **kwargs)
        _torch.note_step(optimizer)
        return with_own_hooks(optimizer, _torch.step_without_hooks(optimizer), args, kwargs)


def _observed(optimizer: Any) -> bool:
    return bool(_C.observed() or _torch.has_step_hooks(optimizer))


def with_own_hooks(
    optimizer: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """profile_hook_step of torch/optim/optimizer.py without the global hooks."""
    if not _observed(optimizer):
        return step(optimizer, *args, **kwargs)
    args = (optimizer, *args)
    with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        for hook in _torch.step_pre_hooks(optimizer):
            if (changed := hook(optimizer, args, kwargs)) is not None:
                args, kwargs = changed
        result = step(*args, **kwargs)
        for hook in _torch.step_post_hooks(optimizer):
            hook(optimizer, args, kwargs)
    return result


def run_state_dict_pre_hooks(optimizer: Optimizer) -> None:
    for hook in _torch.state_dict_hooks(optimizer, "pre"):
        hook(optimizer)


def run_state_dict_post_hooks(optimizer: Optimizer, result: dict[str, Any]) -> dict[str, Any]:
    """The state dict as its hooks leave it."""
    for hook in _torch.state_dict_hooks(optimizer, "post"):
        hooked = hook(optimizer, result)
        result = result if hooked is None else hooked
    return result


def run_load_state_dict_pre_hooks(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """The state dict to load, as its hooks leave it; the one that was given stays."""
    state_dict = state_dict.copy()
    for hook in _torch.load_state_dict_hooks(optimizer, "pre"):
        hooked = hook(optimizer, state_dict)
        state_dict = state_dict if hooked is None else hooked
    return state_dict


def run_load_state_dict_post_hooks(optimizer: Optimizer) -> None:
    for hook in _torch.load_state_dict_hooks(optimizer, "post"):
        hook(optimizer)
