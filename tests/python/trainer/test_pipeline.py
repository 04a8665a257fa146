"""Which layers are in which pipeline stage, and which stage is on which rank."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchopt_ext.trainer.config import ConfigError, JobConfig, Parallelism
from torchopt_ext.trainer.forward_pass import Validator
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.parallelize import layers_of
from torchopt_ext.trainer.pipeline import pipeline, split_layers, stage_module, stages_of_rank


def split(layers: int, ranks: int, schedule: str, **settings: object) -> list[int]:
    """Returns the layers of each stage, after a check that stages keep all layers in order."""
    config = Parallelism(pipeline_parallel_schedule=schedule)
    for name, value in settings.items():
        assert hasattr(config, f"pipeline_parallel_{name}")
        setattr(config, f"pipeline_parallel_{name}", value)
    names = [str(i) for i in range(layers)]
    stages = split_layers(names, ranks, get_schedule_class(schedule), config)
    assert [name for stage in stages for name in stage] == names
    return [len(stage) for stage in stages]


@pytest.mark.parametrize(
    ("layers", "ranks", "schedule", "settings", "expected"),
    [
        # Embedding and output count as one layer each. The first stages get the rest.
        (4, 2, "1F1B", {}, [2, 2]),
        (5, 2, "1F1B", {}, [3, 2]),
        (6, 4, "GPipe", {}, [1, 2, 2, 1]),
        (2, 4, "1F1B", {}, [0, 1, 1, 0]),
        (4, 2, "Interleaved1F1B", {}, [1, 2, 1, 0]),
        (6, 2, "Interleaved1F1B", {}, [1, 2, 2, 1]),
        (6, 2, "ZBVZeroBubble", {}, [1, 2, 2, 1]),
        (6, 2, "1F1B", {"layers_per_stage": 4}, [3, 3]),
        (6, 2, "Interleaved1F1B", {"layers_per_stage": 2}, [1, 2, 2, 1]),
        (10, 2, "LoopedBFS", {"layers_per_stage": 2}, [1, 2, 2, 2, 2, 1]),
        (4, 2, "1F1B", {"first_stage_less_layers": 0, "last_stage_less_layers": 0}, [2, 2]),
        (4, 2, "1F1B", {"first_stage_less_layers": 0, "last_stage_less_layers": 2}, [3, 1]),
        (4, 2, "1F1B", {"split_points": ["layers.1"]}, [1, 3]),
        (4, 2, "1F1B", {"split_points": ["layers.0"]}, [0, 4]),
        (4, 2, "Interleaved1F1B", {"split_points": ["layers.1", "layers.2", "layers.3"]}, [1] * 4),
    ],
)
def test_splits(layers, ranks, schedule, settings, expected) -> None:
    assert split(layers, ranks, schedule, **settings) == expected


@pytest.mark.parametrize(
    ("layers", "ranks", "schedule", "settings", "message"),
    [
        (1, 4, "1F1B", {}, r"1 layers, .* do not fill 4 pipeline stages"),
        (2, 2, "1F1B", {"first_stage_less_layers": 5}, r"less_layers 5 .* do not fill 2"),
        (6, 2, "1F1B", {"layers_per_stage": 2}, r"makes 4 .* on 2 ranks, .* 1F1B needs one a rank"),
        (6, 2, "Interleaved1F1B", {"layers_per_stage": 4}, r"makes 2 .* needs two or more a rank"),
        (10, 2, "ZBVZeroBubble", {"layers_per_stage": 2}, r"makes 6 .* needs two a rank"),
        (6, 2, "1F1B", {"layers_per_stage": 3}, r"makes 3 pipeline stages on 2 ranks"),
        (6, 2, "1F1B", {"layers_per_stage": 0}, r"layers_per_stage is 0, expected 1 or more"),
        (4, 2, "1F1B", {"split_points": ["layers.4"]}, r"is \['layers.4'\], expected names from"),
        (4, 2, "1F1B", {"split_points": ["layers"]}, r"is \['layers'\], expected names from"),
        (4, 3, "1F1B", {"split_points": ["layers.2", "layers.1"]}, r"in this order"),
        (4, 3, "1F1B", {"split_points": ["layers.2", "layers.2"]}, r"in this order"),
        (4, 3, "1F1B", {"split_points": ["layers.2"]}, r"split_points makes 2 .* on 3 ranks"),
    ],
)
def test_invalid_splits(layers, ranks, schedule, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        split(layers, ranks, schedule, **settings)


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [
        ("1F1B", 2, [(0,), (1,)]),
        ("Interleaved1F1B", 6, [(0, 2, 4), (1, 3, 5)]),
        ("ZBVZeroBubble", 4, [(0, 3), (1, 2)]),
        ("DualPipeV", 4, [(0, 3), (1, 2)]),
    ],
)
def test_stages_of_ranks(schedule: str, stages: int, expected: list[tuple[int, ...]]) -> None:
    """Stages are where the schedule itself places them (torch/distributed/pipelining/_utils.py)."""
    config = Parallelism(pipeline_parallel_schedule=schedule)
    assert [stages_of_rank(rank, 2, stages, config) for rank in range(2)] == expected


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.dropout = nn.Dropout()
        self.layers = nn.ModuleDict({str(i): nn.Linear(2, 2, bias=False) for i in range(3)})
        self.output = nn.Linear(2, 4, bias=False)


def test_a_stage_has_its_modules_under_their_names() -> None:
    with torch.device("meta"):
        model = Model()
    parts = [stage_module(model, [["0"], ["1", "2"], []], stage) for stage in range(3)]
    assert [sorted(dict(part.named_parameters())) for part in parts] == [
        ["embedding.weight", "layers.0.weight"],
        ["layers.1.weight", "layers.2.weight"],
        ["output.weight"],
    ]
    assert (parts[1].embedding, parts[1].dropout, parts[1].output) == (None, None, None)
    assert len(list(model.parameters())) == 5  # the whole model is unchanged


def test_a_parameter_outside_of_all_stages_is_rejected() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"Model has \['scale'\] itself"):
        stage_module(model, [["0"], ["1", "2"]], 0)


@pytest.mark.parametrize("names", [("embedding", "output"), ("layers.0", "layers.2")])
def test_a_parameter_of_two_stages_is_rejected_on_all_ranks(names: tuple[str, str]) -> None:
    model = Model()
    first, second = map(model.get_submodule, names)
    second.weight = first.weight
    dims: Any = SimpleNamespace(pp=2)
    without: Any = None  # the rejection precedes the use of rank-dependent arguments
    with pytest.raises(ConfigError, match=rf"{names[0]}.weight and {names[1]}.weight are one"):
        pipeline(model, without, dims, JobConfig(), without, without, without, without)


def test_too_few_microbatches_are_rejected() -> None:
    config, no_arguments = JobConfig(), cast(Any, None)
    config.training.batch_size = config.parallelism.pipeline_parallel_microbatch_size = 4
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        dims = ParallelDims(1, 1, 1, 1, 2, world_size=2, enable_loss_parallel=False)
        arguments = Model(), dims.build_mesh("cpu"), dims, config, torch.device("cpu"), no_arguments
        message = "batch_size 4 in microbatches of parallelism.pipeline_parallel_microbatch_size 4"
        with pytest.raises(ConfigError, match=message):
            pipeline(*arguments, lambda part, *_: part, no_arguments)
    finally:
        dist.destroy_process_group()


def test_schedules_have_names() -> None:
    config, without = JobConfig(), cast(Any, None)
    config.parallelism.pipeline_parallel_schedule = "nosuch"
    with pytest.raises(
        ConfigError, match="pipeline_parallel_schedule: Unknown schedule name 'nosu"
    ):
        pipeline(nn.Linear(1, 1), without, without, config, without, without, without, without)


@pytest.mark.parametrize(
    ("schedule", "size", "message"),
    [
        ("1F1B", 8, ""),
        ("1F1B", 4, ""),
        ("1F1B", 6, "local_batch_size is 6, expected a multiple .* 4"),
        ("1F1B", 2, "local_batch_size is 2, expected a multiple .* 4"),
        ("ZBVZeroBubble", 4, "schedule 'ZBVZeroBubble': torch evaluates no V-shaped"),
        ("DualPipeV", 4, "schedule 'DualPipeV': torch evaluates no V-shaped"),
    ],
)
def test_a_pipeline_must_be_able_to_split_a_batch_of_validation(
    schedule: str, size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0")  # others take the shape of training only
    config, forward_pass = JobConfig(), cast(Any, SimpleNamespace(schedule=object()))
    config.training.batch_size, config.validation.local_batch_size = 4, size
    config.parallelism.pipeline_parallel_schedule = schedule
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        Validator(forward_pass, config, cast(Any, None))


def test_a_data_set_without_a_batch_of_validation_is_named() -> None:
    config = JobConfig()
    config.validation.dataset, config.validation.dataset_path = "text", "held_out"
    forward_pass: Any = SimpleNamespace(model_parts=[], schedule=None, device=None)
    message = r"validation.dataset is 'text' at 'held_out', .* no batch"
    with pytest.raises(ValueError, match=message):
        Validator(forward_pass, config, lambda job_config: []).validate()


def test_layers_have_names() -> None:
    with pytest.raises(TypeError, match=r"Linear\.layers is NoneType, expected nn\.ModuleDict"):
        layers_of(nn.Linear(1, 1))
