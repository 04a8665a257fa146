"""Typed wrappers of the operators in csrc/ops/, and the partition of DDP's buckets.

docs/numerics.md states what the operators compute.

An argument out of range raises ValueError. A tensor that does not fit raises RuntimeError, which
names its position in the list. In both cases nothing is changed.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from torchopt_ext import _C

__all__ = [
    "CONTROL_FIELDS",
    "BalancedPlan",
    "Schedule",
    "accumulator_total",
    "control_update_",
    "grad_sumsq_",
    "loss_scale_update_",
    "lr_factor",
    "new_accumulator",
    "new_control",
    "partition_balanced",
    "partition_buckets",
    "partition_greedy",
    "scaled_copy_",
]

CONTROL_FIELDS: tuple[str, ...] = _C.CONTROL_FIELDS
"""Names of the control block's fields, in order (csrc/kernels/control.h says what each means)."""

_ops = torch.ops.torchopt_ext


def new_accumulator(device: torch.device | str = "cpu") -> Tensor:
    """Returns an exact accumulator (int64) that holds zero, on ``device``."""
    return torch.zeros(_C.ACCUMULATOR_SIZE, dtype=torch.int64, device=device)


def new_control(
    device: torch.device | str = "cpu",
    *,
    max_grad_norm: float = 0.0,
    skip_nonfinite: bool | float = False,
    **fields: float,
) -> Tensor:
    """Returns a control block: float64, one element for each of :data:`CONTROL_FIELDS`.

    Args:
        device: the parameters' device.
        max_grad_norm: clip threshold; 0 or less leaves gradients unchanged.
        skip_nonfinite: whether to skip a step that has a non-finite gradient.
        fields: initial values of other fields. By default ``clip_factor``, ``grad_factor``,
            ``grad_scale``, ``loss_scale`` and ``lr_factor`` are 1, and the rest is 0.

    Raises:
        ValueError: a keyword is not the name of a field.
    """
    if unknown := fields.keys() - set(CONTROL_FIELDS):
        raise ValueError(f"a control block has no field {min(unknown)!r}")
    ones = ("clip_factor", "grad_factor", "grad_scale", "loss_scale", "lr_factor")
    fields |= {"max_grad_norm": max_grad_norm, "skip_nonfinite": skip_nonfinite}
    values = dict.fromkeys(CONTROL_FIELDS, 0.0) | dict.fromkeys(ones, 1.0) | fields
    return torch.tensor(list(values.values()), dtype=torch.float64, device=device)


def grad_sumsq_(grads: Sequence[Tensor], accumulator: Tensor) -> None:
    """Adds the sum of squares of every gradient to ``accumulator``, in place (pass A).

    Args:
        grads: float32, float64, bfloat16 or float16, dense, of any shape, on the accumulator's
            device.
        accumulator: from :func:`new_accumulator`.
    """
    _ops.grad_sumsq_.default(grads, accumulator)


def accumulator_total(accumulator: Tensor) -> Tensor:
    """Returns the sum, rounded once to float64, 0-dim; NaN or infinity if any was added."""
    return _ops.accumulator_total.default(accumulator)


def control_update_(
    control: Tensor,
    accumulator: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Computes norm, clip factor and skip decision from the accumulated squares, in place.

    Args:
        control: from :func:`new_control`, on the accumulator's device.
        accumulator: the squares of all gradients, reduced over ranks if they are sharded.
        grad_scale: one float32 element, torch.amp.GradScaler's scale of the gradients.
        found_inf: one float32 element; nonzero skips the step.
    """
    _ops.control_update_.default(control, accumulator, grad_scale, found_inf)


def loss_scale_update_(control: Tensor, found_inf: Tensor, scale: Tensor) -> None:
    """Lets the loss scale back off or grow after a step, in place.

    Args:
        control: holds the settings for growth, backoff and hysteresis, and the counts.
        found_inf: one float32 or float64 element; nonzero if the step's gradients overflowed.
        scale: one float32 element, the loss scale.
    """
    _ops.loss_scale_update_.default(control, found_inf, scale)


adam_, lion_, sgd_ = _ops.adam_, _ops.lion_, _ops.sgd_
"""One step of an algorithm over lists of tensors, in place (pass B).

    adam_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, control, *, lr, ...)
    lion_(params, grads, exp_avgs, state_steps, control, *, lr, ...)
    sgd_(params, grads, momentum_buffers, state_steps, control, *, lr, ...)

- ``params``: dense tensors of float32, float64, bfloat16 or float16 on one device.
- ``grads``: of each parameter's shape and dtype, read only. The gradient of a 16-bit parameter may
  be float32, and the gradient of a float32 parameter may be 16-bit.
- The states: of each parameter's shape and strides; lists of states that are not kept are empty.
- ``state_steps``: one float32 element each, the steps done before this step; incremented.
- ``control``: has the factors for gradients and learning rate, and the decision to skip.
- ``lr``: a number, or one float32 or float64 element on the CPU or the parameters' device. The
  other hyperparameters are those of a param group, by their names in ``adam_.default._schema``,
  with numbers ``beta1`` and ``beta2``, and have the algorithm's defaults.
"""


def scaled_copy_(
    to: Sequence[Tensor], from_: Sequence[Tensor], control: Tensor, *, unscale: bool
) -> None:
    """Copies each tensor of ``from_`` to the tensor of ``to`` at its position, with a cast.

    With ``unscale`` each element is first multiplied by the control block's ``grad_factor``, which
    unscales and clips gradients. Values are rounded to nearest even. If the control block says
    skip, nothing is written.

    Args:
        to: dense tensors of float32, bfloat16 or float16, or of float64 if their sources are.
        from_: tensors of the same shapes, in any of these dtypes; a tensor with other strides is
            copied first. A source may be the very tensor at its position in ``to``, but may share
            no other memory with tensors there. In place, a factor that rounds to 1 changes nothing,
            not even payloads of NaNs.
        control: from :func:`new_control`, on the device of all the tensors.
        unscale: whether to multiply by ``grad_factor``.
    """
    _ops.scaled_copy_.default(to, from_, control, unscale=unscale)


class Schedule(TypedDict, total=False):
    """The arguments of :func:`lr_factor` after ``step``, for type checkers."""

    warmup_steps: Required[int]
    stable_steps: Required[int]
    decay_steps: Required[int]
    decay_type: str
    min_factor: float
    generation: int


@overload
def lr_factor(step: int, **schedule: Unpack[Schedule]) -> float: ...
@overload
def lr_factor(step: Tensor, **schedule: Unpack[Schedule]) -> Tensor: ...
def lr_factor(
    step: int | Tensor,
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    decay_type: str = "linear",
    min_factor: float = 0.0,
    generation: int = 1,
) -> Any:
    """Returns the learning-rate factor after ``step`` steps of a warmup-stable-decay schedule.

    Args:
        step: steps done, 0 or more; an int64 tensor gives a float64 tensor of its shape, an int a
            float. Pass a tensor under torch.compile: an int is a constant of the compiled graph.
        warmup_steps, stable_steps, decay_steps: lengths of the three parts, in steps.
        decay_type: "linear", "sqrt" or "cosine".
        min_factor: the factor at the end of the decay, 0 to 1.
        generation: 1 for torchtitan's formula before 0.1, 2 for the later formula.
    """
    overload = _ops.lr_factor.tensor if isinstance(step, Tensor) else _ops.lr_factor.default
    return overload(
        step, warmup_steps=warmup_steps, stable_steps=stable_steps, decay_steps=decay_steps,
        decay_type=decay_type, min_factor=min_factor, generation=generation,
    )  # fmt: skip


def partition_greedy(
    numels: Sequence[int],
    world_size: int,
    initial_loads: Sequence[int] | None = None,
    tie_loads: Sequence[int] | None = None,
) -> list[int]:
    """Assigns each tensor to a rank: largest first, each to the first rank with the least load.

    Args:
        numels: elements of each tensor.
        world_size: number of ranks.
        initial_loads: elements that each rank already has; zeros by default.
        tie_loads: among ranks with the least load, the rank with the smallest value comes first.
            The values stay as given. They spread tensors without load, such as frozen tensors.

    Raises:
        ValueError: loads are negative or are not one for each rank, or all numels together with the
            largest initial load are 2**63 or more.
    """
    return _ops.partition_greedy.default(numels, world_size, initial_loads, tie_loads)


def partition_buckets(
    numels: Sequence[int], bucket_lengths: Sequence[int], world_size: int, shard_buckets: bool
) -> list[tuple[int, int, int, int]]:
    """Assigns the parameters of DistributedDataParallel's buckets to ranks, for overlapped steps.

    Each row is a bucket, the position in it of the first parameter, the number of parameters and
    their group rank. The rows are the assignments of torch's
    ``ZeroRedundancyOptimizer(overlap_with_ddp=True)``, in the order in which torch makes them.
    Where torch runs out of ranks for a bucket, the last rank takes the rest.

    Args:
        numels: elements of each parameter, bucket by bucket.
        bucket_lengths: number of parameters in each bucket, 1 or more.
        world_size: number of ranks.
        shard_buckets: whether several ranks may share a bucket, each taking about
            ``sum(numels) / world_size`` elements; otherwise rank ``bucket % world_size`` takes all.

    Raises:
        ValueError: the lengths do not add up to ``len(numels)``.
    """
    if not 0 < world_size < 2**31:
        raise ValueError(f"world_size is {world_size}, expected 1 or more and less than 2**31")
    for name, values, least in (("numels", numels, 0), ("bucket_lengths", bucket_lengths, 1)):
        for index, value in enumerate(values):
            if value < least:
                raise ValueError(f"{name}[{index}] is {value}, expected {least} or more")
    if sum(bucket_lengths) != len(numels):
        raise ValueError(f"bucket_lengths add up to {sum(bucket_lengths)} for {len(numels)} numels")
    if not shard_buckets:  # ZeroRedundancyOptimizer._get_assigned_rank
        return [(b, 0, length, b % world_size) for b, length in enumerate(bucket_lengths)]
    # ZeroRedundancyOptimizer._bucket_assignments_per_rank: the smallest bucket first, each run of
    # parameters to the rank with the least load that has no run of this bucket yet. A run ends
    # before the parameter that brings it to the threshold.
    sizes = iter(numels)
    buckets = [[*itertools.islice(sizes, length)] for length in bucket_lengths]
    threshold = sum(numels) / world_size
    loads = [0] * world_size
    rows = []
    for bucket in sorted(range(len(buckets)), key=lambda b: sum(buckets[b])):
        own, starts, size = buckets[bucket], [0], 0
        for index, numel in enumerate(own):
            if size + numel >= threshold and index > starts[-1] and len(starts) < world_size:
                starts.append(index)
                size = 0
            size += numel
        unused = [*range(world_size)]
        for first, end in itertools.pairwise([*starts, len(own)]):
            rank = min(unused, key=loads.__getitem__)
            unused.remove(rank)
            loads[rank] += sum(own[first:end])
            rows.append((bucket, first, end - first, rank))
    return rows


class BalancedPlan(NamedTuple):
    """The positions of tensors in buckets, and each rank's part of every bucket, in elements.

    Tensor ``i`` begins at ``starts[i]`` of bucket ``buckets[i]``. Bucket ``b`` ends with its last
    tensor, at ``lengths[b]``. Rank ``r`` owns its elements ``cuts[b][r]`` to ``cuts[b][r + 1]``.
    """

    buckets: list[int]
    starts: list[int]
    lengths: list[int]
    cuts: list[list[int]]


def partition_balanced(
    numels: Sequence[int],
    row_lengths: Sequence[int],
    world_size: int,
    bucket_elements: int | None = None,
    alignment: int = 64,
) -> BalancedPlan:
    """Lays tensors one after the other into buckets and cuts each bucket evenly among the ranks.

    A bucket is cut only where the blocks of the sum of squares allow it (docs/numerics.md
    section 3): at a tensor's start; in a tensor with rows below 64 elements, at multiples of
    ``alignment`` from its start; in a tensor with longer rows, at a row's start and every 4,096
    elements from there, unless fewer than 64 of the row are left. Each cut is the nearest of these
    to an equal share. So ranks' shares of a bucket differ by two blocks at most, of 4,159 elements
    without padding or of ``alignment`` if that is more.

    Args:
        numels: elements of each tensor, in forward order.
        row_lengths: elements of each tensor's rows; 1 for a 1-D tensor.
        world_size: number of ranks.
        bucket_elements: a bucket ends before the tensor that would take it beyond this size. A last
            bucket of less than half the size joins the previous bucket. By default 2**23, or
            ``world_size * 2**20`` if that is more: shares then differ by 0.8% at most.
        alignment: every tensor starts at a multiple of this number in its bucket.

    Raises:
        ValueError: a row length does not divide its tensor's elements; the message says which.
    """
    buckets, starts, lengths, cuts = _C.partition_balanced(
        numels, row_lengths, world_size, bucket_elements, alignment
    )
    cut = [cuts[i : i + world_size + 1] for i in range(0, len(cuts), world_size + 1)]
    return BalancedPlan(buckets, starts, lengths, cut)
