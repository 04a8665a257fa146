"""Warns if an integration was not tested with another package's version."""

import warnings
from importlib.metadata import version


def warn_if_untested(package: str, tested: str) -> None:
    """Warns unless the installed version is the tested version. Integrations call it on import."""
    installed = version(package)
    if installed.split("+")[0] != tested:
        warnings.warn(
            f"this integration was tested with {package} {tested} and may not fit {installed}",
            stacklevel=2,
        )
