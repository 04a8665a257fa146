"""Compiles the small C++ programs beside the benchmarks, for the processor at hand."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_library(source: str) -> Iterator[Path]:
    """A shared library of benchmarks/``source``; the file is gone afterwards, a loaded copy stays.

    Raises:
        RuntimeError: the compiler (``CXX``, otherwise g++) fails; with what it says.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library.so"
        flags = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fopenmp"]
        flags += ["-shared", "-fPIC"]
        command = [os.environ.get("CXX", "g++"), *flags, "-o", str(library)]
        path = Path(__file__).with_name(source)
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} {path}:\n{done.stderr}")
        yield library
