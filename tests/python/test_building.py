"""setup.py: what it deletes, and the sentences with which it stops."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]


# Compilers are told by their macros, so g++ with other macros stands for them.
OLD = "-U__GNUC__ -D__GNUC__=10 -U__GNUC_MINOR__ -D__GNUC_MINOR__=5"
CLANG = "-D__clang__ -D__clang_major__=18 -D__clang_minor__=1 -D__clang_patchlevel__=0"
NVCC = "echo Cuda compilation tools, release 13.0, V13.0.88"
ARCHES = re.findall(r"set\(arches_(\S+) ([\d.+PTX ]+)\)", (ROOT / "CMakeLists.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "script", "environment", "sentence"),
    [
        ("CXX", f'exec g++ {OLD} "$@"', {}, ", GNU 10.5.0, lacks parts of C++20. Set CXX to g++"),
        ("CXX", f'exec g++ {CLANG} "$@"', {}, ", Clang 18.1.0, needs an OpenMP library of its own"),
        ("CXX", 'exec g++ "$@"', {"MAX_JOBS": "three"}, "three"),
        ("CUDACXX", None, {}, ", where there is no program: set it to the path of nvcc"),
        ("CUDACXX", "echo no driver; exit 3", {}, "does not tell CUDA's version, but: no driver;"),
        (
            "CUDACXX",
            NVCC,
            {"TORCH_CUDA_ARCH_LIST": ";".join([*dict(ARCHES), "native 9.0a 9.0+PTX Hoper"])},
            "TORCH_CUDA_ARCH_LIST has 'Hoper'; expected such as 9.0, 9.0+PTX or Hopper",
        ),
    ],
)
def test_setup_stops_with_a_sentence_and_deletes_only_its_own_folders(
    tmp_path: Path, variable: str, script: str | None, environment: dict[str, str], sentence: str
) -> None:
    keep = tmp_path / "build" / "package" / "keep"
    keep.parent.mkdir(parents=True)
    keep.touch()
    named = tmp_path / "compiler"
    if script is not None:
        named.write_text(f"#!/bin/sh\n{script}\n")
        named.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=ROOT,
        env=os.environ
        | {"TORCHOPT_EXT_BUILD_DIR": str(tmp_path / "build"), variable: str(named)}
        | {"USE_CUDA": "0" if variable == "CXX" else "", "FORCE_CUDA": ""}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert sentence in said
    assert "Traceback" not in said
    assert keep.exists()
    assert [path.name for path in keep.parents[1].glob("package*")] == ["package"]


def test_architectures_have_torchs_names() -> None:
    """torch reads TORCH_CUDA_ARCH_LIST in a function that also needs a GPU or a toolkit."""
    torchs = inspect.getsource(cpp_extension)
    assert ARCHES
    for name, arches in ARCHES:
        assert f"('{name}', '{arches.replace(' ', ';')}')" in torchs
