"""All CPU builds of the kernels, thread counts and outer float modes give the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).resolve().parent / "capability_digests.py"
FLAGS = {"default": "", "avx2": " avx2 ", "avx512": " avx512f "}


MODES = ("plain", "flush", "truncate")


@cache
def digests(capability: str) -> dict[str, dict[str, str]]:
    """Returns the digests by float mode."""
    finished = subprocess.run(
        [sys.executable, str(WORKER), *MODES],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    assert result.pop("capability") == capability.upper()
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capability", FLAGS)
def test_same_bits(capability: str, mode: str) -> None:
    if FLAGS[capability] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {capability}")
    assert digests(capability)[mode] == digests("default")["plain"]


def test_same_bits_with_one_and_two_threads() -> None:
    plain = digests("default")["plain"]
    one = {k: x for k, x in plain.items() if k.endswith("1 threads")}
    assert one
    assert one == {k.replace("2 threads", "1 threads"): plain[k.replace("1 t", "2 t")] for k in one}
