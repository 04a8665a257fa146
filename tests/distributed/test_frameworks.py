"""On two ranks, Accelerate, transformers and Lightning train bitwise like plain DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .rank_results import Results, case

pytestmark = [pytest.mark.newest_torch, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def results(run_ranks: Callable[[str, int], Results]) -> Results:
    for package in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(package, reason="the frameworks are installed with torch 2.15")
    return run_ranks("frameworks_worker.py", 2)


@pytest.mark.parametrize("name", ["accelerate", "accelerate_zero", "hugging_face", "lightning"])
def test_trains_as_by_hand(results: Results, name: str) -> None:
    expected = case(results, "by_hand")
    assert any(norm > 0.3 for norm in expected["norms"])
    assert case(results, name) == expected


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_container", "fsdp2_in_backward"])
def test_trains_as_by_hand_where_accelerate_replaces_parameters(
    results: Results, name: str
) -> None:
    expected, found = case(results, "by_hand"), case(results, name)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-6)
