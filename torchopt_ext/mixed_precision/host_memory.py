"""Host memory of exactly the size that is asked for, pinned where that is possible.

torch's allocator of pinned memory rounds sizes up to powers of two.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

cuda: Any = torch.cuda


class HostMemory:
    """``block``: uint8 elements on the host, pinned if CUDA is in use and its driver agrees.

    They stay pinned as long as this object lives.
    """

    def __init__(self, size: int) -> None:
        self.block: Tensor = torch.empty(size, dtype=torch.uint8)
        if size and cuda.is_initialized():
            runtime, address = cuda.cudart(), self.block.data_ptr()
            if int(runtime.cudaHostRegister(address, size, 0)) != 0:
                forget_error()
            else:
                unpin = weakref.finalize(self, _unpin, address, self.block)
                unpin.atexit = False  # the driver has let go of everything by then


def forget_error() -> None:
    """Lets the runtime's last error be noticed here, and not after whatever kernel comes next."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(address: int, _keeps: Tensor) -> None:
    cuda.cudart().cudaHostUnregister(address)
