"""Cases with bfloat16 parameters: ours, and float32 masters updated by torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import MAX_NORM, OURS, SCALER, SCALER_SETTINGS, gradients_of, params_with, ready_scaler
from harness import Case, Group
from roofline import in_turn, loop_case
from shapes import Shapes
from torch import Tensor, nn

from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.state.quantized import SCALES

MASTERS, REMAINDER = f"{OURS}, fp32 masters", f"{OURS}, remainder"
INT8 = f"{OURS}, remainder8, int8 moments"
PLAIN, STOCHASTIC = f"{OURS}, bf16 moments", f"{OURS}, stochastic rounding"
OPERATORS, PREALLOCATED = "torch operators", "torch foreach, preallocated"

# Bytes per parameter. Pass A reads g, 2. Pass B with masters: g 2, master, m, v 24, p written 2;
# with remainders: g 2, p, remainder 8, m, v 16; with bf16 moments: g 2, p, m, v 12; with
# 8-bit moments and remainders: g 2, p 4, remainder 2, m, v 4, scales 0.25.
# Torch: cast 6, norm 4, scaling 8, fused step 28, copy back 6.
BYTES: dict[str, float] = {
    MASTERS: 30, REMAINDER: 28, INT8: 14.25, PLAIN: 16, STOCHASTIC: 16,
    OPERATORS: 52, PREALLOCATED: 52,
}  # fmt: skip
READ = "read_bf16"
UPDATE = {
    MASTERS: "update_bf16_master",
    REMAINDER: "update_bf16_remainder",
    INT8: "update_bf16_int8",
    PLAIN: "update_bf16",
    STOCHASTIC: "update_bf16",
}
OPTIONS: dict[str, dict[str, Any]] = {
    MASTERS: {"master_weights": "fp32"},
    REMAINDER: {"master_weights": "remainder"},
    INT8: {"master_weights": "remainder8", "state_dtype": "int8"},
    PLAIN: {},
    STOCHASTIC: {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
}


def build_masters(name: str, shapes: Shapes) -> Group:
    """Compares ours with masters, remainders and 8 bits to torch's operators with masters."""
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    kinds = (MASTERS, REMAINDER, INT8)
    cases = [case for kind in kinds for case in our_cases(kind, gradients, "cpu")]
    masters = TorchMasters(params_with(gradients))
    cases += [
        Case(OPERATORS, SCALER, masters.step_by_operators, BYTES[OPERATORS]),
        Case(PREALLOCATED, SCALER, masters.step_preallocated, BYTES[PREALLOCATED]),
    ]
    return Group(name, shapes, cases, baseline=OPERATORS)


def build_plain(name: str, shapes: Shapes) -> Group:
    """Builds cases with everything in bfloat16, rounded to nearest and stochastically."""
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    stochastic, _ = our_cases(STOCHASTIC, gradients, "cpu")  # its loops are those of PLAIN
    cases = [*our_cases(PLAIN, gradients, "cpu"), stochastic]
    return Group(name, shapes, cases, baseline=None)


def our_cases(implementation: str, gradients: list[Tensor], device: str) -> list[Case]:
    """Returns the step and, on the CPU, the roofline's loops over the same tensors."""
    params = params_with(gradients)
    optimizer = FusedAdamW(params, max_grad_norm=MAX_NORM, **OPTIONS[implementation])
    scaler = ready_scaler(GradScaler(device, **SCALER_SETTINGS), device)

    def call() -> None:
        scaler.step(optimizer)
        scaler.update()

    update = UPDATE[implementation]
    step = Case(implementation, SCALER, call, BYTES[implementation], f"{READ} + {update}")
    if device != "cpu":
        return [step]
    call()  # creates the state
    streams = streams_of(implementation, optimizer, gradients)
    return [step, in_turn(loop_case(READ, gradients), loop_case(update, *streams))]


def streams_of(
    implementation: str, optimizer: FusedAdamW, gradients: list[Tensor]
) -> list[list[Tensor]]:
    """Returns the tensors of pass B, in the order of the loop in roofline.cpp."""
    params = optimizer.param_groups[0]["params"]
    if implementation == INT8:  # leaves out vectors, whose moments are fp32
        pairs = zip(gradients, params, strict=True)
        held = [(g, p) for g, p in pairs if SCALES.keys() & optimizer.state[p].keys()]
        gradients, params = [g for g, _ in held], [p for _, p in held]
    state = [optimizer.state[p] for p in params]
    codes = "_codes" if implementation == INT8 else ""
    names = (f"exp_avg{codes}", f"exp_avg_sq{codes}")
    moments = [[entry[name] for entry in state] for name in names]
    if implementation == MASTERS:
        return [gradients, [kept_beside(entry) for entry in state], *moments, params]
    if implementation in (REMAINDER, INT8):
        return [gradients, params, [kept_beside(entry) for entry in state], *moments]
    return [gradients, params, *moments]


def kept_beside(entry: dict[str, Tensor]) -> Tensor:
    """Returns the master or remainder in a parameter's state."""
    (name,) = entry.keys() & {"master_weight", "remainder", "remainder8"}
    return entry[name]


class TorchMasters:
    """bf16 weights and their fp32 masters in torch.optim.AdamW(fused=True), stepped in two ways.

    Both check for overflow and multiply by the combined factor of scale and clipping. They clip
    fp32 copies, and leave the gradients of the weights unchanged.
    """

    scale = 1.0

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        self.gradients = [torch.empty_like(master) for master in self.masters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True)

    @torch.no_grad()
    def step_by_operators(self) -> None:
        """Steps by one operator a tensor, with gradients cast into new memory."""
        gradients = [weight.grad.to(torch.float32) for weight in self.weights]

        def scale_(factor: Tensor) -> None:
            for gradient in gradients:
                gradient.mul_(factor)

        def copy_back() -> None:
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

        self._finish(gradients, [gradient.norm() for gradient in gradients], scale_, copy_back)

    @torch.no_grad()
    def step_preallocated(self) -> None:
        """Steps by foreach operators, with gradients cast into memory that is kept."""
        torch._foreach_copy_(self.gradients, [weight.grad for weight in self.weights])
        self._finish(
            self.gradients,
            torch._foreach_norm(self.gradients),
            lambda factor: torch._foreach_mul_(self.gradients, factor),
            lambda: torch._foreach_copy_(self.weights, self.masters),
        )

    def _finish(
        self,
        gradients: list[Tensor],
        norms: list[Tensor],
        scale_: Callable[[Tensor], object],
        copy_back: Callable[[], object],
    ) -> None:
        norm = torch.linalg.vector_norm(torch.stack(norms)) / self.scale
        if not torch.isfinite(norm):
            return
        clip = torch.clamp((norm + 1e-6) / MAX_NORM, min=1.0)
        scale_(1.0 / (clip * self.scale))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        copy_back()
