"""Bytes that a rank holds and moves with fused optimizers, from shapes and options."""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext import ops
from torchopt_ext._arguments import expect_counts
from torchopt_ext.optim.bandwidths import Crossing
from torchopt_ext.optim.embeddings import reject_embeddings
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params
from torchopt_ext.optim.options import EmaDtype, StepOptions
from torchopt_ext.optim.shares import SHARDINGS, Choices, Cost, cost_of, cuts_matrices
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
from torchopt_ext.state.matrices import direction_dtype, fix_settings
from torchopt_ext.state.pieces import is_stack, matrix_sizes
from torchopt_ext.state.storage import MasterWeights, StateDevice, StateDtype

__all__ = ["SHARDINGS", "RankBytes", "estimate"]

STEP = 4
"""Bytes of a tensor's step count."""


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
    options = {
        "master_weights": master_weights,
        "state_dtype": state_dtype,
        "state_device": state_device,
        "state_fraction": state_fraction,
        "fp32_moments": fp32_moments,
        "ema_decay": ema_decay,
        "ema_dtype": ema_dtype,
    }
    storage = StepOptions.of(StepOptions, options).storage
    on_host = state_fraction if storage.state_device == "cpu" else 0.0
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
    costs: dict[Tensor, Cost] = {}
    owned: list[tuple[int, int]] = []  # by ranks, as optim/owners.py chooses them: flops and bytes
    each = ((group, *pair) for group, members in groups for pair in members)
    for number, (group, name, param) in enumerate(each):
        if not param.requires_grad:
            continue
        if found := storage.problem(param):
            raise ValueError(f"parameter {name or number} {found}")
        costs[param] = cost_of(param, name or number, group, grad_dtype, storage, norm)
        is_shared = world_size > 1 and algorithm_of(group).steps_matrices
        if is_shared and cuts_matrices(param, group, sharding):
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
    of_all = Choices(costs, bucket_elements, columns)
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
