"""Builds a JobConfig from a TOML file and a command line, whose values tyro reads.

The command line overrides the file, and the file overrides the defaults, as in torchtitan 0.2
(torchtitan/config/manager.py). Both may use the names of torchtitan 0.1 and 0.2 (torchtitan.toml).
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import importlib
import io
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.extras import import_extra

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
    path = _given(options, "job.config_file")
    file = _read(path) if path else {}
    module = _given([*_leaves({}, file), *options], "job.custom_config_module")
    config = (_extended(module) if module else JobConfig)()
    settings = settings_of(type(config))
    if "help" in dict(options):
        tyro.cli(type(config), prog=prog, args=["--help"], default=config, use_underscores=True)
    seen: dict[str, str] = {}
    for given, value in _leaves(settings, file):
        if value == {} and any(name.startswith(f"{given}.") for name in (*settings, *REJECTED)):
            continue
        try:
            name = _set(config, settings, given, value)
        except ConfigError as error:
            raise ConfigError(f"in {path}, {error}") from error
        if name in seen:
            raise ConfigError(f"{path} sets {seen[name]} and {given}, which are the same setting")
        seen[name] = given
    for given, value in options:
        _set(config, settings, given, value)
    return config


def _given(options: Iterable[tuple[str, Any]], name: str) -> str | None:
    """Returns the last value given for a setting under either of its names, or None."""
    found = [value for given, value in options if name in (given, RENAMED.get(given))]
    return str(found[-1]) if found and found[-1] else None


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


def _set(config: JobConfig, settings: Mapping[str, Any], given: str, value: Any) -> str:
    """Sets the setting that `given` names, and returns its name.

    Args:
        value: as TOML has it; of an option its text, a list of several, or None for a switch.

    Raises:
        ConfigError: No setting has this name, or the value does not fit.
    """
    name, on = _name_of(given, settings), True
    if name is None and value is None:
        name, on = _name_of(given.replace(".no_", ".", 1), settings), False
    if name is None:
        raise ConfigError(_unknown(given, settings))
    kind = settings.get(name)
    if value is None and kind in (bool, None):
        value = on
    if kind is None:
        config.unused[name] = value
        return name
    *sections, field = name.split(".")
    setattr(functools.reduce(getattr, sections, config), field, _parsed(given, kind, value))
    return name


def _name_of(given: str, settings: Mapping[str, Any]) -> str | None:
    """Returns the name of a setting, or of one that only torchtitan has, or None."""
    name = given if given in settings else RENAMED.get(given, given)
    unused = name in REJECTED or any(f"{name}.".startswith(f"{one}.") for one in IGNORED)
    return name if unused or name in settings else None


def _unknown(given: str, settings: Mapping[str, Any]) -> str:
    """Describes a name that no setting has, with the nearest name."""
    sections = {name.rpartition(".")[0] for name in settings}
    if given in sections:
        return f"{given} is a section, expected one of its settings: {given}.<name>"
    last = given.rpartition(".")[2]
    near = [known for known in settings if known.rpartition(".")[2] == last]
    near += difflib.get_close_matches(given, [*sections, *settings, *RENAMED], n=1)
    hint = f"did you mean {RENAMED.get(near[0], near[0])}?" if near else "--help lists all"
    return f"there is no setting {given}: {hint}"


def _parsed(given: str, kind: Any, value: Any) -> Any:
    """Returns a value as a field's type has it. Text has commas between items of a list or table.

    Raises:
        ConfigError: The value does not fit.
    """
    import tyro

    items = value if isinstance(value, list) else [] if value is None else [value]
    if isinstance(value, dict):
        items = [part for pair in value.items() for part in pair]
    elif isinstance(value, str) and get_origin(kind) in (list, dict):
        items = [item.strip() for item in value.split(",") if item.strip()]
        if get_origin(kind) is dict:
            pairs = [item.rpartition("=") for item in items]
            items = [part.strip() for key, _, number in pairs for part in (key, number) if part]
    texts = [f"--value={items[0]}"] if len(items) == 1 else ["--value", *map(str, items)]
    option = dataclasses.make_dataclass("Option", [("value", kind)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(option, args=texts, add_help=False).value
    except SystemExit:
        raise ConfigError(f"{given} is {value!r}, expected {describe(kind)}") from None


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
