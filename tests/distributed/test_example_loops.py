"""The examples with their own training loops, on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(100), pytest.mark.newest_torch]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("script", ["zero_ddp.py", "fsdp_mixed_precision.py"])
def test_a_loop_of_ones_own_learns(start_ranks: Callable[..., str], script: str) -> None:
    output = start_ranks(str(EXAMPLES / script), 2)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 4, output
    assert losses == sorted(losses, reverse=True)
    assert 5.6 > losses[0]  # ln 256 is 5.55
    assert losses[-1] < 4
    if script == "zero_ddp.py":
        shares = re.findall(r"rank \d holds ([\d.]+)%", output)
        assert [float(x) for x in shares] == pytest.approx([50, 50], abs=2.5)
    else:
        assert output.count("stepped True") == 4
