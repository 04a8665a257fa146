"""The C++ interface of the installed package: its example, its bits and its library's symbols."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchopt_ext
from torchopt_ext import FusedAdamW

# The first test waits for the compiler.
pytestmark = pytest.mark.timeout(300)

LIBRARY = Path(torchopt_ext.cmake_prefix_path).parents[1] / "lib" / "libtorchopt_ext.so"
ROOT = Path(__file__).resolve().parents[3]
CMake = Callable[..., str]


def test_the_example_learns(cpp_programs: Path) -> None:
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    done = subprocess.run(
        [str(cpp_programs / "examples" / "train"), *map(str, texts)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[0] == pytest.approx(5.5, abs=0.2)  # the logarithm of 256
    assert losses[-1] < 2.5
    assert "saved and loaded the state of 5 parameters" in done.stdout


def test_a_program_with_a_torch_of_its_own(cpp_programs: Path) -> None:
    """The loader finds all libraries, although the program uses none of torch's symbols."""
    program = cpp_programs / "after_torch" / "partition"
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0", "1"]


@pytest.mark.slow
def test_the_benchmark_runs(cpp_benchmark: Path) -> None:
    done = subprocess.run([str(cpp_benchmark), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"torch {torch.__version__.partition('+')[0]}, g++ ")
    assert len(re.findall(r"times as fast: [\d.]+ \(quartiles", done.stdout)) == 2


@pytest.fixture(scope="module")
def steps(cpp_programs: Path) -> torch._ops.OpOverloadPacket:
    torch.ops.load_library(cpp_programs / "libsteps.so")
    return torch.ops.torchopt_ext_test.steps


SETTINGS = {
    "lr": 1e-2, "eps": 1e-8, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "amsgrad": 0.0,
    "maximize": 0.0, "decoupled_weight_decay": 1.0, "max_grad_norm": 0.0, "skip_nonfinite": 0.0,
}  # fmt: skip
VARIANTS = {
    "adamw": {},
    "clipped": {"max_grad_norm": 1.0, "eps": 1e-5, "weight_decay": 0.2},
    "amsgrad": {"amsgrad": 1.0, "beta1": 0.4, "beta2": 0.3, "max_grad_norm": 3.0},
    "adam": {"decoupled_weight_decay": 0.0, "maximize": 1.0, "lr": 0.1},
    "overflow": {"skip_nonfinite": 1.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_are_those_of_the_python_class(
    steps: torch._ops.OpOverloadPacket, variant: str, dtype: torch.dtype
) -> None:
    settings = SETTINGS | VARIANTS[variant]
    torch.manual_seed(3)
    shapes = [(300, 70), (70,), (), (5, 3, 2), (0, 2), (4099,)]
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    gradients = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(5)]
    if variant == "overflow":
        gradients[2][1][3] = torch.inf

    leaves = [param.clone().requires_grad_() for param in params]
    flags = {name: bool(settings[name]) for name in ("amsgrad", "maximize", "skip_nonfinite")}
    optimizer = FusedAdamW(
        leaves,
        lr=settings["lr"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        betas=(settings["beta1"], settings["beta2"]),
        max_grad_norm=settings["max_grad_norm"],
        **flags,
    )
    optimizer.param_groups[0]["decoupled_weight_decay"] = bool(settings["decoupled_weight_decay"])
    norms: list[Tensor] = []
    for step in gradients:
        for leaf, gradient in zip(leaves, step, strict=True):
            leaf.grad = gradient.clone()
        optimizer.step()
        norms.append(optimizer.control.grad_norm)
    state = [
        optimizer.state[leaf][key] for leaf in leaves for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    expected = [*(leaf.detach() for leaf in leaves), *state, *norms]

    results = steps(params, list(itertools.chain(*gradients)), list(settings.values()))
    torch.testing.assert_close(
        [x.detach() for x in results], expected, rtol=0, atol=0, equal_nan=True
    )


class TestLibrary:
    def test_shows_its_interface_only(self) -> None:
        if shutil.which("nm") is None:
            pytest.skip("no nm")
        listed = subprocess.run(
            ["nm", "-DC", "--defined-only", "--with-symbol-versions", str(LIBRARY)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names: dict[str, set[str]] = {}
        for line in listed.splitlines():
            name, _, version = line[19:].partition("@@")
            match = re.search(r"torchopt_ext::(\w+)", name)
            names.setdefault(version, set()).add(match[1] if match else name)
        assert names.keys() == {"", "TORCHOPT_EXT", "TORCHOPT_EXT_PRIVATE"}
        assert names[""] == {"TORCHOPT_EXT", "TORCHOPT_EXT_PRIVATE"}  # the versions themselves
        assert names["TORCHOPT_EXT"] == {
            "FusedAdamW", "FusedAdamWOptions", "FusedAdamWParamState", "lr_factor",
            "partition_balanced", "partition_greedy",
        }  # fmt: skip

    def test_needs_no_python(self) -> None:
        assert b"libpython" not in LIBRARY.read_bytes()
        assert b"libtorch_python" not in LIBRARY.read_bytes()


FIND = """
set(TORCH_VERSION 2.15.0)
set(WITH_CUDA ON)
configure_file({root}/csrc/api/torchopt_extConfig.cmake.in
  {site}/torchopt_ext/share/cmake/torchopt_ext/torchopt_extConfig.cmake @ONLY)
set(torchopt_ext_DIR {site}/torchopt_ext/share/cmake/torchopt_ext)
get_cmake_property(before VARIABLES)
find_package(torchopt_ext {option})
get_cmake_property(made VARIABLES)
list(REMOVE_ITEM made ${{before}} before)
list(FILTER made EXCLUDE REGEX ^torchopt_ext_)
message("made [${{made}}] found ${{torchopt_ext_FOUND}}: ${{torchopt_ext_NOT_FOUND_MESSAGE}}")
"""


class TestFindPackage:
    @pytest.fixture(autouse=True)
    def _setup(self, cmake: CMake, tmp_path: Path) -> None:
        self.cmake = cmake
        self.site = tmp_path / "site"
        self.script = tmp_path / "find.cmake"

    def find(self, *arguments: str, option: str = "QUIET") -> str:
        self.script.write_text(FIND.format(root=ROOT, site=self.site, option=option))
        return " ".join(self.cmake(*arguments, "-P", str(self.script)).split())

    def add_torch(self, folder: Path, minor: int) -> None:
        (folder / "share" / "cmake" / "Torch").mkdir(parents=True)
        version = folder / "include" / "torch" / "headeronly" / "version.h"
        version.parent.mkdir(parents=True)
        version.write_text(f"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR {minor}\n")

    def test_another_torch_is_refused(self) -> None:
        self.add_torch(self.site / "torch", 3)
        assert "was built against torch 2.15.0, but" in self.find()
        with pytest.raises(AssertionError, match=r"torch\s2\.3:\sbuild\sit"):
            self.find(option="REQUIRED")

    def test_an_optional_package_is_not_found(self) -> None:
        assert self.find().startswith("made [] found 0: torchopt_ext found no torch: add ")

    def test_a_cuda_build_needs_torchs(self) -> None:
        self.add_torch(self.site / "torch", 15)
        assert "is a CPU build of torch" in self.find()

    @pytest.mark.parametrize("place", [".", "share/cmake"])
    def test_looks_where_find_package_does(
        self, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch = self.site.parent / "elsewhere"
        self.add_torch(torch, 3)
        message = f"but {torch} is torch 2.3"
        folder = torch / place
        assert message in self.find(f"-DCMAKE_PREFIX_PATH=/nowhere;{folder}")
        assert message in self.find(f"-DTorch_ROOT={folder}")
        assert message in self.find(f"-DTorch_DIR={torch}/share/cmake/Torch")
        for variable, value in {
            "CMAKE_PREFIX_PATH": f"/nowhere:{folder}",
            "Torch_ROOT": f"{folder}",
        }.items():
            with monkeypatch.context() as patch:
                patch.setenv(variable, value)
                assert message in self.find()
