"""Weights that ranks hold in parts and that change between steps, with their masters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext.state.collective import fail_together
from torchopt_ext.state.masters import row_factors
from torchopt_ext.state.params import find_param, params_of
from torchopt_ext.zero.averages import AveragesOfRanks
from torchopt_ext.zero.exchange import check_same
from torchopt_ext.zero.ranks import bounded


class WeightsOfRanks(AveragesOfRanks):
    """The interface of one optimizer's weights and averages for parts on many ranks."""

    param_groups: list[dict[str, Any]]

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
