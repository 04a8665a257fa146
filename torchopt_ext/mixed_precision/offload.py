"""Keeps an optimizer's state on the host while other programs need the device's memory.

Between the steps of reinforcement learning an inference engine generates samples on the same GPU.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from torchopt_ext import _C
from torchopt_ext._arguments import inner_optimizer
from torchopt_ext._torch import tree_leaves, tree_map_only
from torchopt_ext.optim.context import IDLE
from torchopt_ext.state.entries import CONTROL_KEY, MASTERS
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import params_of

cuda: Any = torch.cuda

KINDS = ("states", "masters")


def offload_fsdp_optimizer(
    optimizer: Optimizer, *, include: Collection[str] = KINDS, empty_cache: bool = True
) -> None:
    """Moves an optimizer's state from its GPU to the host. State on the host stays there.

    Copies run on a separate stream, into page-locked memory of exactly their size (pageable memory
    if locking fails), which is kept for the next time. A step and ``load_state_dict`` first bring
    everything back. ``state_dict`` works while the state is on the host. Other code must wait for
    the copies before it reads the state: ``empty_cache`` waits.

    Args:
        optimizer: any optimizer. The masters of an :class:`FSDPadaptOptimizer` move, too.
        include: what to move: "states", such as moments; "masters", master weights and remainders.
        empty_cache: wait for the copies and return the memory to the driver, so that other
            processes can use it.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``include`` contains an unknown kind.
        RuntimeError: a step of an optimizer of this package is under way, or its states lie on the
            host, because it was given ``state_device="cpu"``.
    """
    offloader = _offloader_of(optimizer)
    offloader.offload(include)
    if empty_cache:
        offloader.wait()
        if cuda.is_initialized():
            cuda.empty_cache()


def load_fsdp_optimizer(
    optimizer: Optimizer, device_id: torch.device | int | str | None = None
) -> None:
    """Moves an optimizer's state back to its device. The current stream waits for the copies.

    Args:
        device_id: the target device; None for each tensor's former device.
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
    """Keeps an optimizer's state on its device during a ``with`` block, for example for a step.

    Arguments and errors are as in :func:`load_fsdp_optimizer` and :func:`offload_fsdp_optimizer`.
    """
    check_kinds(include)
    offloader = _offloader_of(optimizer)
    offloader.expect_movable()
    load_fsdp_optimizer(optimizer, device_id)
    offloader.users += 1
    try:
        yield
    finally:
        offloader.users -= 1
        if not offloader.users:  # otherwise an outer block still needs the state
            offload_fsdp_optimizer(optimizer, include=include)


def _offloader_of(optimizer: Any) -> Offloader:
    """Returns the optimizer's offloader, and creates it at the first call."""
    optimizer = inner_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    owner: Any = optimizer
    if getattr(owner, "_offloader", None) is None:
        owner._offloader = Offloader(optimizer)
    return owner._offloader


def check_kinds(include: Collection[str]) -> None:
    """Raises ValueError if ``include`` contains anything but kinds."""
    if isinstance(include, str) or not set(include) <= set(KINDS):
        raise ValueError(f"Invalid include: {include!r}, expected any of {KINDS}")


def is_on_device(tensor: Tensor) -> bool:
    """Returns whether offloading moves a tensor. Step counts stay: they are small, read at once."""
    moves = tensor.device.type not in ("cpu", "meta") and tensor.numel() > 1
    return moves and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class Offloader:
    """Moves one optimizer's state between its device and host memory.

    Tensors stay the same objects and only their memory is replaced, so references stay valid.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak: its hooks refer to this object
        self.users = 0  # active blocks of optimizer_on_device()
        self._kept: dict[str, _Kept] = {}  # host memory, by kind
        self._origin: Any = WeakTensorKeyDictionary()  # former devices of offloaded tensors
        self._streams: dict[torch.device, Any] = {}
        optimizer.register_step_pre_hook(lambda *_: self.bring_back())
        optimizer.register_state_dict_pre_hook(lambda _: self.wait())
        # Clones offloaded state for a state dict: the next offload overwrites host memory.
        optimizer.register_state_dict_post_hook(
            lambda _, states: tree_map_only(Tensor, Tensor.clone, states) if self._origin else None
        )
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.bring_back())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns None: a copy of the optimizer has no offloader."""

    @torch.no_grad()
    def offload(self, include: Collection[str]) -> None:
        """Moves state of the kinds in ``include`` from devices to the host."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if getattr(optimizer, "_context", IDLE) is not IDLE:
            raise RuntimeError("a step of this optimizer is under way: move its state afterwards")
        check_kinds(include)
        self.expect_movable()
        if hasattr(optimizer, "_wait_for_states"):
            optimizer._wait_for_states()
        for kind in include:
            moving = [t for t in tensors_of(optimizer, kind) if is_on_device(local_tensor(t))]
            if moving:
                if kind not in self._kept or not self._kept[kind].is_for(moving):
                    self._kept[kind] = _Kept(moving)
                for tensor in moving:
                    self._origin[tensor] = local_tensor(tensor).device
                self._move(zip(moving, self._kept[kind].memory, strict=True))

    def expect_movable(self) -> None:
        """Raises RuntimeError if the states lie on the host during steps, too."""
        optimizer: Any = self._optimizer()
        # A container's, or FSDPadaptOptimizer's.
        stepped = getattr(optimizer, "optimizers", [getattr(optimizer, "_stepper", optimizer)])
        for each in stepped:
            storage = getattr(each, "_storage", None)
            if storage is not None and any(map(storage.on_host, params_of(each))):
                raise RuntimeError(
                    "the optimizer's states lie on the host: it was given state_device='cpu'"
                )

    @torch.no_grad()
    def bring_back(self, device: torch.device | None = None) -> None:
        """Moves all offloaded state back."""
        if not self._origin:
            return
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", cuda.current_device())
        pairs = [
            (tensor, torch.empty_like(local_tensor(tensor), device=device or former))
            for tensor, former in self._origin.items()
        ]
        self._origin = WeakTensorKeyDictionary()  # only now: memory may have run out above
        self._move(pairs)

    def wait(self) -> None:
        """Waits until all copies to the host have ended."""
        for stream in self._streams.values():
            stream.synchronize()

    def _move(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies tensors to other memory, which then replaces their own memory.

        Copies run on a separate stream per GPU. The current stream waits for copies to the GPU.
        """
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for tensor, memory in pairs:
            source = local_tensor(tensor)
            by_device[memory.device if source.is_cpu else source.device].append((source, memory))
        for device, moving in by_device.items():
            if device.type != "cuda":
                self.wait()
                for source, memory in moving:
                    source.data = memory.copy_(source)  # the plan refers to this tensor object
                continue
            if device not in self._streams:
                self._streams[device] = cuda.Stream(device)
            stream, current = self._streams[device], cuda.current_stream(device)
            for other in (current, *self._streams.values()):
                stream.wait_stream(other)
            with cuda.stream(stream):
                for source, memory in moving:
                    memory.copy_(source, non_blocking=True)
                    if source.is_cuda:  # its memory must not be reused before the copy ends
                        source.record_stream(stream)
                    source.data = memory
            if moving[0][1].is_cuda:
                current.wait_stream(stream)


class _Kept:
    """Host memory of exactly the size of some tensors, kept while the tensors are the same.

    Its pages are locked if the driver agrees: copies then need no second one by the host.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        locals_ = [local_tensor(tensor) for tensor in tensors]
        try:
            self.memory = _C.carve(locals_, stepped_on=locals_[0].device)
        except RuntimeError:  # too many bytes, or a device that this package does not know
            self.memory = _C.carve(locals_, device=torch.device("cpu"))

    def is_for(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(
            ref() is tensor
            and memory.shape == local_tensor(tensor).shape
            and memory.dtype == tensor.dtype
            for ref, tensor, memory in zip(self._tensors, tensors, self.memory, strict=True)
        )


def tensors_of(optimizer: Optimizer, kind: str) -> Iterator[Tensor]:
    """Yields an optimizer's tensors of a kind: "states" or "masters"."""
    for entry in optimizer.state.values():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            # The counts are a view of the control block, which stays.
            if (name in MASTERS) == (kind == "masters") and name != CONTROL_KEY:
                for leaf in tree_leaves(value):  # some optimizers have lists of tensors
                    if isinstance(leaf, Tensor):
                        yield leaf
    if kind == "masters":
        yield from (p for p in params_of(optimizer) if hasattr(p, "is_master_weight"))
