"""After SIGKILL of a rank at a random moment, a job resumes bitwise from its newest checkpoint."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_trainer import JOB, layout

pytestmark = pytest.mark.slow

STEPS, LIMIT = 12, 110  # steps; seconds of a run under torchrun, which may restart the job
SETTINGS = (
    *("--training.batch_size", "4", "--training.steps", str(STEPS), *layout(fsdp=2)),
    *("--checkpoint.enable_checkpoint", "--checkpoint.interval", "2"),
    *("--checkpoint.keep_latest_k", "2", "--lr_scheduler.total_steps", str(STEPS)),
)
Start = Callable[..., None]


@pytest.fixture(scope="module")
def start(rank_server) -> Iterator[Start]:
    """A function that runs the job on two ranks."""
    with rank_server("trainer_worker.py") as serve:

        def run(folder: Path, *settings: str, kill: tuple[Any, ...] = ()) -> None:
            words = ("kill", *map(str, kill)) if kill else ()
            job = (*JOB, *SETTINGS, "--job.dump_folder", str(folder), *settings)
            serve("trainer_worker.py", 2, *words, *job)

        yield run


def ended(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("rank*.json"))]


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(folder: Path) -> dict[int, set[float]]:
    """Returns the distinct losses of each step. A repeated step must give the same loss."""
    by_step: dict[int, set[float]] = {}
    for line in lines(folder):
        by_step.setdefault(line["step"], set()).add(line["loss_metrics/global_avg_loss"])
    return by_step


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    start(folder)
    return folder


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_job_resumes_to_the_bits_of_one_that_was_not(start, undisturbed, tmp_path, seed):
    draw = random.Random(seed)
    kill = (draw.randrange(2), draw.randrange(2, STEPS + 1), draw.random() * 0.06)
    mode = ("--checkpoint.async_mode", draw.choice(["disabled", "async"]))
    early = kill[1] <= STEPS // 2  # later, the job may end before the kill
    with pytest.raises(AssertionError) if early else contextlib.suppress(AssertionError):
        start(tmp_path, *mode, kill=kill)
    before = len(lines(tmp_path))
    start(tmp_path, *mode)
    assert ended(tmp_path) == ended(undisturbed)
    assert losses(tmp_path) == losses(undisturbed)
    # A job repeats at most the steps since a checkpoint and the steps during its writing.
    assert len(lines(tmp_path)) - STEPS <= min(before, 4)


def test_torchrun_starts_a_killed_job_again(undisturbed, tmp_path):
    worker = Path(__file__).with_name("trainer_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(worker), *JOB, *SETTINGS]
    command += ["--job.dump_folder", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    output = tmp_path / "output.txt"
    with (
        output.open("wb") as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=file) as job,
    ):
        deadline = time.monotonic() + LIMIT
        while len(lines(tmp_path)) < 5 and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        try:
            code = job.wait(timeout=LIMIT)
        finally:
            job.kill()
    assert code == 0, output.read_text()[-4000:]
    assert ended(tmp_path) == ended(undisturbed)
