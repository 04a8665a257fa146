"""If a rank rejects a step, all ranks raise, other ranks name that rank, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results

pytestmark = [pytest.mark.timeout(300), pytest.mark.newest_torch]

SOON = 20  # seconds; the group waits for 60


def test_all_ranks_raise_and_go_on(run_ranks: Callable[[str, int], Results]) -> None:
    wrong = {}
    other_rank, rejecting_rank = run_ranks("step_rejection_worker.py", 2)
    for name, other in other_rank.items():
        rejecting = rejecting_rank[name]
        both = [other, rejecting]
        fine = (
            all("error" not in found and found["went on"] for found in both)
            and all(found["seconds"] < SOON for found in both)
            and other["raised"] == "RuntimeError"
            and "rank 1 rejected the step" in other["message"]
            and rejecting["raised"]
            and "rejected the step" not in rejecting["message"]
            # torch's AdamW finds sparse gradients in the middle of its step.
            and (name.startswith("AdamW, sparse") or not any(found["changed"] for found in both))
        )
        if not fine:
            wrong[name] = both
    control = other_rank["later"]["control"]
    assert control == rejecting_rank["later"]["control"]
    assert [float.fromhex(field) for field in control[:3]] == [2.0, 1.0, 4.0]
    assert len(other_rank) > 20
    assert not wrong
