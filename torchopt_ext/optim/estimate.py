"""Bytes that a rank holds and moves with fused optimizers, from shapes and options."""

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext import _C, ops
from torchopt_ext._arguments import expect_counts
from torchopt_ext._torch import is_dtensor
from torchopt_ext.optim.balanced_plan import plan_buckets, reals_of
from torchopt_ext.optim.bandwidths import Crossing, stepped_on_host, streamed
from torchopt_ext.optim.embeddings import reject_embeddings
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, check_chosen, fp32_params
from torchopt_ext.optim.options import EmaDtype, StepOptions
from torchopt_ext.state.algorithms import (
    algorithm_of,
    check_values,
    defaults_of,
    defaults_of_new,
    keys_of,
    name_algorithm,
    reject_unknown,
    without_codes,
)
from torchopt_ext.state.by_row import row_shape
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.matrices import (
    OPERATIONS,
    direction_dtype,
    fix_settings,
    newton_schulz_flops,
)
from torchopt_ext.state.pieces import is_stack, matrix_sizes
from torchopt_ext.state.quantized import GROUP, groups_before
from torchopt_ext.state.storage import MASTER, MasterWeights, StateDevice, StateDtype, Storage

__all__ = ["SHARDINGS", "RankBytes", "estimate"]

STEP = 4
"""Bytes of a tensor's step count."""


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


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds and moves, in bytes, and what it multiplies.

    Attributes:
        elements: number of trainable elements that this rank steps.
        weights: parameters, including frozen parameters and padding.
        gradients: gradients that are kept from backward until the step.
        masters: fp32 master weights or remainders.
        moments: the algorithm's states, such as first and second moments, and their scales.
        averages: moving averages of weights.
        steps: the tensors' step counts; a tensor that is cut has one in each piece.
        host: how many bytes of ``masters``, ``moments`` and ``averages`` lie in memory of the host,
            to within the states of one tensor. A step of the GPU, mapped or staged, moves them
            over the link once in each direction.
        host_step: what a step moves instead with ``offload_step="host"``, to within the same; with
            it Muon's matrices stay mapped.
        moved: memory read and written by the optimizer's step on a GPU. A CPU's updates averages
            with the weights, which it then reads once less.
        sent: sent to other ranks in a training step, by ring algorithms: gradients, and parameters
            if they are returned (ZeRO) or gathered for forward and for backward (FSDP).
        newton_schulz_flops: floating-point operations of Muon's iterations in a step, as torch's
            products take them: for a matrix of sides s <= l, five iterations take
            5 s s (4 l + 2 s). float32 matrices on CPUs take fewer (docs/muon.md). Groups with their
            own ``orthogonalize`` count 0.
    """

    elements: int
    weights: int
    gradients: int
    masters: int
    moments: int
    averages: int
    steps: int
    host: int
    host_step: Crossing
    moved: int
    sent: int
    newton_schulz_flops: int

    @property
    def held(self) -> int:
        """All bytes that are held when a step begins."""
        states = self.masters + self.moments + self.averages + self.steps
        return self.weights + self.gradients + states

    @property
    def on_device(self) -> int:
        """The bytes held beside the parameters, without those on the host."""
        return self.held - self.host


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


_Item = Tensor | tuple[str, Tensor]


def _completed(
    params: Iterable[_Item | Mapping[str, Any]], own: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
    """Yields param groups, as an optimizer with these defaults completes them, and their members.

    A name is "" where none is given.
    """
    items: list[Any] = list(params)
    if not (items and isinstance(items[0], Mapping)):
        items = [{"params": items}]
    for item in items:
        given = dict(item)
        name_algorithm(given)
        group = defaults_of_new(own, given) | given
        fix_settings(group)
        check_values(group)
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        pairs = [("", each) if isinstance(each, Tensor) else each for each in members]
        names = group.get("param_names") or [name for name, _ in pairs]
        named = list(zip(names, (param for _, param in pairs), strict=True))
        if algorithm_of(group).steps_matrices:
            reject_embeddings({"params": [param for _, param in named], "param_names": names})
        yield group, named


def estimate(
    params: Iterable[_Item | Mapping[str, Any]],
    *,
    sharding: str = "ddp",
    world_size: int = 1,
    grad_dtype: torch.dtype | None = None,
    master_weights: MasterWeights | None = None,
    state_dtype: StateDtype | None = None,
    state_device: StateDevice = None,
    state_fraction: float = 1.0,
    ema_decay: float | None = None,
    ema_dtype: EmaDtype | None = None,
    algorithm: str = "adamw",
    norm: bool = True,
    bucket_elements: int | None = None,
    fp32_moments: Collection[str | Tensor] = EMBEDDINGS,
    **defaults: Any,
) -> list[RankBytes]:
    """Estimates the bytes that every rank holds and moves with an optimizer of these parameters.

    Groups may have different algorithms, such as those of :func:`torchopt_ext.muon_groups`.
    Activations, communication buffers (DDP's buckets, FSDP's gathered layers, two buckets of a
    sharded backward pass), and memory that does not grow with the model are not counted.

    Args:
        params: contiguous parameters in forward order, with or without names, or param groups; only
            shapes, dtypes and ``requires_grad`` are read, so they may be on the meta device.
            Functions that make groups leave out frozen parameters, which then do not count.
        sharding: one of :data:`SHARDINGS`.
        world_size: number of ranks that share the work.
        grad_dtype: dtype of gradients; None for each parameter's own dtype.
        master_weights, state_dtype, state_device, state_fraction, ema_decay, ema_dtype: as
            FusedAdamW's, for parameters on GPUs.
        algorithm: "adamw", "adam", "lion", "sgd", "muon" or "normuon", of the groups that name
            none.
        norm: whether gradients are clipped or checked, which reads them once more.
        bucket_elements: as ZeroRedundancyOptimizer's, for "balanced" and "zero2".
        fp32_moments: as FusedAdamW's; embeddings may be on the meta device if their module exists.
        defaults: hyperparameters of the algorithm, as the optimizer's: ``amsgrad``, ``momentum``,
            ``beta2``, ``ns_steps`` and so on.

    Returns:
        One entry for each rank.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be held this way.
        TypeError: ``params`` is a module; ``fp32_moments`` is no collection of strings and tensors;
            an algorithm has no such hyperparameter.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"Invalid sharding: {sharding!r}, expected one of {', '.join(SHARDINGS)}")
    expect_counts(world_size=world_size)
    if world_size < 1:
        raise ValueError(f"Invalid world_size: {world_size}, expected 1 or more")
    reject_unknown(defaults, keys_of(algorithm), f"estimate with algorithm {algorithm!r}")
    storage = StepOptions(
        master_weights=master_weights,
        state_dtype=state_dtype,
        state_device=state_device,
        state_fraction=state_fraction,
        ema_decay=ema_decay,
        ema_dtype=ema_dtype,
    ).storage
    on_host = state_fraction if storage.state_device == "cpu" else 0.0
    check_chosen(fp32_moments)
    if isinstance(params, nn.Module):
        kind = type(params).__name__
        raise TypeError(f"params is of type {kind}, expected its parameters or named_parameters()")
    groups = list(_completed(params, defaults_of(algorithm) | defaults))
    named = [pair for _, members in groups for pair in members]
    if storage.state_dtype == torch.int8:
        if wide := next(filter(None, (without_codes(group) for group, _ in groups)), None):
            raise ValueError(f"{wide} is not supported with 8-bit moments: state_dtype='int8'")
        ids = frozenset(map(id, fp32_params(named, fp32_moments)))
        storage = replace(storage, fp32_moments=ids)
    costs: dict[Tensor, _Cost] = {}
    owned: list[tuple[int, int]] = []  # by ranks, as optim/owners.py chooses them: flops and bytes
    each = ((group, *pair) for group, members in groups for pair in members)
    for number, (group, name, param) in enumerate(each):
        if not param.requires_grad:
            continue
        if found := storage.problem(param):
            raise ValueError(f"parameter {name or number} {found}")
        costs[param] = _cost(param, name or number, group, grad_dtype, storage, norm)
        is_shared = world_size > 1 and algorithm_of(group).steps_matrices
        if is_shared and _cuts(param, group, sharding):
            count = param.shape[0] if is_stack(group, param) else 1
            width = direction_dtype(group, param).itemsize
            bytes_ = width * param.numel() + costs[param].by_row
            owned += [(costs[param].flops // count, bytes_ // count)] * count
            costs[param] = replace(costs[param], flops=0)
    tensors = [[param for _, param in members] for _, members in groups]
    columns = {
        param: matrix_sizes(group, param.shape)[2]
        for group, members in groups
        for _, param in members
        if any(state.by_row for state in algorithm_of(group).states_of(group))
    }
    of_all = _Options(costs, bucket_elements, columns)
    shares = SHARDINGS[sharding](tensors, world_size, of_all)
    flops = [of for of, _ in owned]
    for of, owner in zip(flops, ops.partition_greedy(flops, world_size), strict=True):
        shares.flops[owner] += of
    exchanged = sum(2 * width for _, width in owned) // world_size
    weights = sum(p.numel() * p.dtype.itemsize for _, p in named)
    trained = [p for _, p in named if p.requires_grad]
    gradients = sum(p.numel() * costs[p].gradient for p in trained)
    returned = sum(p.numel() * p.dtype.itemsize for p in trained)
    # In units of (world_size - 1) / world_size, the share of the bytes that a ring sends.
    sent = {
        "ddp": 2 * gradients,
        "zero1": 2 * gradients + returned,
        "balanced": gradients + returned + exchanged,
        "zero2": gradients + returned + exchanged,
        "fsdp": gradients + 2 * weights + exchanged,
    }[sharding]

    weights = weights if sharding in ("ddp", "zero1") else 0
    gradients = gradients if sharding in ("ddp", "zero1", "balanced") else 0

    @functools.cache  # most ranks have what another has
    def rank_bytes(
        reduced: int, tensors: int, beside: int, flops: int, *elements: int
    ) -> RankBytes:
        by_kind = list(zip(shares.elements, elements, strict=True))
        states = ((kind.master + kind.moments + kind.average) * n for kind, n in by_kind)
        crossing = (
            round(on_host * sum(kind.host_step[part] * n for kind, n in by_kind))
            for part in range(len(Crossing._fields))
        )
        return RankBytes(
            elements=sum(elements),
            weights=weights + shares.weights,
            gradients=gradients + reduced,
            masters=sum(kind.master * n for kind, n in by_kind),
            moments=sum(kind.moments * n for kind, n in by_kind) + beside,
            averages=sum(kind.average * n for kind, n in by_kind),
            steps=STEP * tensors,
            host=round(on_host * sum(states)),
            host_step=Crossing(*crossing),
            moved=sum(kind.moved * n for kind, n in by_kind) + 2 * beside,
            sent=sent * (world_size - 1) // world_size,
            newton_schulz_flops=flops,
        )

    return list(map(rank_bytes, *shares.columns()))


def unevenness(elements: Sequence[int]) -> float:
    """Returns the relative excess of the fullest rank over the mean; 0 if all ranks are empty."""
    mean = sum(elements) / len(elements)
    return max(elements) / mean - 1 if mean else 0.0


# ---- who has what --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
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


def _cost(
    param: Tensor,
    what: str | int,
    group: Mapping[str, Any],
    grad_dtype: torch.dtype | None,
    storage: Storage,
    norm: bool,
) -> _Cost:
    algorithm = algorithm_of(group)
    states = algorithm.states_of(group)
    moments = sum(state.is_moment for state in states) if storage.quantizes(param) else 0
    rows = math.prod(row_shape(param.shape, group)) * sum(state.by_row for state in states)
    flops = 0
    if algorithm.steps_matrices:
        whole = torch.empty(param.shape, device="meta") if is_dtensor(param) else param
        flops = newton_schulz_flops(group, whole, what)
    return _Cost(
        element=element_bytes(param, group, grad_dtype, storage, norm),
        gradient=(grad_dtype or param.dtype).itemsize,
        scale=4 * moments,
        by_row=4 * rows,
        flops=flops,
    )


def _cuts(param: Tensor, group: Mapping[str, Any], sharding: str) -> bool:
    """Returns whether a sharding over several ranks cuts matrices."""
    return sharding not in ("ddp", "zero1") and not (sharding == "fsdp" and is_stack(group, param))


@dataclass(frozen=True)
class _Options:
    """What each trained parameter takes, the size of buckets, and the columns of NorMuon's
    matrices, whose rows stay whole."""

    costs: Mapping[Tensor, _Cost]
    bucket_elements: int | None
    columns: Mapping[Tensor, int]


_ByGroup = Sequence[Sequence[Tensor]]


class _Shares:
    """What ranks hold beside whole replicas, and what they step: lists of a number for each rank.

    ``weights``, ``gradients`` and ``beside`` are bytes, the last of scales and states by row.
    """

    def __init__(self, options: _Options, ranks: int) -> None:
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


def _replicated(groups: _ByGroup, world_size: int, options: _Options) -> _Shares:
    shares = _greedy(groups, 1, options)
    for column in shares.columns():
        column *= world_size
    return shares


def _greedy(groups: _ByGroup, world_size: int, options: _Options) -> _Shares:
    """Assigns whole tensors, group by group (zero/whole.py)."""
    shares, loads = _Shares(options, world_size), [0] * world_size
    for params in groups:
        trained = [p for p in params if p.requires_grad]
        sizes = [OPERATIONS * p.numel() + options.costs[p].flops for p in trained]
        owners = ops.partition_greedy(sizes, world_size, loads)
        for param, owner, size in zip(trained, owners, sizes, strict=True):
            shares.add(param, owner, (0, param.numel()))
            loads[owner] += size
    return shares


def _in_buckets(groups: _ByGroup, world_size: int, options: _Options) -> _Shares:
    """Cuts buckets evenly (zero/balanced.py); a rank keeps its part of the reduced gradients.

    Each group has its own. Buckets of equal parameters are cut once: large models have many, each
    with a cut for each rank.
    """
    shares, costs = _Shares(options, world_size), options.costs
    kinds: dict[tuple[int, torch.dtype, bool], list[Tensor]] = defaultdict(list)
    for number, params in enumerate(groups):
        for param in params:
            kinds[number, param.dtype, param.requires_grad].append(param)
    for (_, dtype, trained), alike in kinds.items():
        chosen = _C.default_bucket_elements(world_size) // reals_of(alike[0])
        target = options.bucket_elements or chosen
        buckets: dict[int, list[Tensor]] = defaultdict(list)
        layout = plan_buckets(alike, [*map(_row_length, alike)], 1, target)
        for param, bucket in zip(alike, layout.buckets, strict=True):
            buckets[bucket].append(param)
        same: dict[tuple[Any, ...], list[list[Tensor]]] = defaultdict(list)
        for own in buckets.values():
            same[tuple((p.shape, costs.get(p)) for p in own)].append(own)
        for own, *others in same.values():
            count = 1 + len(others)
            columns = [options.columns[p] for p in own if p in options.columns]
            plan = plan_buckets(own, [*map(_row_length, own)], world_size, 1 << 53, columns)
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


def _row_length(param: Tensor) -> int:
    return param.numel() // param.shape[0] if param.dim() > 1 and param.numel() else 1


def _rows(groups: _ByGroup, world_size: int, options: _Options) -> _Shares:
    """Divides every tensor's rows, as FSDP2 does; memory is padded to the first rank's part."""
    # First by how much a rank differs from the one before.
    shares = _Shares(options, world_size + 2)
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


SHARDINGS: dict[str, Callable[..., _Shares]] = {
    "ddp": _replicated,
    "zero1": _greedy,
    "balanced": _in_buckets,
    "zero2": _in_buckets,
    "fsdp": _rows,
}
"""DDP, or one process; ZeroRedundancyOptimizer with whole tensors, with balanced buckets and
``reduce_scatter_hook``, and with ``sharded_gradients``; FSDP2 with resharding after forward."""
