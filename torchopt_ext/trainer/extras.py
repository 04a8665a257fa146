"""Imports packages and modules that only some jobs need."""

import importlib
from pathlib import Path
from typing import Any

from torchopt_ext.trainer.config import ConfigError


class MissingExtra(ConfigError, ImportError):
    """A setting needs a package that is not installed."""


def import_extra(module: str, needed_by: str) -> Any:
    """Imports a module of a package that the extra "trainer" installs.

    Raises:
        MissingExtra: The import fails. The message says what needs it and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{needed_by} needs {module} ({error}): pip install 'torchopt_ext[trainer]'"
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
