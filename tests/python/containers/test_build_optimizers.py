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
    values = {
        "name": "AdamW",
        "lr": 8e-4,
        "eps": 1e-8,
        "implementation": "fused",
        "early_step_in_backward": False,
    }
    return SimpleNamespace(**{**values, **changes})


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


@GENERATIONS
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
def test_name_and_implementation(build, parts, name, implementation, cls):
    own = {"SGD": {"momentum": 0.9}, "Lion": {}}.get(name, {"eps": 1e-5})
    container = build(parts, name=name, implementation=implementation, lr=0.5, **own)
    assert type(container) is OptimizersContainer
    assert [type(optimizer) for optimizer in container] == [cls, cls]
    for group in container.param_groups:
        assert (group["lr"], group["weight_decay"]) == (0.5, 0.1 if "Adam" in name else 0.0)
        assert own.items() <= group.items()
        assert group.get("betas") == {"SGD": None, "Lion": (0.9, 0.99)}.get(name, (0.9, 0.95))
        assert bool(group.get("foreach")) == (implementation == "foreach")
        if "Adam" in name:
            assert group["decoupled_weight_decay"] == (name == "AdamW")


@GENERATIONS
def test_betas_and_weight_decay_can_be_configured(build, parts):
    container = build(parts, beta1=0.8, beta2=0.9, weight_decay=0.0)
    assert container.param_groups[0]["betas"] == (0.8, 0.9)
    assert container.param_groups[0]["weight_decay"] == 0.0


@GENERATIONS
@pytest.mark.parametrize("max_grad_norm", [None, 0.0, 0.25])
@pytest.mark.parametrize("skip_nonfinite", [None, False, True])
def test_clipping_and_skipping_can_be_configured(
    build, parts, set_grads, max_grad_norm, skip_nonfinite
):
    container = build(parts, max_grad_norm=max_grad_norm, skip_nonfinite=skip_nonfinite)
    set_grads(parts, 0)
    grads = [p.grad for part in parts for p in part.parameters()]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    container.step()
    factor = 0.25 / norm if max_grad_norm else 1.0
    bias = parts[1].layers["2"][1].bias
    torch.testing.assert_close(
        container.state[bias]["exp_avg"], 0.1 * factor * bias.grad, rtol=1e-5, atol=1e-9
    )
    before = bias.clone()
    bias.grad[0] = torch.nan
    container.step()
    assert torch.equal(before, bias) == bool(skip_nonfinite)


@GENERATIONS
@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("wanted", [{"max_grad_norm": 1.0}, {"master_weights": "fp32"}])
def test_our_arguments_need_our_implementation(build, parts, implementation, wanted):
    with pytest.raises(ValueError, match=f"{next(iter(wanted))} needs implementation 'fused'"):
        build(parts, implementation=implementation, **wanted)


@GENERATIONS
@pytest.mark.parametrize("state_dtype", ["bfloat16", torch.bfloat16])
def test_all_arguments_can_be_configured(build, model, set_grads, state_dtype):
    """Every argument arrives at the optimizer, whose own tests cover the effects."""
    container = build(
        [model.bfloat16()],
        master_weights="remainder",
        state_dtype=state_dtype,
        stochastic_rounding=True,
        rounding_seed=7,
        write_back_gradients=True,
        track=["norms"],
        max_grad_norm=1e-3,
    )
    set_grads([model], 0)
    container.step()
    weight = model.layers["0"][0].weight
    assert container.state[weight]["exp_avg"].dtype == torch.bfloat16
    assert "remainder" in container.state[weight]
    (optimizer,) = container
    assert optimizer._options.stochastic_rounding
    assert optimizer._options.rounding_seed == 7
    assert optimizer.telemetry.grad_norms.gt(0).any()
    total = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
    torch.testing.assert_close(float(total), 1e-3, rtol=0.02, atol=0)
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        build([model], state_dtype="int3")


@pytest.mark.parametrize("wanted", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}])
def test_a_norm_over_stages_of_unknown_ranks_is_rejected(parts, wanted):
    with pytest.raises(ValueError, match="pass process_group="):
        first_generation(parts, pp=2, **wanted)
    first_generation(parts, pp=2)


@GENERATIONS
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_in_backward(build, parts, implementation):
    container = build(parts, early_step_in_backward=True, implementation=implementation)
    assert type(container) is OptimizersInBackwardContainer
    assert len(container) == 12


@GENERATIONS
@pytest.mark.parametrize("in_backward", [False, True])
def test_nothing_to_train(build, parts, in_backward):
    for part in parts:
        part.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model parts is trainable"):
        build(parts, early_step_in_backward=in_backward)
    build(parts, pp=2)  # another stage may have trainable parameters


@GENERATIONS
@pytest.mark.parametrize("in_backward", [False, True])
def test_compat(build, parts, in_backward):
    container = build(parts, early_step_in_backward=in_backward, compat="torchtitan")
    steps = [v for k, v in container.state_dict().items() if k.endswith(".step")]
    assert steps and all(step == 1 for step in steps)
    with pytest.raises(ValueError, match="Invalid compat: 'old'"):
        build(parts, early_step_in_backward=in_backward, compat="old")


@GENERATIONS
def test_in_backward_with_clipping(build, parts):
    container = build(parts, early_step_in_backward=True, max_grad_norm=1.0, backwards_per_step=2)
    assert type(container) is OptimizersInBackwardContainer
    assert [optimizer.max_grad_norm for optimizer in container] == [1.0, 1.0]


@GENERATIONS
def test_deferred_clipping(build, parts, set_grads):
    container = build(parts, deferred_clipping=True)
    set_grads(parts, 0)
    norm = container.deferred_clipping.clip(0.25)
    container.step()
    assert torch.equal(container.control.clip_factor, 0.25 / (norm + 1e-6))
    assert build(parts).deferred_clipping is None


@GENERATIONS
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_torchs_other_arguments(build, parts, implementation):
    container = build(parts, implementation=implementation, amsgrad=True, maximize=True)
    assert all(group["amsgrad"] and group["maximize"] for group in container.param_groups)


IN_BACKWARD = {"early_step_in_backward": True}


@GENERATIONS
@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ({"name": "Muon"}, NotImplementedError, "Optimizer Muon is not available"),
        (
            {"name": "Lion", "implementation": "foreach"},
            NotImplementedError,
            "Lion is not available: use Adam, AdamW or SGD",
        ),
        ({"name": "Lion", "amsgrad": True}, ValueError, "amsgrad has no effect: Lion"),
        ({"name": "Lion", "nesterov": True}, ValueError, "nesterov has no effect: Lion"),
        ({"name": "SGD", "beta1": 0.8}, ValueError, "beta1 has no effect: SGD"),
        ({"dampening": 0.5}, ValueError, "dampening has no effect: AdamW"),
        ({"implementation": "Fused"}, AssertionError, "implementation is 'Fused', expected"),
        ({"implementation": None}, AssertionError, "implementation is None, expected"),
        ({"pp": 2, **IN_BACKWARD}, NotImplementedError, "in backward .* pipeline"),
        ({"ft": True, **IN_BACKWARD}, ValueError, "Fault tolerance .* in backward"),
    ],
)
def test_errors_are_of_torchtitans_types(build, parts, wanted, error, message):
    with pytest.raises(error, match=message):
        build(parts, **wanted)


def test_optimizers_in_backward_exclude_expert_parallelism(parts):
    with pytest.raises(NotImplementedError, match=r"in backward .* expert"):
        second_generation(parts, ep=2, **IN_BACKWARD)
    second_generation(parts, ep=2)


@GENERATIONS
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"deferred_clipping": True, "implementation": "foreach"}, "needs implementation 'fused'"),
        ({"deferred_clipping": True, "max_grad_norm": 1.0}, "leave out one of the two"),
        ({"deferred_clipping": True, "early_step_in_backward": True}, "set max_grad_norm instead"),
        ({"write_back_gradients": True, "early_step_in_backward": True}, "frees gradients"),
        ({"backwards_per_step": 2}, "no effect without early_step_in_backward"),
        ({"rounding_seed": 7}, "no effect without stochastic_rounding"),
        ({"fp32_moments": ["head"]}, "fp32_moments has no effect without state_dtype='int8'"),
        ({"fp32_moments": [], "state_dtype": "bfloat16"}, "fp32_moments has no effect"),
        ({"master_weights": "fp32"}, r"no effect: the parameters are torch\.float32"),
        ({"stochastic_rounding": True}, r"no effect: the parameters are torch\.float32"),
    ],
)
def test_a_setting_without_effect(build, parts, wanted, message):
    with pytest.raises(ValueError, match=message):
        build(parts, **wanted)


@GENERATIONS
def test_embeddings_keep_fp32_moments(build):
    parts = [nn.Sequential(nn.Embedding(3, 64), nn.Linear(64, 2))]
    for wanted, expected in (
        ({}, [torch.float32, torch.int8]),
        ({"fp32_moments": ["embedding"]}, [torch.float32, torch.int8]),
        ({"fp32_moments": []}, [torch.int8, torch.int8]),
        ({"fp32_moments": ["^1"]}, [torch.int8, torch.float32]),
    ):
        for in_backward in (False, True):
            options = {"state_dtype": "int8", "early_step_in_backward": in_backward}
            container = build(parts, **options, **wanted)
            for optimizer in container:
                optimizer.init_state()
            states = [container.state[part.weight] for part in parts[0]]
            kept = [s.get("exp_avg", s.get("exp_avg_codes")).dtype for s in states]
            assert kept == expected
    with pytest.raises(ValueError, match="no parameter has a name with 'tok'"):
        build(parts, state_dtype="int8", fp32_moments=["tok"])
    build(parts, pp=2, state_dtype="int8", fp32_moments=["tok"])  # of another stage
    with pytest.raises(ValueError, match="state_dtype needs implementation 'fused'"):
        build(parts, state_dtype="int8", fp32_moments=[], implementation="foreach")


@pytest.mark.parametrize("master", ["fp32", "remainder", "remainder8"])
def test_rounding_of_parameters_with_masters(model, master):
    """An 8-bit remainder also needs rounding, as it does not hold all lost bits."""
    wanted = {"master_weights": master, "stochastic_rounding": True}
    model = model.bfloat16()
    if master == "remainder8":
        second_generation([model], **wanted)
    else:
        with pytest.raises(ValueError, match="nothing else is rounded"):
            second_generation([model], **wanted)
    second_generation([model], **wanted, state_dtype="bfloat16")


# Ways to call it


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


def test_every_way_to_pass_the_arguments(parts):
    job_config = SimpleNamespace(optimizer=section(lr=0.5))
    dims = SimpleNamespace(pp_enabled=False, ep_enabled=False)
    disabled = SimpleNamespace(enabled=False)
    for container in (
        build_optimizers(parts, job_config),
        build_optimizers(parts, job_config, None),
        build_optimizers(parts, job_config, ft_manager=disabled),
        build_optimizers(model_parts=parts, job_config=job_config, ft_manager=disabled),
        build_optimizers(parts, section(lr=0.5), dims),
        build_optimizers(parts, section(lr=0.5), dims, None),
        build_optimizers(
            model_parts=parts,
            optimizer_config=section(lr=0.5),
            parallel_dims=dims,
            ft_manager=disabled,
        ),
    ):
        assert container.param_groups[0]["lr"] == 0.5


def test_a_wrong_call_is_pythons_own_error(parts):
    with pytest.raises(TypeError, match="parallel_dims"):
        build_optimizers(parts, section())
    with pytest.raises(TypeError, match="unknown"):
        build_optimizers(parts, section(), None, unknown=1)
    with pytest.raises(AttributeError, match="implementation"):
        build_optimizers(
            parts, SimpleNamespace(name="AdamW", lr=1.0, early_step_in_backward=False), None
        )
