"""FusedAdam and FusedAdamW as functional optimizers: gradients are an argument of ``step``.

The form that torch.distributed.optim.utils.functional_optim_map asks for, and that steps inside
DDP's backward need: one bucket's parameters at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim.utils import register_functional_optim

from torchopt_ext import ops
from torchopt_ext.optim import FusedAdam, FusedAdamW


class FunctionalFusedAdam:
    """FusedAdam whose ``step`` takes gradients; state and arithmetic are the same.

    Args:
        params: what to update.
        defaults: of FusedAdam; what needs all gradients at once (``max_grad_norm``,
            ``skip_nonfinite``) or a storage of its own is not available.

    Raises:
        ValueError: an argument that is not available here, or no parameters.
    """

    optimizer_class: type[FusedAdam] = FusedAdam

    def __init__(
        self, params: Sequence[Tensor], *, _allow_empty_param_list: bool = False, **defaults: Any
    ) -> None:
        if not params and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        checked = self.optimizer_class([torch.zeros(1)], **defaults)
        plain = self.optimizer_class([torch.zeros(1)])
        for setting in ("_settings", "_storage", "_options"):
            if getattr(checked, setting) != getattr(plain, setting):
                raise ValueError(
                    f"{self.optimizer_class.__name__} steps bucket by bucket inside DDP's backward "
                    f"here, so that norms, skipped steps, master weights, state dtypes, random "
                    f"rounding and tracking are not available; got {defaults}"
                )
        self.defaults = checked.defaults
        self.param_group: dict[str, Any] = {"params": list(params)}
        self.param_group |= {k: v for k, v in checked.param_groups[0].items() if k != "params"}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._controls: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Updates the parameters that have a gradient.

        Args:
            gradients: one for each parameter, of its shape and dtype, or None.

        Raises:
            ValueError: their number is not that of the parameters.
        """
        group = self.param_group
        params: list[Tensor] = group["params"]
        if len(params) != len(gradients):
            raise ValueError(f"got {len(gradients)} gradients for {len(params)} parameters")
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for param, gradient in zip(params, gradients, strict=True):
            if gradient is not None:
                by_device.setdefault(param.device, []).append((param, gradient))
        moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        for device, pairs in by_device.items():
            for param, _ in pairs:
                if param not in self.state:
                    step = torch.zeros((), dtype=torch.float32, device=device)
                    zeros = {name: torch.zeros_like(param.detach()) for name in moments}
                    self.state[param] = {"step": step} | zeros
            entries = [self.state[param] for param, _ in pairs]
            if device not in self._controls:
                self._controls[device] = ops.new_control(device)
            ops.adam_(
                [param.detach() for param, _ in pairs],
                [gradient for _, gradient in pairs],
                [entry["exp_avg"] for entry in entries],
                [entry["exp_avg_sq"] for entry in entries],
                [entry["max_exp_avg_sq"] for entry in entries] if group["amsgrad"] else [],
                [entry["step"] for entry in entries],
                self._controls[device],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                maximize=group["maximize"],
            )


class FunctionalFusedAdamW(FunctionalFusedAdam):
    """FusedAdamW in the same form."""

    optimizer_class = FusedAdamW


def register() -> None:
    """Makes them known to torch.distributed.optim."""
    known: Any = register_functional_optim
    known(FusedAdam, FunctionalFusedAdam)
    known(FusedAdamW, FunctionalFusedAdamW)
