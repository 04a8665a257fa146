"""Parsing of excerpts of resource reports and disassemblies, and which kernels fail the check."""

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


NAME = "void torchopt_ext::run<torchopt_ext::(anonymous namespace)::UpdateKernel<7> >(X<7>)"
USAGE = f"""\
Resource usage:
 Common:
  GLOBAL:0
 Function {NAME}:
  REG:80 STACK:64 SHARED:1616 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function torchopt_ext::f(long const*):
  REG:23 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def listing(*instructions: str) -> str:
    lines = [
        f"        /*{16 * i:04x}*/      {x} ;      /* 0x0 */" for i, x in enumerate(instructions)
    ]
    return f"\t\tFunction : {NAME}\n" + "\n".join(lines)


# Head loads, spills, the main loop, and a tail of single elements with more accesses than the main
# loop.
SASS = listing(
    "LDG.E.64 R2, desc[UR4][R2.64]",
    "STL [R1+0x10], R5",
    "@P1 LDL.128 R8, [R1]",
    "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]",
    "@!P1 LDG.E.EF.128 R8, desc[UR4][R2.64+0x10]",
    "@P0 STG.E.128 desc[UR4][R2.64], R4",
    "LDS.128 R4, [R2]",
    "@!P0 BRA P1, 0x30",
    *["LDG.E.U16.CONSTANT R4, desc[UR4][R2.64]"] * 9,
    "LD.E R4, desc[UR4][R2.64]",
    "@P0 BRA 0x80",
    "BRA 0x130",
)


def kernel(check: ModuleType, sass: str = SASS) -> Any:
    kernels = check.read_resources(USAGE, "sm_90")
    check.read_sass(sass, kernels)
    return kernels["UpdateKernel<7>"]


def test_resources_and_spills(check: ModuleType) -> None:
    kernels = check.read_resources(USAGE, "sm_90")
    assert list(kernels) == ["UpdateKernel<7>", "f"]
    update = kernels["UpdateKernel<7>"]
    assert (update.registers, update.stack, update.shared) == (80, 64, 1616)
    check.read_sass(SASS, kernels)
    assert [k.spill for k in kernels.values()] == [4 + 16, 0]


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
        ({"spill": 20, "stack": 64, "blocks": 3, "narrow": 0}, None),
        ({"spill": 19, "stack": 64}, "UpdateKernel<7>, sm_90: 20 bytes of spill, at most 19"),
        ({"stack": 64}, "20 bytes of spill, at most 0"),
        ({"spill": 20}, "64 bytes of stack, at most 0"),
        ({"spill": 20, "stack": 64, "blocks": 4}, "leave 3 blocks a multiprocessor, 4 expected"),
    ],
)
def test_what_uses_more_than_it_may(
    check: ModuleType, allowed: dict[str, int], problem: str | None
) -> None:
    found = check.problems([kernel(check)], {"UpdateKernel<*": allowed})
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_narrow_accesses_are_refused_where_wide_ones_are_expected(check: ModuleType) -> None:
    narrow = kernel(check, SASS.replace("@P0 STG.E.128", "@P0 STG.E.64"))
    allowed = {"spill": 20, "stack": 64}
    assert not check.problems([narrow], {narrow.name: allowed})
    assert not check.problems([narrow], {narrow.name: allowed | {"narrow": 1}})
    (found,) = check.problems([narrow], {narrow.name: allowed | {"narrow": 0}})
    assert "1 of the main loop's 3 accesses are below 128 bits" in found
    none = kernel(check, listing("EXIT"))
    assert len(check.problems([none], {none.name: allowed | {"narrow": 0}})) == 1


def test_an_unknown_kernel_may_not_spill_and_every_pattern_fits_one(check: ModuleType) -> None:
    found = check.problems([kernel(check)], {"NormKernel": {}})
    assert len(found) == 3
    assert found[-1] == "sass.toml: no kernel is called NormKernel"
