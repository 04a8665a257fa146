"""Cases of test_trainer.py with single Trainers. Every rank writes its errors to rank<n>.json.

Arguments: a folder, and the settings that all cases share.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # examples/

from torchopt_ext.trainer import distributed
from torchopt_ext.trainer.checkpoint_files import contents_of
from torchopt_ext.trainer.config import ConfigError
from torchopt_ext.trainer.ft import FTManager
from torchopt_ext.trainer.load_config import load_config
from torchopt_ext.trainer.train_spec import get_train_spec, register_train_spec
from torchopt_ext.trainer.trainer import Trainer

CLIPPING = 0.05  # seconds that torch's clipping takes at least while calls are recorded
CASES: dict[int, list[Callable[[Path, list[str]], None]]] = {1: [], 2: []}


def case(ranks: int) -> Callable[[Any], Any]:
    return lambda function: CASES[ranks].append(function) or function


@contextmanager
def trainer_of(folder: Path, shared: list[str], settings: str) -> Any:
    options = ["--job.dump_folder", str(folder), *settings.split()]
    trainer = Trainer(load_config([*shared, *options]))
    try:
        yield trainer
        _take_another_port()
    finally:
        trainer.close()
        dist.destroy_process_group()


def _take_another_port() -> None:
    """Changes the port, because the next group could find this group's store and addresses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = [str(server.getsockname()[1])]
        dist.broadcast_object_list(port)
    os.environ["MASTER_PORT"] = port[0]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def agreed_seeds(trainer: Trainer) -> list[Any]:
    """Returns all ranks' seeds after they had different seeds."""
    seeds: list[Any] = [None] * dist.get_world_size()
    torch.manual_seed(100 + dist.get_rank())
    distributed.set_determinism(trainer.world_mesh, trainer.device)
    dist.all_gather_object(seeds, torch.initial_seed())
    return seeds


def spied(trainer: Trainer) -> list[str]:
    """Runs a training and returns its calls in order."""
    calls: list[str] = []
    seen = [
        (trainer.gc_handler, "run"),
        (trainer, "next_batch"),
        (trainer.optimizers, "zero_grad"),
        (trainer.model_parts[0], "forward"),
        (distributed, "clip_grad_norm_"),
        (trainer.checkpointer, "maybe_wait_for_staging"),
        (trainer.optimizers, "step"),
        (trainer.lr_schedulers, "step"),
        (trainer.metrics_processor, "log"),
        (trainer.checkpointer, "save"),
    ]

    def spy(owner: Any, call: Any, *args: Any, **more: Any) -> Any:
        calls.append(f"{type(owner).__name__}.{call.__name__}")
        if owner is distributed:
            time.sleep(CLIPPING)
        return call(*args, **more)

    with ExitStack() as patches:
        for owner, name in seen:
            watched = partial(spy, owner, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, watched))
        trainer.train()
    return calls


@case(1)
def order_of_calls(folder: Path, shared: list[str]) -> None:
    """Calls of a step come in the order of torchtitan."""
    calls: dict[str, list[str]] = {}
    module = "--experimental.custom_import examples.torch_adamw"
    for name, settings in {
        "fused": "",
        "foreach": "--optimizer.implementation foreach",
        "in backward": "--optimizer.early_step_in_backward --training.max_norm inf",
        "a TrainSpec's": f"{module} --model.name byte_llama_torch_adamw",
    }.items():
        with trainer_of(folder / name, shared, f"--training.steps 2 {settings}") as trainer:
            calls[name] = spied(trainer)
    clips = ["module.clip_grad_norm_"]
    wait = "CheckpointManager.maybe_wait_for_staging"
    for name, clip in (("fused", []), ("foreach", clips), ("a TrainSpec's", clips)):
        step = [
            *("GarbageCollection.run", "Trainer.next_batch", "OptimizersContainer.zero_grad"),
            *("ByteLlama.forward", *clip, wait),
            *("OptimizersContainer.step", "LRSchedulersContainer.step", "MetricsProcessor.log"),
            "CheckpointManager.save",
        ]
        assert calls[name] == step * 2, name
    early = calls["in backward"]  # changes the state in backward
    assert early.index(wait) < early.index("ByteLlama.forward")
    seconds = {
        name: [line.get("time_metrics/optimizer(s)") for line in lines(folder / name)]
        for name in ("in backward", "a TrainSpec's")
    }
    assert set(seconds["in backward"]) == {None}
    # Clipping counts as the optimizer's time.
    assert min(seconds["a TrainSpec's"]) > CLIPPING


def poison(trainer: Trainer, gradients: set[int], losses: set[int] = frozenset()) -> None:
    """Makes a gradient NaN in some steps, and the loss infinite (gradients finite) in others."""
    param = next(trainer.model_parts[0].parameters())
    param.register_hook(lambda g: g * math.nan if trainer.step in gradients else g)
    loss_fn = trainer.forward_pass.loss_fn
    trainer.forward_pass.loss_fn = lambda *args: (
        loss_fn(*args) + (math.inf if trainer.step in losses else 0)
    )


@case(2)
@case(1)
def each_matrix_is_orthogonalized_once(folder: Path, shared: list[str]) -> None:
    """In a step of two batches, however many ranks hold it."""
    settings = """
        --optimizer.name Muon --training.steps 2 --training.batch_size 4
        --training.global_batch_size 16
    """
    zero = "--parallelism.data_parallel_replicate_degree 2 --parallelism.zero balanced"
    for more in ("", zero) if os.environ["WORLD_SIZE"] == "2" else ("",):
        with trainer_of(folder / more[-8:], shared, f"{settings} {more}") as trainer:
            trainer.train()
            assert trainer.gradient_accumulation_steps > 1
            groups = trainer.optimizers.param_groups
            matrices = sum(len(g["params"]) for g in groups if g["algorithm"] == "muon")
            assert matrices > 4
            assert float(trainer.optimizers.control.orthogonalized) == matrices


@case(1)
def skipped_steps(folder: Path, shared: list[str]) -> None:
    """Steps that are not finite change nothing and are counted."""
    for implementation in ("fused", "foreach"):
        job_folder = folder / implementation
        settings = f"--training.steps 5 --optimizer.implementation {implementation}"
        with trainer_of(job_folder, shared, settings) as trainer:
            poison(trainer, {2}, losses={4})
            before: list[Any] = []
            step = trainer.train_step

            def watched(*args: Any, _step: Any = step, _t: Trainer = trainer, _b: Any = before):
                weights = [p.detach().clone() for p in _t.model_parts[0].parameters()]
                _step(*args)
                new = _t.model_parts[0].parameters()
                _b.append(all(torch.equal(a, b) for a, b in zip(weights, new, strict=True)))

            trainer.train_step = watched  # type: ignore[method-assign]
            trainer.train()
        assert before == [False, True, False, True, False]
        assert [line["skipped_steps"] for line in lines(job_folder)] == [0, 1, 1, 2, 2]
        assert [line["grad_norm"] is None for line in lines(job_folder)] == before


@case(1)
def too_many_skips(folder: Path, shared: list[str]) -> None:
    limit = "--training.steps 9 --training.max_consecutive_skips 3"
    saving = "--checkpoint.enable_checkpoint --checkpoint.interval 2"
    with trainer_of(folder, shared, f"{limit} {saving}") as trainer:
        poison(trainer, {3, 5, 6, 7})
        last = "3 steps in a row.*the last checkpoint before them is step 4"
        with pytest.raises(RuntimeError, match=last):
            trainer.train()
        assert trainer.step == 7


@case(1)
def refused_commits(folder: Path, shared: list[str]) -> None:
    """One of two groups. Steps 2 and 4 are refused, and step 3 is skipped for a NaN.

    Two groups make a step of 16 sequences from two batches of 4 each. Refused commits are neither
    steps nor skips.
    """
    if importlib.util.find_spec("torchft") is None:
        return
    settings = """
        --training.steps 5 --training.batch_size 4 --training.global_batch_size 16
        --training.max_consecutive_skips 2 --checkpoint.enable_checkpoint --checkpoint.interval 4
    """
    manager = MagicMock()  # stands for torchft's
    manager.participating_rank.return_value = 0
    manager.should_commit.side_effect = [True, False, True, False, True]
    manager.state_dict.return_value = {"step": 5, "batches_committed": 10}
    group = FTManager(manager, group_size=2)
    with (
        patch("torchopt_ext.trainer.ft.init_ft_manager", lambda _: group),
        trainer_of(folder, shared, settings) as trainer,
    ):
        poison(trainer, {3})
        trainer.train()
        steps = int(trainer.optimizers.control.steps)
        saved = sorted(path.name for path in trainer.checkpointer.folder.iterdir())
    norms = [line["grad_norm"] for line in lines(folder)]
    finite = [norm is not None and math.isfinite(norm) for norm in norms]
    assert trainer.gradient_accumulation_steps == 2
    assert steps == 3  # 1, 3 and 5
    assert finite == [True, False, False, False, True]
    assert saved == ["step-5"]  # step 4 was due between a skipped step and a good one


@case(1)
def data_that_ends(folder: Path, shared: list[str]) -> None:
    """When its data ends, a job validates and exports as after its last step."""
    text = folder / "text"
    text.mkdir(parents=True)
    (text / "a").write_bytes(bytes(range(256)) * 3)  # 23 windows of 33 bytes
    settings = f"""
        --training.dataset_path {text} --training.epochs 1 --training.batch_size 4
        --training.steps 50 --validation.enable --validation.dataset text --validation.freq 3
        --validation.dataset_path {text} --validation.local_batch_size 2 --validation.seq_len 16
        --checkpoint.enable_checkpoint --checkpoint.interval 4 --checkpoint.model_weights_only
        --checkpoint.export_safetensors
    """
    with trainer_of(folder, shared, settings) as trainer:
        trainer.train()
        saved = sorted(path.name for path in trainer.checkpointer.folder.iterdir())
        contents = contents_of(trainer.checkpointer.folder / "step-5")
    validated = [line["step"] for line in lines(folder) if "validation_metrics/loss" in line]
    assert (trainer.stopped_by, trainer.step, contents) == ("data", 5, "model")
    assert saved == ["step-4", "step-5", "step-5.safetensors"]
    assert validated == [0, 3, 5]


@case(1)
@case(2)
def validation(folder: Path, shared: list[str]) -> None:
    """Validation reads the same data every time. On two ranks it runs through pipeline stages."""
    settings = f"""
        --validation.enable --validation.dataset text --validation.freq 2 --validation.steps 3
        --validation.dataset_path {Path(__file__).parents[2] / "docs"} --validation.seq_len 32
        --validation.local_batch_size 8 --training.steps 5 --optimizer.lr 0
        --training.global_batch_size 16
        --parallelism.pipeline_parallel_degree {os.environ["WORLD_SIZE"]}
    """
    with trainer_of(folder, shared, settings) as trainer:
        trainer.train()
        assert trainer.model_parts[0].training
        # Stages count up from rank 0's seed, so that dropout differs.
        assert agreed_seeds(trainer) == [100, 101][: dist.get_world_size()]
    key = "validation_metrics/loss"
    losses = {line["step"]: line[key] for line in lines(folder) if key in line}
    assert list(losses) == [0, 2, 4, 5]
    assert len(set(losses.values())) == 1
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)  # of weights that know nothing


@case(1)
def closing(folder: Path, shared: list[str]) -> None:
    """close() leaves the process as it was, and the settings are in a file."""
    with pytest.raises(ConfigError):
        Trainer(load_config([*shared, "--model.flavor", "none"]))
    assert gc.isenabled() and not dist.is_initialized()
    settings = "--training.steps 1 --job.save_config_file saved/config.json"
    with trainer_of(folder, shared, settings) as trainer:
        handler = signal.getsignal(signal.SIGTERM)
        trainer.train()
        assert not gc.isenabled()
        assert signal.getsignal(signal.SIGTERM) is handler
    assert gc.isenabled()
    saved = json.loads((folder / "saved/config.json").read_text())
    assert saved["training"]["steps"] == 1


@case(2)
def low_precision_shards(folder: Path, shared: list[str]) -> None:
    """Low-precision copies of shards change no bit."""
    sums = []
    for kept in ("", "--parallelism.fsdp_keep_low_precision_shards"):
        settings = f"--training.mixed_precision_param bfloat16 --training.steps 3 {kept}"
        with trainer_of(folder / f"{len(kept)}", shared, settings) as trainer:
            trainer.train()
            shards = [param._local_tensor for param in trainer.model_parts[0].parameters()]
            copies = [hasattr(shard, "low_precision_copy") for shard in shards]
            assert copies == [bool(kept)] * len(shards)
            sums.append([shard.double().sum().item().hex() for shard in shards])
    assert sums[0] == sums[1]


@case(2)
def sigterm_at_one_rank(folder: Path, shared: list[str]) -> None:
    """A signal at one rank ends all ranks after one step."""
    settings = "--training.steps 50 --checkpoint.enable_checkpoint"
    with trainer_of(folder, shared, settings) as trainer:
        step = trainer.train_step

        def with_signal(*args: Any) -> None:
            if trainer.step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step(*args)

        trainer.train_step = with_signal  # type: ignore[method-assign]
        trainer.train()
        ended = trainer.stopped_by, trainer.step, trainer.checkpointer.newest()
        assert ended == ("SIGTERM", 4, 4)
        assert agreed_seeds(trainer) == [100, 100]


@case(2)
def a_stage_that_fails(folder: Path, shared: list[str]) -> None:
    """All stages end if the last one's optimizers cannot be built.

    It comes last, because its ranks have no group left that could agree on another port.
    """
    importlib.import_module("examples.byte_llama")
    spec = get_train_spec("byte_llama")

    def build(model_parts: Any, *rest: Any) -> Any:
        if model_parts[0].output is not None:
            raise ConfigError("no optimizer for the last stage")
        return spec.build_optimizers_fn(model_parts, *rest)

    failing = dataclasses.replace(spec, name=folder.name, build_optimizers_fn=build)
    register_train_spec(failing)
    settings = ("--model.name", folder.name, "--parallelism.pipeline_parallel_degree", "2")
    with pytest.raises(ConfigError) as error:
        Trainer(load_config([*shared, "--job.dump_folder", str(folder), *settings]))
    message = "no optimizer for the last stage"
    expected = message if os.environ["RANK"] == "1" else f"rank 1: ConfigError: {message}"
    assert str(error.value) == expected


def main() -> None:
    torch.set_num_threads(1)
    folder, shared = Path(sys.argv[1]), sys.argv[2:]
    ranks, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    results: dict[str, Any] = {}
    for function in CASES[int(ranks)]:
        name = function.__name__
        try:
            function(folder / name, copy.copy(shared))
            results[name] = {}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
