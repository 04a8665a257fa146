"""Moving averages of weights that ranks hold in parts (optim/averaged_weights.py)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.local_optimizer import LocalOptimizer
from torchopt_ext.zero.overlap import of_whole_steps
from torchopt_ext.zero.ranks import Ranks, bounded
from torchopt_ext.zero.whole import WholeTensors


class AveragesOfRanks:
    """The interface of one optimizer's averages for parts on many ranks."""

    local: LocalOptimizer
    partition: WholeTensors | BalancedBuckets
    ranks: Ranks
    _has_state: bool
    _consolidated: tuple[Any, ...] | None

    def wait_for_params(self) -> None:
        raise NotImplementedError

    ema_decay = of_whole_steps("ema_decay")
    """The decay of the local FusedOptimizer's averages. Set it on all ranks."""

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Works like :meth:`torchopt_ext.FusedAdamW.ema_weights`. Call it on all ranks."""
        self.wait_for_params()
        fused = self.local.fused
        fused._expect_averages()
        try:
            with fused.ema_weights():
                self._return_weights()
                yield
        finally:  # also after an error in the block
            self._return_weights()

    @bounded
    def _return_weights(self) -> None:
        self.partition.send_updates()
        self.wait_for_params()

    @bounded
    @torch.no_grad()
    def load_ema(self, source: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Works like :meth:`torchopt_ext.FusedAdamW.load_ema`. Call it on all ranks.

        Args:
            source: whole averages, the same on all ranks.
            model: the module of the parameters, if the optimizer was given no names.

        Raises:
            AttributeError: the local optimizer is not a fused one.
            ValueError: an average is missing or does not fit, on any rank. Nothing has changed.
            RuntimeError: ``ema_decay`` is None.
        """
        self.wait_for_params()
        self.local.load_ema(source, model)
        self._has_state, self._consolidated = True, None
