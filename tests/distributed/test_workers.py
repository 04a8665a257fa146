"""All cases of the worker scripts pass on gloo ranks. The scripts say what their cases check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .rank_results import Results, assert_passed

NEWEST, SLOW = pytest.mark.newest_torch, pytest.mark.slow
OLD = pytest.mark.skipif(torch.__version__ < "2.12", reason="sends to itself, which gloo cannot")


def worker(
    name: str,
    cases: dict[int, int],
    *marks: pytest.MarkDecorator,
    seconds: int = 150,
    kind: str = "",
) -> Any:
    """Returns the parameters of a test.

    Args:
        cases: the number of cases by world size. Each size may load the size before's checkpoint.
        kind: an argument of the script.
    """
    time = pytest.mark.timeout(seconds)
    return pytest.param(name, cases, kind, marks=[time, *marks], id=f"{name} {kind}".rstrip())


@pytest.mark.parametrize(
    ("name", "cases", "kind"),
    [
        worker("containers", {2: 25}),
        worker("containers_dcp", {2: 5}),
        worker("estimate", {2: 17}),
        worker("fsdp", {2: 28}),
        worker("mixed_precision", {4: 57, 2: 41, 1: 4}, NEWEST, seconds=240),
        worker("parallelize", {2: 14}, NEWEST, kind="data parallel"),
        worker("parallelize", {2: 13}, NEWEST, SLOW, kind="two ranks"),
        worker("parallelize", {2: 1}, NEWEST, SLOW, OLD, kind="v-shaped"),
        worker("parallelize", {4: 9}, NEWEST, SLOW, kind="four ranks"),
        worker("quantized", {2: 21, 3: 47}, NEWEST, seconds=250),
        worker("state_dicts", {2: 6}, NEWEST),
        worker("state_dicts", {2: 43}, NEWEST, SLOW, kind="complete"),
        worker("step_engine", {2: 42, 4: 8}),
        worker("step_rejection", {2: 80}, NEWEST, seconds=300),
        worker("zero_checkpoint", {1: 14, 4: 8, 3: 8, 2: 29}, NEWEST, seconds=240),
        worker("zero_exchange", {3: 30}, NEWEST),
        worker("zero_faults", {2: 190, 4: 21}, NEWEST),
        worker("zero_groups", {4: 30}),
        worker("zero_misuse", {2: 22}),
        worker("zero_random", {2: 52}),
    ],
)
def test_all_cases_pass(
    run_ranks: Callable[..., Results], name: str, cases: dict[int, int], kind: str
) -> None:
    for ranks, number in cases.items():
        assert_passed(run_ranks(f"{name}_worker.py", ranks, *[kind] * bool(kind)), number)
