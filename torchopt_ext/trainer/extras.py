"""Packages that only some jobs need."""

import importlib
from typing import Any


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
