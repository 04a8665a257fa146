"""torchtitan 0.3's own Trainer trains its llama3 debug model on CPU with our containers in it.

Every run is ten steps of `torchtitan_cpu/train_030.py` in separate processes, from the same seed.
The first test that needs a run starts it, and all tests of this module share it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import torchtitan_runs
from .torchtitan_runs import (
    CROSSINGS,
    OPTIONS,
    SAVED,
    STEPS,
    WEIGHTS_ALONE,
    Run,
    assert_continues,
    read_checkpoint,
    require_torchtitan,
    slow,
    torchtitan_server,
)

require_torchtitan("0.3.")

pytestmark = pytest.mark.timeout(400)

INTEGRATION = "torchopt_ext.integrations.torchtitan_0_3"
PIPELINE = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=1F1B",
    "--training.disable_cuda_graphs",
)
LAYOUTS = torchtitan_runs.LAYOUTS | {"pp": (2, PIPELINE)}


class Runs(torchtitan_runs.Runs):
    def get(
        self,
        layout: str,
        ours: bool,
        resume: str | Run = "",
        config: str = "small",
        saved_in: str = "",
        without: str = "",
        **fields: Any,
    ) -> Run:
        """Trains to step 10. `resume` is the run to continue from step 5, or "ours" or "stock".

        `saved_in` is that run's layout if it differs. The data then starts from the beginning:
        torchtitan's loader continues only with the same ranks. `without` is not loaded. `fields`
        are fields of our container's Config.
        """
        without = without or ("dataloader" if saved_in else "")
        name = f"{layout}-{config}-{'ours' if ours else 'stock'}"
        name += "".join(f"-{key}={value}" for key, value in fields.items())
        if isinstance(resume, str) and resume:
            resume = self.get(saved_in or layout, resume == "ours", "", config)
        name += f"-from-{resume.checkpoints.parent.name}{without}" if resume else ""
        if name in self.done:
            return self.done[name]
        ranks, parallelism = LAYOUTS[layout]
        options = [*self.options(self.folder / name, config), *parallelism]
        if ours:
            optimizers = f"{INTEGRATION}.optimizers" + (f"={json.dumps(fields)}" if fields else "")
            options += ["--override.imports", optimizers, f"{INTEGRATION}.lr_schedulers"]
        script = "torchtitan_cpu/train_030.py"
        lines, checkpoints, log = self.train(name, script, ranks, options, resume or None, without)
        if layout == "pp":
            lines = lines[-1:]  # the first stage logs a loss of -1
        assert all(other == lines[0] for other in lines), f"{name}: ranks disagree"
        self.done[name] = Run(lines[0], checkpoints, log)
        return self.done[name]

    def options(self, folder: Path, config: str) -> list[str]:
        return [
            *["--module=configs_030", f"--config={config}", f"--dump_folder={folder}"],
            f"--hf_assets_path={self.folder / 'tokenizer'}",
            f"--dataloader.dataset_path={self.folder / 'data'}",
            *["--checkpoint.enable", f"--checkpoint.interval={SAVED}"],
            *["--validator.no-enable", "--debug.no-enable_structured_logging", *OPTIONS],
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rank_server: Any) -> Iterator[Runs]:
    with torchtitan_server(rank_server, "preload_030.py", tmp_path_factory) as (folder, start):
        yield Runs(folder, start)


def assert_same_training(
    run: Run, expected: Run, first_step: int = 1, *, norm_tolerance: float = 1e-5
) -> None:
    assert list(run.metrics) == list(range(first_step, STEPS + 1))
    for step, line in run.metrics.items():
        reference = expected.metrics[step]
        assert line["lrs"] == pytest.approx(reference["lrs"], rel=1e-14), f"step {step}"
        for name, tolerance in (("loss", 1e-5), ("grad_norm", norm_tolerance)):
            found = pytest.approx(reference[name], rel=tolerance)
            assert line[name] == found, f"{name} of step {step}"


@pytest.mark.parametrize("layout", [slow("single"), "fsdp", slow("tp"), slow("ddp"), slow("pp")])
def test_training_equals_stock(runs: Runs, layout: str) -> None:
    stock, ours = runs.get(layout, ours=False), runs.get(layout, ours=True)
    assert stock.metrics[1]["classes"][1:] == ["torch.optim.adamw.AdamW"]
    assert all(name.startswith("torchopt_ext.") for name in ours.metrics[1]["classes"])
    # Both runs start with the same weights, and the model learns.
    assert ours.metrics[1]["loss"] == stock.metrics[1]["loss"]
    assert stock.metrics[STEPS]["loss"] < stock.metrics[1]["loss"] - 0.1
    assert_same_training(ours, stock)


@pytest.mark.parametrize("layout", ["fsdp", slow("pp")])
def test_groups_of_two_optimizers_train_as_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, of, config="groups") for of in (False, True))
    assert ours.metrics[1]["classes"][1:] == [
        "torchopt_ext.optim.fused_adam.FusedAdamW",
        "torchopt_ext.optim.fused_adam.FusedAdam",
    ]
    assert len(ours.metrics[1]["lrs"]) == 3
    assert_same_training(ours, stock)
    assert ours.entries() == stock.entries()


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
def test_checkpoint_has_stock_keys(runs: Runs, layout: str) -> None:
    ours, stock = (runs.get(layout, of).entries() for of in (True, False))
    assert "optimizer.state.layers.0.attention.wo.weight.exp_avg" in stock
    assert {name for name in stock if name.startswith("lr_")} == {"lr_scheduler.last_epoch"}
    assert ours == stock


@pytest.mark.parametrize("layout", [slow("single"), "fsdp", slow("tp"), slow("pp")])
def test_resume_repeats_every_digit(runs: Runs, layout: str) -> None:
    whole, resumed = (runs.get(layout, ours=True, resume=saved) for saved in ("", "ours"))
    assert_continues(resumed, whole, "optimizer.state.layers.0.attention.wo.weight.exp_avg")


@pytest.mark.parametrize("layout", [slow("single"), "fsdp"])
@pytest.mark.parametrize("ours", [True, False], ids=["ours from stock", "stock from ours"])
def test_checkpoints_are_exchanged(runs: Runs, layout: str, ours: bool) -> None:
    resumed = runs.get(layout, ours, resume="stock" if ours else "ours")
    assert_same_training(resumed, runs.get(layout, not ours), first_step=SAVED + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_in", "layout"), CROSSINGS)
def test_another_layout_resumes_as_with_stock(runs: Runs, saved_in: str, layout: str) -> None:
    stock, ours = (runs.get(layout, of, "ours", saved_in=saved_in) for of in (False, True))
    assert_same_training(ours, stock, first_step=SAVED + 1)
    # Training continues from trained weights, not from initial weights.
    first = runs.get(saved_in, ours=True).metrics[1]
    assert ours.metrics[SAVED + 1]["loss"] < first["loss"] - 0.05


@pytest.mark.slow
def test_groups_of_two_optimizers_resume_in_another_layout(runs: Runs) -> None:
    stock, ours = (
        runs.get("pp", of, "ours", config="groups", saved_in="fsdp") for of in (False, True)
    )
    assert_same_training(ours, stock, first_step=SAVED + 1)


@pytest.mark.slow
def test_weights_alone_are_loaded_as_with_stock(runs: Runs) -> None:
    stock, ours = (runs.get("fsdp", of, "ours", without=WEIGHTS_ALONE) for of in (False, True))
    assert_same_training(ours, stock, first_step=SAVED + 1)
    assert ours.metrics[SAVED + 1]["lrs"] == runs.get("fsdp", ours=True).metrics[1]["lrs"]


@pytest.mark.slow
def test_master_weights_join_a_running_job(runs: Runs) -> None:
    """Masters start from a checkpoint without masters, and torchtitan ignores saved masters."""
    masters = {"config": "bf16", "master_weights": "fp32"}
    stock = runs.get("fsdp", ours=False, config="bf16")
    joined = runs.get("fsdp", ours=True, resume=stock, **masters)
    assert list(joined.metrics) == list(range(SAVED + 1, STEPS + 1))
    assert joined.metrics[SAVED + 1]["loss"] == stock.metrics[SAVED + 1]["loss"]
    whole = runs.get("fsdp", ours=True, **masters)
    assert "optimizer.state.norm.weight.master_weight" in whole.entries()
    resumed = runs.get("fsdp", ours=True, resume=whole, **masters)
    assert resumed.metrics == {s: whole.metrics[s] for s in range(SAVED + 1, STEPS + 1)}
    back = runs.get("fsdp", ours=False, resume=whole, config="bf16")
    assert back.metrics[SAVED + 1]["loss"] == whole.metrics[SAVED + 1]["loss"]


@pytest.mark.parametrize("layout", [slow("single"), "fsdp", slow("tp"), slow("ddp"), slow("pp")])
def test_deferred_clipping_trains_as_stock(runs: Runs, layout: str) -> None:
    stock = runs.get(layout, ours=False)
    assert all(line["grad_norm"] > 1.0 for line in stock.metrics.values())  # all steps clip
    # torch sums the norm in float32, with an error of 2e-4 here. Our sum is exact.
    deferred = runs.get(layout, ours=True, deferred_clipping=True)
    assert_same_training(deferred, stock, norm_tolerance=1e-3)


@pytest.mark.slow
def test_experts_stay_balanced_as_with_stock(runs: Runs) -> None:
    stock, ours = (runs.get("fsdp", of, config="moe") for of in (False, True))
    assert_same_training(ours, stock)
    bias = "layers.1.moe.expert_bias_E"
    expected, found = (read_checkpoint(run, STEPS)[bias] for run in (stock, ours))
    assert expected.any()
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_group_may_lie_in_one_pipeline_stage_only(runs: Runs) -> None:
    """A pattern may match nothing in a stage, which torchtitan's own containers reject."""
    ours = runs.get("pp", ours=True, config="embeddings_apart")
    assert list(ours.metrics[1]["lrs"]) == ["lr/AdamW"]  # the last stage's
    assert_same_training(ours, runs.get("pp", ours=False, config="small"), norm_tolerance=1e-5)


@pytest.mark.slow
def test_clipping_in_the_step_is_one_decision_of_all_stages(runs: Runs) -> None:
    stock = runs.get("pp", ours=False)
    ours = runs.get("pp", ours=True, config="clipping_in_step")
    for step, line in ours.metrics.items():
        assert line["loss"] == pytest.approx(stock.metrics[step]["loss"], rel=1e-5)
    with pytest.raises(AssertionError, match="need one decision of all pipeline stages"):
        runs.get("pp", ours=True, max_grad_norm=1.0)


def test_a_loss_that_is_not_finite_ends_the_run(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="Loss is not finite"):
        runs.get("single", ours=True, config="diverging")
