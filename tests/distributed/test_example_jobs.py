"""The jobs in examples/ give equal losses: they only divide the work differently. Loops learn."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchopt_ext.trainer.load_config import load_config

pytestmark = pytest.mark.timeout(150)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOBS = sorted(path for path in EXAMPLES.glob("*.toml") if path.name != "demo.toml")
STEPS = 3
FAST = ("debug",)
MUON = ("--optimizer.name", "Muon")


def ranks_of(job: Path) -> int:
    """Returns the number of ranks in the command of the file's comment."""
    [ranks] = re.findall(r"torchrun --nproc-per-node (\d)", job.read_text())
    return int(ranks)


def losses(
    start: Callable[..., None], job: Path, ranks: int, folder: Path, *more: str
) -> list[float]:
    arguments = ("--config", str(job), "--job.dump_folder", str(folder), "--metrics.log_freq", "1")
    start("trainer_worker.py", ranks, *arguments, "--training.steps", str(STEPS), *more)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss_metrics/global_avg_loss"] for line in lines]


@pytest.fixture(scope="module")
def one_process(start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("one")
    return losses(start_ranks, EXAMPLES / "debug.toml", 1, folder, "--training.batch_size", "16")


def test_there_is_a_job_for_each() -> None:
    parallelisms = "ddp zero fsdp hsdp tp fsdp_tp pp pp_interleaved fsdp_pp cp accumulation"
    assert {job.stem for job in JOBS} >= {"debug", *parallelisms.split()}


@pytest.mark.parametrize("job", JOBS, ids=[job.stem for job in JOBS])
def test_jobs_read(job: Path) -> None:
    config = load_config(["--config", str(job)])
    assert config.model.name == "byte_llama"
    assert job.read_text().startswith("# ")
    assert config.job.dump_folder == f"out/{job.stem}"


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=job.stem, marks=[] if job.stem in FAST else [pytest.mark.slow])
        for job in JOBS
        if job.stem != "cp"  # needs GPUs
    ],
)
def test_jobs_train_alike(
    start_ranks: Callable[..., None], one_process: list[float], job: Path, tmp_path: Path
) -> None:
    run = losses(start_ranks, job, ranks_of(job), tmp_path)
    tolerance = 1e-3 if "bfloat16" in job.read_text() else 1e-5
    assert run == pytest.approx(one_process, rel=tolerance)
    assert run[-1] < run[0]


@pytest.fixture(scope="module")
def muon_in_one_process(
    start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    folder, job = tmp_path_factory.mktemp("muon"), EXAMPLES / "debug.toml"
    return losses(start_ranks, job, 1, folder, "--training.batch_size", "16", *MUON)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "fsdp" else [pytest.mark.slow])
        for name in (
            *("ddp", "zero", "fsdp", "hsdp", "tp", "fsdp_tp"),
            *("pp", "pp_interleaved", "fsdp_pp", "accumulation"),
        )
    ],
)
def test_muon_trains_alike(
    start_ranks: Callable[..., None], muon_in_one_process: list[float], name: str, tmp_path: Path
) -> None:
    job = EXAMPLES / f"{name}.toml"
    run = losses(start_ranks, job, ranks_of(job), tmp_path, *MUON)
    tolerance = 1e-3 if "bfloat16" in job.read_text() else 1e-4
    assert run == pytest.approx(muon_in_one_process, rel=tolerance)
    assert run[-1] < run[0]


@pytest.mark.parametrize("script", ["zero_ddp.py", "fsdp_mixed_precision.py"])
@pytest.mark.timeout(100)
def test_a_loop_of_ones_own_learns(start_ranks: Callable[..., str], script: str) -> None:
    narrow = os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2")
    if script == "fsdp_mixed_precision.py" and narrow and torch.cpu._is_amx_tile_supported():
        pytest.skip("torch's bf16 attention raises on a CPU with AMX but without AVX-512")
    output = start_ranks(str(EXAMPLES / script), 2)
    learned = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert len(learned) == 4, output
    assert learned == sorted(learned, reverse=True)
    assert 5.6 > learned[0]  # ln 256 is 5.55
    assert learned[-1] < 4
    if script == "zero_ddp.py":
        shares = re.findall(r"rank \d holds ([\d.]+)%", output)
        assert [float(x) for x in shares] == pytest.approx([50, 50], abs=2.5)
    else:
        assert output.count("stepped True") == 4
