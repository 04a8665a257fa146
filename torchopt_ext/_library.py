"""Loads the compiled operators, once it is certain that they were built for this torch.

The libraries use torch's C++ interface, which changes with every minor version: loading them
under another one would end in an undefined symbol, or in a crash later.
"""

import importlib

import torch

_MEND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(version: str) -> str:
    return version.split(".")[0]


def mismatch(
    built_torch: str, built_cuda: str | None, torch_version: str, torch_cuda: str | None
) -> str | None:
    """Why libraries built for one torch cannot run under another, as a sentence; None if they can.

    Args:
        built_torch: ``torch.__version__`` at build time, such as ``"2.15.0+cu132"``.
        built_cuda: version of the CUDA toolkit built with; None for a build without CUDA.
        torch_version: ``torch.__version__`` now.
        torch_cuda: ``torch.version.cuda`` now; None for a CPU build of torch.
    """
    built, running = f"torch {built_torch}", f"torch {torch_version}"
    same = _minor(built_torch) == _minor(torch_version)
    if built_cuda is not None:
        built += f" and CUDA {built_cuda}"
        running += f" and CUDA {torch_cuda}" if torch_cuda else " and no CUDA"
        same = same and torch_cuda is not None and _major(built_cuda) == _major(torch_cuda)
    if same:
        return None
    return (
        f"torchopt_ext was built against {built}, but {running} is running; "
        f"rebuild it in its source directory with: {_MEND}"
    )


def _load() -> str | None:
    """Checks and loads the libraries; returns the CUDA version they were built with."""
    try:
        info = importlib.import_module("torchopt_ext._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            f"torchopt_ext at {__file__} has no compiled library; "
            f"build it in its source directory with: {_MEND}"
        ) from None
    cuda: str | None = info.CUDA_VERSION
    reason = mismatch(info.TORCH_VERSION, cuda, torch.__version__, torch.version.cuda)
    if reason is not None:
        raise ImportError(reason)
    importlib.import_module("torchopt_ext._C")  # brings in lib/libtorchopt_ext.so, the operators
    return cuda


_CUDA_VERSION = _load()


def cuda_built() -> bool:
    """Whether the operators were built for CUDA, be there a GPU or not."""
    return _CUDA_VERSION is not None
