"""Parsing of excerpts of ptxas reports and disassemblies, and which kernels fail the check."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).parents[2] / ".ci"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sass", CI / "check_sass.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_sass"] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


NAME = "void torchopt_ext::(anonymous namespace)::adam_kernel<float>(torchopt_ext::AdamArgs)"
PTXAS = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAME}' for 'sm_90'
ptxas info    : Function properties for {NAME}
    64 bytes stack frame, 52 bytes spill stores, 108 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 64 bytes cumulative stack size, 1616 bytes smem
ptxas info    : Compile time = 241.754 ms
ptxas info    : Function properties for _INTERNAL_9deac_9_launch_cu_b99::torchopt_ext::cospi(double)
    16 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for _INTERNAL_9deac_9_launch_cu_b99::torchopt_ext::cospi(double)
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def listing(*instructions: str) -> str:
    lines = [
        f"        /*{16 * i:04x}*/      {x} ;      /* 0x0 */" for i, x in enumerate(instructions)
    ]
    return f"\t\tFunction : {NAME}\n" + "\n".join(lines)


# Head loads, the main loop, and a tail of single elements with more accesses than the main loop.
SASS = listing(
    "LDG.E.64 R2, desc[UR4][R2.64]",
    "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]",
    "@!P1 LDG.E.EF.128 R8, desc[UR4][R2.64+0x10]",
    "@P0 STG.E.128 desc[UR4][R2.64], R4",
    "LDS.128 R4, [R2]",
    "@!P0 BRA P1, 0x10",
    *["LDG.E.U16.CONSTANT R4, desc[UR4][R2.64]"] * 9,
    "LD.E R4, desc[UR4][R2.64]",
    "@P0 BRA 0x60",
    "BRA 0x110",
)


def kernel(check: ModuleType, sass: str = SASS) -> Any:
    kernels = check.read_ptxas(PTXAS, "sm_90")
    check.read_sass(sass, kernels)
    return kernels["adam_kernel<float>"]


def test_what_ptxas_reports(check: ModuleType) -> None:
    kernels = check.read_ptxas(PTXAS, "sm_90")
    assert list(kernels) == ["adam_kernel<float>", "cospi"]
    adam, cospi = kernels.values()
    assert (adam.registers, adam.spill, adam.stack, adam.shared) == (80, 160, 64, 1616)
    assert (cospi.registers, cospi.spill, cospi.stack) == (0, 28, 16)


def test_kinds_are_called_by_their_names(check: ModuleType) -> None:
    header = (
        "enum class Kind : int {\n  kOne,  // is {0}, not 1\n  kTwo };\nenum class Bit { kA = 4 };"
    )
    names = check.enumerators([header, "enum class Other;"])
    assert names == {"(Kind)0": "kOne", "(Kind)1": "kTwo"}
    assert check.with_names("f<(Kind)1, (Bit)0>", names) == "f<kTwo, (Bit)0>"


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        (
            "void a::(anonymous namespace)::f<(a::W)1, float>(a::X, int (*)(int))",
            "a::f<(a::W)1, float>",
        ),
        ("torchopt_ext::f(long const*)", "f"),
        ("f", "f"),
    ],
)
def test_names(check: ModuleType, demangled: str, short: str) -> None:
    assert check.short_name(demangled) == short


# A multiprocessor has 65,536 registers, given out by 256 to a warp; 8 warps a block, at most 64.
@pytest.mark.parametrize(
    ("registers", "shared", "blocks"),
    [(32, 0, 8), (33, 0, 6), (64, 0, 4), (80, 0, 3), (81, 0, 2), (255, 0, 1), (32, 75 << 10, 3)],
)
def test_blocks_of_a_multiprocessor(
    check: ModuleType, registers: int, shared: int, blocks: int
) -> None:
    assert check.Kernel("f", "sm_90", registers=registers, shared=shared).blocks == blocks


def test_the_main_loop_is_the_one_with_wide_accesses(check: ModuleType) -> None:
    found = kernel(check)
    assert (found.loads, found.stores) == ({128: 2}, {128: 1})


def test_without_a_loop_all_code_is_the_main_loop(check: ModuleType) -> None:
    found = kernel(check, listing("LDG.E.ENL2.256 R2, R4, desc[UR4][R2.64]", "ST.E.U8 [R2], R3"))
    assert (found.loads, found.stores) == ({256: 1}, {8: 1})


@pytest.mark.parametrize(
    ("allowed", "problem"),
    [
        ({"spill": 160, "stack": 64, "blocks": 3, "narrow": 0}, None),
        ({"spill": 159, "stack": 64}, "adam_kernel<float>, sm_90: 160 bytes of spill, at most 159"),
        ({"stack": 64}, "160 bytes of spill, at most 0"),
        ({"spill": 160}, "64 bytes of stack, at most 0"),
        ({"spill": 160, "stack": 64, "blocks": 4}, "leave 3 blocks a multiprocessor, 4 expected"),
    ],
)
def test_what_uses_more_than_it_may(
    check: ModuleType, allowed: dict[str, int], problem: str | None
) -> None:
    found = check.problems([kernel(check)], {"adam_kernel<*": allowed})
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_narrow_accesses_are_refused_where_wide_ones_are_expected(check: ModuleType) -> None:
    narrow = kernel(check, SASS.replace("@P0 STG.E.128", "@P0 STG.E.64"))
    allowed = {"spill": 160, "stack": 64}
    assert not check.problems([narrow], {narrow.name: allowed})
    assert not check.problems([narrow], {narrow.name: allowed | {"narrow": 1}})
    (found,) = check.problems([narrow], {narrow.name: allowed | {"narrow": 0}})
    assert "1 of the main loop's 3 accesses are below 128 bits" in found
    none = kernel(check, listing("EXIT"))
    assert len(check.problems([none], {none.name: allowed | {"narrow": 0}})) == 1


def test_an_unknown_kernel_may_not_spill_and_every_pattern_fits_one(check: ModuleType) -> None:
    found = check.problems([kernel(check)], {"norm_kernel": {}})
    assert len(found) == 3
    assert found[-1] == "sass.toml: no kernel is called norm_kernel"


def test_the_projects_flags_are_read(check: ModuleType) -> None:
    assert {"--fmad=false", "-prec-div=true", "-std=c++20"} <= set(check.flags())
