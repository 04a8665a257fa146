"""Compiles the small C++ programs of the benchmarks for this machine's processor."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_library(source: str) -> Iterator[Path]:
    """Builds a shared library of benchmarks/``source``. Its file is removed; a loaded copy stays.

    Raises:
        RuntimeError: the compiler (``CXX``, otherwise g++) fails; with the compiler's output.
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
