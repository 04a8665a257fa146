import copy
from pathlib import Path
from typing import Any

import pytest
import run_demo
from config import load_config
from plot import draw
from run_demo import DemoError, check, read_log

Events = list[dict[str, Any]]


def train(step: int) -> dict[str, Any]:
    values = {"bits_per_byte": 8.0 / step, "lr": 1e-3, "grad_norm": 1.5}
    return {"event": "train", "step": step, **values}


START = {"event": "start", "parameters": 10, "train_bytes": 20, "held_out_bytes": 5}
END = [
    {"event": "validation", "step": 6, "bits_per_byte": 2.5},
    {"event": "end", "step": 6, "sha256": "abc", "step_milliseconds": {"ours": 1.0, "torch": 2.0}},
]


@pytest.fixture
def peace() -> Events:
    first = {"event": "validation", "step": 0, "bits_per_byte": 8.1}
    return copy.deepcopy([{**START, "step": 0}, first, *map(train, range(1, 7)), *END])


@pytest.fixture
def killed(peace: Events) -> Events:
    resumed = [{**START, "step": 2}, *map(train, range(3, 7)), *END]
    return copy.deepcopy(peace[:6] + resumed)


def test_equal_runs_are_summed_up(peace: Events, killed: Events) -> None:
    summary = check(peace, killed, resume_step=2, killed_step=4)
    assert summary["sha256"] == summary["resumed_sha256"] == "abc"
    assert (summary["bits_before"], summary["bits_after"]) == (8.1, 2.5)
    assert summary["speedup"] == 2
    assert (summary["steps"], summary["killed_step"], summary["resume_step"]) == (6, 4, 2)


def test_other_bits_in_the_end_fail(peace: Events, killed: Events) -> None:
    killed[-1]["sha256"] = "abd"
    with pytest.raises(DemoError, match="different bits: abc and abd"):
        check(peace, killed, 2, 4)


def test_a_repeated_step_that_differs_fails(peace: Events, killed: Events) -> None:
    killed[7]["grad_norm"] += 1e-12  # step 3, after resuming
    with pytest.raises(DemoError, match="Step 3 went differently after resuming"):
        check(peace, killed, 2, 4)


def test_a_step_that_differs_between_the_runs_fails(peace: Events, killed: Events) -> None:
    killed[-3]["lr"] *= 2  # step 6
    with pytest.raises(DemoError, match="gradient norms of the two runs differ"):
        check(peace, killed, 2, 4)


def test_a_second_start_from_the_beginning_fails(peace: Events, killed: Events) -> None:
    with pytest.raises(DemoError, match="went on from step 2, not 3"):
        check(peace, killed, 3, 4)


@pytest.mark.parametrize("after", [4.2, float("nan")])
def test_a_model_that_hardly_learned_fails(peace: Events, killed: Events, after: float) -> None:
    peace[-2]["bits_per_byte"] = after
    with pytest.raises(DemoError, match="hardly learned"):
        check(peace, killed, 2, 4)


def test_an_unfinished_run_fails(peace: Events, killed: Events) -> None:
    with pytest.raises(DemoError, match="no 'end' event"):
        check(peace, killed[:-1], 2, 4)


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
    (tmp_path / "log.jsonl").write_text('{"event": "start", "step": 0}\n{"event": "tra')
    assert read_log(tmp_path) == [{"event": "start", "step": 0}]


def test_the_picture_is_drawn(
    peace: Events, killed: Events, examples: Path, tmp_path: Path
) -> None:
    config = load_config(examples / "demo.toml")
    draw(peace, killed, config, 4, "title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_stage_that_fails_ends_with_a_sentence_and_a_status(
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = tmp_path / "job.toml"
    job.write_text((examples / "demo.toml").read_text().replace("lr = ", "rate = "))
    monkeypatch.setattr(run_demo, "JOB", job)
    monkeypatch.setattr("sys.argv", ["run_demo.py", "--out", str(tmp_path / "out")])
    assert run_demo.main() == 1
    assert f"make demo failed: {job}: optimizer.rate is not" in capsys.readouterr().err


def test_a_run_that_fails_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit('the disk is on fire')")
    monkeypatch.setattr(run_demo, "EXAMPLES", tmp_path)
    monkeypatch.setattr(run_demo, "RANKS", 1)
    with pytest.raises(DemoError, match=r"(?s)Run first ended with exit status 1.*disk is on fire"):
        run_demo.run_to_end(tmp_path / "out", "first")
