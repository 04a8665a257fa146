"""The optimizers of a job: which are built, and which clip."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext import FusedAdamW, muon_groups, param_groups
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.build import FUSED
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.optimizers import build_for_stage, build_optimizers, clips_in_step
from torchopt_ext.trainer.parallel_dims import ParallelDims


def job(**settings: Any) -> JobConfig:
    """Returns a job with settings of `optimizer`, and `max_norm`, `stages`, `zero` or `shards`."""
    config = JobConfig()
    config.training.max_norm = settings.pop("max_norm", 1.0)
    config.parallelism.pipeline_parallel_degree = settings.pop("stages", 1)
    config.parallelism.zero = settings.pop("zero", "none")
    config.parallelism.fsdp_keep_low_precision_shards = settings.pop("shards", False)
    vars(config.optimizer).update(settings)
    return config


IN_BACKWARD = {"early_step_in_backward": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "RMSprop"}, "Optimizer RMSprop is not available: use Adam,"),
        ({"name": "RMSprop", "zero": "greedy"}, "no algorithm 'rmsprop', expected one of 'adam',"),
        ({"name": "Lion", "amsgrad": True}, "amsgrad has no effect: Lion has no such"),
        ({"name": "SGD", "eps": 1e-6, "zero": "greedy"}, "eps has no effect: SGD has no such"),
        ({"momentum": 0.9}, "momentum has no effect: AdamW has no such"),
        (
            {"shards": True, "implementation": "foreach"},
            "no effect with optimizer.implementation 'foreach'",
        ),
        *(
            ({"implementation": kind, **IN_BACKWARD, **more}, "neither clips nor skips: set")
            for kind in ("foreach", "for-loop")
            for more in ({}, {"skip_nonfinite": False}, {"max_norm": inf})
        ),
        *(
            ({"offload_step": "host", "zero": zero}, "'host' has no effect without state_device")
            for zero in ("none", "greedy")
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    settings: dict[str, Any], message: str, one_rank: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizers([nn.Linear(2, 2)], job(**settings))


@pytest.mark.parametrize(
    "settings",
    [{}, {"zero": "greedy"}, {"zero": "balanced"}, IN_BACKWARD, IN_BACKWARD | {"max_norm": 0.0}],
)
def test_states_on_the_host(settings: dict[str, Any], one_rank: None, params_on_gpu: None) -> None:
    """As the configuration says, and moved between steps, with the same bits."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(70, 30), nn.Linear(30, 30)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    placed = {"state_device": "cpu", "state_fraction": 0.6}
    beside, on_host = (
        build_optimizers([model], job(skip_nonfinite=False, **settings, **more))
        for model, more in zip(models, ({}, placed), strict=True)
    )
    held = 8 * sum(param.numel() for param in models[0].parameters())
    for place in (None, "cuda", "cpu"):
        if place is not None:
            on_host.move_state(place)
        for model, optimizer in zip(models, (beside, on_host), strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 70)).square().sum().backward()
            optimizer.step()
        assert beside.host_bytes == 0
        assert on_host.host_bytes == 0 if place == "cuda" else on_host.host_bytes >= 0.6 * held
    for weight, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("zero", ["none", "greedy"])
@pytest.mark.parametrize("name", FUSED)
def test_what_is_not_set_is_the_algorithms_default(name: str, zero: str, one_rank: None) -> None:
    """For Adam and AdamW torchtitan's defaults, otherwise those that the algorithm declares."""
    preset: dict[str, Any] = {"lr": 8e-4, "weight_decay": 0.1}
    presets = preset | {"betas": (0.9, 0.95)} if "Adam" in name else {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 3), nn.Linear(3, 3))
    copy = deepcopy(model)
    params: Any = copy.parameters()
    if name == "Muon":  # AdamW's learning rate serves both
        presets = preset | {"adjust_lr_fn": "match_rms_adamw"}
        adamw = {"betas": (0.9, 0.95)}
        params = muon_groups(copy, adamw_options=adamw, no_decay=(), quiet=True)
    plain = FUSED[name](params, **presets, max_grad_norm=1.0, skip_nonfinite=True)
    container = build_optimizers([model], job(name=name, zero=zero))
    for part, optimizer in ((model, container), (copy, plain)):
        for _ in range(3):
            optimizer.zero_grad()
            part(torch.ones(2, 70)).square().sum().backward()
            optimizer.step()
    for weight, expected in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("zero", "in_backward"),
    [("none", False), ("none", True), ("greedy", False), ("balanced", False)],
)
def test_patterns_send_matrices_to_muon_and_to_adamw(
    zero: str, in_backward: bool, one_rank: None
) -> None:
    """They train as the groups of muon_groups with these patterns do."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    model = nn.Sequential(nn.Embedding(7, 4), *layers)
    copy = deepcopy(model)
    choice: dict[str, Any] = {"muon": ["^3.weight"], "adamw": ["^1"]}
    groups = muon_groups(
        copy, adamw_options={"betas": (0.9, 0.95)}, no_decay=(), quiet=True, **choice
    )
    assert [name for name, _ in groups[0]["params"]] == ["2.weight", "3.weight"]
    options: dict[str, Any] = {"lr": 0.01, "max_grad_norm": 0.5, "skip_nonfinite": True}
    plain = FUSED["Muon"](groups, adjust_lr_fn="match_rms_adamw", **options)
    settings = {"early_step_in_backward": in_backward, "zero": zero, "lr": 0.01, "max_norm": 0.5}
    container = build_optimizers([model], job(name="Muon", **settings, **choice))
    for part, optimizer in ((model, container), (copy, plain)):
        for step in range(3):
            optimizer.zero_grad()
            part(torch.arange(7) * step % 7).square().sum().backward()
            optimizer.step()
    for weight, expected in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert float(container.control.orthogonalized) == 2
    saved = container.state_dict()
    assert "state.3.weight.momentum_buffer" in saved and "state.1.weight.exp_avg" in saved


@pytest.mark.parametrize("partition", ["none", "greedy"])
@pytest.mark.parametrize(
    ("chosen", "coded"),
    [
        ({}, [False, True]),
        ({"fp32_moments": []}, [True, True]),
        ({"fp32_moments": ["^1"]}, [True, False]),
    ],
)
def test_embeddings_keep_fp32_moments(
    chosen: Any, coded: list[bool], partition: Any, one_rank: None
) -> None:
    part = nn.Sequential(nn.Embedding(3, 64), nn.Linear(64, 2))
    saved = build_optimizers([part], job(state_dtype="int8", zero=partition, **chosen)).state_dict()
    assert [f"state.{name}.weight.exp_avg_codes" in saved for name in "01"] == coded


def test_no_decay_and_factors_of_the_learning_rate(one_rank: None) -> None:
    """They train as the groups of param_groups do, however the job divides or updates the model."""
    choice: dict[str, Any] = {
        "no_decay": ["norm", "bias", "^2"],
        "lr_multipliers": {r"^0": 0.5, r"^1.*s$": 0.1},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 2))
    saved: dict[str, Any] = {}

    def trained(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.arange(7) * step % 7).square().sum().backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    copy = deepcopy(model)
    groups = param_groups(copy, 0.5, lr=0.01, **choice)
    expected = trained(copy, FusedAdamW(groups, lr=0.01, betas=(0.9, 0.95), skip_nonfinite=True))
    for settings in (
        {},
        IN_BACKWARD,
        {**IN_BACKWARD, "skip_nonfinite": False, "max_norm": inf},
        {**IN_BACKWARD, "skip_nonfinite": False, "max_norm": inf, "implementation": "foreach"},
        {"implementation": "foreach"},
        {"zero": "greedy"},
        {"zero": "balanced"},
    ):
        copy = deepcopy(model)
        options: dict[str, Any] = {"max_norm": 1e9, "lr": 0.01, "weight_decay": 0.5, **choice}
        container = build_optimizers([copy], job(**options | settings))
        for weight, other in zip(trained(copy, container), expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=2e-7)
        if not saved:
            saved = container.state_dict()
        container.load_state_dict(deepcopy(saved))
        lrs = {group["lr"] for group in container.param_groups}
        assert lrs == {0.01, 0.005, 0.001}
    assert saved["param_groups.0.weight.lr"] == 0.005
    assert saved["param_groups.2.weight.weight_decay"] == 0.0


@pytest.mark.parametrize("other", ["dp_shard", "tp", "pp"])
def test_zero_needs_replicas_alone(
    other: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = SimpleNamespace(**{"dp_shard": 1, "tp": 1, "pp": 1, other: 2})
    monkeypatch.setattr(ParallelDims, "of", lambda *_: dims)
    message = r"zero is 'greedy', which needs parallelism\.\w+_parallel_.* 1, found 2"
    with pytest.raises(ConfigError, match=message):
        build_optimizers([nn.Linear(2, 2)], job(zero="greedy"))


@pytest.mark.parametrize(
    "setting",
    [
        {"state_dtype": "int8", "fp32_moments": ["tok"]},
        {"no_decay": ["norm", "tok"]},
        {"lr_multipliers": {"tok": 2.0}},
        {"name": "Muon", "muon": ["tok"]},
        {"name": "Muon", "adamw": ["tok"]},
    ],
)
def test_a_pattern_may_be_of_another_stage(setting: dict[str, Any], one_rank: None) -> None:
    config, part = job(**setting), nn.Sequential(nn.Linear(64, 2))
    with pytest.raises(ValueError, match=r"no parameter has a name with \[?'tok'"):
        build_optimizers([part], config)
    config.parallelism.pipeline_parallel_degree = 2
    build = partial(build_optimizers, [part], config)
    build()
    message = r"no parameter has a name with .*'tok'.* \['0\.weight', '0\.bias'\]"
    with pytest.raises(ConfigError, match=message):
        build_for_stage(build, config, dist.group.WORLD)
    there: dict[str, Any] = {"fp32_moments": ["embedding", "^0"], "no_decay": ["embedding", "^0"],
                             "lr_multipliers": {"^0": 2.0}}  # fmt: skip
    for name in setting.keys() - {"state_dtype", "name"}:
        setattr(config.optimizer, name, there.get(name, ["^0"]))
    build_for_stage(build, config, dist.group.WORLD)


@pytest.mark.parametrize(
    ("stage", "master", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(False), None, "no parameter of the model is trainable"),
        (nn.Linear(2, 2), "fp32", "master_weights has no effect: the parameters are torch.float32"),
        (nn.Linear(2, 2).bfloat16(), "fp32", None),
    ],
)
def test_stages_are_judged_together(
    stage: nn.Module, master: Any, message: str | None, one_rank: None
) -> None:
    config = job(master_weights=master)
    with pytest.raises(ConfigError) if message else nullcontext():
        build_optimizers([stage], config)
    config.parallelism.pipeline_parallel_degree = 2
    optimizers = build_optimizers([stage], config)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        build_for_stage(lambda: optimizers, config, dist.group.WORLD)
    assert all(optimizer.process_group is dist.group.WORLD for optimizer in optimizers)


@pytest.mark.parametrize(
    ("optimizer", "options", "clips"),
    [
        (FusedAdamW, {"max_grad_norm": 1.0}, True),
        (FusedAdamW, {"max_grad_norm": float("inf")}, True),
        (FusedAdamW, {}, False),
        (torch.optim.AdamW, {}, False),
    ],
)
def test_steps_clip_if_their_optimizers_do(optimizer: Any, options: Any, clips: bool) -> None:
    container = OptimizersContainer([nn.Linear(2, 2)], optimizer, {"lr": 0.1, **options})
    assert clips_in_step(container) is clips
