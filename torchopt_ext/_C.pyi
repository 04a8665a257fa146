"""The compiled module (csrc/python/); importing it registers the operators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ACCUMULATOR_SIZE: int
CONTROL_FIELDS: tuple[str, ...]

def algorithms() -> dict[str, tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], bool]]:
    """Returns hyperparameters and states of each algorithm, in the order of the fields of Hyper and
    State in state/algorithms.py, and whether it steps matrices."""

def check_hypers(algorithm: str, values: Sequence[float]) -> None:
    """Raises ValueError if a value, in the order of the declaration, is out of range."""

STATES: int  # the most states of an algorithm
SCALES: int  # the most 8-bit moments

def cpu_kernels() -> str: ...

# The bucket_elements that ops.partition_balanced chooses.
def default_bucket_elements(world_size: int) -> int: ...

# ops.partition_balanced, with the cuts of all buckets in one list.
def partition_balanced(
    numels: Sequence[int],
    row_lengths: Sequence[int],
    world_size: int,
    bucket_elements: int | None,
    alignment: int,
) -> tuple[list[int], list[int], list[int], list[int]]: ...

# Adds every value, as a double, to a CPU accumulator, exactly, and carries its digits.
def accumulator_add(accumulator: Tensor, values: Tensor) -> None: ...
def requires_grad(tensors: list[Tensor]) -> bytes: ...

# Returns bytes that are the same only for tensors of the same dtypes, shapes, strides and memory.
def places(tensors: list[Tensor]) -> bytes: ...

# Returns the positions of two tensors that share memory. Raises RuntimeError if one's own elements
# may share it.
def shared_memory(tensors: list[Tensor]) -> tuple[int, int] | None: ...
def share_gradients(tensors: list[Tensor], params: list[Tensor]) -> None: ...
def increment_versions(tensors: list[Tensor]) -> None: ...
def clear_gradients(tensors: list[Tensor]) -> None: ...

# Whether anything, such as a profiler, is told of operators and records (at::hasCallbacks).
def observed() -> bool: ...

# ops.scaled_copy_ without the dispatcher, in half the time over thousands of small tensors.
def scaled_copy_(
    to: list[Tensor], from_: list[Tensor], control: Tensor, *, unscale: bool
) -> None: ...

# Allocates one uninitialized tensor per entry of `like`, with its sizes, strides and (without
# `dtype`) dtype, packed in one block at multiples of 128 bytes. Each has a storage of its bytes,
# which keeps the block and cannot be resized. With `one_version` they share a version counter.
def carve(
    like: list[Tensor],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    one_version: bool = False,
    stepped_on: torch.device | None = None,  # then in host memory that this device can access
) -> list[Tensor]: ...
def is_host_memory(tensor: Tensor) -> bool: ...

# Makes a 16-bit copy, and its version counter, what the weight's are.
def renew_copy(copy: Tensor, weight: Tensor) -> None: ...

class WeightMarks:
    """Shows which of several weights user code has written to; keeps none of them alive."""

    def __init__(self, params: list[Tensor] = ..., shards: list[Tensor] = ...) -> None: ...
    def renew(self, params: list[Tensor], shards: list[Tensor]) -> list[int]:
        """Marks weights as they are; returns the positions of those that did not fit their marks.

        ``params`` are the shards themselves, or the DTensors around them.
        """

def followed(master: Tensor, weight: Tensor) -> Tensor:
    """Returns the master as :func:`take_weight` would leave it."""

def take_weight(master: Tensor, weight: Tensor) -> None:
    """Sets the elements of a master that do not round to the weight to the weight."""

class Identity:
    """Tells tensors from others, also from a later one at an address; keeps nothing alive.

    torch.utils.swap_tensors swaps the identities of two tensors, too.
    """

    def __init__(self, tensors: list[Tensor]) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

def orthogonalize_(
    buffer: Tensor,
    matrices: Sequence[tuple[int, int, int, int, float]],  # as state/matrices.py has them
    coefficients: Sequence[tuple[float, float, float]],
    eps: float,
    instead: Callable[[Tensor], Tensor] | None,
) -> None:
    """Orthogonalizes matrices that lie in a flat tensor, in place."""

def normalize_rows_(
    buffer: Tensor,
    matrices: Sequence[tuple[int, int, int, int, float]],
    averages: Tensor,
    beta2: float,
) -> None:
    """Normalizes the rows of such matrices, blocks of whole rows, and averages their squares."""

class OptimizerPlan:
    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        state: Mapping[Tensor, Any],
        # Parameter, states, master, scales, step (None where absent); their local tensors; group,
        # name, number, part; place (state/storage.py); is_copy: the local parameter is the 16-bit
        # copy of an fp32 weight, which takes the master's position
        params: Sequence[tuple[Any, ...]],
        # By group: algorithm, coefficients, eps, dtype of products, what replaces the products
        algorithms: Sequence[tuple[str, Sequence[Any], float, torch.dtype | None, Any]],
        part_devices: Sequence[torch.device],
        idle: Sequence[Tensor],
        local_gradients: Callable[[list[Any]], list[Tensor | None]],
        # Called with a part's number, average and apply, as csrc/plan/orthogonal_update.h has
        # them; returns the number of matrices
        exchange: Callable[[int, Callable[[int], Any], Callable[[int], None]], int],
        stochastic_rounding: bool,
        rounding_seed: int,
        write_back_gradients: bool,
        track: int,  # bits of csrc/kernels/trace.h, Track
        staging_bytes: int = 0,  # of a slot of csrc/work/staging.h
    ) -> None: ...
    def release(self) -> None: ...
    def collect(self, param_groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool: ...
    def accumulate(self, part: int, accumulator: Tensor) -> None: ...
    def weight_marks(self) -> dict[int, WeightMarks]:
        """Marks of the weights with an fp32 master after the last step, by parameters' ids."""

    def traces(self) -> list[tuple[Tensor, Tensor, list[int]]]: ...
    def update(self, part_controls: Sequence[Tensor]) -> None: ...
    def update_part(self, part: int, control: Tensor) -> None:
        """Runs pass B of one part on the current stream; call :meth:`release` after the last."""

    def collected(
        self,
    ) -> list[tuple[list[int], list[Tensor], list[Tensor | None], list[Tensor]]]:
        """Returns, by part, what has a gradient: positions, local parameters, their fp32 masters,
        and local gradients."""

    def renew_marks(self) -> None:
        """Takes weights that were rounded from their masters for those of the last step."""
    def step(
        self,
        param_groups: list[dict[str, Any]],
        state: Mapping[Tensor, Any],
        control: Tensor,
        accumulator: Tensor,
        with_norm: bool,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> bool: ...
    @property
    def gradients_copied(self) -> int: ...
