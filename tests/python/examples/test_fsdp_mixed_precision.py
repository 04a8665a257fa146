"""A few steps of the three ways on two ranks, in both dtypes."""

import re
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_moving_and_resuming_change_nothing(run_example: Callable[..., str], dtype: str) -> None:
    output = run_example("fsdp_mixed_precision.py", "--steps=4", f"--dtype={dtype}")
    assert re.search(r"the same sha256, [0-9a-f]{16}$", output, re.MULTILINE), output
    rows = re.findall(r"^(\S.*?) {2,}((?:[\d.]+ *){5})$", output, re.MULTILINE)
    assert len(rows) == 3, output
    fused, moved, torchs = ([float(x) for x in numbers.split()] for _, numbers in rows)
    assert fused[:4] == moved[:4] or dtype == "float16"  # skipped steps are not saved
    assert fused[0] == moved[0]
    assert 4 < fused[0] < 8
    assert torchs[0] == pytest.approx(fused[0], rel=2e-2)
    assert fused[2] == 1 or (dtype == "float16" and 1 < fused[2] <= 2.0**16)
