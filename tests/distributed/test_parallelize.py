"""Each kind of parallelism computes what one process does on the same batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .rank_results import Results, each_rank

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]

DATA_PARALLEL = (
    "fsdp",
    "ddp",
    "fsdp accumulated",
    "ddp accumulated",
    "full checkpointing",
    "every second layer",
    "costly operations",
    "reshard always",
    "cpu offload",
)
TWO_RANKS = (
    "tp",
    "tp without loss parallel",
    "tp checkpointed",
    "1f1b",
    "1f1b accumulated",
    "split points",
    "interleaved",
    "interleaved larger microbatch",
    "gpipe",
    "fsdp compiled",
    "ddp compiled",
    "compiled and checkpointed",
    "compiled, costly operations",
)
FOUR_RANKS = (
    "fsdp",
    "hsdp",
    "hsdp accumulated",
    "fsdp and tp",
    "fsdp and pp",
    "fsdp and interleaved",
    "pp and tp",
    "tp",
    "1f1b",
)
FLOAT32 = 2e-6  # sums in another order; seen: 5e-7
BFLOAT16 = 3e-2  # rounded at other places; seen: 1.2e-2


def check(results: Results, name: str, tolerance: float = FLOAT32) -> None:
    for result in each_rank(results, name):
        assert result["names"]
        assert result["same_weights"]
        assert result["largest_at_least_mean"]
        assert result["gradients"] < tolerance
        for scalar in ("loss", "norm", "clipped"):
            assert result[scalar] < max(tolerance / 10, FLOAT32), scalar


@pytest.fixture(scope="module")
def data_parallel(run_ranks: Callable[..., Results]) -> Results:
    return run_ranks("parallelize_worker.py", 2, "data parallel")


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_data_parallel(data_parallel: Results, name: str) -> None:
    check(data_parallel, name)


@pytest.mark.parametrize("name", ["fsdp bf16", "ddp bf16"])
def test_mixed_precision(data_parallel: Results, name: str) -> None:
    """FSDP gathers bf16 weights. DDP and the one process use autocast."""
    check(data_parallel, name, BFLOAT16)
    assert all(result["gradients"] > 1e-3 for result in each_rank(data_parallel, name))


def test_seeds(data_parallel: Results) -> None:
    """All ranks get rank 0's seed. Pipeline stages count up from it, so dropout differs."""
    shared = [found["seed"] for found in each_rank(data_parallel, "seeds of replicas")]
    stages = [found["seed"] for found in each_rank(data_parallel, "seeds of stages")]
    assert (shared, stages) == ([100, 100], [100, 101])


def test_too_few_microbatches(data_parallel: Results) -> None:
    for found in each_rank(data_parallel, "one microbatch"):
        assert (
            "batch_size 4 in microbatches of parallelism.pipeline_parallel_microbatch_size 4"
            in (found["problem"])
        )


@pytest.fixture(scope="module")
def two_ranks(run_ranks: Callable[..., Results]) -> Results:
    return run_ranks("parallelize_worker.py", 2, "two ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_tensor_pipeline_and_compiled(two_ranks: Results, name: str) -> None:
    check(two_ranks, name)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="sends to itself, which gloo cannot")
def test_v_shaped_pipeline(run_ranks: Callable[..., Results]) -> None:
    check(run_ranks("parallelize_worker.py", 2, "v-shaped"), "zero bubble")


@pytest.fixture(scope="module")
def four_ranks(run_ranks: Callable[..., Results]) -> Results:
    return run_ranks("parallelize_worker.py", 4, "four ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_two_dimensions(four_ranks: Results, name: str) -> None:
    check(four_ranks, name)
