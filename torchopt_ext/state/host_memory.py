"""States of parameters on a GPU in page-locked memory of the host, where a step's kernels use them.

Each entry of the states has one allocation a device: locking pages takes milliseconds a call, and
800 calls have taken minutes (TensorRT-LLM#17429).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext._torch import dtensor_of, is_dtensor
from torchopt_ext.state.local import PLAIN, inner_tensors, local_tensor

ACCELERATORS = {"cuda"}
"""Types of devices beside whose parameters states need not lie. Tests add "cpu": the memory of
parameters then stands for a GPU's."""


class Need(NamedTuple):
    """An entry of a parameter's state that has a value for each element."""

    param: Any
    name: str
    dtype: torch.dtype


class HostMemory:
    """Memory that is locked before the states exist: late locking has deadlocked with NCCL.

    Copies of an optimizer have none: their states are placed by their first step.

    Args:
        users: how many optimizers take from it.
    """

    def __init__(self, users: int = 1) -> None:
        self.users = users
        self._reserved: dict[tuple[int, str], Tensor] = {}

    def reserve(self, needs: Iterable[Need]) -> None:
        """Locks memory for entries that have none.

        Raises:
            RuntimeError: the system does not let pages be locked; nothing has changed.
        """
        new = [need for need in needs if not self._fits(need)]
        for need, memory in zip(new, _allocated(new), strict=True):
            self._reserved[id(need.param), need.name] = memory

    def _fits(self, need: Need) -> bool:
        # Another parameter may have the id of a freed one: then only the size counts.
        memory, local = self._reserved.get((id(need.param), need.name)), local_tensor(need.param)
        return memory is not None and memory.dtype == need.dtype and memory.shape == local.shape

    def take(self, needs: Sequence[Need]) -> list[Any]:
        """Returns zeros for entries, placed as their parameters, in reserved or in new memory."""
        self.reserve(needs)
        return [_placed(self._reserved.pop((id(n.param), n.name)), n.param) for n in needs]

    def take_reserved(self, need: Need) -> Any:
        """Returns zeros for an entry in reserved memory, None if there is none."""
        return self.take([need])[0] if self._fits(need) else None

    def drop_others(self, params: Iterable[Any], users: int = 1) -> None:
        """Frees memory that was reserved for other parameters than these, if all users ask."""
        if users != self.users:
            return
        ids = {id(param) for param in params}
        self._reserved = {key: memory for key, memory in self._reserved.items() if key[0] in ids}


def _allocated(needs: Sequence[Need]) -> list[Tensor]:
    """Returns zeros with the layouts of the parameters' local tensors, in the host's memory."""
    by_kind: dict[tuple[torch.device, str, torch.dtype], list[int]] = {}
    for k, (param, name, dtype) in enumerate(needs):
        by_kind.setdefault((local_tensor(param).device, name, dtype), []).append(k)
    memory: dict[int, Tensor] = {}
    for (device, _, dtype), numbers in by_kind.items():
        locals_ = [local_tensor(needs[k].param) for k in numbers]
        # dense, as torch.zeros_like() makes them
        like = [torch.empty_like(local, device="meta") for local in locals_]
        memory |= zip(numbers, _C.carve(like, dtype, stepped_on=device), strict=True)
    return [memory[k] for k in range(len(needs))]


def _placed(local: Tensor, param: Any) -> Any:
    return dtensor_of(local, param) if is_dtensor(param) else local


def is_on_host(value: Any) -> bool:
    """Returns whether a tensor is in such memory."""
    if not isinstance(value, Tensor):
        return False
    local = local_tensor(value)
    is_plain = local.layout is torch.strided and type(local) in PLAIN
    return bool(is_plain and local.device.type == "cpu" and _C.is_host_memory(local))


def place_states(entries: Iterable[tuple[Any, dict[str, Any]]], storage: Any) -> None:
    """Moves states to where ``storage`` (state/storage.py) says, given with their parameters.

    Leaves entries that do not fit to later checks, which name them.
    """
    to_host: list[tuple[dict[str, Any], Need]] = []
    moved: list[tuple[dict[str, Any], str, Any]] = []
    for param, state in entries:
        on_host = storage.on_host(param)
        for name in storage.by_element(state):
            value = state[name]
            if not _may_move(value, param) or is_on_host(value) == on_host:
                continue
            if not on_host:
                moved.append((state, name, torch.zeros_like(param, dtype=value.dtype)))
            elif storage.keeps(param, name):
                to_host.append((state, Need(param, name, local_tensor(value).dtype)))
    memory = storage.host.take([need for _, need in to_host])
    moved += [(state, need.name, new) for (state, need), new in zip(to_host, memory, strict=True)]
    for state, name, new in moved:  # only now: memory may have run out above
        local_tensor(new).copy_(local_tensor(state[name]))
        state[name] = new


def _may_move(value: Any, param: Any) -> bool:
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    local = local_tensor(value)
    dense = local.layout is torch.strided and not local.is_meta and not inner_tensors(local)
    return dense and is_dtensor(value) == is_dtensor(param)
