"""torchtitan 0.2: importing this module makes its models train with torchopt_ext.

    torchrun ... -m torchtitan.train ... \
        --experimental.custom_import=torchopt_ext.integrations.torchtitan_0_2

Every TrainSpec that torchtitan looks up from then on, its own or a registered one, builds its
optimizers and learning-rate schedules with `torchopt_ext.containers` wherever it would have used
torchtitan's builders. Expert load balancing of mixture-of-experts models stays. A TrainSpec with
builders of its own keeps them, and a warning says so. "llama3_torchopt_ext", and so on for every
model, is the same TrainSpec under a name that says it.

`--job.custom_config_module` with this module's name does the same and adds the fields of
:class:`Optimizer` and :class:`LRScheduler` to torchtitan's configuration.
"""

# mypy: disable-error-code="import-not-found"

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from torchopt_ext import containers
from torchopt_ext.containers import build_lr_schedulers
from torchopt_ext.containers.build import fused_options, reject_unclipped_write_back
from torchopt_ext.containers.deferred_clipping import report_norm, take_over
from torchopt_ext.integrations.checkpoints import load_ours
from torchopt_ext.integrations.tested import warn_if_untested

warn_if_untested("torchtitan", "0.2.2")

from torchtitan.components import checkpoint, lr_scheduler, optimizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402

__all__ = [
    "JobConfig",
    "LRScheduler",
    "Optimizer",
    "build_lr_schedulers",
    "build_optimizers",
    "use_torchopt_ext",
]

logger = logging.getLogger(__name__)

_SUFFIX = "_torchopt_ext"


@dataclass
class Optimizer:
    """What `[optimizer]` may have besides torchtitan's fields: docs/torchtitan.md.

    torchtitan adds the fields to its own (config/manager.py, _merge_configs).
    """

    deferred_clipping: bool = False
    """Let the step clip to training.max_norm, where torchtitan reads all gradients twice more."""
    max_grad_norm: float | None = None
    """Clip to this norm inside the step, besides what training.max_norm does before it."""
    skip_nonfinite: bool = False
    """Change nothing in a step in which a gradient is not finite."""
    master_weights: Literal["fp32", "remainder", "remainder8"] | None = None
    """Keep what 16-bit parameters (training.dtype) lack of float32."""
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Dtype of the moments."""
    fp32_moments: list[str] = field(default_factory=lambda: ["embedding"])
    """What keeps fp32 moments with state_dtype int8: "embedding" or patterns of names."""
    stochastic_rounding: bool = False
    """Round bfloat16 parameters and moments at random, without bias."""
    rounding_seed: int = 0
    """Seed of stochastic_rounding."""
    write_back_gradients: bool = False
    """Let gradients be clipped in memory, too."""
    track: list[str] = field(default_factory=list)
    """What to note of each parameter: norms, lost_updates, digest."""
    norm_in_backward: bool = False
    """Sum the squares of gradients in backward, while they are in cache."""
    amsgrad: bool = False
    """As torch.optim.AdamW's."""
    maximize: bool = False
    """As torch.optim.AdamW's."""
    backwards_per_step: int = 1
    """With early_step_in_backward: gradient accumulation steps."""
    compat: Literal["seed"] | None = None
    """"seed", with fault tolerance: count a step that makes the state, as torchtitan does."""


@dataclass
class LRScheduler:
    """What `[lr_scheduler]` may have besides torchtitan's fields."""

    compat: Literal["seed"] | None = None
    """"seed": the learning rates of torchtitan before 0.1, for jobs that began with it."""


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Any,
    parallel_dims: Any,
    ft_manager: Any = None,
) -> containers.OptimizersContainer[Any]:
    """As torchtitan's, with :func:`torchopt_ext.containers.build_optimizers`.

    With `deferred_clipping`, and for clipping in backward, torchtitan's `clip_grad_norm_` is taken
    over.

    Raises:
        ValueError: `compat` without fault tolerance: the Trainer saves no state before the first
            step; `write_back_gradients` without clipping in the step.
    """
    fault_tolerant = ft_manager is not None and ft_manager.enabled
    if getattr(optimizer_config, "compat", None) and not fault_tolerant:
        raise ValueError("compat of the optimizer section has no effect without fault tolerance")
    reject_unclipped_write_back(
        fused_options(optimizer_config),
        deferred=getattr(optimizer_config, "deferred_clipping", False),
    )
    built = containers.build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    if isinstance(built, containers.OptimizersInBackwardContainer) and built.measures_norm:
        report_norm(built)
        take_over(distributed)
    if built.deferred_clipping is not None:
        take_over(distributed)
    return built


_stock_get_train_spec = train_spec.get_train_spec
_OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    optimizer.build_optimizers: build_optimizers,
    lr_scheduler.build_lr_schedulers: build_lr_schedulers,
    # It calls torchtitan's build_optimizers, replaced below, and adds a step hook.
    optimizer.build_optimizers_with_moe_load_balancing: (
        optimizer.build_optimizers_with_moe_load_balancing
    ),
}


def use_torchopt_ext(spec: train_spec.TrainSpec) -> train_spec.TrainSpec:
    """The same TrainSpec, with torchopt_ext in place of torchtitan's two builders."""
    return dataclasses.replace(
        spec,
        build_optimizers_fn=_ours(spec.build_optimizers_fn),
        build_lr_schedulers_fn=_ours(spec.build_lr_schedulers_fn),
    )


def _ours(builder: Callable[..., Any]) -> Callable[..., Any]:
    if builder not in _OURS and builder not in _OURS.values():
        logger.warning("%r is not a builder of torchtitan's: torchopt_ext leaves it", builder)
    return _OURS.get(builder, builder)


def _get_train_spec(name: str) -> train_spec.TrainSpec:
    try:
        spec = _stock_get_train_spec(name)
    except ValueError:
        if not name.endswith(_SUFFIX):
            raise
        spec = _stock_get_train_spec(name.removesuffix(_SUFFIX))
    return use_torchopt_ext(spec)


load_ours(
    checkpoint.CheckpointManager,
    checkpoint.OPTIMIZER,
    lambda saved: isinstance(saved, containers.OptimizersContainer),
)
optimizer.build_optimizers = build_optimizers
train_spec.get_train_spec = _get_train_spec  # the Trainer looks it up in this module
