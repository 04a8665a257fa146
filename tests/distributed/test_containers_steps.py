"""Steps in backward, and deferred clipping, over two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, case, each_rank

pytestmark = pytest.mark.timeout(150)

WRAPPERS = ("ddp", "inner module of ddp", "replicate", "ddp, accumulated", "ddp, used by rank")
SHARDED = ("fsdp", "fsdp, accumulated", "fsdp, several roots")
LAYOUTS = ("plain", "rows", "expert parallel", "tensor parallel", "stages")


@pytest.fixture(scope="module")
def results(run_two_ranks: Callable[[str], Results]) -> Results:
    return run_two_ranks("containers_worker.py")


@pytest.mark.parametrize("clipped", ["", " clipped"])
@pytest.mark.parametrize("name", [*WRAPPERS, *SHARDED])
def test_in_backward_equals_the_plain_container(results: Results, name: str, clipped: str) -> None:
    """The weights are equal bitwise. torchtitan steps before DDP has reduced: its ranks diverge."""
    found = case(results, name + clipped)
    assert found["difference"] == ""
    assert found["moved"] > 1e-3


def test_a_wrapper_may_come_after_the_first_backward(results: Results) -> None:
    assert case(results, "wrapped later")["difference"] == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deferred_clipping_over_meshes(results: Results, layout: str) -> None:
    """The norm covers all gradients, and the step equals a step with `max_grad_norm` bitwise."""
    for found in each_rank(results, f"deferred, {layout}"):
        assert found["difference"] == ""
        assert found["clip_factor"] < 1
        if layout != "stages":
            assert found["off"] < 1e-14


def test_deferred_clipping_over_stages_is_one_norm(results: Results) -> None:
    found, whole = case(results, "deferred, stages"), case(results, "deferred, plain")
    assert found["clip_factor"] == whole["clip_factor"]
    assert found["off"] < 1e-14


def test_a_gradient_that_does_not_fit_is_rejected_by_all(results: Results) -> None:
    found = [rank["local"] for rank in each_rank(results, "deferred, rejected")]
    assert "rank 1 rejected the step" in found[0]
    assert "a gradient is placed" in found[1]


def test_a_step_that_fails_after_clipping_leaves_the_next_norm_right(results: Results) -> None:
    found = each_rank(results, "deferred, failed after clipping")
    assert not found[0]["local"]
    assert "a gradient is placed" in found[1]["local"]
    assert [rank["difference"] for rank in found] == [0.0, 0.0]
