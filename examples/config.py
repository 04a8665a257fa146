"""The job file: TOML into nested plain objects, with torchtitan's names for what it shares."""

import dataclasses
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args


@dataclass
class Model:
    dim: int
    n_layers: int
    n_heads: int


@dataclass
class Optimizer:
    name: str
    lr: float
    eps: float
    implementation: str
    early_step_in_backward: bool
    max_grad_norm: float


@dataclass
class LRScheduler:
    warmup_steps: int
    decay_type: str
    lr_min: float  # a fraction of optimizer.lr
    decay_ratio: float | None = None  # None: decay starts where warmup ends


@dataclass
class Training:
    steps: int
    batch_size: int  # sequences per rank
    seq_len: int  # bytes
    seed: int


@dataclass
class Parallelism:
    pipeline_parallel_degree: int


@dataclass
class Checkpoint:
    folder: str  # inside the run's output folder
    interval: int  # steps


@dataclass
class Validation:
    freq: int  # steps
    batches: int  # per rank


@dataclass
class JobConfig:
    model: Model
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    training: Training
    parallelism: Parallelism
    checkpoint: Checkpoint
    validation: Validation


def _convert(key: str, value: Any, expected: Any) -> Any:
    kinds = get_args(expected) if isinstance(expected, types.UnionType) else (expected,)
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
    raise ValueError(f"{key} is {value!r} ({type(value).__name__}), expected {wanted}")


def _section(cls: Any, table: Any, prefix: str) -> Any:
    """Builds the dataclass `cls` from a TOML table; errors name the key."""
    if not isinstance(table, dict):
        raise ValueError(f"{prefix.rstrip('.')} is {table!r}, expected a table")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in table:
        if name not in fields:
            raise ValueError(f"{prefix}{name} is not a known key; known: {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name not in table:
            if field.default is dataclasses.MISSING:
                raise ValueError(f"{prefix}{name} is missing")
        elif dataclasses.is_dataclass(field.type):
            values[name] = _section(field.type, table[name], f"{prefix}{name}.")
        else:
            values[name] = _convert(f"{prefix}{name}", table[name], field.type)
    return cls(**values)


def load_config(path: Path) -> JobConfig:
    """Reads a job file. Raises ValueError naming the file and key that is missing or wrong."""
    try:
        with path.open("rb") as file:
            job: JobConfig = _section(JobConfig, tomllib.load(file), "")
    except ValueError as error:  # includes tomllib.TOMLDecodeError
        raise ValueError(f"{path}: {error}") from None
    return job
