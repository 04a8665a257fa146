"""Steps small parameters in backward, many in one call of the engine."""

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
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.joint import JointStep, can_join, only_param
from torchopt_ext.optim.norm import NormGroup, NormKey, norm_key
from torchopt_ext.state.devices import current_stream
from torchopt_ext.state.local import local_tensor

SMALL_BYTES = 1 << 18
"""Larger parameters are stepped separately: their updates take much longer than the call."""

BATCH_BYTES = 1 << 20
"""Bytes of parameters in one call. The call then costs little compared with their updates."""

WAITING_BYTES = 2 * BATCH_BYTES
"""The maximum bytes of gradients that wait in a backward pass, in any order of arrival."""


class Batches:
    """Steps small parameters in backward, in batches.

    A batch is stepped when all its gradients have arrived. All batches are stepped when too many
    gradients wait, and when backward ends. A waiting gradient is no longer the parameter's `grad`:
    a second gradient in the same backward makes another step. If a backward raises, the gradients
    that wait in it are dropped.

    Args:
        batches: optimizers of parameters on one device.
        sizes: bytes of each parameter, the same on all ranks that share it: gradients of a batch
            may be redistributed together, so all ranks must step the same parameters.
    """

    def __init__(
        self, batches: Iterable[Sequence[FusedOptimizer]], sizes: dict[Tensor, int]
    ) -> None:
        self.joint_steps = [JointStep(optimizers) for optimizers in batches]
        self.places = {  # by the parameter's id
            id(param): (joint, position, sizes[param])
            for joint in self.joint_steps
            for position, param in enumerate(joint.params)
        }
        # By stream, because gradients are complete in order on each stream.
        self._waiting: weakref.WeakValueDictionary[torch.Stream | None, _Waiting]
        self._waiting = weakref.WeakValueDictionary()

    def take(self, param: nn.Parameter) -> None:
        """Takes a parameter's gradient, and steps with it now or before backward has ended."""
        gradient, param.grad = param.grad, None
        task, stream = graph_task(), current_stream(param.device)
        waiting = self._waiting.get(stream)
        if waiting is None or waiting.task != task:
            waiting = self._waiting[stream] = _Waiting(task)
            if task >= 0:
                call_at_end_of_backward(waiting.end)  # only this callback keeps the gradients
        waiting.add(gradient, *self.places[id(param)])
        if task < 0:  # called outside of backward
            waiting.end()


class _Waiting:
    """The waiting gradients of one graph task on one stream."""

    def __init__(self, task: int) -> None:
        self.task = task
        self._gradients: dict[JointStep, dict[int, Tensor | None]] = {}  # by position
        self._bytes: dict[JointStep, int] = {}

    def add(self, gradient: Tensor | None, joint: JointStep, position: int, size: int) -> None:
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
        """Steps all batches at the end of the graph task. Later callbacks may bring more gradients.

        The caller's stream has waited for the other streams by then.
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
    """Batches the optimizers that have one small parameter each.

    A batch holds neighbors in the model, from its end, in the usual order of backward.
    """
    alike: defaultdict[NormGroup, list[FusedOptimizer]] = defaultdict(list)
    sizes: dict[Tensor, int] = {}
    for optimizer in filter(can_join, reversed(optimizers)):
        param = only_param(optimizer)
        key = norm_key(param)
        if (size := _bytes(param, key)) <= SMALL_BYTES:
            sizes[param] = size
            alike[local_tensor(param).device, key].append(optimizer)
    return [Batches(_cut(joined, sizes), sizes) for joined in alike.values()]


def _cut(optimizers: list[FusedOptimizer], sizes: dict[Tensor, int]) -> list[list[FusedOptimizer]]:
    """Cuts the optimizers into runs with about BATCH_BYTES of parameters each."""
    ends = accumulate(sizes[only_param(optimizer)] for optimizer in optimizers)
    numbered = zip((end // BATCH_BYTES for end in ends), optimizers, strict=True)
    return [[opt for _, opt in run] for _, run in groupby(numbered, key=itemgetter(0))]


def _bytes(param: Tensor, key: NormKey) -> int:
    """Returns the bytes of an equal share of a parameter, which is the same on all ranks."""
    shards = math.prod(key[0].size(d) for d in key[1]) if key else 1
    return -(-param.numel() // shards) * param.element_size()
