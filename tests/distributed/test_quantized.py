"""8-bit moments and remainders with FSDP2 and ZeRO give one process's bits, also resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.timeout(250)
@pytest.mark.newest_torch
def test_a_run_goes_on_to_the_bit_on_other_ranks(
    start_ranks: Callable[..., None], tmp_path: Path
) -> None:
    for ranks in (2, 3):
        results = tmp_path / str(ranks)
        results.mkdir()
        start_ranks("quantized_worker.py", ranks, str(results))
        for rank in range(ranks):
            found = json.loads((results / f"rank{rank}.json").read_text())
            assert found
            assert not {name: what for name, what in found.items() if what}, (ranks, rank)
