"""build_optimizers takes the signatures and configurations of two torchtitan generations."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.containers import (
    OptimizersContainer,
    OptimizersInBackwardContainer,
    build_optimizers,
)


def section(**changes):
    """Returns an optimizer section with torchtitan's defaults."""
    values = {"name": "AdamW", "lr": 8e-4, "eps": 1e-8, "implementation": "fused"}
    return SimpleNamespace(**{**values, "early_step_in_backward": False, **changes})


def first_generation(parts, *, pp=1, ft=False, **changes):
    job_config = SimpleNamespace(
        optimizer=section(**changes),
        parallelism=SimpleNamespace(pipeline_parallel_degree=pp),
    )
    return build_optimizers(parts, job_config, SimpleNamespace(enabled=ft, manager=None))


def second_generation(parts, *, pp=1, ep=1, ft=False, **changes):
    parallel_dims = SimpleNamespace(pp_enabled=pp > 1, ep_enabled=ep > 1)
    ft_manager = SimpleNamespace(enabled=ft, manager=None)
    return build_optimizers(parts, section(**changes), parallel_dims, ft_manager)


GENERATIONS = pytest.mark.parametrize("build", [first_generation, second_generation])
IN_BACKWARD = {"early_step_in_backward": True}


@GENERATIONS
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("name", "implementation", "cls"),
    [
        ("Adam", "fused", FusedAdam),
        ("AdamW", "fused", FusedAdamW),
        ("Adam", "foreach", torch.optim.Adam),
        ("AdamW", "foreach", torch.optim.AdamW),
        ("Adam", "for-loop", torch.optim.Adam),
        ("AdamW", "for-loop", torch.optim.AdamW),
        ("Lion", "fused", FusedLion),
        ("SGD", "fused", FusedSGD),
        ("SGD", "foreach", torch.optim.SGD),
    ],
)
def test_name_and_implementation(build, parts, name, implementation, cls, in_backward):
    settings = {"SGD": {"momentum": 0.9}, "Lion": {}}.get(name, {"eps": 1e-5, "amsgrad": True})
    settings |= {"lr": 0.5, "maximize": True}
    kinds = {"implementation": implementation, "early_step_in_backward": in_backward}
    container = build(parts, name=name, **kinds, **settings)
    assert type(container) is (
        OptimizersInBackwardContainer if in_backward else OptimizersContainer
    )
    assert [type(optimizer) for optimizer in container] == [cls] * (12 if in_backward else 2)
    for group in container.param_groups:
        assert group["weight_decay"] == (0.1 if "Adam" in name else 0.0)
        assert settings.items() <= group.items()
        assert group.get("betas") == {"SGD": None, "Lion": (0.9, 0.99)}.get(name, (0.9, 0.95))
        assert bool(group.get("foreach")) == (implementation == "foreach")
        if "Adam" in name:
            assert group["decoupled_weight_decay"] == (name == "AdamW")


@GENERATIONS
@pytest.mark.parametrize("state_dtype", ["bfloat16", torch.bfloat16])
def test_all_arguments_can_be_configured(build, model, state_dtype):
    """Every argument arrives at the optimizer, whose own tests cover the effects."""
    options = {
        "master_weights": "remainder",
        "stochastic_rounding": True,
        "rounding_seed": 7,
        "write_back_gradients": True,
        "skip_nonfinite": True,
        "max_grad_norm": 1e-3,
        "process_group": None,
        "state_device": "cpu",
        "state_fraction": 0.5,
    }
    settings = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.0}
    container = build(
        [model.bfloat16()], state_dtype=state_dtype, track=["norms"], **options, **settings
    )
    (optimizer,) = container
    expected = {"state_dtype": torch.bfloat16, "track": ("norms",), **options}
    assert {name: getattr(optimizer._options, name) for name in expected} == expected
    (group,) = container.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.0)
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        build([model], state_dtype="int3")


@GENERATIONS
@pytest.mark.parametrize("skip_nonfinite", [None, False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.0, 0.25, "deferred"])
def test_clipping_and_skipping(build, parts, max_grad_norm, skip_nonfinite):
    deferred = max_grad_norm == "deferred"
    threshold = {"deferred_clipping": True} if deferred else {"max_grad_norm": max_grad_norm}
    container = build(parts, skip_nonfinite=skip_nonfinite, **threshold)
    assert (container.deferred_clipping is not None) == deferred
    if deferred:
        container.deferred_clipping.clip(max_grad_norm := 0.25)
    for optimizer in container:
        assert optimizer.max_grad_norm == (max_grad_norm or None)
        assert optimizer.skip_nonfinite == bool(skip_nonfinite)


@GENERATIONS
@pytest.mark.parametrize("in_backward", [False, True])
def test_what_containers_take(build, parts, in_backward):
    kind = {"early_step_in_backward": in_backward}
    container = build(parts, **kind, compat="torchtitan")
    steps = [v for k, v in container.state_dict().items() if k.endswith(".step")]
    assert steps and all(step == 1 for step in steps)
    with pytest.raises(ValueError, match="Invalid compat: 'old'"):
        build(parts, **kind, compat="old")
    container = build(parts, no_decay=["bias"], lr_multipliers={"weight": 0.5}, **kind)
    chosen = {(group["lr"], group["weight_decay"]) for group in container.param_groups}
    assert chosen == {(4e-4, 0.1), (8e-4, 0.0)}
    accumulates = {"backwards_per_step": 2} if in_backward else {}
    container = build(parts, **kind, max_grad_norm=1.0, **accumulates)
    assert [optimizer.max_grad_norm for optimizer in container] == [1.0, 1.0]
    for part in parts:
        part.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model parts is trainable"):
        build(parts, **kind)
    build(parts, pp=2)  # another stage may have trainable parameters


@GENERATIONS
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"name": "NAdam"}, NotImplementedError, "Optimizer NAdam is not available"),
        (
            {"name": "Lion", "implementation": "foreach"},
            NotImplementedError,
            "Lion is not available: use Adam, AdamW or SGD",
        ),
        ({"implementation": "Fused"}, AssertionError, "implementation is 'Fused', expected"),
        ({"implementation": None}, AssertionError, "implementation is None, expected"),
        ({"pp": 2, **IN_BACKWARD}, NotImplementedError, "in backward .* pipeline"),
        ({"ft": True, **IN_BACKWARD}, ValueError, "Fault tolerance .* in backward"),
    ],
)
def test_errors_are_of_torchtitans_types(build, parts, settings, error, message):
    with pytest.raises(error, match=message):
        build(parts, **settings)


def test_optimizers_in_backward_exclude_expert_parallelism(parts):
    with pytest.raises(NotImplementedError, match=r"in backward .* expert"):
        second_generation(parts, ep=2, **IN_BACKWARD)
    second_generation(parts, ep=2)


NO_NORM, NO_EFFECT = "needs implementation 'fused'", r"no effect: the parameters are torch\.float32"


@GENERATIONS
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "Lion", "amsgrad": True}, "amsgrad has no effect: Lion"),
        ({"name": "Lion", "nesterov": True}, "nesterov has no effect: Lion"),
        ({"name": "SGD", "beta1": 0.8}, "beta1 has no effect: SGD"),
        ({"dampening": 0.5}, "dampening has no effect: AdamW"),
        ({"max_grad_norm": 1.0, "implementation": "foreach"}, f"max_grad_norm {NO_NORM}"),
        ({"master_weights": "fp32", "implementation": "for-loop"}, f"master_weights {NO_NORM}"),
        ({"deferred_clipping": True, "implementation": "foreach"}, NO_NORM),
        ({"deferred_clipping": True, "max_grad_norm": 1.0}, "leave out one of the two"),
        ({"deferred_clipping": True, **IN_BACKWARD}, "set max_grad_norm instead"),
        ({"write_back_gradients": True, **IN_BACKWARD}, "frees gradients"),
        ({"backwards_per_step": 2}, "no effect without early_step_in_backward"),
        ({"rounding_seed": 7}, "no effect without stochastic_rounding"),
        ({"state_fraction": 0.5}, "state_fraction=0.5 has no effect without state_device='cpu'"),
        ({"state_device": "cuda", "offload_step": "auto"}, "offload_step='auto' has no effect"),
        ({"state_device": "cpu", "implementation": "foreach"}, f"state_device {NO_NORM}"),
        ({"fp32_moments": ["head"]}, "fp32_moments has no effect without state_dtype='int8'"),
        ({"fp32_moments": [], "state_dtype": "bfloat16"}, "fp32_moments has no effect"),
        ({"master_weights": "fp32"}, NO_EFFECT),
        ({"stochastic_rounding": True}, NO_EFFECT),
    ],
)
def test_a_setting_without_effect(build, parts, settings, message):
    with pytest.raises(ValueError, match=message):
        build(parts, **settings)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}])
def test_a_norm_over_stages_of_unknown_ranks_is_rejected(parts, settings):
    with pytest.raises(ValueError, match="pass process_group="):
        first_generation(parts, pp=2, **settings)
    first_generation(parts, pp=2)


FP32, INT8 = torch.float32, torch.int8


@GENERATIONS
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [FP32, INT8]),
        ({"fp32_moments": ["embedding"]}, [FP32, INT8]),
        ({"fp32_moments": []}, [INT8, INT8]),
        ({"fp32_moments": ["^1"]}, [INT8, FP32]),
    ],
)
def test_embeddings_keep_fp32_moments(build, in_backward, settings, expected):
    parts = [nn.Sequential(nn.Embedding(3, 64), nn.Linear(64, 2))]
    settings = {"state_dtype": "int8", **settings}
    container = build(parts, early_step_in_backward=in_backward, **settings)
    for optimizer in container:
        optimizer.init_state()
    states = [container.state[part.weight] for part in parts[0]]
    assert [s.get("exp_avg", s.get("exp_avg_codes")).dtype for s in states] == expected
    with pytest.raises(ValueError, match="no parameter has a name with 'tok'"):
        build(parts, state_dtype="int8", fp32_moments=["tok"])
    build(parts, pp=2, state_dtype="int8", fp32_moments=["tok"])  # of another stage
    with pytest.raises(ValueError, match="state_dtype needs implementation 'fused'"):
        build(parts, **settings, implementation="foreach")


@pytest.mark.parametrize("master", ["fp32", "remainder", "remainder8"])
def test_rounding_of_parameters_with_masters(model, master):
    """An 8-bit remainder also needs rounding, as it does not hold all lost bits."""
    settings = {"master_weights": master, "stochastic_rounding": True}
    model = model.bfloat16()
    if master == "remainder8":
        second_generation([model], **settings)
    else:
        with pytest.raises(ValueError, match="nothing else is rounded"):
            second_generation([model], **settings)
    second_generation([model], **settings, state_dtype="bfloat16")


@pytest.mark.parametrize(
    ("dtype", "setting", "warns"),
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {"implementation": "foreach"}, True),
        (torch.bfloat16, {"master_weights": "remainder"}, False),
        (torch.bfloat16, {"stochastic_rounding": True}, False),
        (torch.float32, {}, False),
    ],
)
def test_weights_that_lose_updates_are_named(parts, caplog, dtype, setting, warns):
    first_generation([part.to(dtype) for part in parts], **setting)
    named = f"Parameters are {str(dtype)[6:]}, without master weights or stochastic rounding"
    assert (named in caplog.text) is warns


# Ways to call it


def test_every_way_to_pass_the_arguments(parts):
    config, disabled = section(lr=0.5), SimpleNamespace(enabled=False)
    job_config = SimpleNamespace(optimizer=config)
    dims = SimpleNamespace(pp_enabled=False, ep_enabled=False)
    second = {"optimizer_config": config, "parallel_dims": dims, "ft_manager": disabled}
    for args, kwargs in (
        ((parts, job_config), {}),
        ((parts, job_config, None), {}),
        ((parts, job_config), {"ft_manager": disabled}),
        ((), {"model_parts": parts, "job_config": job_config, "ft_manager": disabled}),
        ((parts, config, dims), {}),
        ((parts, config, dims, None), {}),
        ((), {"model_parts": parts, **second}),
    ):
        assert build_optimizers(*args, **kwargs).param_groups[0]["lr"] == 0.5
    incomplete = SimpleNamespace(name="AdamW", lr=1.0, early_step_in_backward=False)
    with pytest.raises(TypeError, match="parallel_dims"):
        build_optimizers(parts, config)
    with pytest.raises(TypeError, match=r"build_optimizers.*'lr': options of a step are attr"):
        build_optimizers(parts, config, None, lr=1)
    with pytest.raises(AttributeError, match="implementation"):
        build_optimizers(parts, incomplete, None)
