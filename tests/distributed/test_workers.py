"""All cases of the worker scripts pass on gloo ranks. The scripts say what their cases check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..support.ranks import Results, assert_passed

SLOW = pytest.mark.slow


def worker(
    name: str,
    sizes: tuple[int, ...],
    *marks: pytest.MarkDecorator,
    seconds: int = 150,
    kind: str = "",
) -> Any:
    """Returns the parameters of a test.

    Args:
        sizes: the world sizes, in order: each may load the checkpoint of the one before.
        kind: an argument of the script.
    """
    time = pytest.mark.timeout(seconds)
    return pytest.param(name, sizes, kind, marks=[time, *marks], id=f"{name} {kind}".rstrip())


@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [
        worker("containers", (2,)),
        worker("containers_dcp", (2,)),
        worker("ema", (2,)),
        worker("estimate", (2,)),
        worker("fsdp", (2,)),
        worker("host_states", (2,)),
        worker("muon", (2,), seconds=300),
        worker("muon", (4, 2, 3, 1), SLOW, seconds=600),
        worker("muon_exchange", (4,), seconds=200),
        worker("muon_groups", (4,)),
        worker("muon_zero", (2,), seconds=300),
        worker("muon_zero", (1, 3, 4), SLOW, seconds=300),
        worker("mixed_precision", (2, 1), seconds=240),
        worker("mixed_precision", (4, 2, 1), SLOW, seconds=240),
        worker("quantized", (2, 3), seconds=250),
        worker("quantized", (2, 3), SLOW, seconds=250, kind="complete"),
        worker("state_dicts", (2,)),
        worker("state_dicts", (2,), SLOW, kind="complete"),
        worker("step_engine", (2, 4)),
        worker("step_rejection", (2,), seconds=300),
        worker("trainer_checkpoint", (2, 1, 2)),
        worker("zero_exchange", (3,)),
        worker("zero_files", (4,)),
        worker("zero_groups", (4,)),
        worker("zero_random", (2,)),
        worker("zero_random", (2,), SLOW, kind="complete"),
        worker("zero_rejected", (2,)),
        worker("zero_scale", (2,)),
        worker("zero_scale", (3,), SLOW),
        worker("zero_sharded", (2,)),
        worker("zero_sharded", (3, 4), SLOW),
        worker("zero_state", (4,), seconds=240),
        worker("zero_state", (4,), SLOW, seconds=240, kind="complete"),
        worker("zero_training", (2, 4)),
    ],
)
def test_all_cases_pass(
    run_ranks: Callable[..., Results], name: str, sizes: tuple[int, ...], kind: str
) -> None:
    for ranks in sizes:
        assert_passed(run_ranks(f"{name}_worker.py", ranks, *[kind] * bool(kind)))
