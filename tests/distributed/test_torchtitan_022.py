"""torchtitan 0.2's own Trainer trains its llama3 debug model on CPU with our builders plugged in.

Every run is ten steps of `torchtitan_cpu/train.py` in separate processes, from the same seed. The
first test that needs a run starts it, and all tests of this module share it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import torchtitan_runs
from .torchtitan_runs import (
    CROSSINGS,
    OPTIONS,
    SAVED,
    STEPS,
    WEIGHTS_ALONE,
    Run,
    assert_continues,
    require_torchtitan,
    slow,
    torchtitan_server,
)

require_torchtitan("0.2.")

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent / "torchtitan_cpu"
INTEGRATION = "torchopt_ext.integrations.torchtitan_0_2"
# torch sums squares in float32, on the CPU sequentially: its norms are off by up to 2e-4, ours are
# exact. The losses hardly differ, because Adam does not depend on the gradients' scale.
NORM_TOLERANCE = 5e-4
MAX_NORM = 0.1  # below every gradient norm of these runs, so that clipping always shows
OURS = (f"--job.custom_config_module={INTEGRATION}",)
IN_BACKWARD = "--optimizer.early_step_in_backward"
KINDS = {
    "stock": (),
    "ours": (f"--experimental.custom_import={INTEGRATION}",),
    "deferred": (*OURS, "--optimizer.deferred_clipping"),
    "stock in backward": (IN_BACKWARD,),
    "in backward": (*OURS, IN_BACKWARD),
    "clipped in backward": (*OURS, IN_BACKWARD, f"--optimizer.max_grad_norm={MAX_NORM}"),
    "accumulated in backward": (
        *(*OURS, IN_BACKWARD, f"--optimizer.max_grad_norm={MAX_NORM}"),
        "--optimizer.backwards_per_step=2",
    ),
    "stock bf16": ("--training.dtype=bfloat16",),
    "masters": (*OURS, "--training.dtype=bfloat16", "--optimizer.master_weights=fp32"),
}
LAYOUTS = torchtitan_runs.LAYOUTS | {
    "single accumulated": (1, ("--training.global_batch_size=4",)),
    "fsdp accumulated": (2, ("--training.global_batch_size=8",)),
    "pp": (2, ("--parallelism.pipeline_parallel_degree=2",)),
    "pp interleaved": (
        2,
        (
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        ),
    ),
}


class Runs(torchtitan_runs.Runs):
    def get(
        self, layout: str, kind: str, resume: str = "", saved_in: str = "", without: str = ""
    ) -> Run:
        """Trains to step 10. `resume` is the kind of run whose step 5 is continued.

        `saved_in` is that run's layout if it differs. The data then starts from the beginning:
        torchtitan's loader continues only with the same ranks. `without` is not loaded.
        """
        without = without or ("dataloader" if saved_in else "")
        name = f"{layout}-{kind}-from-{saved_in}-{resume}".removesuffix("-from--") + without
        name = name.replace(" ", "-").replace(",", "")
        if name in self.done:
            return self.done[name]
        before = self.get(saved_in or layout, resume) if resume else None
        ranks, parallelism = LAYOUTS[layout]
        options = [*self.options(self.folder / name), *parallelism, *KINDS[kind]]
        script = "torchtitan_cpu/train.py"
        metrics, checkpoints, log = self.train(name, script, ranks, options, before, without)
        for line, *others in zip(*(run.values() for run in metrics), strict=True):
            if layout.startswith("pp"):  # only the last stage knows the loss
                line, *others = ({**each, "loss": 0, "max_loss": 0} for each in (line, *others))
            assert all(other == line for other in others), f"{name}: ranks disagree"
        self.done[name] = Run(metrics[-1], checkpoints, log)
        return self.done[name]

    def options(self, folder: Path) -> list[str]:
        return [
            f"--job.dump_folder={folder}",
            *["--model.name=llama3", "--model.flavor=debugmodel"],
            f"--model.hf_assets_path={self.folder / 'tokenizer'}",
            *["--training.dataset=c4_test", f"--training.dataset_path={self.folder / 'data'}"],
            *["--optimizer.implementation=fused", "--lr_scheduler.warmup_steps=2"],
            *["--checkpoint.enable", f"--checkpoint.interval={SAVED}"],
            "--checkpoint.no-last_save_model_only",
            *["--metrics.log_freq=1", f"--training.max_norm={MAX_NORM}", *OPTIONS],
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rank_server: Any) -> Iterator[Runs]:
    with torchtitan_server(rank_server, "preload_022.py", tmp_path_factory) as (folder, start):
        yield Runs(folder, start)


def assert_same_training(
    run: Run, expected: Run, first_step: int = 1, norm_tolerance: float = 1e-5
) -> None:
    assert list(run.metrics) == list(range(first_step, STEPS + 1))
    for step, line in run.metrics.items():
        reference = expected.metrics[step]
        norm_tolerance_here = norm_tolerance * max(1.0, reference["grad_norm"])
        for name, tolerance in (("loss", 1e-5), ("grad_norm", norm_tolerance_here), ("lr", 1e-15)):
            assert abs(line[name] - reference[name]) <= tolerance, f"{name} of step {step}"


@pytest.mark.parametrize("layout", [slow("single"), "fsdp", slow("tp"), slow("ddp"), slow("pp")])
def test_training_equals_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, kind) for kind in ("stock", "ours"))
    assert stock.metrics[1]["classes"][1] == "torch.optim.adamw.AdamW"
    assert all(name.startswith("torchopt_ext.") for name in ours.metrics[1]["classes"])
    # Both runs start with the same weights, and the model learns.
    assert ours.metrics[1]["loss"] == stock.metrics[1]["loss"]
    assert stock.metrics[STEPS]["loss"] < stock.metrics[1]["loss"] - 1
    assert_same_training(ours, stock)


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
def test_checkpoint_has_stock_keys(runs: Runs, layout: str) -> None:
    ours, stock = (runs.get(layout, kind).entries() for kind in ("ours", "stock"))
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in stock
    assert ours == stock  # names, dtypes, sizes, and the shards of each rank


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
def test_resume_repeats_every_digit(runs: Runs, layout: str) -> None:
    assert_resumes_exactly(runs, layout, "ours")


def assert_resumes_exactly(runs: Runs, layout: str, kind: str) -> None:
    whole, resumed = runs.get(layout, kind), runs.get(layout, kind, resume=kind)
    assert_continues(resumed, whole, "optimizer.state.layers.0.attention.wq.weight.exp_avg")


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
@pytest.mark.parametrize(
    ("kind", "saved"),
    [("ours", "stock"), pytest.param("stock", "ours", marks=pytest.mark.slow)],
)
def test_checkpoints_are_exchanged(runs: Runs, layout: str, kind: str, saved: str) -> None:
    resumed = runs.get(layout, kind, resume=saved)
    assert_same_training(resumed, runs.get(layout, saved), first_step=SAVED + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_in", "layout"), CROSSINGS)
def test_another_layout_resumes_as_with_stock(runs: Runs, saved_in: str, layout: str) -> None:
    runs.get(saved_in, "ours")
    stock, ours = (runs.get(layout, kind, "ours", saved_in) for kind in ("stock", "ours"))
    assert_same_training(ours, stock, first_step=SAVED + 1)
    # Training continues from trained weights, not from initial weights.
    assert ours.metrics[SAVED + 1]["loss"] < runs.get(saved_in, "ours").metrics[1]["loss"] - 0.5


@pytest.mark.slow
def test_weights_alone_are_loaded_as_with_stock(runs: Runs) -> None:
    runs.get("fsdp", "ours")
    stock, ours = (
        runs.get("fsdp", kind, "ours", without=WEIGHTS_ALONE) for kind in ("stock", "ours")
    )
    assert_same_training(ours, stock, first_step=SAVED + 1)
    assert ours.metrics[SAVED + 1]["lr"] == runs.get("fsdp", "ours").metrics[1]["lr"]


@pytest.mark.parametrize(
    "layout", [slow("single"), "fsdp", slow("tp"), slow("pp"), slow("pp interleaved")]
)
def test_deferred_clipping_equals_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, kind) for kind in ("stock", "deferred"))
    assert all(line["grad_norm"] > MAX_NORM for line in stock.metrics.values())
    assert_same_training(ours, stock, norm_tolerance=NORM_TOLERANCE)
    assert all(line["clip_factor"] == 1 for line in stock.metrics.values())
    assert all(0 < line["clip_factor"] < 1 for line in ours.metrics.values())


@pytest.mark.parametrize("layout", [slow("single"), slow("fsdp")])
@pytest.mark.parametrize("kind", ["in backward", "clipped in backward"])
def test_in_backward_resumes_exactly(runs: Runs, layout: str, kind: str) -> None:
    """Losses repeat exactly. torchtitan saves the first parameter's state only: off by 0.03."""
    assert_resumes_exactly(runs, layout, kind)


@pytest.mark.parametrize("layout", [slow("single"), "fsdp", slow("ddp")])
def test_clipping_in_backward_equals_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, kind) for kind in ("stock", "clipped in backward"))
    assert_same_training(ours, stock, norm_tolerance=NORM_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single accumulated", "fsdp accumulated"])
def test_accumulation_in_backward_equals_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, kind) for kind in ("stock", "accumulated in backward"))
    assert_same_training(ours, stock, norm_tolerance=NORM_TOLERANCE)


@pytest.mark.slow
def test_master_weights_from_a_checkpoint_without(runs: Runs) -> None:
    resumed = runs.get("single", "masters", resume="stock bf16")
    stock = runs.get("single", "stock bf16")
    for step, line in resumed.metrics.items():
        assert abs(line["loss"] - stock.metrics[step]["loss"]) < 0.1  # without masters, bf16 rounds
    assert "optimizer.state.output.weight.master_weight" in resumed.entries(STEPS)


@pytest.mark.slow
def test_in_backward_from_torchtitans_checkpoint(runs: Runs) -> None:
    """Such a checkpoint has one parameter's state. The others start anew, with a warning."""
    resumed = runs.get("single", "in backward", resume="stock in backward")
    assert list(resumed.metrics) == list(range(SAVED + 1, STEPS + 1))
    assert "optimizer state of 'tok_embeddings.weight' only" in resumed.log


@pytest.mark.slow
def test_every_kind_of_train_spec_is_served(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "check_specs.py")]
    result = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
