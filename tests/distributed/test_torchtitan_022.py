"""torchtitan 0.2's own Trainer trains its llama3 debug model on CPU with our builders plugged in.

Every run is `torchtitan_cpu/train.py` in processes of its own, ten steps from the same seed. Runs
are started when the first test asks for them and shared by the tests of this module.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

try:
    version = importlib.metadata.version("torchtitan")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("torchtitan is not installed", allow_module_level=True)
if not version.startswith("0.2."):
    pytest.skip(f"torchtitan {version} has another interface", allow_module_level=True)

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent / "torchtitan_cpu"
INTEGRATION = "torchopt_ext.integrations.torchtitan_0_2"
STEPS, SAVED = 10, 5
LAYOUTS = {  # processes, and options
    "single": (1, ()),
    "fsdp": (2, ()),
    "tp": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "ddp": (
        2,
        (
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=1",
        ),
    ),
}
RUN_TIMEOUT = 180  # seconds; a run takes about 10 on an idle machine


@dataclass(frozen=True)
class Run:
    metrics: dict[int, dict[str, Any]]  # by step, as rank 0 logged them
    checkpoints: Path


@dataclass
class Runs:
    """Starts runs under `folder`, each combination of arguments once."""

    folder: Path
    done: dict[str, Run] = field(default_factory=dict)

    def get(self, layout: str, ours: bool, resume: str = "") -> Run:
        """Train to step 10; `resume` = "ours" or "stock": continue that run's step 5."""
        name = f"{layout}-{'ours' if ours else 'stock'}" + (f"-from-{resume}" if resume else "")
        if name in self.done:
            return self.done[name]
        folder = self.folder / name
        if folder.exists():
            pytest.fail(f"the run {name} failed in an earlier test")
        checkpoints = folder / "checkpoint"
        checkpoints.mkdir(parents=True)
        if resume:
            saved = self.get(layout, resume == "ours").checkpoints / f"step-{SAVED}"
            (checkpoints / saved.name).symlink_to(saved)
        world_size, parallelism = LAYOUTS[layout]
        command = [
            # Loopback only, on a port of torchrun's choosing.
            *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"],
            *["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"],
            *[str(HERE / "train.py"), *self.options(folder), *parallelism],
        ]
        if ours:
            command.append(f"--experimental.custom_import={INTEGRATION}")
        run_with_timeout(command, folder)
        metrics = [read_metrics(folder / f"metrics.rank{rank}") for rank in range(world_size)]
        assert all(other == metrics[0] for other in metrics), f"{name}: ranks disagree"
        self.done[name] = Run(metrics[0], checkpoints)
        return self.done[name]

    def options(self, folder: Path) -> list[str]:
        # The seed gives every run of one layout the same initial weights. Without mixed
        # precision: under bf16 one flipped rounding moves the loss by more than 1e-5.
        return [
            f"--job.dump_folder={folder}",
            *["--model.name=llama3", "--model.flavor=debugmodel"],
            f"--model.hf_assets_path={self.folder / 'tokenizer'}",
            *["--training.dataset=c4_test", f"--training.dataset_path={self.folder / 'data'}"],
            *["--training.seq_len=64", "--training.local_batch_size=2"],
            *[f"--training.steps={STEPS}", "--training.mixed_precision_param=float32"],
            *["--optimizer.implementation=fused", "--lr_scheduler.warmup_steps=2"],
            *["--checkpoint.enable", f"--checkpoint.interval={SAVED}"],
            "--checkpoint.no-last_save_model_only",
            *["--metrics.log_freq=1", "--metrics.disable_color_printing"],
            *["--debug.seed=0", "--debug.deterministic"],
            *["--comm.init_timeout_seconds=120", "--comm.train_timeout_seconds=60"],
            "--comm.trace_buf_size=0",
        ]


def run_with_timeout(command: list[str], folder: Path) -> None:
    environment = os.environ | {
        "METRICS_FILE": str(folder / "metrics"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder.parent / "hf"),
        "HF_DATASETS_OFFLINE": "1",
    }
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(RUN_TIMEOUT)
        except subprocess.TimeoutExpired:
            # torchrun ends its workers, which are in sessions of their own, when it is terminated.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()
            pytest.fail(f"no end after {RUN_TIMEOUT} s:\n{log.read_text()[-4000:]}")
    assert code == 0, log.read_text()[-8000:]


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


def read_checkpoint(run: Run, step: int) -> dict[str, Any]:
    """Every tensor of a distributed checkpoint, unsharded, by its flat name."""
    file = run.checkpoints / f"step-{step}.pt"
    dcp_to_torch_save(run.checkpoints / f"step-{step}", file)
    flat: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, item)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    flatten("", torch.load(file, weights_only=True))
    file.unlink()
    return flat


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("torchtitan")
    subprocess.run([sys.executable, HERE / "assets.py", folder], check=True, timeout=60)
    yield Runs(folder)
    shutil.rmtree(folder)  # the checkpoints are some 70 MB each


def slow(layout: str) -> Any:
    return pytest.param(layout, marks=pytest.mark.slow)


def assert_same_training(run: Run, expected: Run, first_step: int = 1) -> None:
    assert list(run.metrics) == list(range(first_step, STEPS + 1))
    for step, line in run.metrics.items():
        reference = expected.metrics[step]
        for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-5), ("lr", 1e-15)):
            assert abs(line[name] - reference[name]) <= tolerance, f"{name} of step {step}"


@pytest.mark.parametrize("layout", ["single", "fsdp", slow("tp"), slow("ddp")])
def test_training_equals_stock(runs: Runs, layout: str) -> None:
    with ThreadPoolExecutor() as pool:
        stock, ours = pool.map(lambda ours: runs.get(layout, ours), (False, True))
    assert stock.metrics[1]["classes"][1] == "torch.optim.adamw.AdamW"
    assert all(name.startswith("torchopt_ext.") for name in ours.metrics[1]["classes"])
    # The same weights to begin with, and a model that learns.
    assert ours.metrics[1]["loss"] == stock.metrics[1]["loss"]
    assert stock.metrics[STEPS]["loss"] < stock.metrics[1]["loss"] - 1
    assert_same_training(ours, stock)


@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_checkpoint_has_stock_keys(runs: Runs, layout: str) -> None:
    def entries(ours: bool) -> dict[str, Any]:
        checkpoint = runs.get(layout, ours).checkpoints / f"step-{SAVED}"
        return FileSystemReader(checkpoint).read_metadata().state_dict_metadata

    ours, stock = entries(True), entries(False)
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in stock
    assert ours == stock  # names, dtypes, sizes, and how tensors are cut among the ranks


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
def test_resume_repeats_every_digit(runs: Runs, layout: str) -> None:
    whole = runs.get(layout, ours=True)
    resumed = runs.get(layout, ours=True, resume="ours")
    assert resumed.metrics == {s: whole.metrics[s] for s in range(SAVED + 1, STEPS + 1)}
    expected, found = read_checkpoint(whole, STEPS), read_checkpoint(resumed, STEPS)
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in expected
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == found[name].numpy().tobytes(), name


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
@pytest.mark.parametrize("ours", [True, False], ids=["ours from stock", "stock from ours"])
def test_checkpoints_are_exchanged(runs: Runs, layout: str, ours: bool) -> None:
    resumed = runs.get(layout, ours, resume="stock" if ours else "ours")
    assert_same_training(resumed, runs.get(layout, not ours), first_step=SAVED + 1)


@pytest.mark.slow
def test_every_kind_of_train_spec_is_served(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "check_specs.py")]
    result = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
