"""LRSchedulersContainer, and the warmup-stable-decay schedules of torchtitan up to 0.3."""

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from numbers import Real
from typing import Any, overload

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchopt_ext import ops
from torchopt_ext._torch import set_step_count, step_together
from torchopt_ext.containers.optimizers import OptimizersContainer, check_compat
from torchopt_ext.optim.control import DECAY_TYPES
from torchopt_ext.state.entries import plain

logger = logging.getLogger(__name__)


class LRSchedulersContainer(Stateful):
    """Holds one LambdaLR per optimizer of a container, all with the same factor by step.

    Args:
        optimizers: the optimizers, usually an OptimizersContainer; at least one.
        lr_lambda: maps the number of completed steps to the factor of each group's initial lr.

    Raises:
        TypeError: `optimizers` is a single optimizer or a generator.
    """

    schedulers: list[LRScheduler]

    def __init__(
        self,
        optimizers: OptimizersContainer[Any] | list[Optimizer],
        lr_lambda: Callable[[int], float],
    ) -> None:
        if not hasattr(optimizers, "__len__"):
            kind = type(optimizers).__name__
            raise TypeError(f"optimizers is of type {kind}, expected a container or a list")
        if len(optimizers) == 0:
            raise AssertionError("Must have at least one optimizer to create LRScheduler")
        every = list(optimizers)  # torchtitan's tests give a mock that can be iterated once
        for group in chain(*(optimizer.param_groups for optimizer in every)):
            # Copy lr before a LambdaLR changes a tensor that groups of several optimizers share.
            lr = group["lr"]
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr)
        self.schedulers = [LambdaLR(optimizer, lr_lambda) for optimizer in every]
        self._partial = getattr(optimizers, "partial", False)
        self._follows_initial_lrs = False

    def __iter__(self) -> Iterator[LRScheduler]:
        return iter(self.schedulers)

    def __len__(self) -> int:
        return len(self.schedulers)

    def step(self) -> None:
        self._update_base_lrs()
        step_together(self.schedulers)

    def state_dict(self) -> dict[str, Any]:
        """Returns the first scheduler's state dict. Others may differ only in base_lrs."""
        self._update_base_lrs()
        return self.schedulers[0].state_dict()

    def _update_base_lrs(self) -> None:
        """Takes base lrs from the groups if load_state_dict says so: dcp.load loads them later."""
        for scheduler in self.schedulers if self._follows_initial_lrs else ():
            lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            if scheduler.base_lrs != lrs:
                scheduler.base_lrs = copy.deepcopy(lrs)
                _set_step(scheduler, scheduler.last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved step, and sets each group's lr to its base lr times the factor.

        Accepts what `state_dict` returns, or `{"last_epoch": n}` as torchtitan from 0.3 writes it,
        which keeps the base lrs. If all groups have the same base lr, here and in the dict, the
        saved one replaces it. If they differ, or other ranks have other parts, each group's base lr
        is its own `initial_lr`, which the optimizers' state dicts hold by parameter, because this
        dict holds only one scheduler's, of one rank. If the optimizers are loaded later, the next
        step sets the right rates.

        Raises:
            KeyError: last_epoch is missing.
            ValueError: last_epoch is not a number of steps, or base_lrs are not numbers.
            Exception: the factor raises for this step. No error changes anything.
        """
        last_epoch = plain(state_dict["last_epoch"])
        if not isinstance(last_epoch, int) or isinstance(last_epoch, bool) or last_epoch < 0:
            raise ValueError(f"last_epoch is {last_epoch!r}, expected a number of steps, 0 or more")
        saved = state_dict.get("base_lrs", [])
        if not all(isinstance(lr, Real | Tensor) for lr in saved):
            raise ValueError(f"base_lrs is {saved!r}, expected learning rates")
        factors = state_dict.get("lr_lambdas", [])
        self._try_factors(last_epoch, factors)
        present = {float(lr) for scheduler in self.schedulers for lr in scheduler.base_lrs}
        same = len(present) <= 1 == len({float(lr) for lr in saved})
        self._follows_initial_lrs = bool(saved) and (self._partial or not same)
        for scheduler in self.schedulers:
            groups = scheduler.optimizer.param_groups
            if len(state_dict) > 1:  # the first scheduler, here or there, may have more groups
                own_factors = {"lr_lambdas": factors[: len(groups)]}
                scheduler.load_state_dict(copy.deepcopy({**state_dict, **own_factors}))
            if saved:
                scheduler.base_lrs = copy.deepcopy(saved[:1] * len(groups))
            _set_step(scheduler, last_epoch)
        self._update_base_lrs()

    def _try_factors(self, step: int, saved: Sequence[dict[str, Any] | None]) -> None:
        """Calls copies of the factors, with their saved attributes, to raise their errors early."""
        for scheduler in self.schedulers:
            factors = [copy.copy(factor) for factor in getattr(scheduler, "lr_lambdas", ())]
            for factor, attributes in zip(factors, saved, strict=False):
                if attributes is not None:  # None for functions, which are saved without attributes
                    vars(factor).update(copy.deepcopy(attributes))
            for factor in factors:
                factor(step)

    def get_metrics(self) -> dict[str, float]:
        """Returns the current learning rates as "lr/AdamW", or "lr/AdamW/0" and so on for several.

        Schedulers with equal base_lrs share entries. Fused optimizers have the names of torch's.
        """
        lrs: dict[str, dict[tuple[float, ...], list[float]]] = {}
        for scheduler in self.schedulers:
            name = type(scheduler.optimizer).__name__.removeprefix("Fused")
            base_lrs = tuple(float(lr) for lr in scheduler.base_lrs)
            lrs.setdefault(name, {})[base_lrs] = [float(lr) for lr in scheduler.get_last_lr()]
        metrics: dict[str, float] = {}
        for name, by_base_lrs in lrs.items():
            values = list(chain(*by_base_lrs.values()))
            keys = [f"lr/{name}/{i}" for i in range(len(values))] if values[1:] else [f"lr/{name}"]
            metrics |= zip(keys, values, strict=True)
        return metrics


def _set_step(scheduler: LRScheduler, last_epoch: int) -> None:
    """Sets the number of completed steps, and the learning rates that belong to it."""
    scheduler.last_epoch = last_epoch - 1
    # step() computes the lr of last_epoch. A count of 0 avoids its order warning.
    set_step_count(scheduler, 0)
    scheduler.step()
    set_step_count(scheduler, last_epoch + 1)


@overload
def build_lr_schedulers(
    optimizers: OptimizersContainer[Any], job_config: Any
) -> LRSchedulersContainer: ...
@overload
def build_lr_schedulers(
    optimizers: OptimizersContainer[Any], lr_scheduler_config: Any, training_steps: int
) -> LRSchedulersContainer: ...
def build_lr_schedulers(
    optimizers: OptimizersContainer[Any], *args: Any, **kwargs: Any
) -> LRSchedulersContainer:
    """Builds the learning-rate schedule of a configuration: warmup, constant phase, decay.

    Accepts `(optimizers, job_config)`, as torchtitan before 0.2, or `(optimizers,
    lr_scheduler_config, training_steps)`, as torchtitan 0.2. A configuration with an attribute
    `lr_scheduler` is a job configuration. It gives the factors of torchtitan before 0.1; for those
    of 0.1 pass `(optimizers, job_config.lr_scheduler, job_config.training.steps)`. Any objects can
    serve. The schedule's section has the attributes

    - `warmup_steps`: the call of 0.2 shortens a warmup that is longer than the training.
    - `decay_ratio`: the share of steps that decay. None means all after the warmup.
    - `decay_type`: "linear", "sqrt" or "cosine".
    - `lr_min` or `min_lr_factor`: the factor at the end, from 0 to 1.
    - `total_steps`: optional, replaces the number of training steps.

    Raises:
        ValueError: the decay type is unknown, a number is below 0 or not finite, a factor above 1.
    """
    config = args[0] if args else kwargs.get("job_config", kwargs.get("lr_scheduler_config"))
    schedule = schedule_from_job_config if hasattr(config, "lr_scheduler") else schedule_from_config
    return LRSchedulersContainer(optimizers, schedule(*args, **kwargs))


def schedule_from_job_config(job_config: Any) -> Callable[[int], Any]:
    """Returns the lr factor as a function of the step, by the formula of torchtitan before 0.1."""
    return _schedule(job_config.lr_scheduler, job_config.training.steps, generation=1)


def schedule_from_config(lr_scheduler_config: Any, training_steps: int) -> Callable[[int], Any]:
    """Returns the lr factor as a function of the step, by the formula of torchtitan from 0.1 on.

    `compat = "torchtitan"` selects the formula of torchtitan before 0.1.
    """
    generation = 1 if check_compat(getattr(lr_scheduler_config, "compat", None)) else 2
    return _schedule(lr_scheduler_config, training_steps, generation)


def _schedule(config: Any, training_steps: int, generation: int) -> Callable[[int], Any]:
    # Configurations from torchtitan 0.2.2 on can set the schedule's length.
    own_steps: int | None = getattr(config, "total_steps", None)
    total = _count("training steps", training_steps if own_steps is None else own_steps)
    warmup = _count("warmup_steps", config.warmup_steps)
    minimum = "lr_min" if hasattr(config, "lr_min") else "min_lr_factor"  # the name from 0.2 on
    min_factor = _number(minimum, getattr(config, minimum), maximum=1.0)
    if config.decay_type not in DECAY_TYPES:
        raise ValueError(f"decay_type is {config.decay_type!r}, expected one of {DECAY_TYPES}")
    if warmup > total:
        does = "is shortened" if generation == 2 else "will not be completed"
        text = "Warmup (%d steps) is longer than the training (%d steps): it %s."
        logger.warning(text, warmup, total, does)
        warmup = total if generation == 2 else warmup
    decay = room = max(0, total - warmup)
    if config.decay_ratio is not None:
        decay = round(total * _number("decay_ratio", config.decay_ratio))
    if decay > room:
        text = (
            "Warmup (%d steps) and decay (%d steps) are longer than the training (%d steps): "
            "decay is shortened to %d steps."
        )
        logger.warning(text, warmup, decay, total, room)
        decay = room
    # A partial can be pickled. It has no attributes of its own that a scheduler would save.
    return functools.partial(
        ops.lr_factor,
        warmup_steps=warmup,
        # The later formula has one more step, so that the last real step's factor is not 0.
        stable_steps=room - decay + (generation == 2),
        decay_steps=decay,
        decay_type=config.decay_type,
        min_factor=min_factor,
        generation=generation,
    )


def _number(name: str, value: float, maximum: float = math.inf) -> float:
    if not (math.isfinite(value) and 0 <= value <= maximum):
        raise ValueError(f"{name} is {value}, expected a finite number from 0 to {maximum:g}")
    return value


def _count(name: str, value: float) -> int:
    count = int(_number(name, value))
    if count != value:
        raise ValueError(f"{name} is {value}, expected a whole number")
    return count
