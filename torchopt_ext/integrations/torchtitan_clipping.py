"""Clipping of a container's gradients where torchtitan's Trainers call a function for it.

They call `clip_grad_norm_` of `distributed.utils` with parameters (torchtitan/train.py,
train_step), so this module has to find the container that they belong to.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.state.params import params_of

_watched: weakref.WeakKeyDictionary[OptimizersContainer[Any], None] = weakref.WeakKeyDictionary()
"""The containers that torchtitan trains with, the latest last."""


def watch(container: OptimizersContainer[Any]) -> None:
    """Makes a container the latest that decides about the clipping of its gradients."""
    _watched.pop(container, None)
    _watched[container] = None


def take_over(module: Any) -> None:
    """Replaces `clip_grad_norm_` of torchtitan's `distributed.utils`, in 0.2 and 0.3.

    A call with exactly the parameters of a watched container with deferred clipping then measures
    their norm for the container's next step. A call with the parameters of a container in backward
    returns the norm that it measured: torchtitan would see no gradients, and a norm of 0.
    torchtitan's function handles every other call: other parameters that have gradients, another
    norm than the 2-norm, `error_if_nonfinite`, and a `max_norm` that is not above 0. The choice
    must be the same on all ranks.
    """
    stock: Callable[..., Tensor] = module.clip_grad_norm_
    if getattr(stock, "torchopt_ext_defers", False):
        return

    @functools.wraps(stock)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        pp_mesh: Any = None,
        ep_enabled: bool = False,
    ) -> Tensor:
        # A generator can be read only once.
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        container = _container_of(params)
        alike = norm_type == 2.0 and not error_if_nonfinite and max_norm > 0.0
        if container is None or not alike:
            return stock(
                params, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh, ep_enabled
            )
        if container.deferred_clipping is None:
            return container.control.grad_norm  # of the update that backward has made
        group = None if pp_mesh is None else pp_mesh.get_group()
        return container.deferred_clipping.clip(max_norm, group)

    clip_grad_norm_.torchopt_ext_defers = True  # type: ignore[attr-defined]
    module.clip_grad_norm_ = clip_grad_norm_


def _container_of(parameters: Sequence[Tensor]) -> OptimizersContainer[Any] | None:
    """Returns the container that clips exactly these parameters, or None if torchtitan clips them.

    Their container decides, whether it defers clipping or not. Parameters that it does not step may
    come along if they have no gradients. If several containers match, it is the one with the most
    parameters, because a stage may train none. If several have as many, it is the latest, because
    an older one may not be collected yet.
    """
    passed, most = set(map(id, parameters)), -1
    decides: OptimizersContainer[Any] | None = None
    for container in [*_watched]:
        stepped = set(map(id, params_of(container)))
        others = (p for p in parameters if id(p) not in stepped)
        if len(stepped) >= most and stepped <= passed and all(p.grad is None for p in others):
            decides, most = container, len(stepped)
    if isinstance(decides, OptimizersInBackwardContainer):
        # Gradients that backward has left are not in the norm that it measured.
        measured = decides.measures_norm and all(p.grad is None for p in parameters)
        return decides if measured else None
    return None if decides is None or decides.deferred_clipping is None else decides
