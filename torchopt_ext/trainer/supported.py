"""Rejects settings that the Trainer cannot honor."""

import math
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any, Literal, Union, get_args, get_origin

from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.load_config import REJECTED, describe, settings_of


def check_supported(job_config: JobConfig) -> None:
    """Rejects settings that the Trainer cannot honor.

    Raises:
        ConfigError: A setting is not supported or out of range. The message names all of them.
    """
    wrong = [*_unsupported(job_config.unused), *_out_of_range(job_config, JobConfig())]
    if not 0 <= job_config.lr_scheduler.lr_min <= 1:
        wrong.append(f"lr_scheduler.lr_min is {job_config.lr_scheduler.lr_min}, expected 0 to 1")
    for name, kind in settings_of(type(job_config)).items():
        value = reduce(getattr, name.split("."), job_config)
        choices, items = [*_choices(kind)], value if isinstance(value, list) else [value]
        if choices and any(item not in choices for item in items):
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
    others = {
        "checkpoint.load_only": checkpoint.load_only,
        "fault_tolerance.enable": job_config.fault_tolerance.enable,
    }
    for name, on in others.items():
        if checkpoint.create_seed_checkpoint and on:
            wrong.append(f"checkpoint.create_seed_checkpoint writes nothing with {name}")
    compiled = job_config.compile.components
    if job_config.training.compile and "model" not in compiled:
        wrong.append(f"compile.components is {compiled}, expected 'model' among them")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _unsupported(unused: dict[str, Any]) -> Iterator[str]:
    """Describes values other than torchtitan.toml accepts. An option's value is a text."""
    for name, value in unused.items():
        if name not in REJECTED:
            continue
        only, why = REJECTED[name]
        texts = {",".join(only) if isinstance(only, list) else str(only), *["None"][: only == ""]}
        if value != only and str(value) not in texts:
            yield f"{name} is {value!r}, which this Trainer does not support: {why}"


def _choices(kind: Any) -> Iterator[Any]:
    """Yields the values that a type with a Literal allows, of a list those of its items."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (list, Union, types.UnionType):
        found = [[*_choices(one)] for one in get_args(kind)]
        if any(found):
            yield from (value for values in found for value in values or [None])


def _out_of_range(config: Any, default: Any, prefix: str = "") -> Iterator[str]:
    """Describes numbers that `at_least` rejects, also where a field is replaced.

    Numbers must also be finite. None, for a default, is allowed.
    """
    for field in fields(default):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        usual = getattr(default, field.name)
        if is_dataclass(usual):
            yield from _out_of_range(value, usual, f"{name}.")
        elif value is not None and (bounds := field.metadata.get("bounds")):
            least, end = bounds
            if not least <= value < end:
                also = f" and less than {end}" if end < math.inf else ""
                yield f"{name} is {value}, expected a number of {least} or more{also}"
