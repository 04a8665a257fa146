"""Steps of small parameters in backward, many in one call of the engine."""

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter, methodcaller

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchopt_ext._torch import call_at_end_of_backward, graph_task
from torchopt_ext.optim.fused_adam import FusedAdam
from torchopt_ext.optim.joint import JointStep, can_join, only_param
from torchopt_ext.optim.local import NormKey, current_stream, local_tensor, norm_key

SMALL_BYTES = 1 << 18
"""A larger parameter is stepped by itself: its update takes much longer than the call."""

BATCH_BYTES = 1 << 20
"""Of parameters in one call, whose own cost is little beside that of their updates."""

WAITING_BYTES = 2 * BATCH_BYTES
"""The most that gradients of one backward pass wait with, in whatever order they come."""


class Batches:
    """Steps small parameters in backward, in batches.

    A batch is stepped when all its gradients have come, and every batch when too many gradients
    wait and when backward ends. A gradient that waits is no longer the parameter's `grad`: a second
    one in the same backward is another step. It belongs to the backward in which it came, and is
    gone with it if that raises.

    Args:
        batches: optimizers of parameters on one device.
        sizes: bytes of each parameter, the same on all ranks that have one: gradients of a batch
            may be redistributed together, so all ranks have to step the same ones.
    """

    def __init__(self, batches: Iterable[Sequence[FusedAdam]], sizes: dict[Tensor, int]) -> None:
        self.joint_steps = [JointStep(optimizers) for optimizers in batches]
        self._places = {
            id(param): (joint, position, sizes[param])
            for joint in self.joint_steps
            for position, param in enumerate(joint.params)
        }
        # By stream, on each of which gradients are complete in order.
        self._waiting: dict[torch.Stream | None, weakref.ref[_Waiting]] = {}

    @property
    def params(self) -> list[Tensor]:
        return [param for joint in self.joint_steps for param in joint.params]

    def take(self, param: nn.Parameter) -> None:
        """Takes a parameter's gradient, and steps by it now or before backward has ended."""
        gradient, param.grad = param.grad, None
        task, stream = graph_task(), current_stream(param.device)
        known = self._waiting.get(stream)
        waiting = None if known is None else known()
        if waiting is None or waiting.task != task:
            waiting = _Waiting(task)
            self._waiting[stream] = weakref.ref(waiting)
            if task >= 0:
                call_at_end_of_backward(waiting.end)  # nothing else keeps the gradients
        if gradient is not None:
            waiting.add(gradient, *self._places[id(param)])
        if task < 0:  # called by hand
            waiting.end()


class _Waiting:
    """The gradients of one graph task, on one stream, that wait."""

    def __init__(self, task: int) -> None:
        self.task = task
        self._gradients: dict[JointStep, dict[int, Tensor]] = {}  # by position
        self._bytes: dict[JointStep, int] = {}

    def add(self, gradient: Tensor, joint: JointStep, position: int, size: int) -> None:
        gradients = self._gradients.get(joint)
        if gradients is None or position in gradients:
            self._step(joint)
            gradients = self._gradients[joint] = {}
        gradients[position] = gradient
        self._bytes[joint] = self._bytes.get(joint, 0) + size
        if len(gradients) == len(joint.params):
            self._step(joint)
        elif sum(self._bytes.values()) > WAITING_BYTES:
            self._step_all()

    def end(self) -> None:
        """At the end of the graph task, when the caller's stream has waited for the others.

        Other callbacks may yet bring gradients.
        """
        self.task = -1
        self._step_all()

    def _step_all(self) -> None:
        for joint in list(self._gradients):
            self._step(joint)

    def _step(self, joint: JointStep) -> None:
        self._bytes.pop(joint, None)
        if gradients := self._gradients.pop(joint, None):
            joint.step_gradients(gradients, methodcaller("step"))


def make_batches(optimizers: Sequence[Optimizer]) -> list[Batches]:
    """Batches of the optimizers that have one small parameter each.

    Neighbours in the model are batched, from its end, as backward mostly comes to them.
    """
    alike: defaultdict[tuple[torch.device, NormKey], list[FusedAdam]] = defaultdict(list)
    sizes: dict[Tensor, int] = {}
    for optimizer in filter(can_join, reversed(optimizers)):
        param = only_param(optimizer)
        key = norm_key(param)
        if (size := _bytes(param, key)) <= SMALL_BYTES:
            sizes[param] = size
            alike[local_tensor(param).device, key].append(optimizer)
    return [Batches(_cut(joined, sizes), sizes) for joined in alike.values()]


def _cut(optimizers: list[FusedAdam], sizes: dict[Tensor, int]) -> list[list[FusedAdam]]:
    """Runs of the optimizers, each of about BATCH_BYTES of parameters."""
    ends = accumulate(sizes[only_param(optimizer)] for optimizer in optimizers)
    numbered = zip((end // BATCH_BYTES for end in ends), optimizers, strict=True)
    return [[opt for _, opt in run] for _, run in groupby(numbered, key=itemgetter(0))]


def _bytes(param: Tensor, key: NormKey) -> int:
    """Of an equal share of a parameter, which is the same on all ranks."""
    shards = math.prod(key[0].size(d) for d in key[1]) if key else 1
    return -(-param.numel() // shards) * param.element_size()
