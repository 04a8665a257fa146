"""The examples are scripts that import each other by name from their own folder."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchopt_ext

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES


def cmake(*arguments: str) -> str:
    """Runs the CMake of this environment, or of the machine, and returns its output."""
    program = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    if program is None or shutil.which("g++") is None:
        pytest.skip("no cmake or no g++")
    done = subprocess.run(
        [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(name="cmake")
def _cmake() -> Callable[..., str]:
    return cmake


@pytest.fixture(scope="session")
def cpp_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the C++ programs of tests/python/cpp, built on the installed package.

    Processes of pytest-xdist share the folder: the first builds, and the others find it built.
    """
    base = tmp_path_factory.getbasetemp()
    build = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cpp"
    build.mkdir(exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_programs(build)
    return build


def build_programs(build: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "cpp.md").read_text()
    for i, block in enumerate(re.findall(r"```cpp\n(.*?)```", page, flags=re.DOTALL)):
        included = build / f"block_{i}.inc"  # included by documented.cpp
        if not included.exists():
            included.write_text(block)
    prefixes = f"{torchopt_ext.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    source = Path(__file__).resolve().parents[1] / "cpp"
    root = Path(torch.__file__).parent
    settings = [f"-DCMAKE_PREFIX_PATH={prefixes}", f"-DTORCH_ROOT={root}"]
    settings.append(f"-DTORCHOPT_EXT_VERSION={torchopt_ext.__version__}")
    cmake("-S", str(source), "-B", str(build), *settings)
    cmake("--build", str(build), "--parallel", "2")


@pytest.fixture
def cpp_benchmark(cpp_programs: Path) -> Path:
    cmake("--build", str(cpp_programs), "--target", "bench_cxx")
    return cpp_programs / "benchmarks" / "bench_cxx"
