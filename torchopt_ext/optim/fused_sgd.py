"""FusedSGD: torch.optim.SGD in two passes over memory."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from torchopt_ext.optim.estimate import estimate
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.options import StepArguments, with_options


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD, fused with clipping and overflow check.

    The arguments up to ``nesterov`` and ``maximize`` are torch's; weight decay is added to the
    gradient, unless ``decoupled_weight_decay``. Per-parameter state: ``step`` and, with
    momentum, torch's ``momentum_buffer``.

    Args:
        params, **options, and errors: as in :class:`FusedOptimizer`.
    """

    estimate = staticmethod(partial(estimate, algorithm="sgd"))

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[StepArguments],
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "foreach": foreach,
            "differentiable": differentiable, "fused": fused is not False,
        }  # fmt: skip
        if decoupled_weight_decay:
            defaults["decoupled_weight_decay"] = True
        self._build(params, {"algorithm": "sgd", **defaults}, options)
