"""FusedAdam and FusedAdamW: torch.optim.Adam and AdamW in two passes over memory."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim import Adam  # torch's own, also where a program replaces it by ours

from torchopt_ext._arguments import expect_bools
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.options import StepArguments, with_options
from torchopt_ext.state.algorithms import numbers_of


class FusedAdam(FusedOptimizer):
    """torch.optim.Adam (Kingma & Ba, arXiv:1412.6980), fused with clipping and overflow check.

    The arguments up to ``fused`` are torch.optim.Adam's; weight decay is added to the gradient.
    ``foreach=True``, ``fused=False`` and ``differentiable=True`` raise ValueError. Per-parameter
    state is torch's: ``step``, ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq``.

    Args:
        params: as in :class:`FusedOptimizer`.
        bias_correction: divides the moments by ``1 - beta**step``, as Adam does. A group may have
            a value of its own. Groups have the key only if it was given or the value is False:
            torch's have none.
        decoupled_weight_decay: uses the weight decay of AdamW, as in torch.optim.Adam.
        **options: as :class:`torchopt_ext.optim.options.StepOptions`, for all groups alike.

    Raises:
        TypeError, ValueError: as :class:`FusedOptimizer`.
    """

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        **options: Unpack[StepArguments],
    ) -> None:
        hypers = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }  # fmt: skip
        numbers_of(hypers)  # checks types
        expect_bools(capturable=capturable)
        torchs = Adam(  # checks the arguments, and knows the keys of state dicts
            [torch.empty(0)], lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, capturable=capturable,
        )  # fmt: skip
        defaults = {
            "betas": tuple(b if isinstance(b, Tensor) else float(b) for b in betas),
            "foreach": foreach,
            "fused": fused is not False,
            "differentiable": differentiable,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        if not bias_correction:
            defaults["bias_correction"] = False
        self._build(params, torchs.defaults | defaults, options)


class FusedAdamW(FusedAdam):
    """torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101), fused as :class:`FusedAdam` is.

    Weight decay multiplies the parameter and does not go through the gradient. Everything else is
    as in :class:`FusedAdam`.
    """

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        **options: Unpack[StepArguments],
    ) -> None:
        arguments: dict[str, Any] = {**locals(), **options, "decoupled_weight_decay": True}
        del arguments["self"], arguments["__class__"], arguments["options"]
        super().__init__(**arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict of Adam has False here
            group["decoupled_weight_decay"] = True
