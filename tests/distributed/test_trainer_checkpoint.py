"""CheckpointManager with sharded models, on other numbers of ranks and when one rank fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.newest_torch
Phase = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def phase(start_ranks: Callable[..., None], tmp_path: Path) -> Phase:
    """A function that runs the worker's main() and returns each rank's result and log."""

    def run(ranks: int, **arguments: Any) -> list[dict[str, Any]]:
        given = json.dumps({"load": None, **arguments})
        start_ranks("trainer_checkpoint_worker.py", ranks, str(tmp_path), given)
        return [
            json.loads((tmp_path / f"rank{rank}.json").read_text())
            | {"log": (tmp_path / f"log{rank}.txt").read_text()}
            for rank in range(ranks)
        ]

    return run


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_same_bits_on_other_numbers_of_ranks(phase: Phase, mode: str) -> None:
    """Random numbers and data positions are restored only on the same number of ranks."""
    first = phase(2, until=2, async_mode=mode)
    assert first[0]["next"] != first[1]["next"]
    same = phase(2, until=2, load=2)
    assert [rank["differences"] for rank in same] == [[], []]
    assert [rank["drawn"] for rank in same] == [rank["next"] for rank in first]
    assert [rank["taken"] for rank in same] == [2, 2]

    [one] = phase(1, until=4, load=-1)
    assert (one["step"], one["differences"]) == (2, [])
    assert "another layout" in one["log"]

    two = phase(2, until=4, load=-1)
    assert [(rank["step"], rank["differences"]) for rank in two] == [(4, []), (4, [])]
    assert [rank["taken"] for rank in two] == [4, 0], "rank 1's position is not known"


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", ["sharded", "zero", "stages"])
def test_a_resumed_job_has_the_same_bits(phase: Phase, kind: str, mode: str) -> None:
    phase(2, until=4, kind=kind, async_mode=mode)
    for step in (2, 4):
        ranks = phase(2, until=4, kind=kind, load=step, load_only=True)
        assert [(rank["step"], rank["differences"]) for rank in ranks] == [(step, [])] * 2
        assert [rank["taken"] for rank in ranks] == [step] * 2
    if kind == "stages":
        [one] = phase(1, until=4, kind=kind, load=4, load_only=True)
        assert one["differences"] == []


def test_all_ranks_skip_what_one_finds_damaged(phase: Phase) -> None:
    phase(2, until=4)
    ranks = phase(2, until=4, load=-1, damage="step-4/__1_0.distcp", load_only=True)
    assert [(rank["step"], rank["differences"]) for rank in ranks] == [(2, []), (2, [])]
    assert "__1_0.distcp has CRC-32" in ranks[0]["log"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("fault", ["full_disk", "no_memory"])
def test_one_ranks_failure_is_told_on_all(phase: Phase, mode: str, fault: str) -> None:
    ranks = phase(2, until=6, **{fault: 4}, async_mode=mode)
    reason = {"full_disk": "[Errno 28] No space left on device", "no_memory": "no room"}[fault]
    for rank in ranks:
        assert rank["saved"] == ["step-2", "step-6"]
        assert "step 4" in rank["log"]
        assert reason in rank["log"]
    assert "rank 1: " in ranks[0]["log"]
    again = phase(2, until=6, load=-1)
    assert [(rank["step"], rank["differences"]) for rank in again] == [(6, []), (6, [])]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_all_ranks_wait_for_a_step_that_none_says_was_skipped(phase: Phase, mode: str) -> None:
    for rank in phase(2, until=6, skipped=4, async_mode=mode):
        assert rank["saved"] == ["step-2", "step-5", "step-6"]


def test_all_ranks_resume_what_was_saved_after_going_back(phase: Phase) -> None:
    phase(2, until=4)
    phase(2, until=3, load=2, interval=1)
    ranks = phase(2, until=3, load=-1)
    assert [(rank["step"], rank["differences"]) for rank in ranks] == [(3, []), (3, [])]
