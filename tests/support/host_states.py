"""What tests of states on the host share. The memory of parameters stands for a GPU's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from torchopt_ext import _C
from torchopt_ext.mixed_precision import offload
from torchopt_ext.state.host_memory import is_on_host

BESIDE = re.compile("step|.*_scale_v2|second_momentum_buffer")
"""Entries of states that stay beside their parameters."""


def places(optimizers: Any) -> dict[Any, set[bool]]:
    """Returns by parameter whether its entries by element lie on the host."""
    return {
        param: {is_on_host(v) for k, v in state.items() if not BESIDE.fullmatch(k)}
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if param.numel()
    }


def let_offloading_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets offload_fsdp_optimizer move what is not on the host, although no GPU holds it."""
    monkeypatch.setattr(offload, "is_on_device", lambda t: t.numel() > 1 and not is_on_host(t))


def count_locks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of tensors of each locked allocation from now on."""
    calls: list[int] = []
    carve = _C.carve

    def counted(like: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("stepped_on") is not None:
            calls.append(len(like))
        return carve(like, *args, **kwargs)

    monkeypatch.setattr(_C, "carve", counted)
    return calls


def addresses(optimizers: Any) -> list[int]:
    """Returns where the entries on the host lie."""
    return sorted(
        value.data_ptr()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if is_on_host(value) and value.numel()
    )
