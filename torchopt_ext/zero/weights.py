"""Weights and their averages, which ranks hold in parts, and what programs do with them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext import _C
from torchopt_ext.state.collective import fail_together
from torchopt_ext.state.masters import row_factors
from torchopt_ext.state.params import find_param, params_of
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.exchange import check_same
from torchopt_ext.zero.local_optimizer import LocalOptimizer
from torchopt_ext.zero.overlap import of_whole_steps
from torchopt_ext.zero.ranks import Ranks, bounded
from torchopt_ext.zero.whole import WholeTensors


class WeightsOfRanks:
    """The interface of one optimizer's weights and averages for parts on many ranks."""

    param_groups: list[dict[str, Any]]
    local: LocalOptimizer
    partition: WholeTensors | BalancedBuckets
    ranks: Ranks
    _has_state: bool
    _consolidated: tuple[Any, ...] | None

    def overlap_forward(self, *modules: nn.Module) -> None:
        """Lets ``step`` return before the parameters of modules, such as layers, have arrived.

        Their forward, ``state_dict`` and ``load_state_dict`` wait. Call :meth:`wait_for_params`
        before anything else reads them.

        Raises:
            ValueError: the partition is not "balanced".
        """
        if not isinstance(self.partition, BalancedBuckets):
            raise ValueError("overlap_forward needs partition='balanced'")
        self.partition.overlap_forward(modules)

    def wait_for_params(self) -> None:
        """Waits until all updated parameters have arrived (see :meth:`overlap_forward`)."""
        if isinstance(self.partition, BalancedBuckets):
            self.partition.wait_for_updates()

    @bounded
    @torch.no_grad()
    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Works like :meth:`torchopt_ext.FusedAdamW.refresh_masters`. Call it on all ranks.

        Args:
            from_: whole float32 weights by parameter or name, the same on all ranks.

        Raises:
            AttributeError: the local optimizer is not a fused one.
            ValueError: a weight is missing or does not fit, on any rank. Nothing is changed.
        """
        self.wait_for_params()
        self.local.refresh_masters(from_)
        self._consolidated = None

    @bounded
    @torch.no_grad()
    def scale_(self, param: Tensor | str, factors: Tensor) -> None:
        """Works like :meth:`torchopt_ext.FusedAdamW.scale_`. Call it on all ranks.

        Sends this weight only.

        Args:
            param: a whole parameter of this optimizer or, if it was given names, a name.
            factors: of the whole parameter, the same on all ranks.

        Raises:
            AttributeError: the local optimizer is not a fused one.
            TypeError: ``param`` is neither, or factors are no dense tensor of real numbers.
            ValueError: there is no such parameter, the factors do not fit it, or they differ
                between ranks, or another rank raises. Nothing is changed.
        """
        self.wait_for_params()
        with fail_together(self.ranks.group):
            self.local.fused._wait_for_states()
            self.partition.follow_memory()
            _, own = find_param(self, param)
            rows = row_factors(own, factors)
            parts = [part for part in self.local.parts if part.param is own]
            number = [p is own for p in params_of(self)].index(True)
            described = [f"parameter {number}", *map(str, factors.tolist())]
        check_same(described, "factors", self.ranks.group)
        _C.increment_versions([own])  # tells autograd on ranks without a part, too
        for part in parts:
            self.local.fused._scale_rows(part.tensor, rows[part.rows()])
        self.partition.send(own)
        self._consolidated = None

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
