"""Weights and their averages in all parts of a container, and what programs do with them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext.optim.averaged_weights import averages_in, fitting
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.placed_states import move_states
from torchopt_ext.state.params import find_param, params_of, take_replaced
from torchopt_ext.statedict.weights import read_weights


class WeightsOfParts:
    """The interface of one optimizer's weights and averages for the fused ones of a container."""

    optimizers: Sequence[Optimizer]

    def _fused(self) -> list[FusedOptimizer]:
        raise NotImplementedError

    def _parameter_names(self) -> Mapping[Any, str]:
        raise NotImplementedError

    @property
    def ema_decay(self) -> float | None:
        """The decay of the averages, as :attr:`torchopt_ext.FusedAdamW.ema_decay`."""
        return self._fused()[0].ema_decay

    @ema_decay.setter
    def ema_decay(self, value: float | None) -> None:
        for optimizer in self._fused():
            optimizer.ema_decay = value

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Sets all parts' parameters to their averages inside a ``with`` block.

        Raises:
            RuntimeError: as for :meth:`torchopt_ext.FusedAdamW.ema_weights`.
        """
        with ExitStack() as stack:
            for optimizer in self._fused():
                stack.enter_context(optimizer.ema_weights())
            yield

    def load_ema(self, source: Mapping[str, Any]) -> None:
        """Continues with averages as :meth:`torchopt_ext.FusedAdamW.load_ema`, by name or order.

        Raises:
            ValueError: averages are missing or do not fit. Nothing has changed.
        """
        fused = self._fused()
        averages = fitting(averages_in(source, self._parameter_names(), params_of(*fused)))
        for optimizer in fused:
            optimizer._take_averages(averages)

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Sets all parts' masters as :meth:`torchopt_ext.FusedAdamW.refresh_masters` does.

        Args:
            from_: float32 weights by parameter, or by name in the state dict. All weights are
                checked before any is set.
        """
        fused = fused_of(self.optimizers)
        if from_ is None:
            for optimizer in fused:
                optimizer.refresh_masters()
            return
        owner = {p: o for o in fused for p in params_of(o)}
        replaced = [(optimizer, take_replaced(optimizer)) for optimizer in fused]
        try:
            named = [(fqn, param) for param, fqn in self._parameter_names().items()]
            pairs = read_weights(from_, named, lambda p: p in owner and owner[p]._keeps_master(p))
        except BaseException:
            for optimizer, entries in replaced:
                optimizer.state.update(entries)
            raise
        for optimizer in fused:
            optimizer._set_weights_and_state([p for p in pairs if owner.get(p[0]) is optimizer])

    def scale_(self, param: Tensor | str, factors: Tensor) -> None:
        """Multiplies rows of a weight as :meth:`torchopt_ext.FusedAdamW.scale_` does.

        Args:
            param: a parameter, or its name in the state dict.

        Raises:
            AttributeError: no inner optimizer is a fused one.
            TypeError, ValueError: as FusedAdamW's.
        """
        holders = {own: optimizer for optimizer in self._fused() for own in params_of(optimizer)}
        names = self._parameter_names()
        _, own = find_param(self, param, ((names.get(own, ""), own) for own in holders))
        holders[own].scale_(own, factors)

    def move_state(self, device: torch.device | str | None) -> None:
        """Moves all parts' states as :meth:`torchopt_ext.FusedAdamW.move_state` does.

        ``state_fraction`` counts over all parts.

        Raises:
            AttributeError: no inner optimizer is a fused one.
            ValueError, RuntimeError: as FusedAdamW's. Nothing has changed.
        """
        move_states(self._fused(), device, self)

    @property
    def host_bytes(self) -> int:
        """The bytes of all parts' states that lie in page-locked memory of the host.

        Raises:
            AttributeError: no inner optimizer is a fused one.
        """
        return sum(optimizer.host_bytes for optimizer in self._fused())


def fused_of(optimizers: Sequence[Optimizer]) -> list[FusedOptimizer]:
    """Returns the optimizers that step by the engine."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, FusedOptimizer)]
