"""Packages and modules that only some jobs need."""

import importlib
from pathlib import Path
from typing import Any

from torchopt_ext.trainer.config import ConfigError


def import_extra(module: str, needed_by: str) -> Any:
    """A module of a package that the extra "trainer" installs.

    Raises:
        ImportError: it cannot be imported; says what needs it, and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs {module} ({error}): pip install 'torchopt_ext[trainer]'"
        ) from error


def import_custom(module: str) -> None:
    """Imports what registers a job's own parts; what it raises has its own traceback.

    Raises:
        ConfigError: there is no such module.
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
