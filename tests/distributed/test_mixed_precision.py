"""FSDPadaptOptimizer on 1, 2 and 4 gloo ranks: equal bits, one decision, checkpoints that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .rank_results import Results, agreed

pytestmark = [pytest.mark.timeout(240), pytest.mark.newest_torch]

WORLD_SIZES = (4, 2, 1)  # in this order: each size loads the checkpoint of the size before
SHARDED = (4, 2)
FUSED = ("fused", "remainder")
BASES = (*FUSED, "adamw", "sgd")


@pytest.fixture(scope="module")
def runs(run_ranks: Callable[[str, int], Results]) -> dict[int, Results]:
    return {size: run_ranks("mixed_precision_worker.py", size) for size in WORLD_SIZES}


def case(results: Results, name: str) -> dict[str, Any]:
    """Returns rank 0's result. The ranks agree on all except the text of "refused"."""
    return agreed(results, name, apart="refused")[0]


sizes = pytest.mark.parametrize("size", WORLD_SIZES)
sharded = pytest.mark.parametrize("size", SHARDED)
wrapped = pytest.mark.parametrize("base", ["fused", "sgd"])
INEXACT = 1e-6  # torch's AdamW rounds the last elements of a shard differently


@sharded
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("base", BASES)
def test_rows_give_the_bits_of_whole_tensors(
    runs: dict[int, Results], size: int, base: str, dtype: str
) -> None:
    if base == "remainder" and dtype == "float16":
        pytest.skip("remainders complete bfloat16 only")
    found = case(runs[size], f"bits {base} {dtype}")
    assert found["norms"][0] == found["norms"][1]
    assert found["scales"][0] == found["scales"][1]
    assert found["moved"]
    if base == "adamw":
        assert found["difference"] < INEXACT
    else:
        assert found["differing"] == ""


@sharded
@pytest.mark.parametrize("kind", ["replicated", "rows", "hybrid"])
def test_every_element_counts_once(runs: dict[int, Results], size: int, kind: str) -> None:
    """Every element counts once in the norm, with or without a group."""
    if kind == "hybrid" and size == 2:
        pytest.skip("needs four ranks")
    found = case(runs[size], f"placements {kind}")
    assert found["meshes"] == found["group"] == [found["whole"]] * 2


@sharded
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("base", ["fused", "adamw", "sgd"])
def test_one_rank_overflows_and_all_skip(
    runs: dict[int, Results], size: int, base: str, value: str
) -> None:
    """All ranks skip the step, and only the scale changes."""
    found = case(runs[size], f"planted {value} {base}")
    assert found["outcomes"] == [False] * size
    assert found["unchanged"] == ""
    assert found["backed off"]
    assert found["skipped"] == size
    assert found["again"] and found["norm is finite"]


@wrapped
def test_dense_and_experts_on_meshes_of_their_own(runs: dict[int, Results], base: str) -> None:
    """All ranks skip if an expert that only half of the ranks hold has a NaN."""
    found = case(runs[4], f"two meshes {base}")
    assert found["outcomes"] == [True, False, True]
    assert found["norms"] == [found["whole"]] * 2


@wrapped
def test_tensor_parallel(runs: dict[int, Results], base: str) -> None:
    """With column shards the norm agrees to 2^-50, and the bf16 weights are equal."""
    found = case(runs[4], f"tensor parallel {base}")
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=2**-50)
    assert found["differing"] == ""


@wrapped
@pytest.mark.parametrize("group", ["", " in a group"])
@pytest.mark.parametrize("kind", ["hybrid", "replicated"])
def test_a_broken_replica(runs: dict[int, Results], base: str, kind: str, group: str) -> None:
    """All ranks skip if one replica has a NaN, although replicas count once."""
    found = case(runs[4], f"{kind} replicas{group} {base}")
    assert found["outcomes"] == [False] * 4
    assert found["unchanged"] == ""


@wrapped
def test_experts_of_which_the_others_do_not_know(runs: dict[int, Results], base: str) -> None:
    """Ranks agree on the decision by the dense part's mesh, but not on the norm."""
    assert case(runs[4], f"separate experts {base}")["outcomes"] == [True, False, True]


def test_a_group_of_some_of_a_mesh_is_rejected(runs: dict[int, Results]) -> None:
    for rank, results in enumerate(runs[4]):
        ranks = [0, 1] if rank < 2 else [2, 3]
        assert f"process_group has the ranks {ranks}" in results["small group"]["refused"]


@sharded
def test_one_rank_cannot_make_its_state_dict(runs: dict[int, Results], size: int) -> None:
    found = case(runs[size], "hook that fails")
    assert found["unchanged"] == ""
    for rank in runs[size]:
        assert "ZeroDivisionError" in rank["hook that fails"]["refused"]


@sharded
def test_plain_shards_and_a_rank_without_any(runs: dict[int, Results], size: int) -> None:
    """A rank without parameters joins every collective."""
    result = case(runs[size], "plain shards")
    for found in result["found"]:
        assert found["outcomes"] == [True, False, True]
        assert found["norm"] == pytest.approx(result["expected"], rel=1e-14)


@sharded
@wrapped
def test_a_step_that_one_rank_rejects_leaves_scales_and_gradients_equal(
    runs: dict[int, Results], size: int, base: str
) -> None:
    found = [rank[f"rejected {base}"] for rank in runs[size]]
    *others, rejecting = (rank["refused"] for rank in found)
    assert "sparse" in rejecting.lower()
    assert all(f"rank {size - 1} rejected the step" in other for other in others)
    for rank in found:
        assert (rank["scale"], rank["gradients"], rank["went on"]) == (8.0, True, True)


@sharded
@wrapped
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_gradient_that_only_some_ranks_have(
    runs: dict[int, Results], size: int, base: str, which: str
) -> None:
    """The gradient counts on the ranks that have it, and no rank hangs."""
    found = case(runs[size], f"without {which} gradient {base}")
    assert found["outcomes"] == [True, True]
    rows_there = 8 - 8 // size
    assert found["norm"] == pytest.approx((64 + 8 * rows_there) ** 0.5, rel=1e-14)


@sharded
@wrapped
@pytest.mark.parametrize("kind", ["fsdp", "offloaded fsdp", "ddp"])
def test_training_under_fsdp_and_ddp(
    runs: dict[int, Results], size: int, base: str, kind: str
) -> None:
    """Training is close to one process, whose bf16 sums have another order."""
    found = case(runs[size], f"{kind} {base}")
    assert found["moved"] > 0.005
    assert found["distance"] < 0.3 * found["moved"]
    assert found["offloaded"] == ""


@sharded
@pytest.mark.parametrize("base", ["fused", "remainder", "sgd"])
def test_shards_move_and_come_back(runs: dict[int, Results], size: int, base: str) -> None:
    found = case(runs[size], f"moved shards {base}")
    assert found["moved"]
    assert found["saved"] == found["after"] == ""


@sizes
@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_goes_from_four_ranks_to_two_to_one(
    runs: dict[int, Results], size: int, base: str
) -> None:
    """Reloads do not change the training, and an unsharded optimizer loads the checkpoint."""
    found = case(runs[size], f"chain {base}")
    assert found["scaler"]
    assert found["unsharded"] == ""
    assert found["left behind"] == []
    if base == "adamw":
        assert found["difference"] < INEXACT
    else:
        assert found["differing"] == ""


@sharded
@wrapped
def test_files_of_each_rank(runs: dict[int, Results], size: int, base: str) -> None:
    """LightRFT's layout loads. If a rank cannot read its file, all raise and none changes."""
    found = case(runs[size], f"rank files {base}")
    assert found["loaded"] == ""
    assert found["unchanged"] == ""
    for rank in runs[size]:
        assert f"_rank{size - 1}" in rank[f"rank files {base}"]["refused"]


@sharded
def test_refused_loads(runs: dict[int, Results], size: int) -> None:
    found = case(runs[size], "bad loads")
    assert "saved weight of parameter 0" in found["other placement"]
    assert "Replicate()" in found["other placement"]
    assert "no checkpoint" in found["no folder"]
    assert found["unchanged"] == ""


@sharded
@wrapped
def test_a_parameter_on_another_mesh_is_refused(
    runs: dict[int, Results], size: int, base: str
) -> None:
    found = case(runs[size], f"resharded {base}")
    assert "parameter 0" in found["refused"]
    assert "Shard(dim=1)" in found["refused"]
    assert found["unchanged"] == ""
