"""Where an optimizer's states lie: beside the parameters, or in memory of the host."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim.context import IDLE
from torchopt_ext.optim.param_states import moments_of
from torchopt_ext.optim.planned import PlannedStep
from torchopt_ext.state.by_row import BY_ROW
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.host_memory import Need, is_on_host, place_states
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import named_group_params, params_of
from torchopt_ext.state.storage import Storage, is_steppable


class PlacedStates(PlannedStep):
    """A planned step whose states may lie in memory of the host, or move between steps."""

    def _reserve_host_memory(self) -> None:
        """Locks memory for states that will lie on the host."""
        self._storage = with_resident(self, self._storage)
        needs = self._needs_on_host()
        missing = [need for need in needs if need.name not in self.state.get(need.param, ())]
        self._storage.host.drop_others(need.param for need in missing)
        self._storage.host.reserve(missing)

    def _init_states(self, chooses: Any) -> None:
        self._storage = with_resident(self, self._storage)
        super()._init_states(chooses)

    @torch.no_grad()
    def move_state(self, device: torch.device | str | None) -> None:
        """Moves the states to the host ("cpu") or beside their parameters ("cuda" or None).

        Between any two steps, which have the same bits in either place. Does nothing where the
        parameters are on the CPU. With "cpu", ``state_fraction`` says how much moves.

        Raises:
            ValueError: ``device`` is another one.
            RuntimeError: a step of this optimizer is under way, or the system does not let pages be
                locked. Nothing has changed.
        """
        if self._context is not IDLE:  # type: ignore[attr-defined]
            raise RuntimeError("a step of this optimizer is under way: move its state afterwards")
        storage = replace(self._storage, state_device=device)  # type: ignore[arg-type]
        storage = with_resident(self, storage)
        self._wait_for_states()
        place_states(self._entries(), storage)
        self._storage = storage
        self._reserve_host_memory()

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


def _needs(optimizer: Any) -> Iterator[Need]:
    """Yields the entries by element of all parameters that a step may update, in their order."""
    storage: Storage = optimizer._storage
    for _, group, _, param in named_group_params(optimizer):
        if not (param.requires_grad and is_steppable(param)) or torch.nn.parameter.is_lazy(param):
            continue
        entries = dict(moments_of(group, param, storage))
        if kept := storage.master_of(param):
            entries[kept] = MASTERS[kept]
        for name, dtype in entries.items():
            if name not in BY_ROW:
                yield Need(param, name, dtype)


def with_resident(optimizer: Any, storage: Storage) -> Storage:
    """Chooses the parameters whose states stay on their GPU: the first that fit."""
    everywhere = replace(storage, resident=frozenset())
    if storage.state_device is None or storage.state_fraction == 1.0:
        return everywhere
    sizes: dict[torch.device, dict[int, int]] = {}
    for param, _, dtype in _needs(optimizer):
        if everywhere.on_host(param):
            local = local_tensor(param)
            its = sizes.setdefault(local.device, {})
            its[id(param)] = its.get(id(param), 0) + local.numel() * dtype.itemsize
    resident = set()
    modules = optimizer._module_numbers()  # forward waits for them in this order
    for its in sizes.values():
        left = (1.0 - storage.state_fraction) * sum(its.values())
        for key, size in sorted(its.items(), key=lambda item: modules.get(item[0], -1)):
            if size <= left:
                left -= size
                resident.add(key)
    return replace(storage, resident=frozenset(resident))
