"""The step that fused optimizers share: pass A, one decision, pass B (docs/numerics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchopt_ext import _C, ops
from torchopt_ext.optim.collective import collective
from torchopt_ext.optim.local import NormKey, all_reduce_, moved

if TYPE_CHECKING:
    from torchopt_ext.optim.base import FusedAdamBase


@torch.no_grad()
@torch.compiler.disable
def fused_step(optimizers: Sequence[FusedAdamBase]) -> None:
    """Steps several optimizers with one gradient norm, one clip factor and one skip decision.

    Closures and step hooks are the callers' business: ``Optimizer.step`` runs them, this does not.

    Args:
        optimizers: fused optimizers, all with the same ``max_grad_norm``, ``skip_nonfinite`` and
            ``process_group``.

    Raises:
        ValueError: the optimizers' settings differ.
        RuntimeError: a gradient does not fit its parameter; names it. Nothing is changed.
    """
    first = optimizers[0]
    for other in optimizers[1:]:
        if other.norm_settings != first.norm_settings:
            raise ValueError(
                f"optimizers of one step differ in (max_grad_norm, skip_nonfinite, process_group): "
                f"{first.norm_settings} and {other.norm_settings}"
            )
    if len(optimizers) == 1 and first.step_alone():
        return
    try:
        for optimizer in optimizers:
            optimizer.collect()
        kept = [optimizer.kept() for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.check_scaler()
        total = _accumulate(optimizers) if first.wants_norm else {}
        for optimizer in optimizers:
            optimizer.update(total)
        del kept
    finally:
        for optimizer in optimizers:
            optimizer.release()


def _accumulate(optimizers: Sequence[FusedAdamBase]) -> dict[torch.device, Tensor]:
    """The squares of all gradients, on every device that has some.

    Parts whose parameters are split over the same ranks are summed here first and then over those
    ranks; the sum is exact, so neither order nor grouping shows.
    """
    by_key: dict[NormKey, dict[torch.device, Tensor]] = {}
    devices: dict[torch.device, None] = {}
    for optimizer in optimizers:
        for part, (device, key) in enumerate(optimizer.parts):
            on_device = by_key.setdefault(key, {})
            if device not in on_device:
                on_device[device] = ops.new_accumulator(device)
            optimizer.accumulate(part, on_device[device])
        devices |= dict.fromkeys(optimizer.devices)
    home = next(iter(devices))
    total = ops.new_accumulator(home)
    _count_overflow(optimizers, total)
    for key, on_device in by_key.items():
        subtotal = ops.new_accumulator(home)
        for accumulator in on_device.values():
            subtotal += moved(accumulator, home)
        _count_overflow(optimizers, subtotal)
        all_reduce_(subtotal, key)
        total += subtotal
    group = optimizers[0].process_group
    if group is not None:
        with collective("adding up the gradient norm"):
            torch.distributed.all_reduce(total, group=group)
    return {device: moved(total, device) for device in devices}


def _count_overflow(optimizers: Sequence[FusedAdamBase], accumulator: Tensor) -> None:
    """Counts as a NaN what a scaler found when it unscaled this rank's gradients."""
    for optimizer in optimizers:
        found_inf = getattr(optimizer, "found_inf", None)
        if optimizer.check_overflow and found_inf is not None:
            accumulator[-1] += (moved(found_inf, accumulator.device) != 0).sum()


def cpu_kernels() -> str:
    """The instruction set of the CPU kernels in use: "default", "avx2" or "avx512"."""
    return _C.cpu_kernels()
