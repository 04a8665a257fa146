"""Devices: copies between them, streams and captured graphs."""

from typing import Any

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``, ready to be read there.

    A copy to the host blocks: torch would return from a non-blocking copy before it has ended.
    """
    if tensor.device == device:
        return tensor  # faster than to(), which calls into torch first
    return tensor.to(device, non_blocking=device.type != "cpu")


def current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the stream that orders this thread's work on a device; None for the host."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def is_captured() -> bool:
    """Returns whether this thread's work on a GPU is captured in a graph."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def sent_to_host(tensor: Tensor) -> tuple[Tensor, Any] | None:
    """Starts a copy of a GPU's tensor to pinned memory; returns it and the event that ends it.

    Returns None while a graph is captured, because its replays tell the host nothing.
    """
    if is_captured():
        return None
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    sent.copy_(tensor, non_blocking=True)
    end: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(tensor.device))
    return sent, end
