"""The cost model's counts match manual counts, and its constants match the library's."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cost() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("cuda_cost")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((), 1),
        ((0,), 0),
        ((0, 5), 0),
        ((1000,), 1),
        ((33000,), 9),  # one stream
        ((700, 63), 11),  # includes rows shorter than 64
        ((50257, 768), 10052),  # 5 rows per chunk
        ((5, 4097), 10),  # two blocks per row
        ((3, 40000), 30),
    ],
)
def test_pass_a(cost: ModuleType, shape: tuple[int, ...], chunks: int) -> None:
    assert cost.norm_chunks(shape) == chunks


@pytest.mark.parametrize(("numel", "chunks"), [(0, 0), (1, 1), (2048, 1), (2049, 2), (33000, 17)])
def test_pass_b(cost: ModuleType, numel: int, chunks: int) -> None:
    assert cost.update_chunks(numel, cost.TYPES[0]) == chunks
    assert cost.update_chunks(2 * numel, cost.TYPES[3]) == chunks


def test_the_models_have_their_parameters(cost: ModuleType) -> None:
    """The parameter counts match transformers' GPT2LMHeadModel and Llama 3's model card."""
    counted = [cost.parameters(shapes) for shapes in cost.MODELS.values()]
    assert counted == [124_439_808, 8_030_261_248, 2_000_000]


def test_a_step_over_small_tensors(cost: ModuleType) -> None:
    step = cost.cost("small", [(1000,)] * 2000, cost.TYPES[0])
    assert [(p.bytes, p.blocks) for p in step.passes] == [(8_000_000, 250), (56_000_000, 2000)]
    assert step.passes[1].waves == pytest.approx(2000 / (132 * 4))
    assert step.table_bytes == 16_000
    assert step.microseconds[3.0] == pytest.approx(64e6 / 3e6 + 4 * 2)
    assert step.torch_microseconds[3.0] == pytest.approx(80e6 / 3e6)


def test_constants_are_the_librarys(cost: ModuleType) -> None:
    paths = [*sorted((ROOT / "csrc").rglob("*.h")), ROOT / "csrc" / "cuda" / "passes.cpp"]
    sources = "".join(path.read_text() for path in paths)
    named = dict(re.findall(r"constexpr \w+ (k\w+) = (\d+);", sources))
    assert int(named["kShortRow"]) == cost.SHORT_ROW
    assert int(named["kBlockElements"]) == cost.NORM_CHUNK
    chunks = [int(named[name]) for name in ("kUpdateChunk", "kUpdateChunk16")]
    assert [cost.TYPES[0].chunk, cost.TYPES[3].chunk] == chunks


def test_json_and_table(cost: ModuleType) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda_cost.py")]
    printed = [
        subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout
        for more in ([], ["--json"])
    ]
    steps = json.loads(printed[1])
    assert len(steps) == len(cost.MODELS) * len(cost.TYPES)
    assert all(step["model"] in printed[0] and step["types"] in printed[0] for step in steps)
