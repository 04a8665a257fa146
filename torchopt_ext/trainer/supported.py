"""Rejects settings that the Trainer cannot honor."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from torchopt_ext.trainer.config import NO_BUDGET, ConfigError, JobConfig
from torchopt_ext.trainer.load_config import checked, describe, settings_of


def check_supported(job_config: JobConfig) -> None:
    """Rejects settings that the Trainer cannot honor.

    Raises:
        ConfigError: A setting is not supported or out of range. The message names all of them.
    """
    wrong = [*_problems(job_config, JobConfig())]
    if not 0 <= job_config.lr_scheduler.lr_min <= 1:
        wrong.append(f"lr_scheduler.lr_min is {job_config.lr_scheduler.lr_min}, expected 0 to 1")
    for name, kind in settings_of(type(job_config)).items():
        if "Literal" in str(kind):
            try:
                checked(kind, value := _get(job_config, name))
            except TypeError:
                wrong.append(f"{name} is {value!r}, expected {describe(kind)}")
    if not job_config.training.max_norm > 0:
        wrong.append(
            f"training.max_norm is {job_config.training.max_norm}, expected a positive number, or "
            "inf to measure only"
        )
    checkpoint, unset = job_config.checkpoint, (-1, None, False, "")
    for name in ("load_step", "initial_load_path", "create_seed_checkpoint", "export_safetensors"):
        if not checkpoint.enable_checkpoint and getattr(checkpoint, name) not in unset:
            wrong.append(f"checkpoint.{name} needs checkpoint.enable_checkpoint, which is false")
    for name in ("checkpoint.load_only", "fault_tolerance.enable"):
        if checkpoint.create_seed_checkpoint and _get(job_config, name):
            wrong.append(f"checkpoint.create_seed_checkpoint writes nothing with {name}")
    if job_config.activation_checkpoint.mode == "memory_budget":
        wrong.append(f"activation_checkpoint.mode is 'memory_budget', but {NO_BUDGET}")
    compiled = job_config.compile.components
    if job_config.training.compile and "model" not in compiled:
        wrong.append(f"compile.components is {compiled}, expected 'model' among them")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _problems(config: Any, default: Any, prefix: str = "") -> Iterator[str]:
    """Describes settings that `only` and `at_least` reject, also where a field is replaced.

    Numbers must also be finite. None, for a default, is allowed.
    """
    for field in fields(default):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        usual = getattr(default, field.name)
        if is_dataclass(usual):
            yield from _problems(value, usual, f"{name}.")
        # None and "" both mean "not set"
        elif (why := field.metadata.get("why")) and (value or None) != (usual or None):
            yield f"{name} is {value!r}, which this Trainer does not support: {why}"
        elif value is not None and (bounds := field.metadata.get("bounds")):
            least, end = bounds
            if not least <= value < end:
                also = f" and less than {end}" if end < math.inf else ""
                yield f"{name} is {value}, expected a number of {least} or more{also}"


def _get(config: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), config)
