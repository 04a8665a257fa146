"""Says with which version of another package an integration was tested."""

import warnings
from importlib.metadata import version


def warn_if_untested(package: str, tested: str) -> None:
    """Warns unless the installed version is the tested one; for the head of an integration."""
    found = version(package)
    if found.split("+")[0] != tested:
        warnings.warn(
            f"this integration was tested with {package} {tested} and may not fit {found}",
            stacklevel=2,
        )
