"""Where optimizers' states lie: beside the parameters, or in memory of the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from torchopt_ext.optim.bandwidths import warn_of_distance
from torchopt_ext.optim.context import IDLE
from torchopt_ext.optim.param_states import moments_of
from torchopt_ext.optim.planned import PlannedStep
from torchopt_ext.state.by_row import BY_ROW
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.host_memory import HostMemory, Need, is_on_host, place_states
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import named_group_params, params_of
from torchopt_ext.state.storage import EMA, Storage, is_steppable

_together: ContextVar[dict[int, ref[Any]] | None] = ContextVar("together", default=None)
"""The optimizers built in :func:`placed_together`, by id."""


class PlacedStates(PlannedStep):
    """A planned step whose states may lie in memory of the host, or move between steps."""

    def _reserve_host_memory(self) -> None:
        """Locks memory for states that will lie on the host."""
        if (built := _together.get()) is not None:
            built[id(self)] = ref(self)
        else:
            self._choose_resident()
            _reserve([self], [self._storage])

    def _init_states(self, chooses: Any) -> None:
        self._choose_resident()
        super()._init_states(chooses)

    def _choose_resident(self) -> None:
        if self._storage.host.users == 1:  # otherwise all of them have chosen
            (self._storage,) = _with_resident([self], [self._storage])

    def move_state(self, device: torch.device | str | None) -> None:
        """Moves the states to the host ("cpu") or beside their parameters ("cuda" or None).

        Between any two steps, which have the same bits in either place. Does nothing where the
        parameters are on the CPU. With "cpu", ``state_fraction`` says how much moves.

        Raises:
            ValueError: ``device`` is another one.
            RuntimeError: a step of this optimizer is under way, or the system does not let pages be
                locked. Nothing has changed.
        """
        move_states([self], device)

    def _rebuild(self) -> Any:
        self._wait_for_states()
        built = super()._rebuild()
        if self._storage.state_device is not None:
            self._storage.host.drop_others(params_of(self))
        return built

    def _needs_on_host(self) -> list[Need]:
        """Returns the entries that lie on the host, or will once there are states."""
        return [need for need in _needs(self) if self._storage.on_host(need.param)]

    def _entries(self) -> list[tuple[Any, dict[str, Any]]]:
        return [
            (param, state)
            for param, state in self.state.items()
            if isinstance(param, Tensor) and isinstance(state, dict)
        ]

    def _wait_for_states(self) -> None:
        """Waits for steps on GPUs that may still write states on the host."""
        if self._storage.state_device is not None:
            for device in {local_tensor(param).device for param, _ in self._entries()}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    @property
    def host_bytes(self) -> int:
        """The bytes of the states that lie in page-locked memory of the host."""
        values = (value for _, state in self._entries() for value in state.values())
        return sum(local_tensor(value).nbytes for value in values if is_on_host(value))


@contextmanager
def placed_together() -> Iterator[None]:
    """Places the states of the optimizers that are built in a ``with`` block as those of one.

    Their memory on the host is locked together, and ``state_fraction`` counts over all of them.
    """
    every: dict[int, ref[Any]] = {}
    token = _together.set(every)
    try:
        yield
    finally:
        _together.reset(token)
    if built := [optimizer for each in every.values() if (optimizer := each()) is not None]:
        host = HostMemory(users=len(built))
        storages = [replace(optimizer._storage, host=host) for optimizer in built]
        storages = _with_resident(built, storages)
        _reserve(built, storages)
        for optimizer, storage in zip(built, storages, strict=True):
            optimizer._storage = storage


@torch.no_grad()
def move_states(
    optimizers: Sequence[Any], device: torch.device | str | None, owner: Any = None
) -> None:
    """Does :meth:`PlacedStates.move_state` for one optimizer, or all that were placed together.

    Args:
        owner: a container or wrapper around the optimizers.
    """
    every = [each for each in (*optimizers, owner) if each is not None]
    if any(each._context is not IDLE for each in every):
        raise RuntimeError("a step of this optimizer is under way: move its state afterwards")
    storages = [replace(each._storage, state_device=device) for each in optimizers]
    for each in every:  # offload_fsdp_optimizer may have moved states until the next step
        if (offloader := getattr(each, "_offloader", None)) is not None:
            offloader.bring_back()
    storages = _with_resident(optimizers, storages)
    _reserve(optimizers, storages)
    for optimizer, storage in zip(optimizers, storages, strict=True):
        optimizer._wait_for_states()
        place_states(optimizer._entries(), storage)
        optimizer._storage = storage


def _reserve(optimizers: Sequence[Any], storages: Sequence[Storage]) -> None:
    """Locks memory for states that will lie on the host and do not yet, one allocation an entry.

    Raises:
        RuntimeError: the system does not let pages be locked; nothing has changed.
    """
    if not optimizers:
        return
    missing = [
        need
        for optimizer, storage in zip(optimizers, storages, strict=True)
        if storage.state_device is not None
        for need in _needs(optimizer)
        if storage.on_host(need.param)
        and not is_on_host(optimizer.state.get(need.param, {}).get(need.name))
    ]
    for device in {local_tensor(need.param).device for need in missing}:
        warn_of_distance(device)
    host = storages[0].host
    host.drop_others((need.param for need in missing), users=len(optimizers))
    host.reserve(missing)


def _needs(optimizer: Any) -> Iterator[Need]:
    """Yields the entries by element of all parameters that a step may update, in their order."""
    storage: Storage = optimizer._storage
    for _, group, _, param in named_group_params(optimizer):
        if not (param.requires_grad and is_steppable(param)) or torch.nn.parameter.is_lazy(param):
            continue
        entries = dict(moments_of(group, param, storage))
        if kept := storage.master_of(param):
            entries[kept] = MASTERS[kept]
        if average := storage.average_dtype(param):
            entries[EMA] = average
        for name, dtype in entries.items():
            if name not in BY_ROW:
                yield Need(param, name, dtype)


def _with_resident(optimizers: Sequence[Any], storages: Sequence[Storage]) -> list[Storage]:
    """Chooses the parameters whose states stay on their GPU: the first that fit."""
    everywhere = [replace(storage, resident=frozenset()) for storage in storages]
    sizes: dict[tuple[torch.device, float], dict[int, int]] = {}
    for optimizer, storage in zip(optimizers, everywhere, strict=True):
        if storage.state_device is None or storage.state_fraction == 1.0:
            continue
        for param, _, dtype in _needs(optimizer):
            if storage.on_host(param):
                local = local_tensor(param)
                its = sizes.setdefault((local.device, storage.state_fraction), {})
                its[id(param)] = its.get(id(param), 0) + local.numel() * dtype.itemsize
    resident = set()
    modules: dict[int, int] = {}  # forward waits for them in this order
    for optimizer in optimizers:
        modules |= optimizer._module_numbers()
    for (_, fraction), its in sizes.items():
        left = (1.0 - fraction) * sum(its.values())
        for key, size in sorted(its.items(), key=lambda item: modules.get(item[0], -1)):
            if size <= left:
                left -= size
                resident.add(key)
    return [replace(storage, resident=frozenset(resident)) for storage in everywhere]
