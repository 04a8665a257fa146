"""Builds a JobConfig from a TOML file and a command line, whose values tyro reads, and checks it.

The command line overrides the file, and the file overrides the defaults, as in torchtitan 0.2
(torchtitan/config/manager.py). Both may use the names of torchtitan 0.1 and 0.2 (torchtitan.toml).
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import io
import math
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchopt_ext._names import SAME, did_you_mean
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.extras import import_extra

__all__ = ["load_config"]

TORCHTITAN = tomllib.loads(resources.files(__package__).joinpath("torchtitan.toml").read_text())
RENAMED: dict[str, str] = TORCHTITAN["renamed"]
REJECTED = {
    name: (only, why)
    for why, names in TORCHTITAN["rejected"].items()
    for name, only in names.items()
}
"""The accepted value of each setting that the Trainer lacks, and why it lacks it."""
IGNORED: dict[str, str] = TORCHTITAN["ignored"]


def load_config(args: Sequence[str], prog: str = "python -m torchopt_ext train") -> JobConfig:
    """Returns the configuration of a command line. `--help` prints all settings and exits.

    Args:
        args: `--config FILE` or `--job.config_file FILE`, and `--section.field value` for any
            setting; "-" and "_" are the same in names. A switch is `--section.field` or
            `--section.no_field`. Commas separate the items of a list.
        prog: the command's name in the help.

    Raises:
        ConfigError: A name, value, file or module is wrong. The message is one sentence that says
            which. For an unknown name it suggests the nearest valid name.
        MissingExtra: tyro is not installed. The message says how to install it.
    """
    tyro = import_extra("tyro", "reading a job's configuration")
    options = _options(args)
    path = _last_value(options, "job.config_file")
    file = _read(path) if path else {}
    module = _last_value([*_leaves({}, file), *options], "job.custom_config_module")
    config = (_extended(module) if module else JobConfig)()
    settings = settings_of(type(config))
    if "help" in dict(options):
        tyro.cli(type(config), prog=prog, args=["--help"], default=config, use_underscores=True)
    seen: dict[str, str] = {}
    for key, value in _leaves(settings, file):
        if value == {} and any(name.startswith(f"{key}.") for name in (*settings, *REJECTED)):
            continue
        try:
            name = _set(config, settings, key, value)
        except ConfigError as error:
            raise ConfigError(f"in {path}, {error}") from error
        if name in seen:
            raise ConfigError(f"{path} sets {seen[name]} and {key}, which are the same setting")
        seen[name] = key
    for key, value in options:
        _set(config, settings, key, value)
    return config


def _last_value(options: Iterable[tuple[str, Any]], name: str) -> str | None:
    """Returns the last value of a setting under either of its names, or None."""
    values = [value for key, value in options if name in (key, RENAMED.get(key))]
    return str(values[-1]) if values and values[-1] else None


# ---- settings ------------------------------------------------------------------------------------


def settings_of(cls: Any) -> dict[str, Any]:
    """Returns every setting of a configuration class, as "section.field", with its type."""
    settings: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            settings |= {f"{field.name}.{key}": inner for key, inner in settings_of(kind).items()}
        elif field.init:
            settings[field.name] = kind
    return settings


def _set(config: JobConfig, settings: Mapping[str, Any], key: str, value: Any) -> str:
    """Sets the setting of a key, and returns its name.

    Args:
        value: as TOML has it; of an option its text, a list of several, or None for a switch.
    """
    name, on = _name_of(key, settings), True
    if name is None and value is None:
        name, on = _name_of(key.replace(".no_", ".", 1), settings), False
    if name is None:
        raise ConfigError(_unknown(key, settings))
    kind = settings.get(name)
    if value is None and kind in (bool, None):
        value = on
    if kind is None:
        config.unused[name] = value
        return name
    *sections, field = name.split(".")
    setattr(functools.reduce(getattr, sections, config), field, _parsed(key, kind, value))
    return name


def _name_of(key: str, settings: Mapping[str, Any]) -> str | None:
    """Returns the name of a setting, or of one that only torchtitan has, or None."""
    name = key if key in settings else RENAMED.get(key, key)
    unused = name in REJECTED or any(f"{name}.".startswith(f"{one}.") for one in IGNORED)
    return name if unused or name in settings else None


def _unknown(key: str, settings: Mapping[str, Any]) -> str:
    """Describes a name that no setting has, with the nearest name."""
    sections = {name.rpartition(".")[0] for name in settings}
    if key in sections:
        return f"{key} is a section, expected one of its settings: {key}.<name>"
    section, _, last = key.rpartition(".")
    means = [last, *(name for names in SAME if last in names for name in names)]
    found = [name for name in settings if name.rpartition(".")[2] in means]
    found.sort(key=lambda name: not name.startswith(f"{section}."))
    same = found[0] if found else None
    elsewhere = RENAMED | ({} if same is None else {key: same})
    hint = did_you_mean(key, [*sections, *settings], elsewhere) or "; --help lists all"
    return f"there is no setting {key}{hint}"


def _parsed(key: str, kind: Any, value: Any) -> Any:
    """Returns a value as a field's type has it. Text has commas between items of a list or table.

    Raises ConfigError if the value does not fit.
    """
    import tyro

    if kind is bool and value in ("true", "false"):  # as TOML has them
        return value == "true"
    items = value if isinstance(value, list) else [] if value is None else [value]
    if isinstance(value, dict):
        items = [part for pair in value.items() for part in pair]
    elif isinstance(value, str) and get_origin(kind) in (list, dict):
        items = [item.strip() for item in value.split(",") if item.strip()]
        if get_origin(kind) is dict:
            pairs = [item.rpartition("=")[::2] for item in items]
            items = [part.strip() for pair in pairs for part in pair if part]
    texts = [f"--value={items[0]}"] if len(items) == 1 else ["--value", *map(str, items)]
    option = dataclasses.make_dataclass("Option", [("value", kind)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(option, args=texts, add_help=False).value
    except SystemExit:
        raise ConfigError(f"{key} is {value!r}, expected {describe(kind)}") from None


def describe(kind: Any) -> str:
    """Describes the values that a type allows, for messages."""
    if isinstance(kind, enum.EnumType):
        return f"one of {', '.join(kind.__members__)}"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


# ---- the file and the command line ---------------------------------------------------------------


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"there is no {path}") from error
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        text = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as TOML: {text}") from error


def _leaves(
    settings: Mapping[str, Any], table: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields a file's values by "section.field". A table is a value if a setting has its name."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in settings:
            yield from _leaves(settings, value, f"{name}.")
        else:
            yield name, value


def _options(args: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns each option's name, with "_" for "-", and its text, a list of several, or None."""
    options: list[tuple[str, list[str]]] = []
    for arg in ["--help" if arg == "-h" else arg for arg in args]:
        if arg.startswith("--") and arg != "--":
            name, equals, value = arg[2:].partition("=")
            options.append((name.replace("-", "_"), [value] if equals else []))
        elif not options or arg == "--":
            raise ConfigError(f"{arg!r} belongs to no option: write --section.field value")
        else:
            options[-1][1].append(arg)
    return [(name, [*values, None][0] if len(values) < 2 else values) for name, values in options]


# ---- extensions ----------------------------------------------------------------------------------


def _extended(module: str) -> type[JobConfig]:
    """Returns JobConfig with the sections and fields that a module's JobConfig adds or replaces."""
    try:
        extension = importlib.import_module(module).JobConfig
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"job.custom_config_module is {module!r}, which has to be a module with a dataclass "
            f"JobConfig: {error}"
        ) from error
    try:
        merged: type[JobConfig] = _merged(JobConfig, extension)
        merged()
    except TypeError as error:
        raise ConfigError(f"{module}.JobConfig cannot extend JobConfig: {error}") from error
    return merged


def _merged(base: Any, extension: Any) -> Any:
    """Returns a dataclass with the fields of both. Sections of the same name are merged."""
    ours, theirs = get_type_hints(base), get_type_hints(extension)
    fields: list[tuple[str, Any, Any]] = []
    for name in (field.name for field in dataclasses.fields(extension)):
        if name in ours and all(map(dataclasses.is_dataclass, (ours[name], theirs[name]))):
            section = _merged(ours[name], theirs[name])
            fields.append((name, section, dataclasses.field(default_factory=section)))
    bases = (extension,) if issubclass(extension, base) else (extension, base)
    return dataclasses.make_dataclass(base.__name__, fields, bases=bases)


# ---- what the Trainer supports -------------------------------------------------------------------


def check_supported(job_config: JobConfig) -> None:
    """Raises ConfigError if settings are not supported or out of range, and names all of them."""
    wrong = [*_unsupported(job_config.unused), *_out_of_range(job_config, JobConfig())]
    if not 0 <= job_config.lr_scheduler.lr_min <= 1:
        wrong.append(f"lr_scheduler.lr_min is {job_config.lr_scheduler.lr_min}, expected 0 to 1")
    for name, kind in settings_of(type(job_config)).items():
        value = functools.reduce(getattr, name.split("."), job_config)
        choices, items = _choices(kind), value if isinstance(value, list) else [value]
        if choices and any(item not in choices for item in items):
            wrong.append(f"{name} is {value!r}, expected {describe(kind)}")
    if not (max_norm := job_config.training.max_norm) > 0:
        expected = "expected a positive number, or inf to measure only"
        wrong.append(f"training.max_norm is {max_norm}, {expected}")
    checkpoint, unset = job_config.checkpoint, (-1, None, False, "")
    for name in ("load_step", "initial_load_path", "create_seed_checkpoint", "export_safetensors"):
        if not checkpoint.enable_checkpoint and getattr(checkpoint, name) not in unset:
            wrong.append(f"checkpoint.{name} needs checkpoint.enable_checkpoint, which is false")
    if checkpoint.create_seed_checkpoint and checkpoint.load_only:
        wrong.append("checkpoint.create_seed_checkpoint writes nothing with checkpoint.load_only")
    if checkpoint.create_seed_checkpoint and job_config.fault_tolerance.enable:
        wrong.append("checkpoint.create_seed_checkpoint writes nothing with fault_tolerance.enable")
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


def _choices(kind: Any) -> tuple[Any, ...]:
    """Returns the values that a type with a Literal allows, of a list those of its items."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) not in (list, Union, types.UnionType):
        return ()
    choices = tuple(choice for one in get_args(kind) for choice in _choices(one))
    return (*choices, None) if choices and type(None) in get_args(kind) else choices


def _out_of_range(config: Any, default: Any, prefix: str = "") -> Iterator[str]:
    """Describes numbers that `at_least` rejects, also where a field is replaced.

    Numbers must also be finite. None, for a default, is allowed.
    """
    for field in dataclasses.fields(default):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        usual = getattr(default, field.name)
        if dataclasses.is_dataclass(usual):
            yield from _out_of_range(value, usual, f"{name}.")
        elif value is not None and (bounds := field.metadata.get("bounds")):
            least, end = bounds
            if not least <= value < end:
                also = f" and less than {end}" if end < math.inf else ""
                yield f"{name} is {value}, expected a number of {least} or more{also}"
