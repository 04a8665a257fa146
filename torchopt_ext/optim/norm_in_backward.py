"""Pass A in backward: gradients are summed as they become final, while they are in cache.

The sums are of the gradients as they were. Before a step uses them, each gradient has to be the
same memory, unchanged by its version counter; otherwise the step measures all gradients itself.
"""

import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext._C import TensorMark, all_fit, sum_gradients
from torchopt_ext._torch import call_at_end_of_backward, graph_task, is_dtensor, local_shard
from torchopt_ext.optim.local import (
    NormKey,
    current_stream,
    is_captured,
    local_tensor,
    norm_key,
    same_placement,
)
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of

MEASURED_BYTES = 1 << 18
"""Smaller parameters are left to the step: their hook would take as long as reading them."""

CACHED_BYTES = {"cpu": 1 << 21}
"""Of gradients that are measured by one call, by kind of device."""

CACHED_BYTES_ON_GPU = 1 << 24


class Measured(NamedTuple):
    """What a step need not measure."""

    positions: Sequence[int] = ()  # of the parameters in the plan
    squares: Mapping[tuple[torch.device, NormKey], list[Tensor]] = {}  # accumulators


NOTHING = Measured()


class _Watched(NamedTuple):
    """What is known of a parameter."""

    nbytes: int
    device: torch.device
    norm_key: NormKey
    sharded: bool  # a DTensor


class NormInBackward:
    """Sums of the squares of an optimizer's gradients, made while backward runs.

    Of several gradients that a parameter gets between two steps, such as those of micro-batches,
    the last counts. Which that is, the step before tells: it is measured when it is the parameter's
    as many-th as there were then. Where that proves wrong, the step measures all gradients.
    """

    def __init__(self) -> None:
        self._handles = handles_of(self)
        self._watched: dict[int, _Watched] = {}  # large parameters, by id
        self._expected: dict[int, int] = {}  # gradients a parameter had before the last step
        self._active = True  # the last step measured a norm
        self._warned = False
        self._lock = threading.Lock()  # autograd has a thread for each device
        self.restart()

    def __reduce__(self) -> Any:
        return NormInBackward, ()  # a copy is for other parameters

    def restart(self) -> None:
        """Forgets what was measured since the last step."""
        self._seen: dict[int, int] = {}  # gradients of each parameter
        self._stale = False  # a gradient came after its parameter was measured
        # By device and stream: parameters, their bytes, and a gradient of the last layer.
        self._waiting: dict[Any, dict[int, Tensor]] = {}
        self._bytes: dict[Any, int] = {}
        self._layer: dict[Any, TensorMark] = {}
        self._task: int | None = None  # the backward pass at whose end the rest is measured
        self._measured: dict[int, Tensor] = {}  # parameters, by id
        self._marks: dict[int, TensorMark] = {}  # what their gradients were
        self._shard_marks: dict[int, TensorMark] = {}  # and the shards of those
        # By device, norm key and stream.
        self._sums: dict[tuple[torch.device, NormKey, Any], Tensor] = {}
        self._ends: dict[Any, Any] = {}  # events, by stream

    def end_step(self, measured_norm: bool) -> None:
        """After a step that was made, with or without a norm."""
        self._expected, self._active = self._seen, measured_norm
        self.restart()

    def watch(self, params: Iterable[Tensor]) -> None:
        """Takes the gradients of large parameters when autograd has accumulated them.

        FSDP2 calls the hooks as well, with the reduced gradients.
        """
        hook = WeakHook(self, "_take")
        for param in params:
            if id(param) not in self._watched and _is_worth_a_hook(param):
                hooked: Any = param
                self._handles.append(hooked.register_post_accumulate_grad_hook(hook))
                local = local_tensor(param)
                self._watched[id(param)] = _Watched(
                    local.nbytes, local.device, norm_key(param), is_dtensor(param)
                )

    def _take(self, param: Tensor) -> None:
        if not self.is_last(param) or param.grad is None:
            return
        watched = self._watched[id(param)]
        place = watched.device, current_stream(watched.device)
        if watched.sharded:
            # FSDP2 adds to the gradients of a layer one after the other, which share a version
            # counter: they are marked when those of another layer come.
            gradient = param.grad
            layer = TensorMark(local_shard(gradient) if is_dtensor(gradient) else gradient)
            if place in self._layer and not self._layer[place].changes_with(layer):
                self._measure_waiting(place)
            self._layer[place] = layer
        waiting = self._waiting.setdefault(place, {})
        if id(param) not in waiting:
            waiting[id(param)] = param
            self._bytes[place] = self._bytes.get(place, 0) + watched.nbytes
        limit = CACHED_BYTES.get(watched.device.type, CACHED_BYTES_ON_GPU)
        if not watched.sharded and self._bytes[place] >= limit:
            self._measure_waiting(place)
        elif (task := graph_task()) != self._task and task >= 0:
            self._task = task
            call_at_end_of_backward(WeakHook(self, "_end_task"))

    def _measure_waiting(self, place: Any) -> None:
        params = list(self._waiting.pop(place, {}).values())
        self._bytes.pop(place, None)
        if _reduced_elsewhere():
            params = [param for param in params if self._watched[id(param)].sharded]
        if not is_captured():
            self.measure([(param, param.grad) for param in params])

    def _end_task(self) -> None:
        """Measures the rest; the streams of backward have joined the caller's by now."""
        self._task = None
        for place in list(self._waiting):
            self._measure_waiting(place)

    def is_last(self, param: Tensor) -> bool:
        """Counts a gradient, and tells whether it is to be measured: not of a small parameter."""
        key = id(param)
        if key not in self._watched:
            return False
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if key in self._measured:
            self._stale = True
        return self._active and not self._stale and seen >= self._expected.get(key, 1)

    def spoil(self) -> None:
        """Lets the step measure all gradients."""
        self._stale = True

    @torch.no_grad()
    def measure(self, pairs: Sequence[tuple[Tensor, Tensor | None]], mark: bool = True) -> None:
        """Sums gradients, in the order of work on the current stream; the step has to be later.

        Args:
            pairs: parameters for which :meth:`is_last` held, and gradients. Those that the step
                would redistribute or copy first are left to it.
            mark: they are the parameters' gradients. Otherwise :meth:`mark` follows, but for
                parameters that are to have none, of which zeros are measured.
        """
        alike: dict[tuple[torch.device, NormKey, bool], list[tuple[Tensor, Any]]] = {}
        for param, gradient in () if self._stale else pairs:
            alike.setdefault(self._watched[id(param)][1:], []).append((param, gradient))
        for (device, key, sharded), same in alike.items():
            params, gradients = map(list, zip(*same, strict=True))
            shards = [_shard(p, g) for p, g in same] if sharded else gradients
            like = [local_tensor(p) for p in params] if sharded else params
            stream = current_stream(device)
            place = device, key, stream
            with self._lock:
                if place not in self._sums:
                    self._sums[place] = ops.new_accumulator(device)
                marks = sum_gradients(like, shards, self._sums[place])
                if stream is not None:
                    self._ends[stream] = stream.record_event()
            for param, gradient, found in zip(params, gradients, marks, strict=True):
                if found is None:
                    continue
                self._measured[id(param)] = param
                if sharded:
                    self._shard_marks[id(param)] = found
                    found = TensorMark(gradient)
                if mark:
                    self._marks[id(param)] = found

    def mark(self, param: Tensor, gradient: Tensor) -> None:
        """Notes what a parameter's gradient is that was measured, if it was."""
        if id(param) in self._measured and id(param) not in self._marks:
            self._marks[id(param)] = TensorMark(gradient)

    def known(self, positions: Mapping[int, int]) -> Measured:
        """What this step need not measure: nothing if a measured gradient is not as it was.

        Args:
            positions: in the plan, by the parameter's id.
        """
        if self._stale or not self._measured or is_captured():
            return NOTHING
        keys, marks, tensors = [], [], []
        for key, param in self._measured.items():
            gradient = param.grad
            if key in self._marks:
                keys.append(key)
                marks.append(self._marks[key])
                tensors.append(gradient)
            elif gradient is not None:
                self._stale = True
        for key, shard in self._shard_marks.items():
            marks.append(shard)
            tensors.append(_shard(self._measured[key], self._measured[key].grad))
        if self._stale or not all_fit(marks, tensors):
            self._stale = True
            self._warn()
            return NOTHING
        if not all(key in positions for key in keys):  # the step will need another plan
            return NOTHING
        for stream, end in self._ends.items():
            torch.accelerator.current_stream(stream.device).wait_event(end)
        squares: dict[tuple[torch.device, NormKey], list[Tensor]] = {}
        for (device, norm, stream), total in self._sums.items():
            if stream is not None:
                total.record_stream(torch.accelerator.current_stream(device))
            squares.setdefault((device, norm), []).append(total)
        return Measured([positions[key] for key in keys], squares)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a gradient was changed after backward had summed its squares, so "
                "norm_in_backward saves nothing: steps read all gradients once more. Let hooks "
                "change gradients before they are accumulated (Tensor.register_hook), and let the "
                "step clip them",
                stacklevel=2,
            )


def _is_worth_a_hook(param: Any) -> bool:
    if not param.requires_grad or not param.is_leaf or param.is_meta or param.is_complex():
        return False
    local = local_tensor(param)
    if is_dtensor(param):
        if any(placement.is_partial() for placement in param.placements):
            return False
        # FSDP2 moves gradients to the host after the reduction: a hook would let it wait there.
        if local.device.type != param.device_mesh.device_type:
            return False
    elif local is not param:
        return False
    return int(local.nbytes) >= MEASURED_BYTES


def _reduced_elsewhere() -> bool:
    """Whether plain gradients may be reduced over ranks later.

    DDP leaves no mark on parameters, nor a collective on the tensors that it writes.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1


def _shard(param: Any, gradient: Any) -> Tensor | None:
    """This rank's shard of a gradient; None unless that is placed as its parameter."""
    return local_shard(gradient) if same_placement(param, gradient) else None
