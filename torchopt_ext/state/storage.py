"""Which parameters a step can update, how weights and moments are held, and where a shard lies."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchopt_ext._torch import is_dtensor, is_flat, local_shape_and_offset
from torchopt_ext.state.algorithms import STATES, State
from torchopt_ext.state.host_memory import ACCELERATORS, HostMemory, Need
from torchopt_ext.state.local import PLAIN, inner_tensors, local_tensor
from torchopt_ext.state.quantized import CODES, can_quantize

MasterWeights = Literal["fp32", "remainder", "remainder8"]
StateDtype = torch.dtype | Literal["int8", "fp32", "float32", "bf16", "bfloat16"]
DTYPE_NAMES = {
    "fp32": torch.float32, "float32": torch.float32,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "int8": torch.int8,
}  # fmt: skip
"""Values of ``state_dtype`` that are names."""
MASTER, REMAINDER, REMAINDER8 = "master_weight", "remainder", "remainder8"
EMA = "ema_weight"
StateDevice = Literal["cpu"] | None
MASTER_WEIGHTS = {"fp32": MASTER, "remainder": REMAINDER, "remainder8": REMAINDER8}
"""Values of ``master_weights``, and the state entry that each keeps."""
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_NARROWED = (*SIXTEEN_BIT, torch.float32)  # the moments of these may have another dtype
_BY_ELEMENT = {
    *(name for of in STATES.values() if not of.by_row for name in (of.name, of.codes)),
    *MASTER_WEIGHTS.values(),
    EMA,
}
STEPPED = (*SIXTEEN_BIT, torch.float32, torch.float64, torch.complex64, torch.complex128)

Place = tuple[int, int, int, int, int, int]
"""Parameter index, first element, run, stride, rows and gap, as in csrc/kernels/tensor_work.h."""


@dataclass(frozen=True)
class Storage:
    """The arguments of :class:`FusedAdam` that say what is kept in addition to a parameter.

    Attributes:
        fp32_moments: ids of parameters that keep float32 moments if others have 8-bit moments. Ids
            do not keep parameters alive that a framework replaces in the groups.
        resident: ids of parameters whose states are beside them although others' are on the host.
        host: memory for states on the host.
        ema_dtype: the dtype of moving averages of weights; None: there are none.
    """

    master_weights: MasterWeights | None = None
    state_dtype: StateDtype | None = None
    fp32_moments: frozenset[int] = field(default=frozenset(), compare=False)
    state_device: StateDevice = None
    state_fraction: float = 1.0
    resident: frozenset[int] = field(default=frozenset(), compare=False)
    host: HostMemory = field(default_factory=HostMemory, compare=False, repr=False)
    ema_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_device", _checked_device(self.state_device))
        fraction = self.state_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise TypeError(f"state_fraction is {fraction!r}, expected a number")
        if not 0.0 < fraction <= 1.0:
            raise ValueError(
                f"Invalid state_fraction: {fraction!r}, expected above 0 and at most 1"
            )
        if isinstance(self.state_dtype, str):
            named = DTYPE_NAMES.get(self.state_dtype, self.state_dtype)
            object.__setattr__(self, "state_dtype", named)
        if self.master_weights not in (None, *MASTER_WEIGHTS):
            expected = f"expected None, {', '.join(map(repr, MASTER_WEIGHTS))}"
            raise ValueError(f"Invalid master_weights: {self.master_weights!r}, {expected}")
        if self.state_dtype not in (None, torch.float32, torch.bfloat16, torch.int8):
            expected = f"expected None or one of {', '.join(map(repr, DTYPE_NAMES))}"
            raise ValueError(f"Invalid state_dtype: {self.state_dtype!r}, {expected}")

    def master_of(self, param: Tensor) -> str | None:
        """Returns the state entry that completes a parameter, by MASTER_WEIGHTS, or None."""
        completed = SIXTEEN_BIT if self.master_weights == "fp32" else (torch.bfloat16,)
        return MASTER_WEIGHTS.get(self.master_weights or "") if param.dtype in completed else None

    def average_dtype(self, param: Tensor) -> torch.dtype | None:
        """Returns the dtype of a parameter's moving average, or None if there is none."""
        return self.ema_dtype and (self.ema_dtype if param.dtype in _NARROWED else param.dtype)

    def on_host(self, param: Tensor) -> bool:
        """Returns whether a parameter's states lie in memory of the host (state/host_memory.py)."""
        if self.state_device is None or id(param) in self.resident:
            return False
        return local_tensor(param).device.type in ACCELERATORS

    def by_element(self, names: Iterable[str]) -> list[str]:
        """Returns the entries that have a value for each element: only these lie on the host."""
        return [name for name in names if name in _BY_ELEMENT]

    def keeps(self, param: Tensor, name: str) -> bool:
        """Returns whether an entry is no master or remainder that the next step converts."""
        return name == self.master_of(param) or name not in MASTER_WEIGHTS.values()

    def zeros(self, param: Tensor, name: str, dtype: torch.dtype) -> Any:
        """Returns zeros for an entry with a value for each element."""
        if self.on_host(param):
            return self.host.take([Need(param, name, dtype)])[0]
        return torch.zeros_like(param, dtype=dtype)

    def quantizes(self, param: Tensor) -> bool:
        """Returns whether a parameter has 8-bit moments with scales."""
        eight_bits = self.state_dtype == torch.int8 and id(param) not in self.fp32_moments
        return eight_bits and can_quantize(param)

    def entries(self, param: Tensor, states: Iterable[State]) -> dict[str, torch.dtype]:
        """Returns the entries that hold a parameter's states, with dtypes."""
        quantizes, dtype = self.quantizes(param), self.float_dtype(param)
        entries = {}
        for state in states:
            if quantizes and state.is_moment:
                entries[state.codes] = CODES[state.codes]
            else:
                entries[state.name] = torch.float32 if state.by_row else dtype
        return entries

    def float_dtype(self, param: Tensor) -> torch.dtype:
        """Returns the dtype of a parameter's moments that are not codes."""
        if param.dtype not in _NARROWED:
            return param.dtype
        if self.state_dtype == torch.int8:
            return torch.float32
        dtype = param.dtype if self.master_of(param) is None else torch.float32
        return self.state_dtype or dtype  # type: ignore[return-value]

    def problem(self, param: Tensor) -> str | None:
        """Returns why a parameter cannot be held this way, to follow its name, or None."""
        exact = self.state_dtype == torch.int8 or self.master_of(param) in (REMAINDER, REMAINDER8)
        if exact and is_flat(param):
            return (
                "is flattened by FullyShardedDataParallel, whose state dicts hold no remainders "
                "and no 8-bit moments: shard the model with torch.distributed.fsdp.fully_shard, or "
                "use master_weights='fp32' and another state_dtype"
            )
        return None

    def passed_over(self, params: Iterable[Tensor], stochastic_rounding: bool) -> str | None:
        """Says which arguments do not apply to which trainable parameters; None if all do."""
        dtypes = {param.dtype for param in params if param.requires_grad}
        wide = [str(dtype).removeprefix("torch.") for dtype in dtypes.difference(_NARROWED)]
        half = torch.float16 in dtypes and self.master_weights != "fp32"
        others = "does not apply to parameters of"
        texts = []
        if wide and self.state_dtype is not None:
            kinds = ", ".join(sorted(wide))
            texts += [f"state_dtype {others} {kinds}: their moments have their dtype"]
        if half and self.master_weights is not None:
            texts += [f"master_weights {others} float16: a remainder completes bfloat16 only"]
        if half and stochastic_rounding:
            texts += [f"stochastic_rounding {others} float16: they are rounded to nearest"]
        return "; ".join(texts) or None


def _checked_device(device: Any) -> StateDevice:
    """Returns "cpu", or None for the parameters' own device."""
    name = device.type if isinstance(device, torch.device) else device
    if name == "cpu":
        return "cpu"
    if name is None:
        return None
    if isinstance(name, str) and name.partition(":")[0] in ACCELERATORS:
        return None
    raise ValueError(
        f"Invalid state_device: {device!r}, expected None, for states beside their parameters, or "
        "'cpu'"
    )


def is_steppable(param: Tensor) -> bool:
    """Returns whether a step could update the parameter if it had a gradient."""
    return param_problem(param) is None


def param_problem(param: Any) -> str | None:
    """Returns why no step could update a parameter, to follow its name in a message, or None.

    Call it only for parameters that require or have a gradient: a frozen parameter, such as a
    quantized weight, may be anything.
    """
    local = local_tensor(param)
    if type(param) not in PLAIN:
        if torch.nn.parameter.is_lazy(param):
            return None  # its first forward gives it a shape
        if is_dtensor(param) and any(placement.is_partial() for placement in param.placements):
            return f"has placements {param.placements}, with which no rank has its value"
        if inner := inner_tensors(local):
            held = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in inner.items())
            return (
                f"is a {type(local).__name__} of {held}; expected one inner tensor of its shape "
                f"{tuple(local.shape)} and dtype {local.dtype}, which a step could update"
            )
    if local.layout is not torch.strided:
        return f"has layout {local.layout}, expected a dense tensor"
    if local.dtype not in STEPPED:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in STEPPED)
        return f"has dtype {param.dtype}, expected one of {expected}"
    if local.is_meta:
        return "is on the meta device; materialize it before building optimizers"
    return None


def split_master(master: Tensor, dtype: torch.dtype = torch.int16) -> tuple[Tensor, Tensor]:
    """Splits a float32 tensor into bfloat16 weight and remainder (csrc/kernels/remainder.h).

    The weight is the nearest, ties to even. An int16 remainder makes the pair exact, except for
    ties between two bfloat16 of which the even value is nearer to zero: such ties move by one
    float32 towards it. An int8 remainder is the nearest that belongs to the weight, within 2**-15
    of the value.
    """
    bits = master.view(torch.int32)
    weight = master.to(torch.bfloat16)
    upper = weight.view(torch.int16).to(torch.int32)
    rest = (bits - (upper << 16)).masked_fill_(master.isnan(), 0)
    if dtype == torch.int16:
        return weight, rest.clamp_(max=0x7FFF).to(dtype)
    even = ~(bits >> 16) & 1
    rest = (rest - even + 0x80) >> 8
    # Rounding up from an even half makes the weight odd. The tie below belongs to the even value.
    lowest = even - 0x80
    return weight, rest.clamp_(max=0x7F).clamp_(lowest).to(dtype)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the exact float32 value of a bfloat16 weight and its remainder."""
    # A negative remainder of 0 is of a weight that was set from outside (csrc/kernels/remainder.h).
    low = remainder.to(torch.int32).masked_fill_((weight == 0) & (remainder < 0), 0)
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + (low << 8 if remainder.dtype == torch.int8 else low)).view(torch.float32)


def place_of(index: int, param: Any, name: str | int = "") -> Place:
    """Returns where this rank's shard lies in parameter ``index``.

    Raises:
        ValueError: the shard is cut in three dimensions after the first, or is not contiguous.
    """
    if not is_dtensor(param):
        return index, 0, 0, 0, 0, 0
    placed = zip(param.placements, param.device_mesh.shape, strict=True)
    cut = {kind.dim for kind, ranks in placed if ranks > 1 and not kind.is_replicate()}
    if len(cut - {0}) > 2 or not local_tensor(param).is_contiguous():
        raise ValueError(
            f"parameter {name or index!r} has placements {param.placements} and a shard with "
            f"strides {local_tensor(param).stride()}: stochastic_rounding= and digests take "
            "shards that are contiguous and cut in at most two dimensions after the first"
        )
    local, offset = local_shape_and_offset(param)
    sizes = list(param.shape)
    inner = [math.prod(sizes[d:]) for d in range(len(sizes) + 1)]  # elements of dimensions d and up
    split = [d for d in range(len(sizes)) if local[d] != sizes[d]]
    first = sum(offset[d] * inner[d + 1] for d in split)
    # Elements of each split dimension after the first, outer before inner: here, and in the whole.
    spans = [(local[d] * inner[d + 1], inner[d]) for d in split if d > 0]
    (here, whole), (run, stride) = [(0, 0), (0, 0), *spans][-2:]
    return index, first, run, stride, here // max(stride, 1), whole - here


def packed_steps(states: Sequence[dict[str, Any]]) -> None:
    """Makes the step counts of parameters on one device views into one vector.

    Incrementing them then takes one pass over contiguous memory. The views must not leave the
    optimizer: saving or copying a single view would carry the vector along.
    """
    if not states:
        return
    steps = [state["step"] for state in states]
    first: int = steps[0].data_ptr()
    if any(step.data_ptr() != first + 4 * i for i, step in enumerate(steps)):
        if any(map(_is_shared, steps)):
            return
        vector = torch.stack(steps)
        for state, step in zip(states, vector.unbind(), strict=True):
            state["step"] = step


def _is_shared(step: Tensor) -> bool:
    """Returns whether other processes use the same count (A3C's SharedAdam)."""
    return step.is_cpu and step.untyped_storage().is_shared()


def with_own_steps(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Returns a copy of an optimizer's state in which every step has memory of its own.

    Steps that processes share stay as they are, for a process that gets the optimizer.
    """
    copies = {key: dict(v) if isinstance(v, dict) else v for key, v in state.items()}
    for entry in copies.values():
        step = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(step, Tensor) and not _is_shared(step):
            entry["step"] = step.clone()
    return copies
