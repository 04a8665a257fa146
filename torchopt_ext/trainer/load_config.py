"""Builds a JobConfig from a TOML file and a command line.

The command line overrides the file, and the file overrides the defaults, as in torchtitan 0.2
(torchtitan/config/manager.py). Both may use the names of torchtitan 0.1 and 0.2.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import importlib
import io
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.extras import import_extra

_RENAMED = {
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_only": "checkpoint.model_weights_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.model_weights_only",
    "compile.enable": "training.compile",
    "config": "job.config_file",
    "debug.deterministic": "training.deterministic",
    "debug.seed": "training.seed",
    "experimental.custom_args_module": "job.custom_config_module",
    "job.print_config": "job.print_args",
    "lr_scheduler.min_lr_factor": "lr_scheduler.lr_min",
    "memory_estimation.enable": "memory_estimation.enabled",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.local_batch_size": "training.batch_size",
}
"""Other names of settings in torchtitan 0.1 to 0.2.2, and `--config`."""


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
    options = list(_options(args))
    path = _given(options, "job.config_file")
    file = _read(path) if path else {}
    module = _given(options, "job.custom_config_module")
    if module is None:
        module = _given(_leaves({}, file), "job.custom_config_module")
    config = (_extended(str(module)) if module else JobConfig)()
    _set_from_file(config, file, path)
    _set_from_options(config, options, prog)
    return config


def _given(options: Iterable[tuple[str, Any]], name: str) -> Any:
    """Returns the last value given for a setting under either of its names, or None."""
    found = None
    for given, value in options:
        if given == name or _RENAMED.get(given) == name:
            found = value[-1] if isinstance(value, list) and value else value
    return found or None


# ---- names and types -----------------------------------------------------------------------------


def settings_of(cls: Any) -> dict[str, Any]:
    """Returns every setting of a configuration class, as "section.field", with its type."""
    settings: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        inner = settings_of(kind) if dataclasses.is_dataclass(kind) else {"": kind}
        settings |= {f"{field.name}.{key}".rstrip("."): value for key, value in inner.items()}
    return settings


def _name_of(given: str, settings: Mapping[str, Any]) -> str:
    """Returns the setting that `given` names.

    Raises:
        ConfigError: No setting has this name.
    """
    name = given if given in settings else _RENAMED.get(given, given)
    if name in settings:
        return name
    last = given.rpartition(".")[2]
    near = [known for known in settings if known.rpartition(".")[2] == last]
    sections = [] if "." in given else sorted({known.partition(".")[0] for known in settings})
    if given in sections:
        raise ConfigError(f"{given} is a section, expected one of its settings: {given}.<name>")
    near += difflib.get_close_matches(given, [*sections, *settings, *_RENAMED], n=1)
    hint = f"did you mean {_RENAMED.get(near[0], near[0])}?" if near else "--help lists all"
    raise ConfigError(f"there is no setting {given}: {hint}")


def checked(kind: Any, value: Any) -> Any:
    """Returns a value as a field's type has it, such as a list of a text with commas.

    Raises:
        TypeError: The value is of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for one in inner:
            with contextlib.suppress(TypeError):
                return checked(one, value)
        raise TypeError
    if origin is list:
        if isinstance(value, str):
            value = _items(value)
        elif get_origin(inner[0]) is list and str in map(type, value):
            raise TypeError  # a list of lists
        if not isinstance(value, list):
            raise TypeError
        return [checked(inner[0], item) for item in value]
    if origin is dict:
        if isinstance(value, str):
            pairs = [item.rpartition("=") for item in _items(value) or [""]]
            try:
                value = {key.strip(): inner[1](number) for key, _, number in pairs}
            except ValueError:
                raise TypeError from None
        if not isinstance(value, dict) or "" in value:
            raise TypeError
        return {key: checked(inner[1], item) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if origin is Literal:
        fits = value in inner and type(value) in map(type, inner)
    else:  # other types come from an extension: only tyro may check them
        fits = type(value) is kind or kind not in (bool, int, float, str, types.NoneType)
    if not fits:
        raise TypeError
    return value


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _set(config: JobConfig, name: str, value: Any) -> None:
    *sections, field = name.split(".")
    setattr(functools.reduce(getattr, sections, config), field, value)


def describe(kind: Any) -> str:
    """Describes the values that a type allows, for messages."""
    named = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if kind in named:
        return named[kind]
    if isinstance(kind, enum.EnumType):
        return f"one of {', '.join(kind.__members__)}"
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is list:
        return f"a list, each item {describe(inner[0])}"
    if origin is dict:
        return f"a table, or name=value,..., each value {describe(inner[1])}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(one) for one in inner if one is not types.NoneType)
    return str(kind)


# ---- the file ------------------------------------------------------------------------------------


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


def _set_from_file(config: JobConfig, file: Mapping[str, Any], path: str | None) -> None:
    settings, seen = settings_of(type(config)), dict[str, str]()
    sections = {name[: match.start()] for name in settings for match in re.finditer(r"\.", name)}
    for given, value in _leaves(settings, file):
        if given in sections:
            if value == {}:
                continue
            raise ConfigError(f"{given} is {value!r} in {path}, expected a table [{given}]")
        try:
            name = _name_of(given, settings)
            value = checked(settings[name], value)
        except ConfigError as error:
            raise ConfigError(f"in {path}, {error}") from error
        except TypeError:
            expected = describe(settings[name])
            raise ConfigError(f"{given} is {value!r} in {path}, expected {expected}") from None
        if name in seen:
            raise ConfigError(f"{path} sets {seen[name]} and {given}, which are the same setting")
        seen[name] = given
        _set(config, name, value)


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


# ---- the command line ----------------------------------------------------------------------------


def _options(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each option's name, with "_" for "-", and the values that follow it."""
    name, values = "", list[str]()
    for arg in ["--help" if arg == "-h" else arg for arg in args]:
        if arg.startswith("--") and arg != "--":
            if name:
                yield name, values
            name, equals, value = arg[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        elif not name or arg == "--":
            raise ConfigError(f"{arg!r} belongs to no option: write --section.field value")
        else:
            values.append(arg)
    if name:
        yield name, values


def _set_from_options(
    config: JobConfig, options: Iterable[tuple[str, list[str]]], prog: str
) -> None:
    tyro = import_extra("tyro", "reading a job's configuration")
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_list_rule)
    parse = functools.partial(tyro.cli, prog=prog, registry=registry, use_underscores=True)
    settings = settings_of(type(config))
    for given, values in options:
        if given == "help":
            parse(type(config), args=["--help"], default=config)
        negated = ".no_" in given and given not in settings
        name = _name_of(given.replace(".no_", ".", 1) if negated else given, settings)
        kind = settings[name]
        if kind is bool:
            if values:
                off = ".no_".join(name.rsplit(".", 1))
                raise ConfigError(f"{name} is a switch: write --{name} or --{off}, without a value")
            _set(config, name, not negated)
            continue
        if negated:
            raise ConfigError(f"{name} is not a switch: write --{name} value")
        option = dataclasses.make_dataclass("Option", [("value", kind)])
        args = [f"--value={values[0]}"] if len(values) == 1 else ["--value", *values]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                _set(config, name, parse(option, args=args).value)
        except SystemExit:
            found = " ".join(map(repr, values)) or "without a value"
            raise ConfigError(f"{given} is {found}, expected {describe(kind)}") from None


def _list_rule(info: Any) -> Any:
    """Lets tyro read comma-separated lists and tables, as torchtitan's command line does lists."""
    tyro = import_extra("tyro", "reading a job's configuration")
    origin = get_origin(info.type)
    (item, *_) = get_args(info.type) if origin in (list, dict) else (None,)
    if item is not str and get_origin(item) is not Literal:
        return None

    def as_text(value: Any) -> list[str]:
        items = [f"{k}={v}" for k, v in value.items()] if origin is dict else value
        return [",".join(items)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="A=1,B=2,..." if origin is dict else "A,B,C,...",
        instance_from_str=lambda args: checked(info.type, args[0]),
        is_instance=lambda value: isinstance(value, list | dict),
        str_from_instance=as_text,
    )
