"""Reads the results of rank_cases.py."""

from __future__ import annotations

from typing import Any

Results = list[dict[str, dict[str, Any]]]  # by rank and case


def assert_passed(results: Results) -> None:
    """Fails with the errors of all cases, or if not every rank ran the same cases."""
    errors = [
        f"{name} on rank {rank}: {found['error']}"
        for rank, cases in enumerate(results)
        for name, found in cases.items()
        if "error" in found
    ]
    assert not errors, "\n".join(errors)
    names = [list(rank) for rank in results]
    assert names[0] and names == [names[0]] * len(results), names


def agreed(results: Results, name: str) -> list[dict[str, Any]]:
    """Returns every rank's result. Fails for errors, or other differences than in "local"."""
    found = [rank[name] for rank in results]
    errors = [f"rank {rank}: {f['error']}" for rank, f in enumerate(found) if "error" in f]
    assert not errors, "\n".join(errors)
    common = [{k: v for k, v in rank.items() if k != "local"} for rank in found]
    assert all(other == common[0] for other in common), common
    return found


def case(results: Results, name: str) -> dict[str, Any]:
    """Returns rank 0's result. Fails as :func:`agreed`."""
    return agreed(results, name)[0]
