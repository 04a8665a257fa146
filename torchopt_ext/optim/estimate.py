"""Bytes that a rank holds and moves with fused optimizers, from shapes and options."""

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext import _C, ops
from torchopt_ext._arguments import expect_counts
from torchopt_ext.optim.balanced_plan import plan_buckets, reals_of
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, check_chosen, fp32_params
from torchopt_ext.state.algorithms import Algorithm, State, algorithm_of, keys_of, reject_unknown
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.quantized import groups_before
from torchopt_ext.state.storage import MASTER, MasterWeights, StateDtype, Storage

STEP = 4
"""Bytes of a tensor's step count."""


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of a parameter in a step.

    Attributes:
        master, moments: bytes held, without the scales of 8-bit moments.
        moved: bytes moved by pass A, which measures the norm, and by pass B; every array that is
            rewritten counts twice (docs/step.md).
    """

    master: int
    moments: int
    moved: int


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds and moves, in bytes.

    Attributes:
        elements: number of trainable elements that this rank steps.
        weights: parameters, including frozen parameters and padding.
        gradients: gradients that are kept from backward until the step.
        masters: fp32 master weights or remainders.
        moments: the algorithm's states, such as first and second moments, and their scales.
        steps: the tensors' step counts; a tensor that is cut has one in each piece.
        moved: memory read and written by the optimizer's step.
        sent: sent to other ranks in a training step, by ring algorithms: gradients, and parameters
            if they are returned (ZeRO) or gathered for forward and for backward (FSDP).
    """

    elements: int
    weights: int
    gradients: int
    masters: int
    moments: int
    steps: int
    moved: int
    sent: int

    @property
    def held(self) -> int:
        """All bytes that are held when a step begins."""
        return self.weights + self.gradients + self.masters + self.moments + self.steps


def element_bytes(
    param: Tensor,
    grad_dtype: torch.dtype | None,
    storage: Storage,
    algorithm: Algorithm,
    states: Sequence[State],
    norm: bool,
) -> ElementBytes:
    """Returns the bytes of one element of a parameter; reads no values of the parameter.

    A direction that is orthogonalized is written once and read once, without what the products
    move: in float32 on CPUs, in bfloat16 elsewhere.
    """
    weight = param.dtype.itemsize
    gradient = (grad_dtype or param.dtype).itemsize
    kind = storage.master_of(param)
    master = 0 if kind is None else MASTERS[kind].itemsize
    moments = sum(dtype.itemsize for dtype in storage.entries(param, states).values())
    # With an fp32 master a step writes the parameter but does not read it.
    weights_moved = weight + 2 * master if kind == MASTER else 2 * (weight + master)
    direction = 2 if param.is_cuda else max(weight, 4)
    moved = (2 if norm else 1) * gradient + weights_moved + 2 * moments
    moved += 2 * direction if algorithm.steps_matrices else 0
    return ElementBytes(master, moments, moved)


def _named(
    params: Iterable[Tensor | tuple[str, Tensor] | Mapping[str, Any]],
) -> Iterator[tuple[str, Tensor]]:
    for item in params:
        if isinstance(item, Tensor):
            yield "", item
        elif isinstance(item, Mapping):
            members = item["params"]
            named = list(_named([members] if isinstance(members, Tensor) else members))
            names = item.get("param_names") or [name for name, _ in named]
            yield from zip(names, (param for _, param in named), strict=True)
        else:
            yield item


def estimate(
    params: Iterable[Tensor | tuple[str, Tensor] | Mapping[str, Any]],
    *,
    sharding: str = "ddp",
    world_size: int = 1,
    grad_dtype: torch.dtype | None = None,
    master_weights: MasterWeights | None = None,
    state_dtype: StateDtype | None = None,
    algorithm: str = "adamw",
    amsgrad: bool = False,
    momentum: float = 0.0,
    norm: bool = True,
    bucket_elements: int | None = None,
    fp32_moments: Collection[str | Tensor] = EMBEDDINGS,
) -> list[RankBytes]:
    """Estimates the bytes that every rank holds and moves with an optimizer of these parameters.

    Activations, communication buffers (DDP's buckets, FSDP's gathered layers, two buckets of a
    sharded backward pass), and memory that does not grow with the model are not counted.

    Args:
        params: contiguous parameters in forward order, with or without names, or param groups; only
            shapes, dtypes and ``requires_grad`` are read, so they may be on the meta device.
        sharding: one of :data:`SHARDINGS`.
        world_size: number of ranks that share the work.
        grad_dtype: dtype of gradients; None for each parameter's own dtype.
        master_weights, state_dtype: as FusedAdamW's.
        algorithm: "adamw", "adam", "lion", "sgd", "muon" or "normuon", whose 4 bytes for each row
            are not counted.
        amsgrad, momentum: as the algorithm's.
        norm: whether gradients are clipped or checked, which reads them once more.
        bucket_elements: as ZeroRedundancyOptimizer's, for "balanced" and "zero2".
        fp32_moments: as FusedAdamW's; embeddings may be on the meta device if their module exists.

    Returns:
        One entry for each rank.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be held this way.
        TypeError: ``params`` is a module; ``fp32_moments`` is no collection of strings and tensors;
            the algorithm has no ``amsgrad`` or no ``momentum``.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"Invalid sharding: {sharding!r}, expected one of {', '.join(SHARDINGS)}")
    expect_counts(world_size=world_size)
    if world_size < 1:
        raise ValueError(f"Invalid world_size: {world_size}, expected 1 or more")
    asked = {"amsgrad": amsgrad, "momentum": momentum}
    chosen: dict[str, Any] = {key: value for key, value in asked.items() if value}
    chosen["algorithm"] = algorithm
    reject_unknown(chosen, keys_of(algorithm), f"estimate with algorithm {algorithm!r}")
    rule = algorithm_of(chosen)
    states = rule.states_of(chosen)
    scale = 4 * sum(state.is_moment for state in states)  # of a group of elements
    storage = Storage(master_weights, state_dtype)
    if amsgrad and storage.state_dtype == torch.int8:
        raise ValueError("amsgrad is not supported with 8-bit moments: state_dtype='int8'")
    check_chosen(fp32_moments)
    if isinstance(params, nn.Module):
        kind = type(params).__name__
        raise TypeError(f"params is of type {kind}, expected its parameters or named_parameters()")
    params = list(params)
    for item in params:
        if not isinstance(item, Mapping):
            continue
        for key in {of.when for of in rule.states if of.when} & asked.keys():
            value = asked[key]
            if bool(item.get(key, value)) != bool(value):
                raise ValueError(f"a group has {key}={item[key]}, expected {key}={value}")
        if algorithm_of({**chosen, **item}) is not rule:
            raise ValueError(f"a group is of {item['algorithm']!r}, expected {algorithm!r}")
    named = list(_named(params))
    tensors = [param for _, param in named]
    for number, (name, param) in enumerate(named):
        if param.requires_grad and (found := storage.problem(param)):
            raise ValueError(f"parameter {name or number} {found}")
    if storage.state_dtype == torch.int8:
        ids = frozenset(map(id, fp32_params(named, fp32_moments)))
        storage = replace(storage, fp32_moments=ids)
    options = _Options(grad_dtype, storage, bucket_elements)
    shares = SHARDINGS[sharding](tensors, world_size, options)
    weights = sum(p.numel() * p.dtype.itemsize for p in tensors)
    trained = [p for p in tensors if p.requires_grad]
    gradients = sum(p.numel() * options.width(p) for p in trained)
    returned = sum(p.numel() * p.dtype.itemsize for p in trained)
    kinds = {
        options.kind(p): element_bytes(p, grad_dtype, storage, rule, states, norm) for p in trained
    }
    # In units of (world_size - 1) / world_size, the share of the bytes that a ring sends.
    sent = {
        "ddp": 2 * gradients,
        "zero1": 2 * gradients + returned,
        "balanced": gradients + returned,
        "zero2": gradients + returned,
        "fsdp": gradients + 2 * weights,
    }[sharding]

    weights = weights if sharding in ("ddp", "zero1") else 0
    gradients = gradients if sharding in ("ddp", "zero1", "balanced") else 0

    @functools.cache  # most ranks have what another has
    def rank_bytes(reduced: int, tensors: int, groups: int, *elements: int) -> RankBytes:
        by_kind = [(kinds[kind], n) for kind, n in zip(shares.elements, elements, strict=True)]
        return RankBytes(
            elements=sum(elements),
            weights=weights + shares.weights,
            gradients=gradients + reduced,
            masters=sum(kind.master * n for kind, n in by_kind),
            moments=sum(kind.moments * n for kind, n in by_kind) + scale * groups,
            steps=STEP * tensors,
            moved=sum(kind.moved * n for kind, n in by_kind) + 2 * scale * groups,
            sent=sent * (world_size - 1) // world_size,
        )

    return list(map(rank_bytes, *shares.columns()))


def unevenness(elements: Sequence[int]) -> float:
    """Returns the relative excess of the fullest rank over the mean; 0 if all ranks are empty."""
    mean = sum(elements) / len(elements)
    return max(elements) / mean - 1 if mean else 0.0


# ---- who has what --------------------------------------------------------------------------------

_Kind = tuple[torch.dtype, bool]
"""A parameter's dtype, and whether its moments have 8 bits."""


@dataclass(frozen=True)
class _Options:
    """The dtype of gradients, the storage of state, and the size of buckets."""

    grad_dtype: torch.dtype | None
    storage: Storage
    bucket_elements: int | None

    def width(self, param: Tensor) -> int:
        """Returns the bytes of an element of a parameter's gradient."""
        return (self.grad_dtype or param.dtype).itemsize

    def kind(self, param: Tensor) -> _Kind:
        return param.dtype, self.storage.quantizes(param)


class _Shares:
    """What ranks hold beside whole replicas, and what they step: lists of a number for each rank.

    ``weights`` and ``gradients`` are bytes, ``groups`` those of elements that share scales.
    """

    def __init__(self, options: _Options, ranks: int) -> None:
        self.options, self.weights = options, 0  # all ranks have the same weights
        self.gradients, self.tensors, self.groups = ([0] * ranks for _ in range(3))
        self.elements: dict[_Kind, list[int]] = defaultdict(lambda: [0] * ranks)

    def columns(self) -> list[list[int]]:
        return [self.gradients, self.tensors, self.groups, *self.elements.values()]

    def add(self, param: Tensor, first_rank: int, ends: Sequence[int], times: int = 1) -> None:
        """Gives ranks from ``first_rank`` on the elements of a parameter from end to end.

        ``times`` parameters of the same shape are divided in the same way.
        """
        kind = self.options.kind(param)
        groups = [groups_before(param, end) for end in ends] if kind[1] else ends
        elements = self.elements[kind]
        for n in range(len(ends) - 1):
            elements[first_rank + n] += times * (ends[n + 1] - ends[n])
            self.tensors[first_rank + n] += times
            if kind[1]:
                self.groups[first_rank + n] += times * (groups[n + 1] - groups[n])


def _replicated(params: Sequence[Tensor], world_size: int, options: _Options) -> _Shares:
    shares = _greedy(params, 1, options)
    for column in shares.columns():
        column *= world_size
    return shares


def _greedy(params: Sequence[Tensor], world_size: int, options: _Options) -> _Shares:
    """Assigns whole tensors (zero/whole.py)."""
    shares = _Shares(options, world_size)
    trained = [p for p in params if p.requires_grad]
    owners = ops.partition_greedy([p.numel() for p in trained], world_size)
    for param, owner in zip(trained, owners, strict=True):
        shares.add(param, owner, (0, param.numel()))
    return shares


def _in_buckets(params: Sequence[Tensor], world_size: int, options: _Options) -> _Shares:
    """Cuts buckets evenly (zero/balanced.py); a rank keeps its part of the reduced gradients.

    Buckets of equal parameters are cut once: large models have many, each with a cut for each rank.
    """
    shares = _Shares(options, world_size)
    kinds: dict[tuple[torch.dtype, bool], list[Tensor]] = defaultdict(list)
    for param in params:
        kinds[param.dtype, param.requires_grad].append(param)
    for (dtype, trained), alike in kinds.items():
        chosen = _C.default_bucket_elements(world_size) // reals_of(alike[0])
        target = options.bucket_elements or chosen
        buckets: dict[int, list[Tensor]] = defaultdict(list)
        layout = plan_buckets(alike, [*map(_row_length, alike)], 1, target)
        for param, bucket in zip(alike, layout.buckets, strict=True):
            buckets[bucket].append(param)
        same: dict[tuple[Any, ...], list[list[Tensor]]] = defaultdict(list)
        for own in buckets.values():
            same[tuple((p.shape, options.kind(p)) for p in own)].append(own)
        for own, *others in same.values():
            count = 1 + len(others)
            plan = plan_buckets(own, [*map(_row_length, own)], world_size, 1 << 53)
            (cuts,) = plan.cuts
            sizes = [hi - lo for lo, hi in itertools.pairwise(cuts)]
            # Room for the last rank to send as much as others.
            shares.weights += count * (max(cuts[:-1]) + max(sizes)) * dtype.itemsize
            if not trained:
                continue
            width = count * options.width(own[0])
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


def _rows(params: Sequence[Tensor], world_size: int, options: _Options) -> _Shares:
    """Divides every tensor's rows, as FSDP2 does; memory is padded to the first rank's part."""
    # First by how much a rank differs from the one before.
    shares = _Shares(options, world_size + 2)
    for param in params:
        length = param.shape[0] if param.dim() else 1
        row = param.numel() // length if length else 0
        most = -(-length // world_size)
        shares.weights += most * row * param.dtype.itemsize
        if param.requires_grad:
            shares.gradients[0] += most * row * options.width(param)
            full, rest = divmod(length, most) if most else (0, 0)
            shares.add(param, 0, (0, most * row))
            shares.add(param, full, (most * row, rest * row))
            shares.add(param, full + 1, (rest * row, 0))
    shares.tensors = [sum(p.requires_grad for p in params), *[0] * (world_size + 1)]
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
