"""Finds and loads the compiled operators, if they were built for this torch.

The libraries use torch's C++ interface, which changes with every minor version. Under another
version, loading them would fail with an undefined symbol, or a later call would crash.
"""

import importlib
import shlex
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

import torch

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def mismatch(
    built_torch: str, built_cuda: str | None, torch_version: str, torch_cuda: str | None
) -> str | None:
    """Returns why libraries built for one torch cannot run under another; None if they can.

    Args:
        built_torch: ``torch.__version__`` at build time, such as ``"2.15.0+cu132"``.
        built_cuda: version of the CUDA toolkit at build time; None for a build without CUDA.
        torch_version: ``torch.__version__`` at run time.
        torch_cuda: ``torch.version.cuda`` at run time; None for a CPU build of torch.
    """
    built, running = f"torch {built_torch}", f"torch {torch_version}"
    same = built_torch.split(".")[:2] == torch_version.split(".")[:2]
    if built_cuda is not None:
        built += f" and CUDA {built_cuda}"
        running += f" and CUDA {torch_cuda}" if torch_cuda else " and no CUDA"
        same = same and built_cuda.split(".")[0] == (torch_cuda or "").split(".")[0]
    if same:
        return None
    return f"torchopt_ext was built against {built}, but {running} is running"


def _find() -> None:
    """Lets a source folder without libraries use the installed package's, if versions agree.

    Python started in a clone's root imports the source folder, which shadows the installed package.
    """
    here = Path(__file__).resolve().parent
    if (here / "_build_info.py").exists():
        return
    package = sys.modules["torchopt_ext"]
    others = [entry for entry in sys.path if Path(entry).resolve() != here.parent]
    spec = PathFinder.find_spec("torchopt_ext", others)
    installed = Path(spec.origin).parent if spec and spec.origin else here
    problem = f"and none is installed for {sys.executable}"
    if (installed / "_build_info.py").exists():
        if f'__version__ = "{package.__version__}"\n' in (installed / "__init__.py").read_text():
            package.__path__.append(str(installed))
            return
        problem = f"and {installed} is not of its version, {package.__version__}"
    raise ImportError(
        f"torchopt_ext at {here} has no compiled library, {problem}; "
        f"build it in its source directory with: {_REBUILD}"
    )


def _load() -> Any:
    """Checks and loads the libraries; returns the module that says how they were built."""
    _find()
    info: Any = importlib.import_module("torchopt_ext._build_info")
    reason = mismatch(info.TORCH_VERSION, info.CUDA_VERSION, torch.__version__, torch.version.cuda)
    folder = Path(info.__file__).parent
    if reason is None and not any((folder / f"_C{end}").exists() for end in EXTENSION_SUFFIXES):
        reason = f"torchopt_ext was not built for this Python, {sys.implementation.cache_tag}"
    if reason is not None:
        way = f"rebuild it in its source directory with: {_REBUILD}"
        if (folder.parent / "setup.py").exists():
            left = map(str, (*folder.glob("_C.*.so"), folder / "_build_info.py", folder / "lib"))
            way = (
                "pip install -e . left its libraries beside the sources, where they come before an "
                f"installed package: remove them with rm -r {shlex.join(left)}, or build them "
                "again with pip install --no-build-isolation -e ."
            )
        raise ImportError(f"{reason}; {way}")
    importlib.import_module("torchopt_ext._C")  # loads lib/libtorchopt_ext.so, the operators
    return info


_BUILT = _load()
cmake_prefix_path = str(Path(_BUILT.__file__).parent / "share" / "cmake")
"""The CMake prefix path of the C++ interface (docs/cpp.md), as torch.utils.cmake_prefix_path."""


def cuda_built() -> bool:
    """Returns whether the operators were built for CUDA; does not look for a GPU."""
    return _BUILT.CUDA_VERSION is not None
