"""FusedAdam and FusedAdamW: torch.optim.Adam and AdamW in two passes over memory."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim.base import FusedAdamBase


class FusedAdam(FusedAdamBase):
    """torch.optim.Adam (Kingma & Ba, arXiv:1412.6980), fused with clipping and overflow check.

    The arguments up to ``fused`` are torch.optim.Adam's; ``weight_decay`` is added to the gradient.
    ``foreach=True``, ``fused=False`` and ``differentiable=True`` raise ValueError. Per-parameter
    state is torch's: ``step``, ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq``.

    Args:
        params: parameters, named parameters or param groups; docs/step.md says of which kinds.
            DTensors are stepped by their local shards, frozen parameters may be anything.
        max_grad_norm: clips the gradients, inside the step, to this 2-norm over all of them, as
            ``torch.nn.utils.clip_grad_norm_`` would; the gradients themselves are not changed.
            None or 0: off. ``math.inf``: measures ``control.grad_norm`` without clipping.
        skip_nonfinite: a step in which any gradient is not finite changes nothing.
        decoupled_weight_decay: AdamW instead, as in torch.optim.Adam.
        process_group: ranks that take norm and skip decision together, where DTensors do not say
            it: plain parameters are then disjoint shards. DTensors whose meshes lie within the
            group are counted once (experts on meshes of their own); those whose meshes share this
            rank alone with it are summed over their meshes first (pipeline stages under FSDP).
            Leave it out under DDP, whose gradients are replicated, and where DTensors' meshes are
            all.
        master_weights: for bfloat16 and float16 parameters: "fp32" keeps a float32 copy in
            ``state[p]["master_weight"]`` which steps update and parameters are rounded from;
            "remainder", for bfloat16, keeps the 16 bits that complete the parameter to float32 in
            ``state[p]["remainder"]`` (int16), 2 bytes less (docs/numerics.md section 7).
        state_dtype: dtype of the moments, float32 or bfloat16; None for float32 with a master
            weight and for the parameter's own dtype without.
        stochastic_rounding: bfloat16 parameters without master weight, and bfloat16 moments, are
            rounded up or down at random so that the mean is exact.
        rounding_seed: with step, parameter number and element it decides every random bit.
        write_back_gradients: gradients become unscaled and clipped in memory, too.
        track: what the step notes of each parameter on its way, for :attr:`telemetry`: any of
            "norms" (of gradient and update), "lost_updates" (elements whose update rounded to
            nothing) and "digest" (64 bits that tell replicas apart); True for all.

    Raises:
        TypeError: a parameter that no step could update; names it.
        ValueError: an argument out of range.
    """


class FusedAdamW(FusedAdamBase):
    """torch.optim.AdamW (Loshchilov & Hutter, arXiv:1711.05101), fused as :class:`FusedAdam` is.

    ``weight_decay`` multiplies the parameter, apart from the gradient; everything else is as in
    :class:`FusedAdam`.
    """

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
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
        master_weights: str | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        write_back_gradients: bool = False,
        track: bool | Collection[str] = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            process_group=process_group,
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
            write_back_gradients=write_back_gradients,
            track=track,
            decoupled_weight_decay=True,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict of Adam's says otherwise
            group["decoupled_weight_decay"] = True
