import copy
from pathlib import Path

import pytest
import run_demo
import torch
import torch.distributed.checkpoint as dcp
from plot import draw
from run_demo import DemoError

from torchopt_ext.trainer.load_config import load_config

Metrics = list[dict[str, float]]
LOSS, VALIDATION = "loss_metrics/global_avg_loss", "validation_metrics/loss"


def train(step: int, milliseconds: float = 100.0, optimizer: float = 4.0) -> dict[str, float]:
    return {
        "step": step,
        LOSS: 8.0 / step,
        "loss_metrics/global_max_loss": 9.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "skipped_steps": 0.0,
        "time_metrics/end_to_end(s)": milliseconds / 1e3,
        "time_metrics/optimizer(s)": optimizer / 1e3,
        "time_metrics/data_loading(s)": 1e-3,
    }


@pytest.fixture
def peace() -> Metrics:
    return [{"step": 0, VALIDATION: 5.6}, *map(train, range(1, 7)), {"step": 6, VALIDATION: 1.4}]


@pytest.fixture
def killed(peace: Metrics) -> Metrics:
    """Returns the metrics of a run up to step 4, then again from step 3."""
    return copy.deepcopy(peace[:5]) + copy.deepcopy(peace[3:])


def test_equal_runs_pass_and_times_do_not_matter(peace: Metrics, killed: Metrics) -> None:
    killed[-2] |= train(6, milliseconds=300)
    run_demo.check_resume(peace, killed, resume_step=2)
    before, after = run_demo.split_at_restart(killed)
    assert (before[-1]["step"], after[0]["step"]) == (4, 3)


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        (5, "grad_norm", "Step 3 went differently after resuming"),
        (8, "lr", "gradient norms of the two runs differ"),
        (9, VALIDATION, "gradient norms of the two runs differ"),
    ],
)
def test_the_last_bit_of_any_step_counts(
    peace: Metrics, killed: Metrics, line: int, key: str, message: str
) -> None:
    killed[line][key] *= 1 + 2**-52
    with pytest.raises(DemoError, match=message):
        run_demo.check_resume(peace, killed, 2)


@pytest.mark.parametrize(
    ("kept", "resume_step", "message"),
    [(10, 3, "went on from step 2, not 3"), (8, 2, "runs differ"), (5, 2, "did not resume")],
)
def test_a_run_that_resumes_elsewhere_or_lacks_steps_fails(
    peace: Metrics, killed: Metrics, kept: int, resume_step: int, message: str
) -> None:
    with pytest.raises(DemoError, match=message):
        run_demo.check_resume(peace, killed[:kept], resume_step)


@pytest.mark.parametrize("after", [2.9, float("nan")])
def test_a_model_that_hardly_learned_fails(peace: Metrics, after: float) -> None:
    learned = run_demo.check_learning(peace, peace)
    assert learned["bits_before"] == pytest.approx(4 * learned["bits_after"])
    peace[-1][VALIDATION] = after
    with pytest.raises(DemoError, match="hardly learned"):
        run_demo.check_learning(peace, peace)


def test_a_loss_that_torch_would_not_have_fails(peace: Metrics) -> None:
    torchs = copy.deepcopy(peace[:4])
    torchs[-1][LOSS] *= 1.03
    with pytest.raises(DemoError, match="After step 3 the loss is"):
        run_demo.check_learning(peace, torchs)


def test_times_are_medians_without_the_first_steps() -> None:
    slow = [train(step, 900.0, 90.0) for step in range(1, 11)]
    ours = run_demo.step_times([*slow, train(11), train(12), train(13, 500.0)])
    assert ours == pytest.approx(
        {"whole step": 100, "clip and AdamW": 4, "data": 1, "forward, backward, the rest": 95}
    )
    torchs = run_demo.step_times([train(step, 108.0, 12.0) for step in range(11, 14)])
    text = run_demo.table(ours, torchs)
    assert "4.00 ms  4.0 %" in text
    assert "12.00 ms 11.1 %" in text
    assert "3.00 times as fast" in text


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    assert run_demo.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    [line] = run_demo.read_metrics(tmp_path)
    assert line["step"] == 1
    assert line["loss"] != line["loss"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_fingerprint_sees_every_bit_of_weights_and_state(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).view(2, 3), "optimizer": {"state.w.step": torch.tensor(3.0)}}
    hashes = set()
    for number, change in enumerate([0.0, 2.0**-22, 0.0]):
        state["optimizer"]["state.w.step"] = torch.tensor(3.0 + change)
        dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / str(number), no_dist=True)
        sha256, weights = run_demo.fingerprint(tmp_path / str(number))
        assert weights == 6
        hashes.add(sha256)
    assert len(hashes) == 2


def test_the_picture_is_drawn(peace: Metrics, killed: Metrics, tmp_path: Path) -> None:
    config = load_config(["--config", str(run_demo.JOB)])
    parts = run_demo.split_at_restart(killed)
    draw(peace, parts, config, 4, "title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_stage_that_fails_ends_with_a_sentence_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(run_demo.JOB.read_text().replace("lr = ", "lrate = "))
    monkeypatch.setattr(run_demo, "JOB", job)
    monkeypatch.setattr("sys.argv", ["run_demo.py", "--out", str(tmp_path / "out")])
    assert run_demo.main() == 1
    message = capsys.readouterr().err
    assert "make demo failed: " in message
    assert "optimizer.lrate" in message


TINY = (
    *("--model.flavor", "debug", "--training.seq_len", "16", "--training.steps", "120"),
    *("--validation.seq_len", "16", "--validation.steps", "1", "--checkpoint.interval", "60"),
)


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_killed_run_of_the_job_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_demo, "TIME_LIMIT", 50)
    peace = run_demo.run("peace", tmp_path / "peace", *TINY)
    killed_folder = tmp_path / "killed"

    def kill(process: object) -> None:
        assert run_demo.kill_after(process, killed_folder, killed_folder / "checkpoint/step-60", 60)

    killed = run_demo.run("killed", killed_folder, *TINY, meanwhile=kill)
    run_demo.check_resume(peace, killed, 60)
    ends = [tmp_path / name / "checkpoint/step-120" for name in ("peace", "killed")]
    assert run_demo.fingerprint(ends[0]) == run_demo.fingerprint(ends[1])
