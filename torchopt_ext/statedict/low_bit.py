"""Decodes moments that torchao and bitsandbytes keep in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import is_dtensor
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.state.local import as_placed
from torchopt_ext.statedict.loaded import Slot

# bitsandbytes/optim/optimizer.py: a state dict has the codes, their values and scales directly, or
# in this entry, which FSDP leaves alone.
_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK = 256  # consecutive elements in memory that share a scale


def dequantized(slot: Slot) -> Slot:
    """Returns the slot with float moments. Unreadable entries stay, so that a check names them."""
    if all(type(value) is Tensor for value in slot.entry.values()) and "exp_avg" in slot.entry:
        return slot
    entry = dict(slot.entry)
    if isinstance(wrapped := entry.pop(_WRAPPED, None), Mapping):
        entry |= wrapped
    for number, name in enumerate(ADAM.required, 1):
        keys = [f"{kind}{number}" for kind in ("state", "absmax", "qmap")]
        state, scales, values = map(entry.get, keys)
        if isinstance(state, Tensor) and state.is_floating_point():  # a small parameter's moment
            moment: Tensor | None = state
        else:
            moment = _of_blocks(state, scales, values)
        if moment is not None:
            entry = {key: value for key, value in entry.items() if key not in keys}
            entry[name] = moment
    return replace(slot, entry={name: _plain(value) for name, value in entry.items()})


def with_step(slot: Slot) -> Slot:
    """Returns the slot with a step count of 1 for torch.optim.SGD's momentum, which has none.

    A buffer that is None, before the first step, is dropped.
    """
    if "step" in slot.entry or not any("momentum_buffer" in name for name in slot.entry):
        return slot
    held = {name: value for name, value in slot.entry.items() if value is not None}
    return replace(slot, entry=held and {"step": torch.ones(()), **held})


def _of_blocks(codes: Any, scales: Any, values: Any) -> Tensor | None:
    """Returns each code's value times its block's scale; None unless shapes are bitsandbytes'."""
    if not all(isinstance(tensor, Tensor) for tensor in (codes, scales, values)):
        return None
    blocks = -(-codes.numel() // _BLOCK)
    fits = codes.dtype == torch.uint8 and codes.is_contiguous()
    if not fits or scales.shape != (blocks,) or values.shape != (256,):
        return None
    numbers = values.float()[codes.view(-1).int()]
    numbers *= scales.float().repeat_interleave(_BLOCK)[: codes.numel()]
    return numbers.view(codes.shape)


def _plain(value: Any) -> Any:
    """Decodes torchao's subclasses. A plain tensor's method is for torch's quantized dtypes."""
    local: Any = value.to_local() if is_dtensor(value) else value
    if not isinstance(local, Tensor) or type(local).dequantize is Tensor.dequantize:
        return value
    return as_placed(local.dequantize(), value)
