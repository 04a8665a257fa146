"""Scripts a training step's second half, saves it, loads it and runs it.

    python examples/torchscript_step.py --out step.pt

The saved module calls only the library's operators, so a C++ program that has loaded
libtorchopt_ext.so runs it as well: torchscript_step.cpp.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from torchopt_ext import ops


class Step(nn.Module):
    """AdamW with clipping and a warmup-stable-decay schedule over lists of tensors."""

    def __init__(self, max_grad_norm: float, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.register_buffer("control", ops.new_control(max_grad_norm=max_grad_norm))

    def forward(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        step: int,
    ) -> Tensor:
        """Updates all lists in place and returns the gradients' norm before clipping."""
        accumulator = torch.zeros(70, dtype=torch.int64, device=self.control.device)
        torch.ops.torchopt_ext.grad_sumsq_(grads, accumulator)
        torch.ops.torchopt_ext.control_update_(self.control, accumulator, None, None)
        factor = torch.ops.torchopt_ext.lr_factor(
            step, warmup_steps=2, stable_steps=4, decay_steps=4
        )
        nothing: list[Tensor] = []
        torch.ops.torchopt_ext.adam_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            nothing,
            steps,
            self.control,
            lr=self.lr * factor,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            decoupled_weight_decay=True,
            maximize=False,
        )
        return torch.ops.torchopt_ext.accumulator_total(accumulator).sqrt()

    @torch.jit.export
    def partition(self, numels: list[int], world_size: int) -> list[int]:
        """Returns the rank that would own each tensor if several ranks shared the step."""
        return torch.ops.torchopt_ext.partition_greedy(numels, world_size, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/step.pt"))
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.script(Step(max_grad_norm=1.0, lr=0.1)).save(str(out))

    loaded = torch.jit.load(str(out))
    params = [torch.ones(3, 4), torch.ones(5)]
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    counts = [torch.zeros(()) for _ in params]
    for step in range(10):
        grads = [2 * p for p in params]  # gradients of the sum of squares
        norm = loaded(params, grads, *states, counts, step)
        print(f"step {step}: gradient norm {norm.item():.4f}")
    print("ranks of two:", loaded.partition([p.numel() for p in params], 2))


if __name__ == "__main__":
    main()
