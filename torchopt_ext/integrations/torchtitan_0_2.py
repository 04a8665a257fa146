"""torchtitan 0.2: importing this module makes its models train with torchopt_ext.

    torchrun ... -m torchtitan.train ... \
        --experimental.custom_import=torchopt_ext.integrations.torchtitan_0_2

After the import, every TrainSpec that torchtitan looks up builds its optimizers and learning-rate
schedules with `torchopt_ext.containers` instead of torchtitan's builders. Mixture-of-experts models
keep their expert load balancing. A TrainSpec with its own builders keeps them, and a warning says
so. Every model is also available under a name that says so, such as "llama3_torchopt_ext".

`--job.custom_config_module` with this module's name does the same, and also adds the fields of
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
from torchopt_ext.containers.build import fused_options, reject_ineffective_without_norm
from torchopt_ext.integrations.checkpoints import patch_dcp_load
from torchopt_ext.integrations.tested import warn_if_untested
from torchopt_ext.integrations.torchtitan_clipping import take_over, watch
from torchopt_ext.optim.options import configures_step

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
@configures_step()
class Optimizer:
    """Additional fields of `[optimizer]`: see docs/torchtitan_0_2.md.

    torchtitan merges them with its own fields (config/manager.py, _merge_configs).
    """

    deferred_clipping: bool = False
    """Clip to training.max_norm in the step; torchtitan reads all gradients twice more."""
    no_decay: list[str] = field(default_factory=list)
    """Without weight decay: "norm", "bias", "vector", "embedding" or patterns of names."""
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    """Factors of the learning rate by pattern of names; the first match decides."""
    muon: list[str] = field(default_factory=list)
    """Patterns of names of matrices that Muon steps, although AdamW would."""
    adamw: list[str] = field(default_factory=list)
    """Patterns of names of matrices that AdamW steps, although Muon would."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "match_rms_adamw"
    """Muon's factor of the learning rate by shape."""
    ns_coefficients: Literal["jordan", "polar_express", "quintic", "deepseek_v4", "cans"] = "jordan"
    """Coefficients of Muon's Newton-Schulz iterations."""
    ns_steps: int = 5
    """Newton-Schulz iterations, where they may be chosen."""
    track: list[str] = field(default_factory=list)  # torchtitan reads other lists without commas
    """Values to record for each parameter: norms, lost_updates."""
    amsgrad: bool = False
    """As in torch.optim.AdamW."""
    momentum: float = 0.0
    """As in torch.optim.SGD; Muon: 0 means 0.95."""
    dampening: float = 0.0
    """As in torch.optim.SGD."""
    nesterov: bool = False
    """As in torch.optim.SGD."""
    maximize: bool = False
    """As in torch.optim.AdamW."""
    cautious_weight_decay: bool = False
    """Decay weights only where the step does not point against them."""
    decay_follows_lr: bool = False
    """Multiply the weight decay by the share of optimizer.lr that the schedule has left (AdamC)."""
    backwards_per_step: int = 1
    """With early_step_in_backward: number of gradient accumulation steps."""
    compat: Literal["torchtitan"] | None = None
    """With fault tolerance, "torchtitan" counts the step that makes the state, as theirs does."""


@dataclass
class LRScheduler:
    """Additional fields of `[lr_scheduler]`."""

    compat: Literal["torchtitan"] | None = None
    """Use "torchtitan" for learning rates of torchtitan before 0.1, if the job began with them."""


@dataclass
class JobConfig:
    """The extension that torchtitan merges into its own JobConfig."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Any,
    parallel_dims: Any,
    ft_manager: Any = None,
) -> containers.OptimizersContainer[Any]:
    """Builds containers for torchtitan, with :func:`torchopt_ext.containers.build_optimizers`.

    With `deferred_clipping`, and for clipping in backward, it replaces torchtitan's
    `clip_grad_norm_`.

    Raises:
        ValueError: `compat` is set without fault tolerance, where the Trainer saves no state before
            the first step, or a setting has no effect without clipping or a norm in the step.
    """
    fault_tolerant = ft_manager is not None and ft_manager.enabled
    if getattr(optimizer_config, "compat", None) and not fault_tolerant:
        raise ValueError("compat of the optimizer section has no effect without fault tolerance")
    reject_ineffective_without_norm(
        fused_options(optimizer_config),
        deferred=getattr(optimizer_config, "deferred_clipping", False),
    )
    built = containers.build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    watch(built)
    in_backward = isinstance(built, containers.OptimizersInBackwardContainer)
    if in_backward or built.deferred_clipping is not None:
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
    """Returns the TrainSpec with torchopt_ext's builders in place of torchtitan's."""
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


patch_dcp_load(checkpoint)
optimizer.build_optimizers = build_optimizers
train_spec.get_train_spec = _get_train_spec  # the Trainer looks it up in this module
