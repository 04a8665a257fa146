"""The step that fused optimizers share: pass A, one decision, pass B (docs/numerics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchopt_ext import _C, ops
from torchopt_ext.optim.local import (
    NormKey,
    all_reduce_,
    all_reduce_over_mesh_,
    counts_here,
    moved,
)

if TYPE_CHECKING:
    from torchopt_ext.optim.base import FusedAdamBase

FLAGS = slice(-2, None)
"""Where an accumulator counts what was infinite and what was a NaN (docs/numerics.md section 3)."""


class HasNorm(Protocol):
    """What takes part in a gradient norm: fused optimizers, their gradients collected."""

    process_group: Any

    @property
    def parts(self) -> list[tuple[torch.device, NormKey]]:
        """Device and norm key of each part; the same keys in the same order on all ranks."""

    @property
    def devices(self) -> list[torch.device]:
        """Where the norm has to be known."""

    def accumulate(self, part: int, accumulator: Tensor) -> None:
        """Adds the squares of a part's gradients."""


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
        total = accumulated_norm(optimizers) if first.wants_norm else {}
        for optimizer in optimizers:
            optimizer.update(total)
        del kept
    finally:
        for optimizer in optimizers:
            optimizer.release()


def accumulated_norm(optimizers: Sequence[HasNorm]) -> dict[torch.device, Tensor]:
    """The squares of all gradients, on every device that has some.

    Without a process group, parameters that are split over the same ranks are summed here first and
    then over those ranks. With one, every rank adds what no other rank of the group does, and one
    all-reduce joins them. The sum is exact, so neither order nor grouping shows.
    """
    group = optimizers[0].process_group
    by_key: dict[NormKey, dict[torch.device, Tensor]] = {}
    devices: dict[torch.device, None] = {}
    for optimizer in optimizers:
        for part, (device, key) in enumerate(optimizer.parts):
            on_device = by_key.setdefault(key, {})
            if device not in on_device:
                on_device[device] = ops.new_accumulator(device)
            if group is None or counts_here(key, group):
                optimizer.accumulate(part, on_device[device])
            else:  # another replica's squares count, but what is not finite here has to be known
                replica = ops.new_accumulator(device)
                optimizer.accumulate(part, replica)
                on_device[device][FLAGS] += replica[FLAGS]
        devices |= dict.fromkeys(optimizer.devices)
    home = next(iter(devices))
    total = ops.new_accumulator(home)
    _count_overflow(optimizers, total)
    for key, on_device in by_key.items():
        subtotal = ops.new_accumulator(home)
        for accumulator in on_device.values():
            subtotal += moved(accumulator, home)
        if group is None:
            _count_overflow(optimizers, subtotal)
            all_reduce_over_mesh_(subtotal, key)
        total += subtotal
    if group is not None:
        all_reduce_(total, group)
    else:
        _agree_on_overflow(total, list(by_key))
    return {device: moved(total, device) for device in devices}


def _agree_on_overflow(total: Tensor, keys: Sequence[NormKey]) -> None:
    """Lets every rank know what is not finite on any rank of the parameters' meshes.

    Sums over the dimensions that split a parameter reach neither replicas, of which one may be
    broken, nor the ranks of another parameter's mesh.
    """
    reached = [{(key[0], d) for d in key[1]} if key else set() for key in keys]
    meshes = dict.fromkeys(key[0] for key in keys if key)
    joined = [(mesh, d) for mesh in meshes for d in range(mesh.ndim) if mesh.size(d) > 1]
    if all(reach.issuperset(joined) for reach in reached):
        return
    for mesh, dimension in joined:
        flags = total[FLAGS].clone()
        all_reduce_(flags, mesh.get_group(dimension), torch.distributed.ReduceOp.MAX)
        total[FLAGS] = flags


def _count_overflow(optimizers: Sequence[HasNorm], accumulator: Tensor) -> None:
    """Counts as a NaN what a scaler found when it unscaled this rank's gradients."""
    for optimizer in optimizers:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and getattr(optimizer, "check_overflow", False):
            accumulator[-1] += (moved(found_inf, accumulator.device) != 0).sum()


def cpu_kernels() -> str:
    """The instruction set of the CPU kernels in use: "default", "avx2" or "avx512"."""
    return _C.cpu_kernels()
