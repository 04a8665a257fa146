"""torchtitan's own Trainer, 0.2 or 0.3, trains its llama3 debug model on CPU with our containers.

Every run is ten steps of a script in `torchtitan_cpu` in separate processes, from the same seed.
The first test that needs a run starts it, and all tests of this module share it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.ranks import Results, assert_passed
from .torchtitan_runs import (
    HERE,
    SAVED,
    STEPS,
    Run,
    Runs,
    Version,
    assert_continues,
    assert_same_training,
    read_checkpoint,
    require_torchtitan,
    torchtitan_runs,
)

version = require_torchtitan("0.2.", "0.3.")
pytestmark = pytest.mark.timeout(400)

MAX_NORM = 0.1  # of 0.2
STAGES = "--parallelism.pipeline_parallel_degree=2"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
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


def config_030(name: str = "small") -> tuple[str, ...]:
    return (f"--config={name}",)


def ours_030(config: str = "small", **fields: Any) -> tuple[str, ...]:
    module = "torchopt_ext.integrations.torchtitan_0_3"
    optimizers = f"{module}.optimizers" + (f"={json.dumps(fields)}" if fields else "")
    return (*config_030(config), "--override.imports", optimizers, f"{module}.lr_schedulers")


MODULE_022 = "torchopt_ext.integrations.torchtitan_0_2"
OURS = (f"--job.custom_config_module={MODULE_022}",)
IN_BACKWARD = "--optimizer.early_step_in_backward"
CLIPPED = (*OURS, IN_BACKWARD, f"--optimizer.max_grad_norm={MAX_NORM}")
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
VERSIONS = {
    "0.2": Version(
        "train.py",
        "preload_022.py",
        (
            *["--optimizer.implementation=fused", "--checkpoint.no-last_save_model_only"],
            f"--training.max_norm={MAX_NORM}",
        ),
        LAYOUTS
        | {
            "single accumulated": (1, ("--training.global_batch_size=4",)),
            "fsdp accumulated": (2, ("--training.global_batch_size=8",)),
            "pp": (2, (STAGES,)),
            "pp interleaved": (2, (STAGES, INTERLEAVED)),
        },
        {
            "stock": (),
            "ours": (f"--experimental.custom_import={MODULE_022}",),
            "deferred": (*OURS, "--optimizer.deferred_clipping"),
            "stock in backward": (IN_BACKWARD,),
            "in backward": (*OURS, IN_BACKWARD),
            "clipped in backward": CLIPPED,
            "accumulated in backward": (*CLIPPED, "--optimizer.backwards_per_step=2"),
            "stock bf16": ("--training.dtype=bfloat16",),
            "masters": (*OURS, "--training.dtype=bfloat16", "--optimizer.master_weights=fp32"),
            "muon": (
                *[*OURS, "--optimizer.name=Muon", "--optimizer.lr=4e-3"],
                "--optimizer.deferred_clipping",
            ),
        },
        "optimizer.state.layers.0.attention.wq.weight.exp_avg",
        learns=1.0,
        max_norm=MAX_NORM,
        norm_tolerance=5e-4,
    ),
    "0.3": Version(
        "train_030.py",
        "preload_030.py",
        (),
        LAYOUTS
        | {
            "pp": (
                2,
                (
                    *[STAGES, "--parallelism.pipeline_parallel_schedule=1F1B"],
                    "--training.disable_cuda_graphs",
                ),
            )
        },
        {
            "stock": config_030(),
            "ours": ours_030(),
            "deferred": ours_030(deferred_clipping=True),
            "stock groups": config_030("groups"),
            "groups": ours_030("groups"),
            "stock bf16": config_030("bf16"),
            "masters": ours_030("bf16", master_weights="fp32"),
            "stock moe": config_030("moe"),
            "moe": ours_030("moe"),
            "embeddings apart": ours_030("embeddings_apart"),
            "clipping in step": ours_030("clipping_in_step"),
            "clipping alone": ours_030(max_grad_norm=1.0),
            "diverging": ours_030("diverging"),
            "muon": ours_030("same_data", muon={}),
            "dist muon": ours_030("dist_muon"),
            "kimi": ours_030("kimi"),
        },
        "optimizer.state.layers.0.attention.wo.weight.exp_avg",
        learns=0.1,
        max_norm=1.0,
        norm_tolerance=1e-3,
    ),
}
TITAN = VERSIONS[version[:3]]
only_022, only_030 = (
    pytest.mark.skipif(version[:3] != name, reason=f"torchtitan {version} has another interface")
    for name in VERSIONS
)
CROSSINGS = [
    *[("fsdp", layout) for layout in ("single", "ddp", "tp", "pp")],
    *[(layout, "fsdp") for layout in ("single", "tp", "pp")],
]
"""The layout of a checkpoint, and the layout of the run that resumes from it."""
WEIGHTS_ALONE = "lr_scheduler,dataloader,optimizer"
"""The parts that are not loaded, as in torchtitan's test of optional checkpoints."""


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


LAYOUT = pytest.mark.parametrize(
    "layout", [slow("single"), "fsdp", slow("tp"), slow("ddp"), slow("pp")]
)
ONE_OR_FSDP = pytest.mark.parametrize("layout", [slow("single"), "fsdp"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rank_server: Any) -> Iterator[Runs]:
    with torchtitan_runs(rank_server, version, TITAN, tmp_path_factory) as runs:
        yield runs


@LAYOUT
def test_training_equals_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, kind) for kind in ("stock", "ours"))
    assert stock.metrics[1]["classes"][1] == "torch.optim.adamw.AdamW"
    assert all(name.startswith("torchopt_ext.") for name in ours.metrics[1]["classes"])
    # Both runs start with the same weights, and the model learns.
    assert ours.metrics[1]["loss"] == stock.metrics[1]["loss"]
    assert stock.metrics[STEPS]["loss"] < stock.metrics[1]["loss"] - TITAN.learns
    assert_same_training(ours, stock)


@ONE_OR_FSDP
def test_checkpoint_has_stock_keys(runs: Runs, layout: str) -> None:
    ours, stock = (runs.get(layout, kind).entries() for kind in ("ours", "stock"))
    assert TITAN.entry in stock
    assert ours == stock  # names, dtypes, sizes, and the shards of each rank


@ONE_OR_FSDP
def test_resume_repeats_every_digit(runs: Runs, layout: str) -> None:
    whole, resumed = (runs.get(layout, "ours", resume=saved) for saved in ("", "ours"))
    assert_continues(resumed, whole, TITAN.entry)


@ONE_OR_FSDP
@pytest.mark.parametrize(("kind", "saved"), [("ours", "stock"), ("stock", "ours")])
def test_checkpoints_are_exchanged(runs: Runs, layout: str, kind: str, saved: str) -> None:
    resumed = runs.get(layout, kind, resume=saved)
    assert_same_training(resumed, runs.get(layout, saved), first_step=SAVED + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_in", "layout"), CROSSINGS)
def test_another_layout_resumes_as_with_stock(runs: Runs, saved_in: str, layout: str) -> None:
    stock, ours = (runs.get(layout, kind, "ours", saved_in) for kind in ("stock", "ours"))
    assert_same_training(ours, stock, first_step=SAVED + 1)
    # Training continues from trained weights, not from initial weights.
    first = runs.get(saved_in, "ours").metrics[1]["loss"]
    assert ours.metrics[SAVED + 1]["loss"] < first - TITAN.learns / 2


@pytest.mark.slow
def test_weights_alone_are_loaded_as_with_stock(runs: Runs) -> None:
    stock, ours = (
        runs.get("fsdp", kind, "ours", without=WEIGHTS_ALONE) for kind in ("stock", "ours")
    )
    assert_same_training(ours, stock, first_step=SAVED + 1)
    assert ours.metrics[SAVED + 1]["lrs"] == runs.get("fsdp", "ours").metrics[1]["lrs"]


def assert_clips_as_stock(runs: Runs, layout: str, kind: str) -> None:
    stock, ours = (runs.get(layout, each) for each in ("stock", kind))
    assert all(line["grad_norm"] > TITAN.max_norm for line in stock.metrics.values())
    assert_same_training(ours, stock, norm_tolerance=TITAN.norm_tolerance)
    for expected, line in zip(stock.metrics.values(), ours.metrics.values(), strict=True):
        assert expected.get("clip_factor", 1) == 1
        assert 0 < line.get("clip_factor", 0.5) < 1


@pytest.mark.slow
@LAYOUT
def test_deferred_clipping_equals_stock(runs: Runs, layout: str) -> None:
    assert_clips_as_stock(runs, layout, "deferred")


# ---- torchtitan 0.2 ------------------------------------------------------------------------------


@only_022
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        slow("deferred", "pp interleaved"),
        slow("clipped in backward", "single"),
        ("clipped in backward", "fsdp"),
        slow("clipped in backward", "ddp"),
        slow("accumulated in backward", "single accumulated"),
        slow("accumulated in backward", "fsdp accumulated"),
    ],
)
def test_clipping_equals_stock(runs: Runs, kind: str, layout: str) -> None:
    assert_clips_as_stock(runs, layout, kind)


@only_022
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "fsdp"])
@pytest.mark.parametrize("kind", ["in backward", "clipped in backward"])
def test_in_backward_resumes_exactly(runs: Runs, layout: str, kind: str) -> None:
    """Losses repeat exactly. torchtitan saves the first parameter's state only: off by 0.03."""
    assert_continues(runs.get(layout, kind, resume=kind), runs.get(layout, kind), TITAN.entry)


@only_022
@pytest.mark.slow
def test_in_backward_from_torchtitans_checkpoint(runs: Runs) -> None:
    """Such a checkpoint has one parameter's state. The others start anew, with a warning."""
    resumed = runs.get("single", "in backward", resume="stock in backward")
    assert list(resumed.metrics) == list(range(SAVED + 1, STEPS + 1))
    assert "optimizer state of 'tok_embeddings.weight' only" in resumed.log


@only_022
@pytest.mark.slow
def test_master_weights_from_a_checkpoint_without(runs: Runs) -> None:
    resumed = runs.get("single", "masters", resume="stock bf16")
    stock = runs.get("single", "stock bf16")
    for step, line in resumed.metrics.items():
        assert abs(line["loss"] - stock.metrics[step]["loss"]) < 0.1  # without masters, bf16 rounds
    assert "optimizer.state.output.weight.master_weight" in resumed.entries(STEPS)


def assert_each_is_orthogonalized(run: Run) -> None:
    """deepspeedai/DeepSpeed#8441: no matrix was, and the loss fell nevertheless."""
    matrices = sum(name.endswith(".momentum_buffer") for name in run.entries())
    assert matrices and {line["orthogonalized"] for line in run.metrics.values()} == {matrices}


@only_022
@pytest.mark.parametrize("layout", ["single", slow("fsdp")])
def test_muon_learns_and_resumes_exactly(runs: Runs, layout: str) -> None:
    whole, resumed = (runs.get(layout, "muon", resume=saved) for saved in ("", "muon"))
    assert whole.metrics[STEPS]["loss"] < whole.metrics[1]["loss"] - TITAN.learns / 2
    assert all(0 < line["clip_factor"] < 1 for line in whole.metrics.values())
    entry = "optimizer.state.layers.0.attention.wq.weight.momentum_buffer"
    assert_continues(resumed, whole, entry)
    assert "optimizer.state.output.weight.exp_avg_sq" in whole.entries()
    assert_each_is_orthogonalized(whole)
    assert entry.replace("momentum_buffer", "exp_avg_sq") not in whole.entries()


@only_022
@pytest.mark.slow
def test_every_kind_of_train_spec_is_served(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "check_specs.py")]
    result = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- torchtitan 0.3 ------------------------------------------------------------------------------


@only_030
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_resume_repeats_every_digit_in_other_layouts(runs: Runs, layout: str) -> None:
    test_resume_repeats_every_digit(runs, layout)


@only_030
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_groups_of_two_optimizers_train_as_stock(runs: Runs, layout: str) -> None:
    stock, ours = (runs.get(layout, kind) for kind in ("stock groups", "groups"))
    fused = "torchopt_ext.optim.fused_adam"
    assert ours.metrics[1]["classes"][1:] == [f"{fused}.FusedAdamW", f"{fused}.FusedAdam"]
    assert len(ours.metrics[1]["lrs"]) == 3
    assert_same_training(ours, stock)
    assert ours.entries() == stock.entries()
    names = {name for name in ours.entries() if name.startswith("lr_")}
    assert names == {"lr_scheduler.last_epoch"}


@only_030
@pytest.mark.slow
def test_groups_of_two_optimizers_resume_in_stages(runs: Runs) -> None:
    stock, ours = (
        runs.get("pp", kind, "groups", saved_in="fsdp") for kind in ("stock groups", "groups")
    )
    assert_same_training(ours, stock, first_step=SAVED + 1)


@only_030
@pytest.mark.slow
def test_master_weights_join_a_running_job(runs: Runs) -> None:
    """Masters start from a checkpoint without masters, and torchtitan ignores saved masters."""
    stock, joined = runs.get("fsdp", "stock bf16"), runs.get("fsdp", "masters", "stock bf16")
    assert list(joined.metrics) == list(range(SAVED + 1, STEPS + 1))
    assert joined.metrics[SAVED + 1]["loss"] == stock.metrics[SAVED + 1]["loss"]
    whole, resumed = runs.get("fsdp", "masters"), runs.get("fsdp", "masters", "masters")
    assert "optimizer.state.norm.weight.master_weight" in whole.entries()
    assert resumed.metrics == {s: whole.metrics[s] for s in range(SAVED + 1, STEPS + 1)}
    back = runs.get("fsdp", "stock bf16", "masters")
    assert back.metrics[SAVED + 1]["loss"] == whole.metrics[SAVED + 1]["loss"]


@only_030
@pytest.mark.slow
def test_experts_stay_balanced_as_with_stock(runs: Runs) -> None:
    stock, ours = (runs.get("fsdp", kind) for kind in ("stock moe", "moe"))
    assert_same_training(ours, stock)
    bias = "layers.1.moe.expert_bias_E"
    expected, found = (read_checkpoint(run, STEPS)[bias] for run in (stock, ours))
    assert expected.any()
    assert torch.equal(found, expected)


@only_030
@pytest.mark.slow
def test_a_group_may_lie_in_one_pipeline_stage_only(runs: Runs) -> None:
    """A pattern may match nothing in a stage, which torchtitan's own containers reject."""
    ours = runs.get("pp", "embeddings apart")
    assert list(ours.metrics[1]["lrs"]) == ["lr/AdamW"]  # the last stage's
    assert_same_training(ours, runs.get("pp", "stock"))


@only_030
@pytest.mark.slow
def test_clipping_in_the_step_is_one_decision_of_all_stages(runs: Runs) -> None:
    stock, ours = (runs.get("pp", kind) for kind in ("stock", "clipping in step"))
    for step, line in ours.metrics.items():
        assert line["loss"] == pytest.approx(stock.metrics[step]["loss"], rel=1e-5)
    with pytest.raises(AssertionError, match="need one decision of all pipeline stages"):
        runs.get("pp", "clipping alone")


@only_030
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("muon", layout) for layout in ("single", "tp", "ddp", "pp")]
    + [("dist muon", layout) for layout in ("tp", "pp")]
    + [("kimi", layout) for layout in ("single", "ddp")],
)
def test_muon_over_ranks_trains_as_in_other_layouts(runs: Runs, kind: str, layout: str) -> None:
    """All ranks have the same data, so that one process continues the run of FSDP2's two."""
    whole = runs.get("fsdp", kind)
    other = runs.get(layout, kind, kind, saved_in="fsdp", without="")
    for step, line in other.metrics.items():
        assert line["loss"] == pytest.approx(whole.metrics[step]["loss"], abs=1e-4), step
    assert [*other.metrics] == [*range(SAVED + 1, STEPS + 1)]
    assert whole.metrics[STEPS]["loss"] < whole.metrics[1]["loss"] - TITAN.learns
    saved = {"kimi": "1.attention.wkv_b"}.get(kind, "0.attention.wo")
    entries = whole.entries()
    assert f"optimizer.state.layers.{saved}.weight.momentum_buffer" in entries
    assert "optimizer.state.lm_head.weight.exp_avg" in entries
    if kind != "kimi":  # which has heads and experts
        assert_each_is_orthogonalized(whole)


@only_030
def test_distmuons_own_tests_hold_for_ours(run_ranks: Callable[..., Results]) -> None:
    assert_passed(run_ranks("torchtitan_muon_worker.py", 4))


@only_030
def test_a_loss_that_is_not_finite_ends_the_run(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="Loss is not finite"):
        runs.get("single", "diverging")
