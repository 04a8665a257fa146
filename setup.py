"""Builds the compiled part with CMake, which has the source list and the flags.

    pip install --no-build-isolation .        # builds against the environment's torch
    pip install --no-build-isolation -e .     # puts the libraries into torchopt_ext/

Environment variables become CMake options: USE_CUDA=0 and FORCE_CUDA=1 (default: CUDA when nvcc
is found), TORCH_CUDA_ARCH_LIST, CMAKE_UNITY_BUILD, CMAKE_BUILD_PARALLEL_LEVEL or MAX_JOBS,
TORCHOPT_EXT_BUILD_DIR.
"""

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

try:
    import torch
except ImportError:
    sys.exit(
        "torchopt_ext is built against an installed torch, and this Python has none: "
        "pip install torch, then pip install --no-build-isolation ."
    )

# setuptools before 70.1 takes the command from the package wheel, which new environments lack.
if not any(map(importlib.util.find_spec, ("setuptools.command.bdist_wheel", "wheel"))):
    sys.exit(
        f"setuptools {setuptools.__version__} makes wheels only with the package wheel, and this "
        "Python has none: pip install cmake ninja setuptools wheel"
    )

ROOT = Path(__file__).parent.resolve()
SUPPORTED_MINORS = range(11, 16)
major, minor = (int(part) for part in torch.__version__.split(".")[:2])
if major != 2 or minor not in SUPPORTED_MINORS:
    sys.exit(
        f"torchopt_ext supports torch 2.{SUPPORTED_MINORS[0]} to 2.{SUPPORTED_MINORS[-1]}; "
        f"this Python has {torch.__version__}"
    )

# As CMake's AUTO: nvcc counts only if CUDACXX, CUDA_HOME or PATH leads to it.
cudacxx = os.environ.get("CUDACXX")
nvcc_path = os.pathsep.join([f"{os.environ.get('CUDA_HOME', '')}/bin", os.environ.get("PATH", "")])
nvcc = shutil.which(cudacxx or "nvcc", path=nvcc_path)
use_cuda = "ON" if (cudacxx or nvcc) and torch.version.cuda else "OFF"
if os.environ.get("USE_CUDA", "").upper() in ("0", "OFF", "NO", "FALSE"):
    use_cuda = "OFF"
elif os.environ.get("FORCE_CUDA", "").upper() in ("1", "ON", "YES", "TRUE"):
    use_cuda = "ON"
if use_cuda == "ON" and cudacxx and not nvcc:
    sys.exit(
        f"CUDACXX is {cudacxx}, where there is no program: set it to the path of nvcc, or set "
        "USE_CUDA=0"
    )
# Kept between builds, so that only changed files are compiled again.
variant = f"torch-{torch.__version__}-{sys.implementation.cache_tag}" + "-cpu" * (use_cuda == "OFF")
build_dir = Path(os.environ.get("TORCHOPT_EXT_BUILD_DIR") or ROOT / "build" / variant).resolve()


def tool(name: str) -> str:
    """Finds this environment's tool (from PyPI) before the system's, which may be too old."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    return found or sys.exit(f"torchopt_ext is built with {name}: pip install cmake ninja")


def cuda_version(nvcc: str) -> str:
    """Returns the version of nvcc's toolkit, without a dot: 130."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        said, failed = done.stdout + done.stderr, done.returncode != 0
    except OSError as error:
        said, failed = str(error), True
    found = re.search(r"release (\d+)\.(\d+)", said)
    if failed or not found:
        sys.exit(
            f"{nvcc} --version does not tell CUDA's version, but: {' '.join(said.split())[:200]}; "
            "name an nvcc that works by CUDACXX or CUDA_HOME, or set USE_CUDA=0"
        )
    return "".join(found.groups())


def version() -> str:
    """Returns the package's version. A build from a clone adds its target: 0.2.0+pt2.15.cu130.

    A source distribution is for any torch. A build from it has the distribution's version.
    """
    text = (ROOT / "torchopt_ext/__init__.py").read_text()
    public = re.search(r'^__version__ = "(.+)"$', text, re.M)[1]
    if "sdist" in sys.argv or (ROOT / "PKG-INFO").exists():
        return public
    built_for = "cpu"
    if use_cuda == "ON" and nvcc:  # without nvcc CMake reports what is missing
        built_for = f"cu{cuda_version(nvcc)}"
    return f"{public}+pt{major}.{minor}.{built_for}"


class Build(build):
    """Stages the package in a new folder, because an old one would keep deleted modules."""

    def initialize_options(self) -> None:
        super().initialize_options()
        build_dir.mkdir(parents=True, exist_ok=True)
        self.build_base = tempfile.mkdtemp(prefix="package-", dir=build_dir)
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class CMakeBuild(build_ext):
    """Configures, builds and installs with CMake into the package's directory."""

    def run(self) -> None:
        cmake, source, binary = tool("cmake"), str(ROOT), str(build_dir)
        configure = [cmake, "-S", source, "-B", binary, "-G", "Ninja"] + [
            f"-D{option}={value}"
            for option, value in {
                "CMAKE_MAKE_PROGRAM": tool("ninja"),
                "Python_EXECUTABLE": sys.executable,
                "USE_CUDA": use_cuda,
                "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
                "CMAKE_UNITY_BUILD": os.environ.get("CMAKE_UNITY_BUILD", "ON"),
            }.items()
        ]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or os.environ.get("MAX_JOBS")
        jobs = jobs or str(len(os.sched_getaffinity(0)))
        build = [cmake, "--build", binary, "--target", "_C", "--parallel", jobs]
        prefix = source if self.inplace else str(Path(self.build_lib).resolve())
        for command in (configure, build, [cmake, "--install", binary, "--prefix", prefix]):
            if subprocess.run(command).returncode:
                sys.exit(f"torchopt_ext: {' '.join(command[:2])} failed; its message is above")


setuptools.setup(
    version=version(),
    license="BSD-3-Clause",  # setuptools before 77 rejects this text in pyproject.toml (PEP 639)
    ext_modules=[setuptools.Extension("torchopt_ext._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
    # The binaries fit only the minor version of torch that they were built against.
    install_requires=[f"torch=={major}.{minor}.*"],
)
