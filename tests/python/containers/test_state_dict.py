"""The containers' flat state dict: its keys, its exchange with torch, and refused loads."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.containers import LRSchedulersContainer, OptimizersContainer
from torchopt_ext.statedict.flat import init_state

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HYPERS = {
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}
SHARED = {"algorithm", "lr", "weight_decay", "maximize"}
OTHER_HYPERS = {
    FusedLion: SHARED | {"betas"},
    FusedSGD: SHARED | {"momentum", "dampening", "nesterov", "foreach", "differentiable", "fused"},
}


def expected_keys(parts, choice, initial_lr=False):
    names = [n for part in parts for n, p in part.named_parameters() if p.requires_grad]
    state = ["step", *choice.states]
    hypers = OTHER_HYPERS.get(choice.cls, HYPERS) | ({"initial_lr"} if initial_lr else set())
    return {f"state.{name}.{key}" for name in names for key in state} | {
        f"param_groups.{name}.{key}" for name in names for key in hypers
    }


def with_value(state_dict, key, value):
    return {**state_dict, key: value}


# Keys and values


@pytest.mark.parametrize("steps", [0, 2])
def test_keys_are_exactly_torchs(choice, parts, train, steps):
    container = choice.container(parts)
    train(container, parts, range(steps))
    assert set(container.state_dict()) == expected_keys(parts, choice)
    LRSchedulersContainer(container, lambda step: 1.0)
    assert set(container.state_dict()) == expected_keys(parts, choice, initial_lr=True)


def test_values_are_torchs_own_flat_dict(choice, parts, train, assert_same):
    container = choice.container(parts)
    train(container, parts, [0, 1])
    merged = {}
    for part, optimizer in zip(parts, container, strict=True):
        merged.update(get_optimizer_state_dict(part, optimizer, options=FLAT))
    assert_same(container.state_dict(), merged)
    assert merged["state.layers.2.1.bias.step"] == 2
    assert merged["param_groups.layers.2.1.bias.weight_decay"] == 0.1


def test_wrappers_leave_no_trace_in_the_keys(choice, parts):
    compiled = torch.compile(parts[0])
    assert "_orig_mod" in next(iter(compiled.state_dict()))
    container = choice.container([compiled, parts[1]])
    assert set(container.state_dict()) == expected_keys(parts, choice)
    container.load_state_dict(container.state_dict())


def test_names_follow_a_module_that_changes(choice, parts):
    """A container looks names up once, and again after a parameter moved or was added."""
    container = choice.container(parts)
    container.state_dict()
    moved = nn.Linear(3, 2)
    container.optimizers[0].add_param_group({"params": [moved.weight]})
    parts[0].first = moved
    assert f"state.first.weight.{choice.states[0]}" in container.state_dict()
    del parts[0].first
    parts[0].second = moved
    keys = container.state_dict().keys()
    assert f"state.second.weight.{choice.states[0]}" in keys and not any(
        "first" in key for key in keys
    )


def test_state_dict_before_the_first_step_changes_nothing(choice, parts, train, assert_same):
    copies = copy.deepcopy(parts)
    container, undisturbed = choice.container(parts), choice.container(copies)
    state_dict = container.state_dict()
    for key, value in state_dict.items():
        if key.startswith("state."):
            assert not value.any(), key
        if key.endswith(".step"):
            assert value.shape == ()
            assert value.dtype == torch.float32
    assert all(p.grad is None for part in parts for p in part.parameters())
    assert container.param_groups[0]["lr"] == 1e-2
    train(container, parts, range(3))
    train(undisturbed, copies, range(3))
    assert_same(container.state_dict(), undisturbed.state_dict())
    assert_same(parts, copies)


@pytest.mark.parametrize("choice", ["FusedAdamW", "AdamW-foreach"], indirect=True)
def test_state_dict_before_the_first_step_with_eps_0_keeps_parameters(choice, parts):
    container = OptimizersContainer(parts, choice.cls, {**choice.all_kwargs(), "eps": 0.0})
    before = copy.deepcopy(parts)
    container.state_dict()
    for part, other in zip(parts, before, strict=True):
        assert all(map(torch.equal, part.parameters(), other.parameters()))


def test_compat_torchtitan_counts_the_step_that_makes_the_state(choice, parts, train, assert_same):
    """torch's get_optimizer_state_dict, which torchtitan's container uses, counts such a step."""
    copies = copy.deepcopy(parts)
    container = OptimizersContainer(parts, choice.cls, choice.all_kwargs(), compat="torchtitan")
    seeds = [choice.optimizer(part.parameters()) for part in copies]
    expected = {}
    for part, optimizer in zip(copies, seeds, strict=True):
        expected |= get_optimizer_state_dict(part, optimizer, options=FLAT)
    assert_same(container.state_dict(), expected)
    assert expected["state.layers.0.0.weight.step"] == 1
    for modules, optimizers in ((parts, [container]), (copies, seeds)):
        for optimizer in optimizers:
            train(optimizer, modules, range(1))
    assert container.state_dict()["state.layers.0.0.weight.step"] == 2  # later calls make no step
    assert_same(parts, copies)


def test_state_dict_before_the_first_step_fires_no_step_hooks(choice, parts):
    container = choice.container(parts)
    seen = []
    for optimizer in [container, *container]:
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
    container.load_state_dict(container.state_dict())
    assert seen == []


def test_state_dict_between_backward_and_step_has_the_state(choice, parts, set_grads, assert_same):
    copies = copy.deepcopy(parts)
    container, undisturbed = choice.container(parts), choice.container(copies)
    for modules in (parts, copies):
        set_grads(modules, 0)
    grads = [p.grad for part in parts for p in part.parameters()]
    values = copy.deepcopy(grads)
    assert set(container.state_dict()) == expected_keys(parts, choice)
    assert all(
        p.grad is g
        for p, g in zip((p for part in parts for p in part.parameters()), grads, strict=True)
    )
    assert all(map(torch.equal, grads, values))
    container.step()
    undisturbed.step()
    assert_same(parts, copies)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_state_made_for_torchs_classes_is_what_their_first_step_makes(
    model, set_grads, cls, fused, capturable, default
):
    model.layers["0"].to(torch.bfloat16)
    model.layers["1"][0].weight = nn.Parameter(
        torch.ones(5, 4, 3, 3).to(memory_format=torch.channels_last)
    )
    kwargs = {"fused": fused, "capturable": capturable, "amsgrad": True}
    torch.set_default_dtype(default)
    try:
        ours = OptimizersContainer([model], cls, kwargs)
        ours.state_dict()
        stepped = cls(model.parameters(), **{**kwargs, "capturable": False})
        set_grads([model], 0)
        stepped.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(ours.state) == set(stepped.state)
    for param, state in stepped.state.items():
        assert list(ours.state[param]) == list(state)
        for name, value in state.items():
            made = ours.state[param][name]
            assert (made.shape, made.dtype, made.device) == (value.shape, value.dtype, value.device)
            assert made.stride() == value.stride()
            assert not made.any()


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"capturable": True}, {}])
def test_step_counts_are_where_torchs_step_reads_them(kwargs):
    """The meta device stands for any device except the CPU."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(3, device="meta"))], **kwargs)
    init_state(optimizer)
    (state,) = optimizer.state.values()
    assert state["step"].device.type == ("meta" if kwargs else "cpu")
    assert state["exp_avg"].device.type == "meta"


def test_an_optimizer_of_another_kind_is_left_to_torch(parts, train, assert_same):
    kwargs = {"lr": 0.1, "momentum": 0.9}
    container = OptimizersContainer(parts, torch.optim.SGD, kwargs)
    train(container, parts, [0])
    saved = copy.deepcopy(container.state_dict())
    assert "state.layers.2.1.bias.momentum_buffer" in saved
    other = OptimizersContainer(copy.deepcopy(parts), torch.optim.SGD, kwargs)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)


# Frozen, tied, without gradient, same names


def test_frozen_parameters_have_no_keys(choice, parts):
    parts[0].layers["1"].requires_grad_(False)
    container = choice.container(parts)
    assert set(container.state_dict()) == expected_keys(parts, choice)


def test_a_parameter_without_gradient_has_state_keys(choice, parts, set_grads, assert_same):
    copies = copy.deepcopy(parts)
    container = choice.container(parts)
    set_grads(parts, 0)
    unused = parts[0].layers["0"][0].weight
    unused.grad = None
    container.step()
    saved = copy.deepcopy(container.state_dict())
    assert set(saved) == expected_keys(parts, choice)
    assert saved["state.layers.0.0.weight.step"] == 0
    assert saved["state.layers.0.0.bias.step"] == 1
    other = choice.container(copies)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    # The first gradient still counts as the first step.
    set_grads(parts, 1)
    container.step()
    assert container.state[unused]["step"] == 1


def test_a_tied_parameter_goes_by_its_first_name(choice, model, train, assert_same):
    model.layers["1"][0].weight = model.layers["0"][0].weight
    fresh = copy.deepcopy(model)
    container = choice.container([model])
    train(container, [model], [0, 1])
    saved = copy.deepcopy(container.state_dict())
    assert set(saved) == expected_keys([model], choice)
    assert not any(key.startswith("state.layers.1.0.weight") for key in saved)
    other = choice.container([fresh])
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)


def test_the_same_name_in_two_parts_is_rejected(choice, model, assert_same):
    parts = [model, copy.deepcopy(model)]
    container = choice.container(parts)
    saved = choice.container([copy.deepcopy(model)]).state_dict()
    with pytest.raises(ValueError, match=r"'layers\.0\.0\.weight' is in more than one model part"):
        container.state_dict()
    with pytest.raises(ValueError, match=r"'layers\.0\.0\.weight' is in more than one model part"):
        container.load_state_dict(saved)
    container.step()  # training such a pair works


@pytest.mark.parametrize("resumed", [False, True])
def test_a_parameter_frozen_after_stepping_loads_its_state(
    choice, parts, train, assert_same, resumed
):
    copies = copy.deepcopy(parts)
    container, never_frozen = choice.container(parts), choice.container(copies)
    train(container, parts, [0, 1])
    train(never_frozen, copies, [0, 1])
    frozen = parts[0].layers["0"]
    frozen.requires_grad_(False)
    saved = copy.deepcopy(container.state_dict())
    assert saved["state.layers.0.0.weight.step"] == 2
    train(container, parts, [2])  # the others continue
    if resumed:
        frozen.requires_grad_(True)
        container = choice.container(parts)
        frozen.requires_grad_(False)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    frozen.requires_grad_(True)
    for module in (parts, copies):
        for part in module:
            part.load_state_dict(copies[0 if part is module[0] else 1].state_dict())
    train(container, parts, [3])
    train(never_frozen, copies, [3])
    assert_same(parts, copies)


def test_state_of_a_frozen_parameter_is_not_demanded_but_complete(choice, parts, train):
    container = choice.container(parts)
    parts[0].layers["0"].requires_grad_(False)
    train(container, parts, [0])
    saved = {
        key: value
        for key, value in container.state_dict().items()
        if not key.startswith("state.layers.0.")
    }
    container.load_state_dict(saved)
    saved["state.layers.0.0.weight.step"] = torch.tensor(3.0)
    with pytest.raises(KeyError, match=rf"layers\.0\.0\.weight\.{choice.states[0]}' is missing"):
        container.load_state_dict(saved)


# Loading


PAIRS = [
    pytest.param(FusedAdamW, torch.optim.AdamW, id="AdamW"),
    pytest.param(FusedAdam, torch.optim.Adam, id="Adam"),
]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
@pytest.mark.parametrize("steps", [0, 2])
def test_state_moves_from_torch_to_ours_and_back_bitwise(
    parts, train, assert_same, ours, torchs, fused, amsgrad, steps
):
    kwargs = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-7, "amsgrad": amsgrad}
    source = OptimizersContainer(parts, torchs, {**kwargs, "fused": fused})
    train(source, parts, range(steps))
    saved = copy.deepcopy(source.state_dict())
    middle = OptimizersContainer(copy.deepcopy(parts), ours, {"amsgrad": amsgrad})
    middle.load_state_dict(saved)
    back = OptimizersContainer(copy.deepcopy(parts), torchs, {"amsgrad": amsgrad, "fused": fused})
    back.load_state_dict(middle.state_dict())
    assert_same(back.state_dict(), saved)
    assert middle.param_groups[0]["betas"] == (0.8, 0.99)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_torchs_own_functions_read_and_write_our_dict(parts, train, assert_same, ours, torchs):
    """A stock container calls set_optimizer_state_dict for each part and optimizer."""
    container = OptimizersContainer(parts, ours, {"lr": 3e-3, "fused": True, "foreach": False})
    train(container, parts, [0, 1])
    copies = copy.deepcopy(parts)
    stock = [torchs(part.parameters(), fused=True, foreach=False) for part in copies]
    saved = copy.deepcopy(container.state_dict())
    for part, optimizer in zip(copies, stock, strict=True):
        set_optimizer_state_dict(part, optimizer, saved, options=FLAT)
    merged = {}
    for part, optimizer in zip(copies, stock, strict=True):
        merged.update(get_optimizer_state_dict(part, optimizer, options=FLAT))
    assert_same(merged, saved)
    fresh = OptimizersContainer(
        copy.deepcopy(parts), ours, {"lr": 1.0, "fused": True, "foreach": False}
    )
    fresh.load_state_dict(merged)
    assert_same(fresh.state_dict(), saved)


def test_foreign_keys_are_ignored(choice, parts, train, assert_same):
    container = choice.container(parts)
    train(container, parts, [0])
    saved = copy.deepcopy(container.state_dict())
    more = {
        **saved,
        "state.other.weight.exp_avg": torch.ones(3),
        "param_groups.other.weight.lr": 7.0,
        "state.layers.0.0.weight.row_sum": torch.ones(3),
        "param_groups.layers.0.0.weight.rho": 0.5,
    }
    container.load_state_dict(more)
    assert_same(container.state_dict(), saved)


def test_the_loaded_dicts_tensors_are_copied(choice, parts, train, assert_same):
    source = choice.container(copy.deepcopy(parts))
    train(source, source.model_parts, [0])
    loaded = copy.deepcopy(source.state_dict())
    before = dict(loaded)
    values = copy.deepcopy(loaded)
    container = choice.container(parts)
    container.load_state_dict(loaded)
    train(container, parts, [1])
    assert all(loaded[key] is before[key] for key in before)
    assert_same(loaded, values)


def test_state_tensors_keep_their_identity_and_dtype(choice, parts, train):
    container = choice.container(parts)
    train(container, parts, [0])
    tensors = {p: dict(state) for p, state in container.state.items()}
    loaded = {
        key: value.double() if isinstance(value, torch.Tensor) else value
        for key, value in container.state_dict().items()
    }
    container.load_state_dict(loaded)
    for param, state in tensors.items():
        for name, tensor in state.items():
            assert container.state[param][name] is tensor
            assert tensor.dtype == torch.float32


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_loading_keeps_the_moments_dtype(model, train, assert_same, moments):
    model.to(torch.float32 if moments == torch.bfloat16 else torch.bfloat16)
    kwargs = {"lr": 1e-2, "state_dtype": moments}
    source = OptimizersContainer([model], FusedAdamW, kwargs)
    train(source, [model], [0, 1])
    saved = copy.deepcopy(source.state_dict())
    container = OptimizersContainer([copy.deepcopy(model)], FusedAdamW, kwargs)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    assert saved["state.layers.0.0.weight.exp_avg"].dtype == moments


def test_a_python_number_serves_as_step(choice, parts):
    container = choice.container(parts)
    saved = {
        key: 7.0 if key.endswith(".step") else value
        for key, value in container.state_dict().items()
    }
    container.load_state_dict(saved)
    assert all(torch.equal(s["step"], torch.tensor(7.0)) for s in container.state.values())


def test_hyperparameters_come_from_the_dict_but_not_how_to_compute(parts):
    saving = {"lr": 0.5, "betas": (0.1, 0.2), "eps": 1e-3, "weight_decay": 0.25, "maximize": True}
    source = OptimizersContainer(
        copy.deepcopy(parts), torch.optim.AdamW, {**saving, "foreach": True}
    )
    container = OptimizersContainer(parts, torch.optim.AdamW, {"lr": 1.0, "fused": True})
    container.load_state_dict(source.state_dict())
    for group in container.param_groups:
        assert {name: group[name] for name in saving} == saving
        assert group["fused"] is True
        assert group["foreach"] is None


def test_a_tensor_lr_stays_the_same_tensor(parts):
    lr = torch.tensor(0.5)
    container = OptimizersContainer(parts, FusedAdamW, {"lr": lr})
    for group in container.param_groups:
        group["lr"] = lr
    saved = OptimizersContainer(copy.deepcopy(parts), FusedAdamW, {"lr": 0.25}).state_dict()
    container.load_state_dict(saved)
    assert all(group["lr"] is lr for group in container.param_groups)
    assert lr == 0.25
    plain = OptimizersContainer(copy.deepcopy(parts), FusedAdamW, {"lr": 1.0})
    plain.load_state_dict(container.state_dict())
    assert plain.param_groups[0]["lr"] == 0.25
    assert isinstance(plain.param_groups[0]["lr"], float)


def test_initial_lr_is_loaded_if_there_and_kept_if_not(choice, parts):
    container = choice.container(parts)
    without = copy.deepcopy(container.state_dict())
    LRSchedulersContainer(container, lambda step: 0.5)
    with_initial = copy.deepcopy(container.state_dict())
    assert with_initial["param_groups.layers.0.0.weight.initial_lr"] == 1e-2
    container.load_state_dict(without)
    assert container.param_groups[0]["initial_lr"] == 1e-2
    assert container.param_groups[0]["lr"] == 1e-2
    for key in with_initial:
        if key.endswith("initial_lr"):
            with_initial[key] = 0.75
    container.load_state_dict(with_initial)
    assert container.param_groups[1]["initial_lr"] == 0.75


BIAS = "layers.2.1.bias"
WRONG = {
    "shape": (
        f"state.{BIAS}.exp_avg",
        torch.zeros(5, 1),
        rf"'state\.{BIAS}\.exp_avg' has shape \(5, 1\), expected \(5,\)",
    ),
    "kind": (
        f"state.{BIAS}.exp_avg",
        {},
        rf"'state\.{BIAS}\.exp_avg' is of type dict, expected a tensor of shape \(5,\)",
    ),
    "number": (f"state.{BIAS}.exp_avg", 0.0, "is of type float, expected a tensor"),
    "step": (f"state.{BIAS}.step", torch.zeros(2), "expected a count of steps"),
    "lr": (f"param_groups.{BIAS}.lr", "fast", r"lr' is 'fast', expected a value like 0\.01"),
    "betas": (f"param_groups.{BIAS}.betas", (0.9,), r"betas' is \(0\.9,\), expected"),
}


@pytest.mark.parametrize(("key", "value", "message"), WRONG.values(), ids=WRONG)
def test_a_value_that_does_not_fit_is_named_and_nothing_changes(
    choice, parts, train, assert_same, key, value, message
):
    key, message = map(choice.in_its_words, (key, message))
    source = choice.container(copy.deepcopy(parts))
    train(source, source.model_parts, [0, 1])
    container = choice.container(parts)
    train(container, parts, [2])
    before = copy.deepcopy(container.state_dict())
    with pytest.raises(ValueError, match=message):
        container.load_state_dict(with_value(source.state_dict(), key, value))
    assert_same(container.state_dict(), before)


@pytest.mark.parametrize(("name", "value"), [("maximize", True), ("lr", 0.5)])
def test_all_parameters_options_are_read(choice, parts, assert_same, name, value):
    container = choice.container(parts)
    before = copy.deepcopy(container.state_dict())
    message = (
        rf"'param_groups\.{BIAS}\.{name}' is {value} but 'param_groups\.layers\.2\.0\.weight\."
        rf"{name}' is .*, and both parameters are in one group here"
    )
    with pytest.raises(ValueError, match=message):
        container.load_state_dict(with_value(before, f"param_groups.{BIAS}.{name}", value))
    assert_same(container.state_dict(), before)


@pytest.mark.parametrize(
    "key", [f"state.{BIAS}.step", f"state.{BIAS}.{{}}", f"param_groups.{BIAS}.weight_decay"]
)
def test_a_missing_key_is_named_and_nothing_changes(choice, parts, train, assert_same, key):
    key = key.format(choice.states[-1])
    source = choice.container(copy.deepcopy(parts))
    train(source, source.model_parts, [0, 1])
    saved = source.state_dict()
    del saved[key]
    container = choice.container(parts)
    train(container, parts, [2])
    before = copy.deepcopy(container.state_dict())
    with pytest.raises(KeyError, match=key):
        container.load_state_dict(saved)
    assert_same(container.state_dict(), before)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "name"),
    [
        ((FusedAdamW, {"amsgrad": True}), (FusedAdamW, {}), "amsgrad"),
        ((FusedAdamW, {}), (FusedAdam, {}), "decoupled_weight_decay"),
        ((torch.optim.Adam, {}), (torch.optim.AdamW, {}), "decoupled_weight_decay"),
        ((FusedAdam, {"bias_correction": False}), (FusedAdam, {}), "bias_correction"),
        ((FusedAdam, {}), (FusedAdam, {"bias_correction": False}), "bias_correction"),
        ((FusedSGD, {"momentum": 0.9}), (FusedSGD, {}), "momentum"),
    ],
)
def test_a_dict_of_another_algorithm_is_refused(parts, saved_as, loaded_as, name):
    saved = OptimizersContainer(copy.deepcopy(parts), *saved_as).state_dict()
    container = OptimizersContainer(parts, *loaded_as)
    with pytest.raises(ValueError, match=f"{name}' is .*, this optimizer was built with"):
        container.load_state_dict(saved)


KINDS = {
    "adam": (torch.optim.AdamW, FusedAdamW, {}),
    "sgd": (torch.optim.SGD, FusedSGD, {"momentum": 0.9}),
    "lion": (FusedLion, FusedLion, {}),
}


@pytest.mark.parametrize("written_by", [0, 1], ids=["torch", "ours"])
@pytest.mark.parametrize(("saved_as", "loaded_as"), itertools.permutations(KINDS, 2))
def test_the_algorithm_of_a_dict_is_named(
    parts, train, assert_same, saved_as, loaded_as, written_by
):
    *classes, options = KINDS[saved_as]
    source = OptimizersContainer(copy.deepcopy(parts), classes[written_by], options)
    train(source, source.model_parts, [0])
    *_, cls, options = KINDS[loaded_as]
    container = OptimizersContainer(parts, cls, options)
    train(container, parts, [1])
    before = copy.deepcopy(container.state_dict())
    with pytest.raises(ValueError, match=rf"0\.0\.weight' is of {saved_as}, expected {loaded_as}"):
        container.load_state_dict(source.state_dict())
    assert_same(container.state_dict(), before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("classes", itertools.permutations([torch.optim.SGD, FusedSGD]))
def test_sgd_goes_on_under_the_other_class(parts, train, classes, momentum):
    copies = copy.deepcopy(parts)
    options = {"lr": 0.1, "momentum": momentum, "dampening": 0.25}
    source = OptimizersContainer(parts, classes[0], options)
    train(source, parts, [0, 1])
    for part, other in zip(parts, copies, strict=True):
        other.load_state_dict(part.state_dict())
    resumed = OptimizersContainer(copies, classes[1], options)
    resumed.load_state_dict(source.state_dict())
    train(source, parts, [2, 3])
    train(resumed, copies, [2, 3])
    for part, other in zip(parts, copies, strict=True):
        for one, two in zip(part.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.RMSprop])
def test_gradients_do_not_keep_state_from_being_created(parts, set_grads, cls, assert_same):
    """torch creates none while there are gradients."""
    source = OptimizersContainer(copy.deepcopy(parts), cls, {"lr": 1e-2})
    set_grads(source.model_parts, 0)
    gradients = [param.grad for part in source.model_parts for param in part.parameters()]
    kept = [gradient.clone() for gradient in gradients]
    names = source.state_dict().keys()
    source.step()
    saved = source.state_dict()
    assert names == saved.keys()
    assert all(map(torch.equal, gradients, kept))
    container = OptimizersContainer(parts, cls, {"lr": 1e-2})
    set_grads(parts, 1)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)


def test_numbers_in_a_users_state_stay_numbers(parts, set_grads):
    class Counting(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                entry = self.state[param]
                entry["step"] = entry.get("step", 0) + 1
                entry["moment"] = param.grad.clone()

    container = OptimizersContainer(parts, Counting, {})
    set_grads(parts, 0)
    container.step()
    saved = copy.deepcopy(container.state_dict())
    container.step()
    container.load_state_dict(saved)
    assert all(type(entry["step"]) is int for entry in container.state.values())
    assert {entry["step"] for entry in container.state.values()} == {1}


def test_tensor_betas_stay_the_given_tensors(model):
    betas = torch.tensor(0.9), torch.tensor(0.99)
    container = OptimizersContainer([model], FusedAdamW, {"betas": betas})
    saved = copy.deepcopy(container.state_dict())
    betas[0].fill_(0.5)
    container.load_state_dict(saved)
    assert container.param_groups[0]["betas"] == betas
    assert betas[0].item() == pytest.approx(0.9)
