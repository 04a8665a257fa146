"""Pass A in backward: gradients are summed as they become final, while they are in the cache.

A step uses the sums only if each gradient still is in the same memory and unchanged by its version
counter. Otherwise the step measures all gradients itself.
"""

import math
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_ext import ops
from torchopt_ext._C import TensorMark, gradients_fit, sum_gradients
from torchopt_ext._torch import call_at_end_of_backward, graph_task, is_dtensor, local_shard
from torchopt_ext.optim.local import (
    NormKey,
    NormPart,
    current_stream,
    is_captured,
    local_tensor,
    norm_key,
    same_placement,
)
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of

MEASURED_BYTES = 1 << 21
"""Smaller parameters are left to the step. In backward Python's objects have left the caches, so
that calling a hook takes as long as reading such a gradient (benchmarks/README.md)."""

CACHED_BYTES = {"cpu": 1 << 20}
"""Bytes of gradients per call, by kind of device; a core's own cache holds 1 or 2 MB."""

CACHED_BYTES_ON_GPU = 1 << 24


class Measured(NamedTuple):
    """The gradients that a step need not measure, and the sums of their squares."""

    positions: Sequence[int] = ()  # of the parameters in the plan
    squares: Mapping[NormPart, list[Tensor]] = {}  # accumulators


NOTHING = Measured()


class _Kind(NamedTuple):
    """The common properties of all parameters that one call measures."""

    device: torch.device
    norm_key: NormKey
    sharded: bool  # DTensors


class _Watched(NamedTuple):
    """A large parameter whose gradients are measured."""

    nbytes: int
    kind: _Kind
    limit: float  # bytes that wait for one call
    hook: Any  # the handle of the parameter's hook


class _Waiting:
    """Parameters whose gradients one call will measure."""

    def __init__(self) -> None:
        self.params: dict[int, Tensor] = {}  # by id
        self.nbytes = 0
        self.layer: TensorMark | None = None  # the mark of a gradient of the last layer


class NormInBackward:
    """The sums of the squares of an optimizer's gradients, made while backward runs.

    If a parameter gets several gradients between two steps, for example from micro-batches, the
    last gradient counts. The number of gradients before the previous step tells which gradient is
    the last. If this turns out wrong, the step measures all gradients.
    """

    def __init__(self) -> None:
        self._handles = handles_of(self)
        self._watched: dict[int, _Watched] = {}  # large parameters, by id
        self._expected: dict[int, int] = {}  # gradients of each parameter before the last step
        self._active = True  # the last step measured a norm
        self._warned = False
        self._lock = threading.Lock()  # autograd has a thread for each device
        self.restart()

    def __reduce__(self) -> Any:
        return NormInBackward, ()  # a copy is for other parameters

    def restart(self) -> None:
        """Forgets what was measured since the last step."""
        self._seen: dict[int, int] = {}  # gradients of each parameter since the last step
        self._stale = False  # the sums are useless: a gradient came later or was changed
        self._waiting: dict[tuple[_Kind, Any], _Waiting] = {}  # by kind and stream
        self._task: int | None = None  # the backward pass at whose end the rest is measured
        self._elsewhere = False  # plain gradients may be reduced over ranks later
        self._measured: dict[int, Tensor] = {}  # parameters, by id
        self._marks: dict[int, TensorMark] = {}  # marks of the measured gradients
        self._shard_marks: dict[int, TensorMark] = {}  # marks of these gradients' shards
        self._sums: dict[tuple[_Kind, Any], Tensor] = {}  # by kind and stream
        self._ends: dict[Any, Any] = {}  # events, by stream

    def end_step(self, measured_norm: bool) -> None:
        """Prepares for the next step, after a step with or without a norm."""
        self._expected, self._active = self._seen, measured_norm
        self.restart()

    def watch(self, params: Iterable[Tensor]) -> None:
        """Hooks large parameters, to measure gradients when autograd has accumulated them.

        FSDP2 calls the hooks as well, with the reduced gradients.
        """
        hook = WeakHook(self, "_take")
        for param in params:
            if not self._is_watched(param) and _is_worth_a_hook(param):
                hooked: Any = param
                handle = hooked.register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)
                local = local_tensor(param)
                kind = _Kind(local.device, norm_key(param), is_dtensor(param))
                limit: float = CACHED_BYTES.get(local.device.type, CACHED_BYTES_ON_GPU)
                if kind.sharded:  # wait for the gradients of the next layer
                    limit = math.inf
                self._watched[id(param)] = _Watched(local.nbytes, kind, limit, handle)

    def watch_only(self, params: Sequence[Tensor]) -> None:
        """Watches these parameters, and no longer those that the optimizer has no more."""
        for key in self._watched.keys() - set(map(id, params)):
            self._watched.pop(key).hook.remove()
        self.watch(params)
        self._handles[:] = [watched.hook for watched in self._watched.values()]

    def _is_watched(self, param: Tensor) -> bool:
        watched = self._watched.get(id(param))
        # A parameter that is gone takes its hooks along, and another may have its id.
        return watched is not None and watched.hook.hooks_dict_ref() is not None

    def _take(self, param: Tensor) -> None:
        if not self.is_last(param):
            return
        if (task := graph_task()) != self._task and task >= 0:
            self._task, self._elsewhere = task, _reduced_elsewhere()
            call_at_end_of_backward(WeakHook(self, "end_backward"))
        key = id(param)
        nbytes, kind, limit, _ = self._watched[key]
        if self._elsewhere and not kind.sharded:
            return
        place = kind, current_stream(kind.device)
        waiting = self._waiting.get(place) or self._waiting.setdefault(place, _Waiting())
        if kind.sharded and param.grad is not None:
            # FSDP2 accumulates the gradients of a layer one after the other, and they share a
            # version counter: they are measured when gradients of another layer come.
            gradient = param.grad
            layer = TensorMark(local_shard(gradient) if is_dtensor(gradient) else gradient)
            if waiting.layer is not None and not waiting.layer.changes_with(layer):
                self._measure_waiting(place)
                waiting = self._waiting.setdefault(place, _Waiting())
            waiting.layer = layer
        if key not in waiting.params:
            waiting.params[key] = param
            waiting.nbytes += nbytes
        if waiting.nbytes >= limit:
            self._measure_waiting(place)

    def _measure_waiting(self, place: tuple[_Kind, Any]) -> None:
        waiting = self._waiting.pop(place, None)
        kind, stream = place
        if waiting is None or (stream is not None and is_captured()):
            return
        params = waiting.params.copy()  # another thread may be changing it
        gradients = [param.grad for param in params.values()] if kind.sharded else None
        self._sum(place, params, gradients, mark=True)

    def end_backward(self) -> None:
        """Measures the rest; by now the streams of backward have joined the caller's."""
        self._task = None
        for place in list(self._waiting):
            self._measure_waiting(place)

    def is_last(self, param: Tensor) -> bool:
        """Counts a gradient; returns whether to measure it, which is False for small parameters."""
        key = id(param)
        if key not in self._watched:
            return False
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if key in self._measured:
            self._stale = True
        return self._active and not self._stale and seen >= self._expected.get(key, 1)

    def spoil(self) -> None:
        """Discards the sums, so that the step measures all gradients."""
        self._stale = True

    def measure(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Sums squares of gradients in order on the current stream; the step must come later.

        The caller then calls :meth:`mark`, except for parameters that get no gradient but zeros.

        Args:
            pairs: parameters for which :meth:`is_last` held, and their future gradients. Gradients
                that the step would redistribute or copy first are left to the step.
        """
        alike: dict[_Kind, list[tuple[Tensor, Tensor]]] = {}
        for param, gradient in pairs:
            alike.setdefault(self._watched[id(param)].kind, []).append((param, gradient))
        for kind, same in alike.items():
            params = {id(param): param for param, _ in same}
            place = kind, current_stream(kind.device)
            self._sum(place, params, [gradient for _, gradient in same], mark=False)

    def _sum(
        self,
        place: tuple[_Kind, Any],
        params: dict[int, Tensor],
        gradients: list[Any] | None,
        mark: bool,
    ) -> None:
        """Sums the squares of gradients of one kind, and marks the gradients.

        Args:
            gradients: None for the gradients that the parameters have, which are not DTensors.
            mark: whether the gradients are already the parameters' gradients.
        """
        if self._stale:
            return
        (device, _, sharded), stream = place
        like = list(params.values())
        summed = gradients
        if sharded and gradients is not None:
            summed = [_shard(p, g) for p, g in zip(like, gradients, strict=True)]
            like = [local_tensor(p) for p in like]
        with self._lock:
            if place not in self._sums:
                self._sums[place] = ops.new_accumulator(device)
            marks = sum_gradients(like, summed, self._sums[place])
            if stream is not None:
                self._ends[stream] = stream.record_event()
        found = {key: m for key, m in zip(params, marks, strict=True) if m is not None}
        self._measured.update((key, params[key]) for key in found)  # the step reads the others
        if sharded and gradients is not None:
            self._shard_marks.update(found)
            own = dict(zip(params, gradients, strict=True))
            found = {key: TensorMark(own[key]) for key in found}
        if mark:
            self._marks.update(found)

    def mark(self, param: Tensor, gradient: Tensor) -> None:
        """Marks the gradient of a parameter if it was measured."""
        if id(param) in self._measured and id(param) not in self._marks:
            self._marks[id(param)] = TensorMark(gradient)

    def known(self, positions: Mapping[int, int]) -> Measured:
        """Returns what this step need not measure: nothing if a measured gradient has changed.

        Args:
            positions: the parameters' positions in the plan, by id.
        """
        if self._stale or not self._measured or is_captured():
            return NOTHING
        params = list(self._measured.values())
        fit = gradients_fit(params, list(map(self._marks.get, self._measured)))
        for key, mark in self._shard_marks.items():
            shard = _shard(param := self._measured[key], param.grad)
            fit = fit and shard is not None and mark.fits(shard)
        if not fit:
            self._stale = True
            self._warn()
            return NOTHING
        found = [positions.get(key, -1) for key in self._marks]
        if -1 in found:  # the step will need another plan
            return NOTHING
        for stream, end in self._ends.items():
            torch.accelerator.current_stream(stream.device).wait_event(end)
        squares: dict[NormPart, list[Tensor]] = {}
        for (kind, stream), total in self._sums.items():
            if stream is not None:
                total.record_stream(torch.accelerator.current_stream(kind.device))
            squares.setdefault((kind.device, kind.norm_key), []).append(total)
        return Measured(found, squares)

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
        # FSDP2 moves gradients to the host after the reduction: a hook would wait for the copy.
        if local.device.type != param.device_mesh.device_type:
            return False
    elif local is not param:
        return False
    return int(local.nbytes) >= MEASURED_BYTES


def _reduced_elsewhere() -> bool:
    """Returns whether plain gradients may be reduced over ranks later.

    DDP leaves no mark on parameters, and collectives leave no mark on tensors that they write.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1


def _shard(param: Any, gradient: Any) -> Tensor | None:
    """Returns this rank's shard of a gradient, or None if it is not placed as its parameter."""
    return local_shard(gradient) if same_placement(param, gradient) else None
