"""A few steps of the four ways on two ranks, and a resume from a sharded checkpoint."""

import re
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]

BLOCK = 4159  # elements by which two ranks' shares of a bucket may differ


@pytest.fixture(scope="module")
def output(run_example: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    checkpoint = tmp_path_factory.mktemp("zero") / "checkpoint"
    printed = run_example("zero_ddp.py", "--steps=3", f"--checkpoint={checkpoint}")
    assert (checkpoint / ".metadata").is_file()
    return printed


@pytest.fixture(scope="module")
def rows(output: str) -> dict[str, list[float]]:
    """By way: loss, milliseconds of a step and of its end, megabytes of state, kept and sent."""
    found = re.findall(r"^(\S.*?) {2,}((?:[\d.]+ *){6})$", output, re.MULTILINE)
    assert len(found) == 4, output
    return {name: [float(x) for x in numbers.split()] for name, numbers in found}


def test_all_ways_train_alike(rows: dict[str, list[float]]) -> None:
    torchs, *ours = [row[0] for row in rows.values()]
    assert 4 < torchs < 8
    assert ours == pytest.approx([ours[0]] * 3, rel=1e-5)
    assert ours == pytest.approx([torchs] * 3, rel=1e-3)
    for row in rows.values():
        assert 0 < row[2] < row[1]


def test_each_of_two_ranks_holds_half(output: str, rows: dict[str, list[float]]) -> None:
    found = re.search(r"^([\d,]+) parameters on 2 ranks", output, re.MULTILINE)
    assert found is not None, output
    parameters = int(found[1].replace(",", ""))
    whole = 4 * parameters / 1e6
    torchs, greedy, hook, sharded = rows.values()
    for state, gradients in (row[3:5] for row in (hook, sharded)):
        assert whole <= state < whole + 8 * BLOCK / 1e6
        assert gradients >= whole / 2
    for row in (torchs, greedy):
        assert row[3] == pytest.approx(whole, rel=0.02)
    kept = [row[4] / whole for row in (torchs, greedy, hook, sharded)]
    assert kept == pytest.approx([1, 1, 1.5, 0.5], abs=0.01)
    sent = [row[5] / whole for row in (torchs, greedy, hook, sharded)]
    assert sent == pytest.approx([1.5, 1.5, 1, 1], abs=0.001)


def test_a_sharded_checkpoint_resumes_with_another_partition(output: str) -> None:
    found = re.search(r"loss is ([\d.]+), and ([\d.]+) without the interruption", output)
    assert found is not None, output
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-5)
