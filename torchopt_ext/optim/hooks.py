"""Hooks of torch.optim.Optimizer around a wrapper and the optimizer in it.

A step fires global step hooks once, with the object on which ``step`` was called. Every optimizer
that takes part fires its own hooks once, even if a subclass's ``step`` calls ``super().step()``.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from torchopt_ext import _C, _torch
from torchopt_ext.optim.context import IDLE, StepContext, amp_attributes, amp_context


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``step`` in hooks and a profiler's record, as torch does, but once in nested calls.

    ``self._context`` is the context of the step under way, set by :func:`step_in`. So neither a
    subclass's ``step`` nor a patch of ``step`` needs an argument for the context.

    torch (torch/optim/optimizer.py, profile_hook_step) makes the record even if nobody observes it,
    which takes a twentieth of a step over 2,000 small tensors. Here only an observer causes it.
    """
    by_torch = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._context is not IDLE:  # a subclass has called super().step()
            return step(self, *args, **kwargs)
        _torch.explain_whole_graph(step)
        self._context = amp_context(self) if self._given is None else self._given
        try:
            if self._context.nested:
                return with_own_hooks(self, step, args, kwargs)
            # A closure may do anything.
            if args or kwargs or _C.observed() or _torch.has_step_hooks(self):
                return by_torch(self, *args, **kwargs)
            return step(self)
        except BaseException:
            # torch.amp.GradScaler sets both for one step, and does not remove them if it raises.
            if vars(self).pop("found_inf", None) is not None:
                vars(self).pop("grad_scale", None)
            raise
        finally:
            del self._context  # copies must not include it

    return _torch.run_eagerly(wrapper)


class HookedStep:
    """Makes torch's constructor wrap ``step`` (also a mixin's) by :func:`hooked_step`."""

    _context = IDLE
    _given: StepContext | None = None  # for the next step
    profile_hook_step = staticmethod(hooked_step)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets a class that imitates an optimizer's class hand our attributes on.

        Lightning and Fabric put a wrapper's class before the optimizer's (lightning/fabric/
        wrappers.py). Our methods would find some attributes there, and some in the optimizer.
        """
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        first = next(i for i in range(1, len(order)) if issubclass(order[i], HookedStep))
        wrapper = {n: v for base in reversed(order[1:first]) for n, v in vars(base).items()}
        if not isinstance(wrapper.get("optimizer"), property):
            return
        ours = [base for base in order[first:] if base.__module__.startswith("torchopt_ext.")]
        for name in {name for base in ours for name in vars(base)} - vars(cls).keys():
            if name not in wrapper and not name.startswith("__"):
                setattr(cls, name, forwarded("optimizer", name))
        cls._step_supports_amp_scaling = False  # type: ignore[assignment, method-assign]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling to ``step``, and sets the scale here.

        False if a wrapper hands it on, because the wrapper would then get the scale, and if
        ``step`` was replaced, for example by Accelerate to see whether the scaler calls it.
        """
        return _torch.is_asked(self) and not is_patched(self) and self._unscales()

    def _unscales(self) -> bool:
        """Whether ``step`` unscales gradients by what torch.amp.GradScaler sets."""
        return False


def forwarded(to: str, name: str) -> Any:
    """Returns a property that reads and sets the attribute ``name`` of the attribute ``to``."""
    inner = operator.attrgetter(to)
    return property(
        lambda self: getattr(inner(self), name),
        lambda self, value: setattr(inner(self), name, value),
    )


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Runs the closure of a step, if there is one; returns its loss."""
    with torch.enable_grad():
        return None if closure is None else closure()


def step_in(optimizer: Any, context: StepContext, *args: Any, **kwargs: Any) -> Any:
    """Calls ``optimizer.step(...)`` with a context, which the step must know."""
    optimizer._given = context
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        optimizer._given = None


def inner_step(optimizer: Any, context: StepContext, *args: Any, **kwargs: Any) -> Any:
    """Calls ``optimizer.step(...)`` as part of another optimizer's step, without global hooks.

    The tables of global hooks stay as they are, because other threads' optimizers use them. For
    torch's optimizers it calls the function inside torch's hook wrapper instead. A ``step`` that
    was set on the object itself is called unchanged.
    """
    if isinstance(optimizer, HookedStep):
        return step_in(optimizer, context._replace(nested=True), *args, **kwargs)
    with amp_attributes(optimizer, context):
        if is_patched(optimizer):
            return optimizer.step(*args, **kwargs)
        _torch.mark_step_for_schedulers(optimizer)
        return with_own_hooks(optimizer, _torch.step_without_hooks(optimizer), args, kwargs)


def is_patched(optimizer: Any) -> bool:
    """Returns whether the object has its own ``step``, other than a learning-rate scheduler's."""
    patch = vars(optimizer).get("step")
    return patch is not None and getattr(patch, "__wrapped__", None) is not type(optimizer).step


def is_watched(optimizer: Any) -> bool:
    """Returns whether a hook of the optimizer's own or a profiler observes its step."""
    return _C.observed() or _torch.has_step_hooks(optimizer, own_only=True)


def with_own_hooks(
    optimizer: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs profile_hook_step of torch/optim/optimizer.py without the global hooks."""
    if not is_watched(optimizer):
        return step(optimizer, *args, **kwargs)
    args = (optimizer, *args)
    with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        for hook in _torch.hooks(optimizer, "step_pre"):
            if (changed := hook(optimizer, args, kwargs)) is not None:
                args, kwargs = changed
        result = step(*args, **kwargs)
        _torch.profiler_step_hook(optimizer)
        for hook in _torch.hooks(optimizer, "step_post"):
            hook(optimizer, args, kwargs)
    return result


def is_left_out(optimizer: Any, attribute: str) -> bool:
    """Returns whether copies leave out an attribute: hooks, and methods that were patched."""
    patched = callable(getattr(type(optimizer), attribute, None))  # for example by a scheduler
    return patched or _torch.is_hook_table(attribute)


def run_hooks(optimizer: Any, kind: str, *state_dict: Any) -> Any:
    """Fires hooks such as ``state_dict_pre``; returns the state dict, if any, as they leave it."""
    for hook in _torch.hooks(optimizer, kind):
        if (changed := hook(optimizer, *state_dict)) is not None and state_dict:
            state_dict = (changed,)
    return state_dict[0] if state_dict else None
