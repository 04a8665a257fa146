"""Keeps an optimizer's state on the host while others need the device's memory.

Between the steps of reinforcement learning an inference engine generates samples on the same GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from torchopt_ext import _C
from torchopt_ext._torch import tree_leaves, tree_map_only
from torchopt_ext.mixed_precision.fsdp_optimizer import FSDPadaptOptimizer
from torchopt_ext.mixed_precision.host_memory import HostMemory
from torchopt_ext.optim.context import IDLE
from torchopt_ext.optim.local import local_tensor
from torchopt_ext.optim.storage import MASTER, REMAINDER

cuda: Any = torch.cuda

KINDS = ("states", "masters")


def offload_fsdp_optimizer(
    optimizer: Optimizer, *, include: Collection[str] = KINDS, empty_cache: bool = True
) -> None:
    """Moves an optimizer's state from its GPU to the host; does nothing to what is there already.

    Copies run on a stream of their own, into pinned memory of exactly their size, which is kept for
    the next time (pageable where memory cannot be pinned). A step, and ``load_state_dict``, bring
    everything back first; ``state_dict`` works while it is on the host. Whoever reads the state
    otherwise waits for the copies first: ``empty_cache`` does.

    Args:
        optimizer: any; of an :class:`FSDPadaptOptimizer` the masters, too.
        include: what to move: "states", such as moments; "masters", master weights and remainders.
        empty_cache: waits for the copies and hands the memory back to the driver, so that other
            processes can have it.

    Raises:
        ValueError: there is no such kind to include.
        RuntimeError: a step of the optimizer, an :class:`FSDPadaptOptimizer`, is under way.
    """
    _offloader_of(optimizer).offload(include)
    if empty_cache:
        _offloader_of(optimizer).wait()
        if cuda.is_initialized():
            cuda.empty_cache()


def load_fsdp_optimizer(
    optimizer: Optimizer, device_id: torch.device | int | str | None = None
) -> None:
    """Moves an optimizer's state back to the device, on a stream that the current one waits for.

    Args:
        device_id: where to; None for where each tensor was.
    """
    device = None if device_id is None else torch.device(device_id)
    _offloader_of(optimizer).bring_back(device)


@contextmanager
def optimizer_on_device(
    optimizer: Optimizer,
    device_id: torch.device | int | str | None = None,
    *,
    include: Collection[str] = KINDS,
) -> Iterator[None]:
    """Has an optimizer's state on the device for the time of a ``with`` block, around a step.

    Args: as :func:`load_fsdp_optimizer` and :func:`offload_fsdp_optimizer`.
    """
    check_kinds(include)
    load_fsdp_optimizer(optimizer, device_id)
    offloader = _offloader_of(optimizer)
    offloader.users += 1
    try:
        yield
    finally:
        offloader.users -= 1
        if not offloader.users:  # or an outer block still needs it
            offload_fsdp_optimizer(optimizer, include=include)


def _offloader_of(optimizer: Any) -> Offloader:
    """The optimizer's, made when it is first asked for."""
    offloader: Offloader | None = getattr(optimizer, "_offloader", None)
    if offloader is None:
        offloader = optimizer._offloader = Offloader(optimizer)
    return offloader


def check_kinds(include: Collection[str]) -> None:
    """Raises ValueError unless ``include`` has nothing but kinds."""
    if isinstance(include, str) or (unknown := [kind for kind in include if kind not in KINDS]):
        found = include if isinstance(include, str) else unknown[0]
        raise ValueError(f"Invalid include: {found!r}, expected any of {KINDS}")


def is_on_device(tensor: Tensor) -> bool:
    """Whether offloading moves a tensor. Counts of steps stay: they are small and read at once."""
    moves = tensor.device.type not in ("cpu", "meta") and tensor.numel() > 1
    return moves and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class Offloader:
    """Where one optimizer's state is, and the host memory it goes to.

    Memory is replaced under the tensors, which stay the same objects, so that nobody who has one is
    left with a copy.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.users = 0  # blocks of optimizer_on_device() that are under way
        self._kept: dict[str, _Kept] = {}  # host memory, by kind
        self._origin: Any = WeakTensorKeyDictionary()  # devices of tensors that are on the host
        self._streams: dict[torch.device, Any] = {}
        me = weakref.ref(self)

        def back(*_: Any) -> None:
            if (offloader := me()) is not None:
                offloader.bring_back()

        def wait(*_: Any) -> None:
            if (offloader := me()) is not None:
                offloader.wait()

        def own_copies(_: Any, states: dict[str, Any]) -> dict[str, Any] | None:
            """Host memory is written anew the next time; a state dict is not to change then."""
            if (offloader := me()) is None or not len(offloader._origin):
                return None
            copied: dict[str, Any] = tree_map_only(Tensor, Tensor.clone, states)
            return copied

        optimizer.register_step_pre_hook(back)
        optimizer.register_state_dict_pre_hook(wait)
        optimizer.register_state_dict_post_hook(own_copies)
        optimizer.register_load_state_dict_pre_hook(back)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the optimizer has none."""

    # ---- to the host and back -----------------------------------------------------------------

    @torch.no_grad()
    def offload(self, include: Collection[str]) -> None:
        optimizer = self._idle()
        check_kinds(include)
        for kind in KINDS:
            if kind not in include:
                continue
            moving = [t for t in tensors_of(optimizer, kind) if is_on_device(local_tensor(t))]
            if not moving:
                continue
            if kind not in self._kept or not self._kept[kind].is_for(moving):
                self._kept[kind] = _Kept(moving)
            self._move(moving, self._kept[kind].memory)

    @torch.no_grad()
    def bring_back(self, device: torch.device | None = None) -> None:
        """Moves back what is on the host."""
        if not len(self._origin):
            return
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", cuda.current_device())
        here = list(self._origin.items())
        self._origin = WeakTensorKeyDictionary()
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor, origin in here:
            by_device.setdefault(device or origin, []).append(tensor)
        for target, tensors in by_device.items():
            room = [torch.empty_like(local_tensor(t), device=target) for t in tensors]
            self._copy(target, [local_tensor(t) for t in tensors], room)
            self._current_waits(target)
            for tensor, memory in zip(tensors, room, strict=True):
                replace_memory(tensor, memory)

    def wait(self) -> None:
        """Until all copies to the host have ended."""
        for stream in self._streams.values():
            stream.synchronize()

    def _idle(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        if getattr(optimizer, "_context", IDLE) is not IDLE:
            raise RuntimeError("a step of this optimizer is under way: move its state afterwards")
        return optimizer

    def _move(self, tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_device.setdefault(local_tensor(tensor).device, []).append(i)
        for device, indices in by_device.items():
            sources = [local_tensor(tensors[i]) for i in indices]
            self._copy(device, sources, [memory[i] for i in indices])
            for i, source in zip(indices, sources, strict=True):
                if source.is_cuda:  # not to be reused before it was read
                    source.record_stream(self._streams[device])
                replace_memory(tensors[i], memory[i])
                self._origin[tensors[i]] = device

    def _copy(
        self, device: torch.device, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> None:
        if device.type != "cuda":
            self.wait()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        stream = self._streams[device]
        for other in (cuda.current_stream(device), *self._streams.values()):
            stream.wait_stream(other)
        with cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def _current_waits(self, device: torch.device) -> None:
        if device in self._streams:
            cuda.current_stream(device).wait_stream(self._streams[device])


class _Kept:
    """Host memory for some tensors, as long as they are the same."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        locals_ = [local_tensor(tensor) for tensor in tensors]
        self._pinned = HostMemory(_C.carved_bytes(locals_))
        self.memory = _C.carve(locals_, block=self._pinned.block)

    def is_for(self, tensors: Sequence[Tensor]) -> bool:
        same = [ref() is tensor for ref, tensor in zip(self._tensors, tensors, strict=False)]
        fits = len(tensors) == len(self._tensors) and all(same)
        return fits and all(
            memory.shape == local_tensor(tensor).shape and memory.dtype == tensor.dtype
            for memory, tensor in zip(self.memory, tensors, strict=True)
        )


def tensors_of(optimizer: Optimizer, kind: str) -> Iterator[Tensor]:
    """An optimizer's own tensors: its "states", or its "masters"."""
    base = optimizer.optim if isinstance(optimizer, FSDPadaptOptimizer) else optimizer
    for entry in base.state.values():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if (name in (MASTER, REMAINDER)) == (kind == "masters"):
                for leaf in tree_leaves(value):  # lists of tensors, in some optimizers
                    if isinstance(leaf, Tensor):
                        yield leaf
    if kind == "masters" and isinstance(optimizer, FSDPadaptOptimizer):
        yield from optimizer.masters_in_groups()


def replace_memory(tensor: Any, memory: Tensor) -> None:
    """Lets a tensor, or this rank's part of a DTensor, be what ``memory`` holds."""
    local_tensor(tensor).data = memory  # the same object: steps know it
