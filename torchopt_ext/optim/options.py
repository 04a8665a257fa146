"""The options of a step, declared once: arguments, signatures, checks and configurations."""

import inspect
import operator
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from typing import Annotated, Any, Literal, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from typing_extensions import Doc  # torch requires this package

from torchopt_ext._arguments import expect_bools, expect_counts, expect_group, expect_numbers
from torchopt_ext._names import SAME, did_you_mean, meant
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, check_chosen
from torchopt_ext.optim.telemetry import TRACKED, track_bits
from torchopt_ext.state.storage import DTYPE_NAMES, MasterWeights, StateDevice, StateDtype, Storage

__all__ = ["StepOptions"]

P = ParamSpec("P")
T = TypeVar("T")
EmaDtype = torch.dtype | Literal["fp32", "float32", "bf16", "bfloat16"]
OffloadStep = Literal["mapped", "staged", "host", "auto"]


class StepArguments(TypedDict, total=False):
    """Arguments of every fused optimizer, as type checkers and editors need them.

    The first two are the group's, for its weight decay (:class:`FusedOptimizer`). The others are
    those of :class:`StepOptions`.
    """

    cautious_weight_decay: bool
    decay_follows_lr: float
    max_grad_norm: float | None
    skip_nonfinite: bool
    master_weights: MasterWeights | None
    state_dtype: StateDtype | None
    fp32_moments: Collection[str | Tensor]
    stochastic_rounding: bool
    rounding_seed: int
    write_back_gradients: bool
    track: bool | Collection[str]
    state_device: StateDevice
    state_fraction: float
    ema_decay: float | None
    ema_dtype: EmaDtype | None
    ema_warmup: bool
    offload_step: OffloadStep
    process_group: torch.distributed.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a step does around the algorithm's formula, for all param groups alike.

    Each option is a keyword argument of every fused optimizer.

    Args:
        max_grad_norm: clips the 2-norm of all gradients to this value, inside the step. Works as
            ``torch.nn.utils.clip_grad_norm_``, but the gradients in memory do not change. None and
            0 turn clipping off. ``math.inf`` measures ``control.grad_norm`` without clipping.
        skip_nonfinite: skips a step in which any gradient is not finite.
        master_weights: what 16-bit parameters keep: "fp32" weights, or for bfloat16 the next 16
            ("remainder") or 8 bits ("remainder8"). A float32 weight is in
            ``state[p]["master_weight"]``; steps update it and round it to the parameter. The 16
            bits that complete the parameter to float32 are in ``state[p]["remainder"]`` (int16), 2
            bytes less. The next 8 bits are in ``state[p]["remainder8"]`` (int8), 3 bytes less
            (docs/numerics.md section 7).
            Where this, ``state_dtype`` or ``stochastic_rounding`` does not apply to a parameter
            that would need it, the others have it, and a warning and ``repr`` say so.
        state_dtype: dtype of the moments, or its name: "fp32", "bf16" or "int8". None means float32
            with a master weight and the parameter's own dtype without. "int8" means 8 bits each:
            ``exp_avg_codes`` (int8) and ``exp_avg_sq_codes`` (uint8) replace the moments, with
            float32 scales for groups of 64 elements of a row in ``exp_avg_scale_v2`` and
            ``exp_avg_sq_scale_v2`` (docs/numerics.md section 11).
            Parameters with one dimension or rows of less than 64 elements keep float32 moments.
        fp32_moments: which parameters keep float32 moments with state_dtype "int8": "embedding" or
            patterns of names. "embedding" chooses weights of nn.Embedding and EmbeddingBag, also if
            they are tied to an output layer; it searches the modules of this process. Any other
            string is a regular expression, searched for in the names of parameters. A tensor
            chooses the given parameter. With (), every matrix has 8-bit moments.
        stochastic_rounding: rounds bfloat16 parameters, and moments of 16 and 8 bits, up or down at
            random, so that the mean is exact. Parameters are rounded so without a master weight,
            and weights with "remainder8".
        rounding_seed: decides every random bit, together with step, parameter number and element.
        write_back_gradients: also writes the unscaled and clipped gradients to memory.
        track: what a step records of each parameter: "norms", "lost_updates". Norms are of gradient
            and update, lost updates the elements whose update rounded to nothing; see
            ``telemetry``. True for both.
        state_device: where moments, master weights and remainders of parameters on a GPU lie. None:
            beside the parameters. "cpu": in page-locked memory of the host, which the step reads
            and writes through the link, with the same bits (docs/offload.md). Step counts, scales
            and values by row stay on the GPU. Parameters on the CPU are held as ever.
        state_fraction: the part of the bytes that lies on the host with state_device "cpu". The
            states of the first parameters stay on the GPU.
        ema_decay: keeps a moving average of each weight in ``state[p]["ema_weight"]``, which begins
            as a copy of the weight, and sets it to ``ema_decay * average + (1 - ema_decay) *
            weight`` in each step that is not skipped. :meth:`ema_weights` validates with the
            averages. A program may set ``optimizer.ema_decay`` between steps. None: no averages.
        ema_dtype: dtype of the averages, or its name: "fp32" (None) or "bf16", which is rounded
            stochastically. Averages of float64 and complex parameters have the parameter's dtype.
        ema_warmup: lets the first averages decay less: by at most ``(1 + t) / (10 + t)`` after t
            updates, and not at all at first, as in diffusers' EMAModel.
        offload_step: how steps update parameters whose states lie on the host, with the same bits.
            "mapped": kernels read and write the states through the link. "staged": copy engines
            bring the states to the GPU, bucket by bucket, and back; Muon's matrices are stepped as
            by "mapped". "host": gradients come to the host, the CPU steps, and weights return;
            ``step`` waits for it. "auto": measures link and host once and chooses "mapped" or
            "host"; ``offload_path`` says what.
        process_group: ranks that share the norm and the decision to skip, if no DTensor mesh
            defines them. Plain parameters are then disjoint shards. DTensors whose meshes lie
            within the group are counted once (experts on meshes of their own). DTensors whose
            meshes have only this rank in common with the group are summed over their meshes first
            (pipeline stages under FSDP). Leave it out under DDP, whose gradients are replicated,
            and if no ranks outside the DTensors' meshes share the norm.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is out of range, or has no effect.
    """

    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    master_weights: MasterWeights | None = None
    state_dtype: StateDtype | None = None
    fp32_moments: Collection[str | Tensor] = field(default=EMBEDDINGS, compare=False)
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    write_back_gradients: bool = False
    track: Collection[str] = ()
    state_device: StateDevice = None
    state_fraction: float = 1.0
    ema_decay: float | None = None
    ema_dtype: EmaDtype | None = None
    ema_warmup: bool = False
    offload_step: OffloadStep = "mapped"
    process_group: Any = field(default=None, compare=False)  # torch.distributed.ProcessGroup | None

    def __post_init__(self) -> None:
        expect_bools(
            stochastic_rounding=self.stochastic_rounding,
            write_back_gradients=self.write_back_gradients,
            ema_warmup=self.ema_warmup,
        )
        if self.offload_step not in (paths := get_args(OffloadStep)):
            raise ValueError(
                f"Invalid offload_step: {self.offload_step!r}, expected one of {paths}"
            )
        if self.offload_step == "host" and self.needs_device:
            raise ValueError(
                f"offload_step='host' is not supported with {self.needs_device}, which steps on "
                f"the GPU record or write: use offload_step='mapped'"
            )
        if self.offload_step == "staged" and self.track:
            raise ValueError(
                "offload_step='staged' is not supported with track, which records whole tensors: "
                "use offload_step='mapped'"
            )
        expect_counts(rounding_seed=self.rounding_seed)
        seed = operator.index(self.rounding_seed)
        if not 0 <= seed < 2**64:
            raise ValueError(f"Invalid rounding_seed: {seed}, expected 64 bits")
        check_chosen(self.fp32_moments)
        check_decay(self.ema_decay)
        bits = track_bits(self.track)
        storage = self.storage
        if self.average_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"Invalid ema_dtype: {self.ema_dtype!r}, expected None, 'fp32', 'bf16'"
            )
        expect_group(self.process_group)
        vars(self).update(
            state_dtype=storage.state_dtype,
            state_device=storage.state_device,
            rounding_seed=seed,
            ema_dtype=self.ema_dtype and self.average_dtype,
            track=tuple(name for name, bit in TRACKED.items() if bits & bit),
        )

    @classmethod
    def of(cls, owner: type, arguments: Mapping[str, Any]) -> "StepOptions":
        """Returns the options that keyword arguments give to the constructor of ``owner``.

        Raises:
            TypeError: there is no such argument; the message names the nearest.
            ValueError: an option has no effect (:func:`without_host`).
        """
        for name in sorted(arguments.keys() - DEFAULTS.keys()):
            hint = did_you_mean(name, inspect.signature(owner).parameters)
            raise TypeError(
                f"{owner.__name__}.__init__() got an unexpected keyword argument {name!r}{hint}"
            )
        options = cls(**arguments)
        for message in without_host(vars(options)).values():
            raise ValueError(message)
        return options

    @property
    def storage(self) -> Storage:
        """How weights and states are held, without the choices by parameter."""
        average = self.average_dtype
        return Storage(
            self.master_weights,
            self.state_dtype,
            state_device=self.state_device,
            state_fraction=self.state_fraction,
            ema_dtype=None if self.ema_decay is None else average,
        )

    @property
    def average_dtype(self) -> torch.dtype:
        """The dtype of averages of parameters that are not wider."""
        average: Any = "fp32" if self.ema_dtype is None else self.ema_dtype
        return DTYPE_NAMES.get(average, average)

    @property
    def needs_device(self) -> str:
        """The options with which no step is made on the host, or ""."""
        return " and ".join(n for n in ("track", "write_back_gradients") if getattr(self, n))

    @property
    def of_plan(self) -> dict[str, Any]:
        """The arguments of OptimizerPlan: StepOptions of csrc/kernels/tensor_work.h."""
        names = ("stochastic_rounding", "rounding_seed", "write_back_gradients")
        return {name: getattr(self, name) for name in names} | {"track": track_bits(self.track)}


def check_decay(value: Any) -> None:
    """Raises TypeError or ValueError unless ``value`` is a decay of averages or None."""
    expect_numbers(ema_decay=0.0 if value is None else value)
    if value is not None and not 0.0 <= value <= 1.0:
        raise ValueError(f"Invalid ema_decay: {value}, expected None or a number from 0 to 1")


def without_host(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that need states on the host, which the others do not ask for.

    With messages. An optimizer whose states moved later keeps these options.
    """
    if str(options.get("state_device")).partition(":")[0] == "cpu":
        return {}
    return {
        name: f"{name}={value!r} has no effect without state_device='cpu': pass both or neither"
        for name in ("state_fraction", "offload_step")
        if (value := options.get(name, DEFAULTS[name])) != DEFAULTS[name]
    }


DECAY: dict[str, Any] = {"cautious_weight_decay": False, "decay_follows_lr": 0.0}
"""The options of the weight decay, which groups have only where they are set."""
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(StepOptions)}
CONFIGURED = tuple(name for name in DEFAULTS if name != "process_group")
"""The options that a file can give."""
_IN_FILES: dict[str, Any] = {
    "state_dtype": Literal["float32", "bfloat16", "int8"] | None,
    "fp32_moments": list[str],
    "ema_dtype": Literal["float32", "bfloat16"] | None,
    "track": list[Literal["norms", "lost_updates"]],
}
"""Types of options in files, if they are others."""
_HELP = {
    name: text[0].upper() + " ".join(text[1:].split())
    for name, text in re.findall(
        r"^    (\w+): ((?:.|\n {8})+?\.)\s", inspect.getdoc(StepOptions) or "", re.MULTILINE
    )
    if name in DEFAULTS
}
"""The first sentence about each option."""
ASK_FOR_NORM = frozenset({"max_grad_norm", "skip_nonfinite"})


def with_options(init: T) -> T:
    """Shows each option in the signature of a constructor that takes ``**options``."""
    signature = inspect.signature(init)  # type: ignore[arg-type]
    *shown, _ = signature.parameters.values()
    kinds, keyword = get_type_hints(StepArguments), inspect.Parameter.KEYWORD_ONLY
    for name, default in (DECAY | DEFAULTS).items():
        shown.append(inspect.Parameter(name, keyword, default=default, annotation=kinds[name]))
    init.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return init


def answers_other_names(options_go_to: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator of methods, whose errors about an unknown argument name the nearest.

    Args:
        options_go_to: what takes the learning rate and the options of a step instead.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        valid = inspect.signature(method).parameters
        own = {name for names in SAME if not valid.keys().isdisjoint(names) for name in names}
        options = {"lr", *DEFAULTS} - own if options_go_to else ()

        @wraps(method)
        def answering(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in sorted(kwargs.keys() - valid.keys()):
                ours = meant(name, [*valid, *options])
                hint = ours and f"; did you mean {ours!r}?"
                if ours and ours not in valid:
                    hint = f"; {ours!r} is an argument of {options_go_to}"
                raise TypeError(
                    f"{type(args[0]).__name__}.{method.__name__}() got an unexpected keyword "
                    f"argument {name!r}{hint}"
                )
            return method(*args, **kwargs)

        return answering

    return decorate


def configures_step(*without: str) -> Callable[[type[T]], type[T]]:
    """Returns a decorator below ``@dataclass`` that adds the options to a configuration.

    Except those in ``without``, and those that the class declares itself.
    """
    kinds = get_type_hints(StepOptions) | _IN_FILES

    def add(cls: type[T]) -> type[T]:
        for name in CONFIGURED:
            if name not in (*without, *cls.__annotations__):
                default = DEFAULTS[name]
                default = [*default] if isinstance(default, tuple) else default
                cls.__annotations__[name] = Annotated[kinds[name], Doc(_HELP.get(name, ""))]
                setattr(cls, name, field(default_factory=partial(copy, default)))
        return cls

    return add
