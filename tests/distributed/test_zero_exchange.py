"""gloo ranks exchange text and errors, and send optimizer state to a single rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .rank_results import Results, each_rank

pytestmark = [pytest.mark.timeout(150), pytest.mark.newest_torch]

QUICK = 20  # seconds; the group's timeout is 60, and a call takes well below 1


@pytest.fixture(scope="module")
def results(run_ranks: Callable[[str, int], Results]) -> Results:
    return run_ranks("zero_exchange_worker.py", 3)


def raised(results: Results, name: str, kind: str) -> str:
    """Returns the error's message. All ranks must raise the same message soon."""
    found = each_rank(results, name)
    for result in found:
        assert result.get("raised") == kind, result
        assert result["message"] == found[0]["message"]
        assert result["seconds"] < QUICK
    return found[0]["message"]


def test_text_of_every_rank(results: Results) -> None:
    assert each_rank(results, "text") == [{"found": True, "empty": True}] * len(results)


def test_agreement_costs_one_length(results: Results) -> None:
    for result in each_rank(results, "agree"):
        assert result["returned"] is None
        assert result["traffic"] == [8]


def test_one_rank_with_an_error_is_named_on_all(results: Results) -> None:
    last = len(results) - 1
    assert raised(results, "disagree", "RuntimeError") == f"rank {last}: no space"
    assert raised(results, "disagree silently", "RuntimeError").startswith(f"rank {last}: ")


@pytest.mark.parametrize("name", ["same", "same, none"])
def test_the_same_parameters_cost_a_count_and_a_digest(results: Results, name: str) -> None:
    for result in each_rank(results, name):
        assert result["returned"] is None
        assert result["traffic"] == [16]


@pytest.mark.parametrize(
    ("name", "position", "first", "last"),
    [
        ("other shape", 1, "'b': float32 (3,)", "'b': float32 (4,)"),
        ("other order", 0, "'a': float32 (2,)", "'c': float32 (4,)"),
        ("one more", 3, "nothing", "'d': float32 (1,)"),
        ("one less", 2, "'c': float32 (4,)", "nothing"),
        ("split otherwise", 0, "a", "a, b"),
    ],
)
def test_other_parameters_on_one_rank(
    results: Results, name: str, position: int, first: str, last: str
) -> None:
    message = raised(results, name, "ValueError")
    has = f"{first} on rank 0, 1; {last} on rank 2"
    assert "differ in their parameters" in message
    assert message.endswith(f"position {position}: {has}")


@pytest.mark.parametrize("name", ["whole", "large", "parts"])
@pytest.mark.parametrize("to", ["first", "last"])
def test_state_of_all_ranks_on_one(results: Results, name: str, to: str) -> None:
    """Only the target gets the state, with equal bits, strides and order."""
    found = each_rank(results, f"{name} to {to}")
    target = 0 if to == "first" else len(results) - 1
    assert [result["target"] for result in found] == [r == target for r in range(len(results))]
    assert [result["difference"] for result in found] == [""] * len(results)


@pytest.mark.parametrize("name", ["other values", "parts, not contiguous", "nothing"])
def test_less_common_state(results: Results, name: str) -> None:
    assert [result["difference"] for result in each_rank(results, name)] == [""] * len(results)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("overlap", "bytes [(0, 24), (20, 40)], expected all 40 once"),
        ("hole", "bytes [(0, 16), (20, 40)]"),
        ("no begin", "bytes [(4, 20), (20, 40)]"),
        ("no end", "bytes [(0, 20), (20, 36)]"),
        ("same twice", "bytes [(0, 40), (0, 40)]"),
        ("too far", "bytes [(0, 20), (20, 44)]"),
        ("negative", "bytes [(-4, 40), (0, 20)]"),
        ("shape", "shape (5, 2)"),
        ("dtype", "torch.float64"),
        ("large dtype", "torch.float64"),
        ("whole and part", "has a part of it, of torch.float32 and shape (2, 5), a lower rank all"),
        ("part and whole", "has all of it"),
    ],
)
def test_parts_that_do_not_fit(results: Results, name: str, says: str) -> None:
    message = raised(results, f"wrong: {name}", "ValueError")
    assert "parameter 4 ['exp_avg']" in message
    assert says in message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("function", "cannot send a function; state may hold tensors, numbers"),
        ("sparse", "layout torch.sparse_coo"),
        ("meta", "on meta"),
        ("subclass", "cannot send a UninitializedParameter"),
        ("part of a float", "is a float, expected a tensor"),
    ],
)
def test_what_one_rank_cannot_send_is_named_on_all(results: Results, name: str, says: str) -> None:
    message = raised(results, name, "RuntimeError")
    start = f"rank {len(results) - 1}: consolidating the optimizer state: state of parameter 3"
    assert message.startswith(f"{start} ['hook']: ")
    assert says in message


def test_sending_takes_little_memory(results: Results) -> None:
    """128 MB take far less than a copy on the sender, and little more than a copy on the target."""
    assert min(result["grown"] for result in each_rank(results, "growth")) > 60
    target, *others = each_rank(results, "memory")
    assert target["target"]
    assert 120 < target["grown"] < 128 + 40
    for other in others:
        assert not other["target"]
        assert other["grown"] < 40


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("late state", "consolidating the optimizer state"),
        ("late agreement", "agreeing on whether every rank can go on"),
        ("late check", "comparing the parameters of the ranks"),
    ],
)
def test_a_rank_that_does_not_answer(results: Results, name: str, what: str) -> None:
    target = each_rank(results, name)[0]
    assert target.get("raised") == "RuntimeError", target
    assert target["message"].startswith(f"{what}: a rank of the group died, is late")
    assert target["cause"] != "NoneType"
    assert target["seconds"] < QUICK


def test_subgroup(results: Results) -> None:
    """Ranks 1 and 2 of three exchange by their ranks in the group."""
    _, first, second = each_rank(results, "subgroup")
    assert [first["target"], second["target"]] == [False, True]
    assert second["difference"] == ""
    for rank in (first, second):
        assert rank["device"] == "cpu"
        assert rank["texts"] == ["global 1", "global 2"]
        assert rank["agree"]["message"] == "rank 1: bad 1"
        assert rank["check_same"]["message"].endswith("position 0: 0 on rank 0; 1 on rank 1")
