"""What only some jobs need: packages, modules, and what those modules register by name."""

import importlib
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchopt_ext.trainer.config import ConfigError

Value = TypeVar("Value")


class MissingExtra(ConfigError, ImportError):
    """A setting needs a package that is not installed."""


def import_extra(module: str, needed_by: str, package: str = "'torchopt_ext[trainer]'") -> Any:
    """Imports a module that only some jobs need, or raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{needed_by} needs {module} ({error}): pip install {package}"
        ) from error


def import_custom(module: str) -> None:
    """Imports a module that registers a job's own parts. Its errors keep their traceback.

    Raises:
        ConfigError: There is no such module.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"experimental.custom_import is {module!r}: there is no module {error.name!r} in the "
            f"current folder, {Path.cwd()}, in PYTHONPATH or installed"
        ) from error


class Registry(Generic[Value]):
    """The values of one kind by name. ``function`` of torchopt_ext.trainer adds one."""

    def __init__(self, kind: str, function: str) -> None:
        self._kind, self._function = kind, function
        self.values: dict[str, Value] = {}

    def add(self, name: str, value: Value) -> None:
        """Adds a value. Raises ValueError if there is one of this name."""
        if name in self.values:
            raise ValueError(f"a {self._kind} named {name!r} is registered already")
        self.values[name] = value

    def get(self, name: str) -> Value:
        """Returns the value of a name. If there is none, raises ConfigError."""
        if name not in self.values:
            registered = ", ".join(map(repr, sorted(self.values))) or "none"
            raise ConfigError(
                f"{self._kind} {name!r} is not registered (registered: {registered}): a module "
                f"that experimental.custom_import names has to call torchopt_ext.trainer."
                f"{self._function}; --config gives a job's file, such as examples/debug.toml"
            )
        return self.values[name]
