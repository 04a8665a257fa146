"""What parameters cost in a step, and how shardings divide it among ranks (optim/estimate.py)."""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C, ops
from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.balanced_plan import plan_buckets, reals_of
from torchopt_ext.optim.bandwidths import Crossing, stepped_on_host, streamed
from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.by_row import row_shape
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.matrices import OPERATIONS, direction_dtype, newton_schulz_flops
from torchopt_ext.state.pieces import is_stack
from torchopt_ext.state.quantized import GROUP, groups_before
from torchopt_ext.state.storage import MASTER, Storage


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of a parameter in a step.

    Attributes:
        master, moments, average: bytes held, without the scales of 8-bit moments and states by row.
        moved: bytes moved by pass A, which measures the norm, and by pass B; every array that is
            rewritten counts twice (docs/memory.md).
        host_step: moved by a step of the CPU over states on the host; groups of 8-bit moments count
            as full.
    """

    master: int
    moments: int
    average: int
    moved: int
    host_step: Crossing


def element_bytes(
    param: Tensor,
    group: Mapping[str, Any],
    grad_dtype: torch.dtype | None,
    storage: Storage,
    norm: bool,
) -> ElementBytes:
    """Returns the bytes of one element of a parameter of a group; reads no values.

    A direction that is orthogonalized is written once and read once, without what the products and
    NorMuon's normalization move: by default in float32 on CPUs, in bfloat16 on GPUs.
    """
    algorithm = algorithm_of(group)
    states = [state for state in algorithm.states_of(group) if not state.by_row]
    weight = param.dtype.itemsize
    gradient = (grad_dtype or param.dtype).itemsize
    kind = storage.master_of(param)
    master = 0 if kind is None else MASTERS[kind].itemsize
    moments = sum(dtype.itemsize for dtype in storage.entries(param, states).values())
    read = master if kind == MASTER else weight + master  # with fp32 masters no parameter is read
    moved = (2 if norm else 1) * gradient + read + weight + master + 2 * moments
    if algorithm.steps_matrices:
        moved += 2 * direction_dtype(group, param).itemsize
    average, averaging = 0, 0
    if (kept := storage.average_dtype(param)) is not None:
        average = kept.itemsize
        averaging = read + 2 * average  # in a kernel after pass B (csrc/cuda/average.h)
    scales = 0.0
    if storage.quantizes(param):
        scales = 4 / GROUP * sum(state.is_moment for state in states)
    held = master + moments + average
    host_step = streamed(held)
    if not algorithm.steps_matrices:
        reads = kind != MASTER
        host_step = stepped_on_host(held, gradient, weight, read=reads, scales=scales)
    return ElementBytes(master, moments, average, moved + averaging, host_step)


@dataclass(frozen=True)
class Cost:
    """What a parameter takes.

    Attributes:
        element: bytes of an element.
        gradient: bytes of an element's gradient.
        scale: bytes of the scales of a group of elements; 0 without 8-bit moments.
        by_row: bytes of states by row.
        flops: of its matrices' orthogonalization.
    """

    element: ElementBytes
    gradient: int
    scale: int
    by_row: int
    flops: int

    def before(self, param: Tensor, element: int) -> tuple[int, int]:
        """Returns the bytes held beside the elements before one, and their flops."""
        scales = self.scale * groups_before(param, element) if self.scale else 0
        count = max(param.numel(), 1)
        return scales + self.by_row * element // count, self.flops * element // count


def cost_of(
    param: Tensor,
    what: str | int,
    group: Mapping[str, Any],
    grad_dtype: torch.dtype | None,
    storage: Storage,
    norm: bool,
) -> Cost:
    algorithm = algorithm_of(group)
    states = algorithm.states_of(group)
    moments = sum(state.is_moment for state in states) if storage.quantizes(param) else 0
    rows = math.prod(row_shape(param.shape, group)) * sum(state.by_row for state in states)
    flops = 0
    if algorithm.steps_matrices:
        whole = torch.empty(param.shape, device="meta") if is_dtensor(param) else param
        flops = newton_schulz_flops(group, whole, what)
    return Cost(
        element=element_bytes(param, group, grad_dtype, storage, norm),
        gradient=(grad_dtype or param.dtype).itemsize,
        scale=4 * moments,
        by_row=4 * rows,
        flops=flops,
    )


def cuts_matrices(param: Tensor, group: Mapping[str, Any], sharding: str) -> bool:
    """Returns whether a sharding over several ranks cuts matrices."""
    return sharding not in ("ddp", "zero1") and not (sharding == "fsdp" and is_stack(group, param))


@dataclass(frozen=True)
class Choices:
    """What each trained parameter takes, the size of buckets, and the columns of NorMuon's
    matrices, whose rows stay whole."""

    costs: Mapping[Tensor, Cost]
    bucket_elements: int | None
    columns: Mapping[Tensor, int]


_ByGroup = Sequence[Sequence[Tensor]]


class Shares:
    """What ranks hold beside whole replicas, and what they step: lists of a number for each rank.

    ``weights``, ``gradients`` and ``beside`` are bytes, the last of scales and states by row.
    """

    def __init__(self, options: Choices, ranks: int) -> None:
        self.costs, self.weights = options.costs, 0  # all ranks have the same weights
        self.gradients, self.tensors, self.beside, self.flops = ([0] * ranks for _ in range(4))
        self.elements: dict[ElementBytes, list[int]] = defaultdict(lambda: [0] * ranks)

    def columns(self) -> list[list[int]]:
        own = [self.gradients, self.tensors, self.beside, self.flops]
        return [*own, *self.elements.values()]

    def add(self, param: Tensor, first_rank: int, ends: Sequence[int], times: int = 1) -> None:
        """Gives ranks from ``first_rank`` on the elements of a parameter from end to end.

        ``times`` parameters of the same shape are divided in the same way.
        """
        cost = self.costs[param]
        elements = self.elements[cost.element]
        for n in range(len(ends) - 1):
            elements[first_rank + n] += times * (ends[n + 1] - ends[n])
            self.tensors[first_rank + n] += times
        if cost.scale or cost.by_row or cost.flops:
            parts = itertools.pairwise(cost.before(param, end) for end in ends)
            for rank, (first, last) in enumerate(parts, first_rank):
                self.beside[rank] += times * (last[0] - first[0])
                self.flops[rank] += times * (last[1] - first[1])


def _replicated(groups: _ByGroup, world_size: int, options: Choices) -> Shares:
    shares = _greedy(groups, 1, options)
    for column in shares.columns():
        column *= world_size
    return shares


def _greedy(groups: _ByGroup, world_size: int, options: Choices) -> Shares:
    """Assigns whole tensors, group by group (zero/whole.py)."""
    shares, loads = Shares(options, world_size), [0] * world_size
    for params in groups:
        trained = [p for p in params if p.requires_grad]
        sizes = [OPERATIONS * p.numel() + options.costs[p].flops for p in trained]
        owners = ops.partition_greedy(sizes, world_size, loads)
        for param, owner, size in zip(trained, owners, sizes, strict=True):
            shares.add(param, owner, (0, param.numel()))
            loads[owner] += size
    return shares


def _in_buckets(groups: _ByGroup, world_size: int, options: Choices) -> Shares:
    """Cuts buckets evenly (zero/balanced.py); a rank keeps its part of the reduced gradients.

    Each group has its own. Buckets of equal parameters are cut once: large models have many, each
    with a cut for each rank.
    """
    shares, costs = Shares(options, world_size), options.costs
    kinds: dict[tuple[int, torch.dtype, bool], list[Tensor]] = defaultdict(list)
    for number, params in enumerate(groups):
        for param in params:
            kinds[number, param.dtype, param.requires_grad].append(param)
    for (_, dtype, trained), alike in kinds.items():
        chosen = _C.default_bucket_elements(world_size) // reals_of(alike[0])
        target = options.bucket_elements or chosen
        buckets: dict[int, list[Tensor]] = defaultdict(list)
        layout = plan_buckets(alike, 1, target)
        for param, bucket in zip(alike, layout.buckets, strict=True):
            buckets[bucket].append(param)
        same: dict[tuple[Any, ...], list[list[Tensor]]] = defaultdict(list)
        for own in buckets.values():
            same[tuple((p.shape, costs.get(p)) for p in own)].append(own)
        for own, *others in same.values():
            count = 1 + len(others)
            columns = [options.columns[p] for p in own if p in options.columns]
            plan = plan_buckets(own, world_size, 1 << 53, columns)
            (cuts,) = plan.cuts
            sizes = [hi - lo for lo, hi in itertools.pairwise(cuts)]
            # Room for the last rank to send as much as others.
            shares.weights += count * (max(cuts[:-1]) + max(sizes)) * dtype.itemsize
            if not trained:
                continue
            width = count * costs[own[0]].gradient
            for rank, size in enumerate(sizes):
                shares.gradients[rank] += width * size
            for param, start in zip(own, plan.starts, strict=True):
                end = start + param.numel()
                first, last = bisect.bisect_right(cuts, start) - 1, bisect.bisect_left(cuts, end)
                if first < last:
                    ends = [start, *cuts[first + 1 : last], end]
                    shares.add(param, first, [at - start for at in ends], count)
    return shares


def _rows(groups: _ByGroup, world_size: int, options: Choices) -> Shares:
    """Divides every tensor's rows, as FSDP2 does; memory is padded to the first rank's part."""
    # First by how much a rank differs from the one before.
    shares = Shares(options, world_size + 2)
    for param in itertools.chain(*groups):
        length = param.shape[0] if param.dim() else 1
        row = param.numel() // length if length else 0
        most = -(-length // world_size)
        shares.weights += most * row * param.dtype.itemsize
        if param.requires_grad:
            shares.gradients[0] += most * row * options.costs[param].gradient
            full, rest = divmod(length, most) if most else (0, 0)
            shares.add(param, 0, (0, most * row))
            shares.add(param, full, (most * row, rest * row))
            shares.add(param, full + 1, (rest * row, 0))
    shares.tensors = [len(options.costs), *[0] * (world_size + 1)]
    for column in shares.columns():
        column[:] = itertools.islice(itertools.accumulate(column), world_size)
    return shares


SHARDINGS: dict[str, Callable[..., Shares]] = {
    "ddp": _replicated,
    "zero1": _greedy,
    "balanced": _in_buckets,
    "zero2": _in_buckets,
    "fsdp": _rows,
}
"""DDP, or one process; ZeroRedundancyOptimizer with whole tensors, with balanced buckets and
``reduce_scatter_hook``, and with ``sharded_gradients``; FSDP2 with resharding after forward."""
