"""torchtitan 0.2: importing this module makes its models train with torchopt_ext.

    torchrun ... -m torchtitan.train ... \
        --experimental.custom_import=torchopt_ext.integrations.torchtitan_0_2

Every TrainSpec that torchtitan looks up from then on, its own or a registered one, builds its
optimizers and learning-rate schedules with `torchopt_ext.containers` wherever it would have used
torchtitan's builders. Expert load balancing of mixture-of-experts models stays. A TrainSpec with
builders of its own keeps them, and a warning says so.
"""

# mypy: disable-error-code="import-not-found"

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from torchtitan.components import lr_scheduler, optimizer
from torchtitan.protocols import train_spec

from torchopt_ext.containers import build_lr_schedulers, build_optimizers

__all__ = ["build_lr_schedulers", "build_optimizers", "use_torchopt_ext"]

logger = logging.getLogger(__name__)

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
    return use_torchopt_ext(_stock_get_train_spec(name))


optimizer.build_optimizers = build_optimizers
train_spec.get_train_spec = _get_train_spec  # the Trainer looks it up in this module
