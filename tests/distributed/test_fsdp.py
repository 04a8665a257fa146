"""Low-precision copies of shards on two gloo ranks replace FSDP2's casts and have their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, each_rank

pytestmark = pytest.mark.timeout(150)

FROZEN, ALL = 2 * 2, 11 * 2  # parameters that a step's two all-gathers cast
NEVER, ONCE = [FROZEN] * 4, [FROZEN, FROZEN, ALL, FROZEN]
SETTINGS = ("hybrid", "float16", "clipping", "several optimizers", "amsgrad", "rounded moments")
CHANGES = ("multiply", "multiply_shards", "load", "set_state", "load_dcp")


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("fsdp_worker.py")


@pytest.mark.parametrize(
    ("name", "cast"),
    [
        *((name, NEVER) for name in ("reshard", *SETTINGS, "written back", "skipped")),
        *((name, NEVER) for name in ("compiled whole", "compiled layers")),
        ("multiply_hidden", NEVER),
        ("no reshard", [2] * 4),
        ("replicas", [0] * 4),  # a shard is the whole parameter: another operator casts
        ("accumulation", [3 * FROZEN] * 4),
        *((name, ONCE) for name in CHANGES),
        ("changed, then skipped", [FROZEN, ALL, FROZEN, FROZEN]),
        ("kept later", [ALL, ALL, FROZEN, FROZEN]),
        *(
            (f"torch's optimizer {name}", [FROZEN, ALL, ALL, ALL])
            for name in ("", "foreach", "fused")
        ),
    ],
)
def test_training_is_that_without(results: Results, name: str, cast: list[int]) -> None:
    """Copies change no bit and stay right. All-gathers cast only after changes from outside."""
    for rank in each_rank(results, name):
        assert rank["different"] == {"losses": "", "weights": "", "state": ""}
        assert rank["moved"]
        assert rank["cast"] == cast
        assert rank["wrong"] == []


def test_state_dicts_are_those_without(results: Results) -> None:
    for rank in each_rank(results, "state dicts"):
        assert rank["different"] == ["", "", "", ""]
        assert rank["kinds"] == [["Tensor", "torch.float32"]]
