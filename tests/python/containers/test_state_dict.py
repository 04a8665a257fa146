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

from ...support.problems import through_file
from .conftest import assert_same, parameters, set_grads, train

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ADAM = "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused"
SHARED = "algorithm lr weight_decay maximize"
HYPERS = {
    FusedLion: f"{SHARED} betas",
    FusedSGD: f"{SHARED} momentum dampening nesterov foreach differentiable fused",
}


def expected_keys(parts, choice, *more):
    names = [n for part in parts for n, p in part.named_parameters() if p.requires_grad]
    hypers = HYPERS.get(choice.cls, f"{ADAM} decoupled_weight_decay").split()
    return {f"state.{name}.{key}" for name in names for key in ("step", *choice.states)} | {
        f"param_groups.{name}.{key}" for name in names for key in (*hypers, *more)
    }


def saved_by(container, seeds=(0, 1)):
    """Returns the container's state dict after some steps."""
    train(container, container.model_parts, seeds)
    return copy.deepcopy(container.state_dict())


def torchs(parts, optimizers):
    """Returns torch's own flat dict of parts and their optimizers."""
    merged = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        merged |= get_optimizer_state_dict(part, optimizer, options=FLAT)
    return merged


# Keys and values


def tied(parts):
    parts[0].layers["1"][0].weight = parts[0].layers["0"][0].weight


def frozen(parts):
    parts[0].layers["1"].requires_grad_(False)


def compiled(parts):
    parts[0] = torch.compile(parts[0])
    assert "_orig_mod" in next(iter(parts[0].state_dict()))


@pytest.mark.parametrize("change", [list, tied, frozen, compiled])
@pytest.mark.parametrize("steps", [0, 2])
def test_keys_and_values_are_torchs(choice, parts, change, steps):
    plain = list(parts)
    change(parts)
    container, fresh = choice.container(parts), choice.container(copy.deepcopy(parts))
    saved = saved_by(container, range(steps))
    assert set(saved) == expected_keys(plain, choice)
    if steps and change is not tied:
        assert_same(saved, torchs(parts, container))
    assert saved["state.layers.2.1.bias.step"] == steps
    fresh.load_state_dict(through_file(saved))
    assert_same(fresh.state_dict(), saved)
    LRSchedulersContainer(container, lambda step: 1.0)
    assert set(container.state_dict()) == expected_keys(plain, choice, "initial_lr")


def test_names_follow_a_module_that_changes(choice, parts):
    container = choice.container(parts)
    container.state_dict()
    moved = nn.Linear(3, 2)
    container.optimizers[0].add_param_group({"params": [moved.weight]})
    for name in ("first", "second"):
        setattr(parts[0], name, moved)
        keys = container.state_dict().keys()
        added = {key.split(".")[1] for key in keys} - {"layers"}
        assert added == {name} and f"state.{name}.weight.{choice.states[0]}" in keys
        delattr(parts[0], name)


@pytest.mark.parametrize("gradients", [False, True])
def test_state_dict_before_the_first_step_changes_nothing(choice, parts, gradients):
    copies = copy.deepcopy(parts)
    container, undisturbed = choice.container(parts), choice.container(copies)
    fired = []
    for optimizer in [container, *container]:
        optimizer.register_step_post_hook(lambda *_: fired.append(1))
    for group in container.param_groups + undisturbed.param_groups:
        group |= {"eps": 0.0} if "eps" in group else {}  # such as a step of 0 / 0
    for models in (parts, copies) if gradients else ():
        set_grads(models, 0)
    before = [param.grad for param in parameters(parts)]
    saved = container.state_dict()
    for key in saved:
        assert not key.startswith("state.") or not saved[key].any(), key
    step = saved["state.layers.2.1.bias.step"]
    assert (step.shape, step.dtype) == ((), torch.float32)
    container.load_state_dict(saved)
    assert container.param_groups[0]["lr"] == 1e-2
    assert fired == []
    for param, grad, other in zip(parameters(parts), before, parameters(copies), strict=True):
        assert param.grad is grad and (grad is None or torch.equal(grad, other.grad))
    assert_same(parts, copies)
    for optimizer, models in ((container, parts), (undisturbed, copies)):
        if gradients:
            optimizer.step()
        train(optimizer, models, range(3))
    assert_same(container.state_dict(), undisturbed.state_dict())
    assert_same(parts, copies)


def test_compat_torchtitan_counts_the_step_that_makes_the_state(choice, parts):
    """torch's get_optimizer_state_dict, which torchtitan's container uses, counts such a step."""
    copies = copy.deepcopy(parts)
    container = OptimizersContainer(parts, choice.cls, choice.all_kwargs(), compat="torchtitan")
    separate = [choice.optimizer(part.parameters()) for part in copies]
    expected = torchs(copies, separate)
    assert_same(container.state_dict(), expected)
    assert expected["state.layers.0.0.weight.step"] == 1
    for models, optimizers in ((parts, [container]), (copies, separate)):
        for optimizer in optimizers:
            train(optimizer, models, range(1))
    assert container.state_dict()["state.layers.0.0.weight.step"] == 2  # later calls make no step
    assert_same(parts, copies)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_state_made_for_torchs_classes_is_what_their_first_step_makes(
    model, cls, fused, capturable, default
):
    model.layers["0"].to(torch.bfloat16)
    channels_last = torch.ones(5, 4, 3, 3).to(memory_format=torch.channels_last)
    model.layers["1"][0].weight = nn.Parameter(channels_last)
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
        kinds = [
            [(name, t.shape, t.dtype, t.device, t.stride()) for name, t in made.items()]
            for made in (ours.state[param], state)
        ]
        assert kinds[0] == kinds[1]
        assert not any(made.any() for made in ours.state[param].values())


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"capturable": True}, {}])
def test_step_counts_are_where_torchs_step_reads_them(kwargs):
    """The meta device stands for any device except the CPU."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(3, device="meta"))], **kwargs)
    init_state(optimizer)
    (state,) = optimizer.state.values()
    assert state["step"].device.type == ("meta" if kwargs else "cpu")
    assert state["exp_avg"].device.type == "meta"


def test_a_parameter_without_gradient_has_state_of_step_0(choice, parts):
    container, other = choice.container(parts), choice.container(copy.deepcopy(parts))
    unused = parts[0].layers["0"][0].weight
    set_grads(parts, 0)
    unused.grad = None
    container.step()
    saved = copy.deepcopy(container.state_dict())
    assert set(saved) == expected_keys(parts, choice)
    assert saved["state.layers.0.0.weight.step"] == 0
    assert saved["state.layers.0.0.bias.step"] == 1
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    train(container, parts, [1])
    assert container.state[unused]["step"] == 1


def test_the_same_name_in_two_parts_is_rejected(choice, model):
    container = choice.container([model, copy.deepcopy(model)])
    saved = choice.container([copy.deepcopy(model)]).state_dict()
    for call in (container.state_dict, lambda: container.load_state_dict(saved)):
        with pytest.raises(ValueError, match=r"'layers\.0\.0\.weight' is in more than one model"):
            call()
    container.step()  # training such a pair works


@pytest.mark.parametrize("resumed", [False, True])
def test_a_parameter_frozen_after_stepping_loads_its_state(choice, parts, resumed):
    copies = copy.deepcopy(parts)
    container, never_frozen = choice.container(parts), choice.container(copies)
    saved_by(never_frozen)
    train(container, parts, [0, 1])
    block = parts[0].layers["0"].requires_grad_(False)
    saved = copy.deepcopy(container.state_dict())
    assert saved["state.layers.0.0.weight.step"] == 2
    train(container, parts, [2])  # the others continue
    if resumed:
        block.requires_grad_(True)
        container = choice.container(parts)
        block.requires_grad_(False)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    block.requires_grad_(True)
    for part, other in zip(parts, copies, strict=True):
        part.load_state_dict(other.state_dict())
    train(container, parts, [3])
    train(never_frozen, copies, [3])
    assert_same(parts, copies)


def test_state_of_a_frozen_parameter_is_not_demanded_but_complete(choice, parts):
    container = choice.container(parts)
    parts[0].layers["0"].requires_grad_(False)
    saved = saved_by(container, [0])
    saved = {key: saved[key] for key in saved if not key.startswith("state.layers.0.")}
    container.load_state_dict(saved)
    saved["state.layers.0.0.weight.step"] = torch.tensor(3.0)
    with pytest.raises(KeyError, match=rf"layers\.0\.0\.weight\.{choice.states[0]}' is missing"):
        container.load_state_dict(saved)


# Loading


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(FusedAdamW, torch.optim.AdamW), (FusedAdam, torch.optim.Adam)]
)
@pytest.mark.parametrize("steps", [0, 2])
def test_state_moves_between_torch_and_ours_bitwise(parts, ours, theirs, fused, amsgrad, steps):
    """torch's set_optimizer_state_dict, which a stock container calls, reads our dict, too."""
    kwargs = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-7, "amsgrad": amsgrad}
    saved = saved_by(OptimizersContainer(parts, theirs, {**kwargs, "fused": fused}), range(steps))
    fields = {"fused": True, "foreach": False} if fused else {}
    middle = OptimizersContainer(copy.deepcopy(parts), ours, {"amsgrad": amsgrad, **fields})
    middle.load_state_dict(saved)
    assert middle.param_groups[0]["betas"] == (0.8, 0.99)
    back = OptimizersContainer(copy.deepcopy(parts), theirs, {"amsgrad": amsgrad, "fused": fused})
    back.load_state_dict(middle.state_dict())
    assert_same(back.state_dict(), saved)
    if fused:
        copies = copy.deepcopy(parts)
        stock = [theirs(part.parameters(), amsgrad=amsgrad, fused=True) for part in copies]
        given = copy.deepcopy(middle.state_dict())
        for part, optimizer in zip(copies, stock, strict=True):
            set_optimizer_state_dict(part, optimizer, given, options=FLAT)
        assert_same(torchs(copies, stock), given)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("classes", [(torch.optim.SGD, FusedSGD), (FusedSGD, torch.optim.SGD)])
def test_sgd_goes_on_under_the_other_class(parts, classes, momentum):
    copies = copy.deepcopy(parts)
    options = {"lr": 0.1, "momentum": momentum, "dampening": 0.25}
    source, resumed = map(OptimizersContainer, (parts, copies), classes, [options] * 2)
    resumed.load_state_dict(saved_by(source))
    for part, other in zip(parts, copies, strict=True):
        other.load_state_dict(part.state_dict())
    train(source, parts, [2, 3])
    train(resumed, copies, [2, 3])
    torch.testing.assert_close(parameters(parts), parameters(copies))


class Counting(torch.optim.Optimizer):
    """A user's optimizer, whose state has a number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            entry = self.state[param]
            entry["step"] = entry.get("step", 0) + 1
            entry["moment"] = param.grad.clone()


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.RMSprop, Counting])
def test_optimizers_of_other_kinds(parts, cls):
    """torch itself creates no state while there are gradients."""
    source = OptimizersContainer(copy.deepcopy(parts), cls, {"lr": 1e-2})
    set_grads(source.model_parts, 0)
    gradients = [param.grad for param in parameters(source.model_parts)]
    kept = [gradient.clone() for gradient in gradients]
    names = source.state_dict().keys()
    source.step()
    saved = copy.deepcopy(source.state_dict())
    assert cls is Counting or names == saved.keys()
    assert_same(gradients, kept)
    container = OptimizersContainer(parts, cls, {"lr": 1e-2})
    train(container, parts, [1] * (cls is Counting))
    set_grads(parts, 1)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    kinds = {type(entry["step"]) for entry in container.state.values()}
    assert kinds == {int if cls is Counting else torch.Tensor}


def test_a_load_fills_the_tensors_that_are_there(choice, parts):
    container = choice.container(parts)
    train(container, parts, [0])
    held = {p: dict(state) for p, state in container.state.items()}
    expected = copy.deepcopy(container.state_dict())
    number = "state.layers.0.0.weight.step"
    loaded = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in expected.items()}
    foreign = {
        "state.other.weight.exp_avg": torch.ones(3),
        "param_groups.other.weight.lr": 7.0,
        "state.layers.0.0.weight.row_sum": torch.ones(3),
        "param_groups.layers.0.0.weight.rho": 0.5,
    }
    loaded |= foreign | {number: 7.0}
    given, values = dict(loaded), copy.deepcopy(loaded)
    container.load_state_dict(loaded)
    assert_same(container.state_dict(), expected | {number: torch.tensor(7.0)})
    train(container, parts, [1])
    assert all(loaded[key] is given[key] for key in given)
    assert_same(loaded, values)
    for param, state in held.items():
        assert all(container.state[param][name] is tensor for name, tensor in state.items())


def test_hyperparameters_come_from_the_dict_but_not_how_to_compute(parts):
    saving = {"lr": 0.5, "betas": (0.1, 0.2), "eps": 1e-3, "weight_decay": 0.25, "maximize": True}
    source = OptimizersContainer(parts, torch.optim.AdamW, {**saving, "foreach": True})
    container = OptimizersContainer(parts, torch.optim.AdamW, {"lr": 1.0, "fused": True})
    container.load_state_dict(source.state_dict())
    for group in container.param_groups:
        assert {name: group[name] for name in saving} == saving
        assert (group["fused"], group["foreach"]) == (True, None)


def test_tensor_hyperparameters_stay_the_given_tensors(parts):
    lr, betas = torch.tensor(0.5), (torch.tensor(0.9), torch.tensor(0.99))
    container = OptimizersContainer(parts, FusedAdamW, {"lr": lr, "betas": betas})
    for group in container.param_groups:
        group["lr"] = lr
    plain = OptimizersContainer(parts, FusedAdamW, {"lr": 0.25, "betas": (0.8, 0.99)})
    container.load_state_dict(plain.state_dict())
    for group in container.param_groups:
        assert group["lr"] is lr and group["betas"] == betas
    assert (float(lr), float(betas[0])) == pytest.approx((0.25, 0.8))
    plain.param_groups[0]["lr"] = 1.0
    plain.load_state_dict(container.state_dict())
    assert plain.param_groups[0]["lr"] == 0.25
    assert isinstance(plain.param_groups[0]["lr"], float)


def test_initial_lr_is_loaded_if_there_and_kept_if_not(choice, parts):
    container = choice.container(parts)
    without = copy.deepcopy(container.state_dict())
    LRSchedulersContainer(container, lambda step: 0.5)
    saved = copy.deepcopy(container.state_dict())
    assert saved["param_groups.layers.0.0.weight.initial_lr"] == 1e-2
    container.load_state_dict(without)
    assert {g[name] for g in container.param_groups for name in ("lr", "initial_lr")} == {1e-2}
    container.load_state_dict(saved | {key: 0.75 for key in saved if key.endswith("initial_lr")})
    assert container.param_groups[1]["initial_lr"] == 0.75


# What is rejected, and changes nothing


BIAS, MISSING = "layers.2.1.bias", object()
IN_ONE_GROUP = r"but 'param_groups\.layers\.2\.0\.weight\.{}' is .*, and both .* in one group"
WRONG = [
    ("state", "exp_avg", torch.zeros(5, 1), r"exp_avg' has shape \(5, 1\), expected \(5,\)"),
    ("state", "exp_avg", {}, r"exp_avg' is of type dict, expected a tensor of shape \(5,\)"),
    ("state", "exp_avg", 0.0, "is of type float, expected a tensor"),
    ("state", "step", torch.zeros(2), "expected a count of steps"),
    ("param_groups", "lr", "fast", r"lr' is 'fast', expected a value like 0\.01"),
    ("param_groups", "betas", (0.9,), r"betas' is \(0\.9,\), expected"),
    ("param_groups", "maximize", True, "maximize' is True " + IN_ONE_GROUP.format("maximize")),
    ("param_groups", "lr", 0.5, r"lr' is 0\.5 " + IN_ONE_GROUP.format("lr")),
    ("state", "step", MISSING, ""),
    ("state", "exp_avg", MISSING, ""),
    ("param_groups", "weight_decay", MISSING, ""),
]


@pytest.mark.parametrize(("where", "name", "value", "message"), WRONG)
def test_a_value_that_does_not_fit_is_named_and_nothing_changes(
    choice, parts, where, name, value, message
):
    saved = saved_by(choice.container(copy.deepcopy(parts)))
    key = choice.in_its_words(f"{where}.{BIAS}.{name}")
    saved[key] = value
    container = choice.container(parts)
    before = saved_by(container, [2])
    error = ValueError
    if value is MISSING:
        error, message = KeyError, f"'{key}' is missing"
        del saved[key]
    with pytest.raises(error, match=choice.in_its_words(message)) as raised:
        container.load_state_dict(saved)
    assert key in str(raised.value)
    assert_same(container.state_dict(), before)


KINDS = {
    "adam": (torch.optim.AdamW, FusedAdamW, {}),
    "sgd": (torch.optim.SGD, FusedSGD, {"momentum": 0.9}),
    "lion": (FusedLion, FusedLion, {}),
}
OTHERS = [
    ((FusedAdamW, {"amsgrad": True}), (FusedAdamW, {}), "amsgrad"),
    ((FusedAdamW, {}), (FusedAdam, {}), "decoupled_weight_decay"),
    ((torch.optim.Adam, {}), (torch.optim.AdamW, {}), "decoupled_weight_decay"),
    ((FusedAdam, {"bias_correction": False}), (FusedAdam, {}), "bias_correction"),
    ((FusedAdam, {}), (FusedAdam, {"bias_correction": False}), "bias_correction"),
    ((FusedSGD, {"momentum": 0.9}), (FusedSGD, {}), "momentum"),
    ((FusedSGD, {"decoupled_weight_decay": True}), (FusedSGD, {}), "decoupled_weight_decay"),
    ((FusedSGD, {}), (FusedSGD, {"decoupled_weight_decay": True}), "decoupled_weight_decay"),
    *(
        ((cls, KINDS[of][-1]), KINDS[loaded][1:], rf"0\.0\.weight' is of {of}, expected {loaded}")
        for of, loaded in itertools.permutations(KINDS, 2)
        for cls in KINDS[of][:2]
    ),
]


@pytest.mark.parametrize(("saved_as", "loaded_as", "message"), OTHERS)
def test_a_dict_of_another_algorithm_is_refused(parts, saved_as, loaded_as, message):
    saved = saved_by(OptimizersContainer(copy.deepcopy(parts), *saved_as), [0])
    container = OptimizersContainer(parts, *loaded_as)
    before = saved_by(container, [1])
    if "expected" not in message:
        message += "' is .*, this optimizer was built with"
    with pytest.raises(ValueError, match=message):
        container.load_state_dict(saved)
    assert_same(container.state_dict(), before)


DECAYS = [{"cautious_weight_decay": True}, {"decay_follows_lr": 0.2}]


@pytest.mark.parametrize(("saved", "held"), itertools.permutations([{}, *DECAYS], 2))
@pytest.mark.parametrize("cls", [FusedAdamW, FusedLion, FusedSGD])
def test_how_weights_decay_is_taken_from_a_dict_that_says_it(parts, cls, saved, held):
    """As the plain optimizers take it. A dict without the key changes nothing."""
    options = {"lr": 0.1, "weight_decay": 0.5}
    options |= {"decoupled_weight_decay": True} if cls is FusedSGD else {}
    source = OptimizersContainer(copy.deepcopy(parts), cls, options | saved)
    target = OptimizersContainer(parts, cls, options | held)
    plain = cls(parts[0].parameters(), **options, **held)
    plain.load_state_dict(cls(parts[0].parameters(), **options, **saved).state_dict())
    target.load_state_dict(saved_by(source))
    for group in (*target.param_groups, *plain.param_groups):
        assert {k: group[k] for k in group if k in {**DECAYS[0], **DECAYS[1]}} == held | saved


def test_a_decay_that_the_optimizer_cannot_have_is_refused(parts):
    saved = saved_by(OptimizersContainer(copy.deepcopy(parts), FusedAdam, {}))
    container = OptimizersContainer(parts, FusedAdam, {})
    before = saved_by(container, [1])
    saved |= {key.replace(".lr", ".decay_follows_lr"): 0.1 for key in saved if key.endswith(".lr")}
    with pytest.raises(ValueError, match="decay_follows_lr require decoupled_weight_decay"):
        container.load_state_dict(saved)
    assert_same(container.state_dict(), before)


def test_torchs_nested_form_is_not_mistaken_for_ours(choice, model):
    nested = get_optimizer_state_dict(model, choice.optimizer(model.parameters()))
    with pytest.raises(KeyError, match="is missing"):
        choice.container([model]).load_state_dict(nested)
