"""What an optimizer step costs: ours beside torch's clip_grad_norm_ and fused AdamW."""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchopt_ext import FusedAdamW

WARM_UP = 3  # the first steps create state and touch its pages


def copy_with_gradients(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for new, old in zip(twin.parameters(), model.parameters(), strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    return twin


def compare_step_times(
    model: nn.Module, options: dict[str, Any], max_grad_norm: float, repeats: int = 100
) -> dict[str, float]:
    """Median milliseconds of one clipped AdamW step on copies of `model` and its gradients.

    `options` are AdamW's lr, betas and so on. The two take turns, so that both meet the same
    caches and the same noise.
    """
    our_model, torch_model = copy_with_gradients(model), copy_with_gradients(model)
    ours = FusedAdamW(our_model.parameters(), **options, max_grad_norm=max_grad_norm)
    torchs = torch.optim.AdamW(torch_model.parameters(), **options, fused=True)

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(torch_model.parameters(), max_grad_norm)
        torchs.step()

    contenders: dict[str, Callable[[], object]] = {"ours": ours.step, "torch": clip_and_step}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(WARM_UP + repeats):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(taken[WARM_UP:]) for name, taken in times.items()}
