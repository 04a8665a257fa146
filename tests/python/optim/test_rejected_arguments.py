"""Rejected arguments raise by name, change nothing, and leave groups and optimizer usable."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, FusedMuon, FusedOptimizer, GradScaler
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer

from ...support.compare import unchanged
from ...support.problems import make_params, params_of, train
from ...support.ways import BF16, FP16, FP64, OURS

ERRORS = (TypeError, ValueError, RuntimeError)

# ---- options -----------------------------------------------------------------------------------

ANY, MOMENTS, DECOUPLED = "Adam AdamW Lion SGD", "Adam AdamW", "AdamW Lion"
HYPERS: list[tuple[str, dict[str, Any], str]] = [
    (ANY, {"lr": "1e-3"}, "lr is '1e-3', expected a number"),  # YAML reads 1e-3 as a string
    (ANY, {"lr": None}, "lr is None"),
    (ANY, {"lr": math.nan}, "Invalid learning rate: nan"),
    (ANY, {"weight_decay": [0.1]}, r"weight_decay is \[0.1\]"),
    (ANY, {"weight_decay": -1.0}, "Invalid weight_decay value: -1"),
    (ANY, {"maximize": "no"}, "maximize is 'no', expected a bool"),
    (ANY, {"cautious_weight_decay": "no"}, "cautious_weight_decay is 'no', expected a bool"),
    (ANY, {"decay_follows_lr": -1.0}, "Invalid decay_follows_lr value: -1"),
    (ANY, {"decay_follows_lr": "yes"}, "decay_follows_lr is 'yes', expected a"),
    (
        "SGD Lion Adam",
        {"decoupled_weight_decay": False, "cautious_weight_decay": True},
        "require decoupled_weight_decay",
    ),
    (
        "SGD Lion Adam",
        {"decoupled_weight_decay": False, "decay_follows_lr": 1.0},
        "require decoupled_weight_decay",
    ),
    (MOMENTS, {"eps": "1e-8"}, "eps is '1e-8'"),
    (MOMENTS, {"eps": -1.0}, "Invalid epsilon"),
    (MOMENTS, {"bias_correction": "no"}, "bias_correction is .*, expected a bool"),
    ("Adam AdamW Lion", {"betas": 0.9}, "betas is 0.9, expected two numbers"),
    ("Adam AdamW Lion", {"betas": (0.9,)}, r"betas is \(0.9,\), expected two numbers"),
    ("Adam AdamW Lion", {"betas": (0.9, 0.95, 0.999)}, r"betas is .*, expected two numbers"),
    ("Adam AdamW Lion", {"betas": (0.9, "0.95")}, r"betas\[1\] is '0.95'"),
    ("Adam AdamW Lion", {"betas": (1.0, 0.99)}, "beta parameter at index 0: 1"),
    ("Adam AdamW Lion", {"betas": (0.9, 1.5)}, "beta parameter at index 1: 1.5"),
    ("SGD", {"nesterov": True}, "Nesterov momentum requires"),
]
"""Wrong in the constructor, in a group, in a state dict, and when a group changes."""
AT_START: list[tuple[str, dict[str, Any], str]] = [
    (ANY, {"lr": -1.0}, "Invalid learning rate: -1"),
    (MOMENTS, {"bias_correction": 2}, "bias_correction is .*, expected a bool"),
    ("SGD", {"momentum": -1.0}, "Invalid momentum value: -1"),
]
"""A group may change to these."""


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [(name, *case) for names, *case in HYPERS + AT_START for name in names.split()],
)
def test_hyperparameters(name: str, wrong: dict[str, Any], message: str) -> None:
    cls, (first, second) = OURS[name], make_params([(3,), (2,)])
    group: dict[str, Any] = {"params": [first]}
    with pytest.raises((TypeError, ValueError), match=message):
        cls([group], **wrong)
    assert list(group) == ["params"]
    with pytest.raises((TypeError, ValueError), match=message):
        FusedOptimizer([group], algorithm=name.lower(), **wrong)
    optimizer = cls([group])
    train(optimizer, [0])
    late = {"params": [second], **wrong}
    with unchanged(optimizer), pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group(late)
    assert list(late) == ["params", *wrong]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(wrong)
    match = f"{message}|the state dict does not fit: {next(iter(wrong))} of group 0 is"
    with unchanged(optimizer), pytest.raises((TypeError, ValueError), match=match):
        optimizer.load_state_dict(saved)
    usual = dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(wrong)
    if wrong not in [case[1] for case in AT_START]:
        with unchanged(optimizer), pytest.raises((TypeError, ValueError), match=message):
            optimizer.step()
    optimizer.param_groups[0].clear()
    optimizer.param_groups[0].update(usual)
    optimizer.step()
    assert optimizer.state[first]["step"] == 2


def fp32_moments(value: Any) -> dict[str, Any]:
    return {"state_dtype": "int8", "fp32_moments": value}


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    (ANY, {"max_grad_norm": "1"}, "max_grad_norm is '1'"),
    (ANY, {"max_grad_norm": -1.0}, "max_grad_norm"),
    (ANY, {"max_grad_norm": math.nan}, "max_grad_norm"),
    (ANY, {"rounding_seed": "1"}, "rounding_seed is '1', expected an integer"),
    (ANY, {"rounding_seed": 1.5}, "integer"),
    (ANY, {"rounding_seed": -1}, "rounding_seed"),
    (ANY, {"rounding_seed": 2**64}, "rounding_seed"),
    (ANY, {"skip_nonfinite": None}, "skip_nonfinite is None"),
    (ANY, {"track": 1}, "track is 1, expected a bool or some of"),
    (ANY, {"stochastic_rounding": "no"}, "stochastic_rounding is 'no', expected a bool"),
    (ANY, {"write_back_gradients": None}, "write_back_gradients is None"),
    (ANY, {"process_group": "dp"}, "process_group is 'dp', expected a torch.distributed"),
    *((ANY, {"master_weights": wrong}, "master_weights") for wrong in ("fp16", True, "")),
    *((ANY, {"state_dtype": wrong}, "state_dtype") for wrong in (FP16, FP64, torch.int16, "fp16")),
    (ANY, {"state_dtype": "int4"}, "state_dtype: 'int4', expected None or one of 'fp32', "),
    *((ANY, {name: 1.0}, "mean 'max_grad_norm'") for name in
      ("max_norm", "gradient_clip_val", "clip_grad_norm", "grad_clip", "clip", "clipnorm")),
    (ANY, {"learning_rate": 1.0}, "mean 'lr'"),
    (ANY, {"wd": 1.0}, "mean 'weight_decay'"),
    (ANY, {"ema_weights": 0.9}, "mean 'ema_decay'"),
    *((ANY, {"ema_decay": wrong}, "Invalid ema_decay") for wrong in (1.5, -0.1, math.nan)),
    (ANY, {"ema_decay": "0.9"}, "ema_decay is '0.9', expected a number"),
    *((ANY, {"ema_decay": 0.9, "ema_dtype": wrong}, "Invalid ema_dtype")
      for wrong in ("int8", FP16)),
    (ANY, {"ema_decay": 0.9, "ema_warmup": "no"}, "ema_warmup is 'no', expected a bool"),
    *((ANY, {"state_device": wrong}, f"Invalid state_device: {wrong!r}") for wrong in ("disk", 1)),
    *((ANY, {"state_fraction": wrong}, f"Invalid state_fraction: {wrong}") for wrong in (0.0, 1.5)),
    (ANY, {"state_fraction": "all"}, "state_fraction is 'all'"),
    (ANY, {"state_fraction": 0.5}, "state_fraction=0.5 has no .* state_device='cpu': pass both"),
    *((ANY, {"state_device": place, "offload_step": path}, f"offload_step='{path}' has no effect")
      for place, path in ((None, "auto"), ("cuda:0", "staged"))),
    (ANY, {"optim_bits": 8}, "mean 'state_dtype'"),
    (ANY, {"max_grad_nom": 1.0}, "mean 'max_grad_norm'"),
    (ANY, {"cautious_decay": True}, "did you mean 'cautious_weight_decay'"),
    (ANY, {"xyzzy": 1}, "has no argument 'xyzzy'|__init__.*'xyzzy'$"),
    (MOMENTS, {"state_dtype": "int8", "amsgrad": True}, "amsgrad"),
    (MOMENTS, {"eps": torch.ones(2)}, r"Tensor eps must be 1-element, but has shape \[2\]"),
    (DECOUPLED, {"decay_follows_lr": True, "lr": 0.0}, "decay_follows_lr is True, but lr is 0"),
    ("Lion SGD", {"amsgrad": True}, "'amsgrad'"),
    ("SGD", {"momentun": 0.9}, "mean 'momentum'"),
    *((MOMENTS, {name: value}, name) for name, value in
      (("foreach", True), ("fused", False), ("differentiable", True))),
    ("AdamW", fp32_moments("embedding"), r"fp32_moments is 'embedding', expected a sequence"),
    ("AdamW", fp32_moments(None), "fp32_moments is None, expected a sequence"),
    ("AdamW", fp32_moments(torch.ones(2)), "fp32_moments is tensor"),
    ("AdamW", fp32_moments([nn.Embedding]), "fp32_moments has <class .*, expected 'embedding'"),
    ("AdamW", fp32_moments(["(bo"]), r"'\(bo' is not a regular expression"),
    ("AdamW", fp32_moments(["bodi"]), r"no parameter has a name with 'bodi'; the nearest .*'body"),
    ("AdamW", fp32_moments([torch.ones(2, 3)]), r"tensor of shape \(2, 3\) that is none of the"),
]  # fmt: skip
"""Wrong in the constructor; most are options of the optimizer, which groups do not have."""


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [(name, *case) for names, *case in OPTIONS for name in names.split()],
)
@pytest.mark.parametrize("wrap", [list, iter])
def test_options(name: str, wrong: dict[str, Any], message: str, wrap: Any) -> None:
    """The groups of the caller stay as they were: a corrected call is as if it were the first."""
    (param,) = make_params([(2, 64)])
    group: dict[str, Any] = {"params": wrap([("body.weight", param)]), "lr": wrong.get("lr", 0.5)}
    with pytest.raises((TypeError, ValueError), match=message):
        OURS[name]([group], **wrong)
    if "fp32_moments" in wrong or "state_fraction" in wrong:
        for build in (
            lambda: FusedAdamW.estimate([("body.weight", param)], **wrong),
            lambda: OptimizersContainer(
                [nn.ModuleDict({"body": nn.Linear(64, 2)})], FusedAdamW, wrong
            ),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                build()
    assert sorted(group) == ["lr", "params"]
    optimizer = OURS[name]([group])
    assert params_of(optimizer) == [param]
    assert optimizer.param_groups[0]["param_names"] == ["body.weight"]


@pytest.mark.parametrize(
    ("build", "wrong", "message"),
    [
        *(("FSDPadapt", {name: 1.0}, "FSDPadaptOptimizer.* mean 'clip_grad_norm'") for name in
          ("max_grad_norm", "max_norm", "grad_clip", "gradient_clip_val", "clip_grad_nrom")),
        ("FSDPadapt", {"init_scale": 1.0}, "mean 'grad_scal_cfg'"),
        ("FSDPadapt", {"scaler": None}, "mean 'grad_scal_cfg'"),
        ("FSDPadapt", {"group": None}, "mean 'process_group'"),
        ("FSDPadapt", {"lr": 1.0}, "'lr' is an argument of the optimizer that this one wraps"),
        ("FSDPadapt", {"grad_scal_cfg": {"init_scale": 1.0}}, "Dynamic.*mean 'initial_scale'"),
        ("FSDPadapt", {"xyzzy": 1}, "'xyzzy'$"),
        ("GradScaler", {"initial_scale": 1.0}, "GradScaler.* mean 'init_scale'"),
        ("GradScaler", {"scale_window": 1}, "mean 'growth_interval'"),
        *((kind, {"grad_clip": 1.0}, f"{kind}.*: put it into optimizer_kwargs") for kind in
          ("OptimizersContainer", "OptimizersInBackwardContainer")),
        ("OptimizersContainer", {"optim_bits": 8}, "'state_dtype' is an argument of the optim"),
        ("OptimizersContainer", {"no_decays": []}, "mean 'no_decay'"),
    ],
)  # fmt: skip
def test_other_classes_answer_with_their_own_names(
    build: str, wrong: dict[str, Any], message: str
) -> None:
    model = nn.Linear(3, 2)
    constructors: dict[str, Any] = {
        "FSDPadapt": lambda **wrong: FSDPadaptOptimizer(FusedAdamW(model.parameters()), **wrong),
        "GradScaler": lambda **wrong: GradScaler("cpu", **wrong),
        "OptimizersContainer": partial(OptimizersContainer, [model], FusedAdamW, {}),
        "OptimizersInBackwardContainer": partial(
            OptimizersInBackwardContainer, [model], FusedAdamW, {}
        ),
    }
    with pytest.raises(TypeError, match=message):
        constructors[build](**wrong)
    assert constructors[build]() is not None


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error() -> None:
    groups = [{"params": make_params([(3,)])}, {"params": make_params([(3,)], FP16)}]
    with pytest.raises(UserWarning, match="float16"):
        FusedAdamW(groups, lr=0.5, master_weights="remainder")
    assert [list(group) for group in groups] == [["params"]] * 2


@pytest.mark.parametrize(
    ("group", "message"),
    [
        *(({option: None}, f"{option}: arguments of FusedAdamW for all") for option in
          ("max_grad_norm", "state_dtype", "track", "process_group", "fp32_moments")),
        *((switch, "FusedAdamW is always fused and not differentiable") for switch in
          ({"fused": False}, {"foreach": True}, {"differentiable": True})),
        ({"algorithm": "lions"}, "did you mean 'lion'"),
        ({"algorithm": "lion", "amsgrad": True}, "group of 'lion' has no argument 'amsgrad'"),
        ({"algorithm": "sgd", "betas": (0.9, 0.99)}, "group of 'sgd' has no argument 'betas'"),
        ({"algorithm": "lion", "betas": (0.9, 1.5)}, "beta parameter at index 1: 1.5"),
    ],
)  # fmt: skip
def test_groups(group: dict[str, Any], message: str) -> None:
    first, second = make_params([(2,), (3,)])
    optimizer = FusedAdamW([first])
    with unchanged(optimizer), pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group({"params": [second], **group})
    with pytest.raises((TypeError, ValueError), match=message):
        FusedAdamW([{"params": [second], **group}])
    train(optimizer, range(2))
    assert optimizer.state[first]["step"] == 2


@pytest.mark.parametrize("more", [{}, {"lr": -1.0}])
def test_a_group_of_a_wrapper_stays_as_it_was(more: dict[str, float]) -> None:
    optimizer = torch.optim.AdamW(make_params([(3,)]), lr=0.5)
    group = {"params": [nn.Parameter(torch.ones(2).to_sparse())], **more}
    with pytest.raises((TypeError, ValueError)):
        FSDPadaptOptimizer(optimizer).add_param_group(group)
    assert list(group) == ["params", *more] and len(optimizer.param_groups) == 1


# ---- calls -------------------------------------------------------------------------------------

SCHEDULE = {"warmup_steps": 1, "stable_steps": 1, "decay_steps": 1}
SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({"warmup_steps": 1.5}, "warmup_steps is 1.5, expected an integer"),
    ({"warmup_steps": -1}, "warmup_steps"),
    ({"min_factor": "0"}, "min_factor is '0'"),
    ({"min_factor": 2.0}, "min_factor"),
    ({"generation": 1.9}, "generation is 1.9"),
    ({"generation": 3}, "generation"),
    ({"decay_type": "quadratic"}, "quadratic"),
]
LOSS_SCALES: list[tuple[dict[str, Any], str]] = [
    ({"growth_factor": None}, "growth_factor is None"),
    ({"init_scale": "8"}, "init_scale is '8'"),
    ({"hysteresis": "2"}, "hysteresis is '2'"),
    *(({"init_scale": wrong}, "Invalid") for wrong in (0.0, math.inf, 1e300)),
    *(({"growth_interval": wrong}, "Invalid") for wrong in (0, math.nan, 1.5)),
    *(({"hysteresis": wrong}, "Invalid") for wrong in (1.5, -1, math.nan)),
    *(({"growth_factor": wrong}, "Invalid") for wrong in (0.5, math.inf)),
    *(({"backoff_factor": wrong}, "Invalid") for wrong in (0.0, 1.5)),
    *(({"min_scale": wrong}, "Invalid") for wrong in (-1.0, math.inf, 16.0)),
    *(({"max_scale": wrong}, "Invalid") for wrong in (math.nan, 4.0)),
    ({"min_scale": 4.0, "max_scale": 2.0}, "Invalid"),
]
SETTERS: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ({"max_grad_norm": math.nan}, "max_grad_norm"),
    ({"skip_nonfinite": "no"}, "skip_nonfinite is 'no'"),
]


def set_options(optimizer: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(optimizer, name, value)


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [("set_schedule", *case) for case in SCHEDULES]
    + [("set_loss_scale", *case) for case in LOSS_SCALES]
    + [("", *case) for case in SETTERS],
)
def test_calls(call: str, wrong: dict[str, Any], message: str) -> None:
    optimizer: Any = FusedAdamW(make_params())
    train(optimizer, [0])
    usual: dict[str, Any] = {"set_schedule": SCHEDULE, "set_loss_scale": {"init_scale": 8.0}}.get(
        call, {}
    )
    with unchanged(optimizer), pytest.raises(ERRORS, match=message):
        getattr(optimizer, call)(**usual | wrong) if call else setattr(
            optimizer, *next(iter(wrong.items()))
        )
    train(optimizer, [1])
    assert (optimizer.control.lr_factor, optimizer.control.loss_scale) == (1.0, 1.0)


# ---- rebuilding from param_groups --------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"state_dtype": BF16},
        {"master_weights": "fp32"}, {"state_dtype": "int8"},
        *({"fp32_moments": chosen, "state_dtype": "int8"} for chosen in ((), ("embedding", "p0"))),
    ],
    ids=str,
)  # fmt: skip
def test_rebuilding_from_param_groups_does_not_lose_settings(settings: dict[str, Any]) -> None:
    """Horovod's wrapper does this."""
    params = make_params([(4, 6), (3, 64)])
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = FusedAdamW([{"params": named[:1]}, {"params": named[1:]}], **settings)
    name = next(iter(settings))
    rest = {key: value for key, value in settings.items() if key != name}
    shallow, twin = [{**g} for g in optimizer.param_groups], copy.deepcopy(optimizer)
    for groups in (optimizer.param_groups, shallow, twin.param_groups):
        with pytest.raises(ValueError, match=rf"with {{'{name}'"):
            FusedAdamW(groups, **rest)
    again = FusedAdamW(optimizer.param_groups, **settings)
    train(again, [0])
    FusedAdamW([{"params": [*g["params"]]} for g in optimizer.param_groups])
    plain = FusedAdamW(params, fp32_moments=())  # of no effect without 8 bits
    FusedAdamW(plain.param_groups)


def test_an_optimizer_with_a_schedule_is_rebuilt_as_the_error_says() -> None:
    optimizer = FusedAdamW(make_params(), lr=0.1, max_grad_norm=1.0)
    optimizer.set_schedule(**SCHEDULE)
    optimizer.set_loss_scale(4.0)
    way = "lists of parameters of its own, and call set_schedule and set_loss_scale again"
    with pytest.raises(ValueError, match=way):
        FusedAdamW(optimizer.param_groups, max_grad_norm=1.0)
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    again = FusedAdamW(groups, max_grad_norm=1.0)
    again.set_schedule(**SCHEDULE)
    assert again.has_schedule


@pytest.mark.parametrize("cls", [FusedAdamW, FusedMuon])
def test_what_is_no_parameters(cls: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for wrong, message in (
        (model, "params is a Sequential module, .*such as model.parameters"),
        (model[0], "params is a Linear module"),
        (model.state_dict(), r"type OrderedDict, .*such as model.named_parameters\(\)$"),
        (dict(model.named_parameters()), "type dict, .*such as model.named_par"),
        ({"params": [*model.parameters()]}, "params is of type dict, .*such as a list$"),
        (model.parameters, r"params is Module.parameters, .* such as model.parameters\(\)$"),
        (3, "params is 3, expected parameters or param groups"),
        ([{"params": model}], "params is a Sequential module, .*such as model.parameters"),
    ):
        with pytest.raises(TypeError, match=message):
            cls(wrong)
    optimizer = FusedAdamW(model[0].parameters())
    with pytest.raises(TypeError, match=r"params is a Linear module, .*such as model.parameters"):
        optimizer.add_param_group({"params": model[1]})
    assert len(optimizer.param_groups) == 1


def test_a_process_group_that_was_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    params = [nn.Parameter(torch.ones(3))]
    optimizer = FusedAdamW(params, max_grad_norm=1.0, process_group=dist.new_group([0]))
    dist.destroy_process_group()
    params[0].grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="group was destroyed: build another optimizer with a"):
        optimizer.step()
    assert params[0].tolist() == [1, 1, 1]


def test_what_is_no_state_dict() -> None:
    model = nn.Linear(3, 3)
    optimizer = FusedAdamW(model.parameters())
    for wrong, message in (
        ("step.pt", "state_dict is 'step.pt', expected a dict: load the file first"),
        (Path("step.pt"), "expected a dict: load the file first, such as by torch.load"),
        (None, "state_dict is None, expected a dict$"),
        (model.state_dict(), r"with the keys \['weight', 'bias'\]; it looks like a model's"),
        ({}, "expected a dict 'state' and a list 'param_groups' in {}"),
    ):
        with unchanged(optimizer), pytest.raises((TypeError, ValueError), match=message):
            optimizer.load_state_dict(wrong)
    for other, path in itertools.product(
        (
            OptimizersContainer([model], FusedAdamW, {}),
            FSDPadaptOptimizer(optimizer),
            FSDPadaptOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
            GradScaler("cpu"),
        ),
        ("step.pt", Path("step.pt")),
    ):
        with pytest.raises(TypeError, match="expected a dict: load the file first, such as by tor"):
            other.load_state_dict(path)
