"""Moving averages of the weights of all parts of a container (optim/averaged_weights.py)."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torchopt_ext.optim.averaged_weights import averages_in, fitting
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.state.params import params_of


class AveragesOfParts:
    """The interface of one optimizer's averages for the fused optimizers of a container."""

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
