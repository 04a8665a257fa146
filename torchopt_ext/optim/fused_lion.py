"""FusedLion: Lion in two passes over memory."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from torchopt_ext.optim.estimate import estimate
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.options import StepArguments, with_options


class FusedLion(FusedOptimizer):
    """Lion (Chen et al., arXiv:2302.06675): weights move by ``lr`` times the sign of an average.

    ``sign(0)`` is 0. The weight decay is decoupled. Per-parameter state: ``step``, ``exp_avg``.

    Args:
        params, **options, and errors: as in :class:`FusedOptimizer`.
        betas: weights of the old average in the direction, and in the new average.
    """

    estimate = staticmethod(partial(estimate, algorithm="lion"))

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[StepArguments],
    ) -> None:
        hypers = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, algorithm="lion", **hypers, **options)
