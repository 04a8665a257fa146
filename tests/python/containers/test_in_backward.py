"""OptimizersInBackwardContainer: the same training, each update inside backward."""

import copy

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)


def in_backward(choice, parts):
    return OptimizersInBackwardContainer(parts, choice.cls, choice.all_kwargs())


def backward(parts, seed):
    """One backward through all parts in a row; a part without anything to train is skipped over."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    for part in parts:
        x = part(x)
    x.square().sum().backward()


@pytest.fixture
def same_training(choice, assert_same):
    """Trains copies of the parts with a plain container and the parts in backward; compares."""

    def same_training(parts, seeds=range(3)):
        copies = copy.deepcopy(parts)
        container, plain = in_backward(choice, parts), choice.container(copies)
        for seed in seeds:
            backward(parts, seed)
            container.step()
            container.zero_grad()
            backward(copies, seed)
            plain.step()
            plain.zero_grad()
        for part, other in zip(parts, copies, strict=True):
            assert_same(part, other)
        return container, plain

    return same_training


def test_trains_like_the_plain_container(same_training, parts):
    container, _ = same_training(parts)
    assert len(container) == len(list(container)) == 12
    assert all(len(opt.param_groups[0]["params"]) == 1 for opt in container)


def test_gradients_are_gone_after_backward(choice, parts):
    container = in_backward(choice, parts)
    before = copy.deepcopy(parts)
    backward(parts, 0)
    container.step()
    params = [p for part in parts for p in part.parameters()]
    assert all(p.grad is None for p in params)
    assert not any(map(torch.equal, params, (p for part in before for p in part.parameters())))
    assert torch.nn.utils.clip_grad_norm_(params, 1.0) == 0


def test_seed_bug_a_frozen_parameter_raised(same_training, parts):
    parts[0].layers["0"][0].weight.requires_grad_(False)
    parts[1].layers["2"][1].requires_grad_(False)
    container, _ = same_training(parts)
    assert len(container) == 9


def test_a_part_without_trainable_parameters(same_training, parts, assert_same):
    parts[0].requires_grad_(False)
    container, plain = same_training(parts)
    assert len(container) == 4
    assert_same(container.state_dict(), plain.state_dict())


def test_nothing_to_train_is_refused(choice, parts):
    for part in parts:
        part.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model parts is trainable"):
        in_backward(choice, parts)


def test_a_tied_parameter_is_stepped_once_per_backward(same_training, model):
    model.layers["1"][0].weight = model.layers["0"][0].weight
    container, _ = same_training([model])
    assert len(container) == 7
    assert container.state[model.layers["0"][0].weight]["step"] == 3


def test_a_parameter_frozen_later_is_no_longer_stepped(choice, parts):
    container = in_backward(choice, parts)
    backward(parts, 0)
    weight = parts[0].layers["0"][0].weight.requires_grad_(False)
    before = weight.clone()
    backward(parts, 1)
    assert torch.equal(weight, before)
    assert container.state[weight]["step"] == 1


@pytest.mark.parametrize("args", [(), (None,), (1, 2)])
@pytest.mark.parametrize("kwargs", [{}, {"set_to_none": True, "closure": None}])
def test_seed_bug_step_and_zero_grad_took_no_arguments(choice, parts, args, kwargs, assert_same):
    container = in_backward(choice, parts)
    before = copy.deepcopy(parts)
    next(parts[0].parameters()).grad = torch.ones(5, 5)
    assert container.step(*args, **kwargs) is None
    assert container.zero_grad(*args, **kwargs) is None
    assert torch.equal(next(parts[0].parameters()).grad, torch.ones(5, 5))
    for part, other in zip(parts, before, strict=True):
        assert_same(part, other)


def test_hooks_fire_once_per_step_after_the_updates(choice, parts):
    container = in_backward(choice, parts)
    seen = []
    container.register_step_pre_hook(lambda opt, *_: seen.append(("pre", opt)))
    container.register_step_post_hook(lambda opt, *_: seen.append(("post", opt)))
    backward(parts, 0)
    assert seen == []
    container.step()
    assert seen == [("pre", container), ("post", container)]


def test_follows_a_schedule(choice, parts, recwarn):
    container = in_backward(choice, parts)
    schedulers = LRSchedulersContainer(container, lambda step: 1.0 if step == 0 else 0.0)
    backward(parts, 0)
    container.step()
    schedulers.step()
    before = copy.deepcopy(parts)
    backward(parts, 1)
    for part, other in zip(parts, before, strict=True):
        assert all(map(torch.equal, part.parameters(), other.parameters()))
    assert [str(warning.message) for warning in recwarn] == []
    assert set(schedulers.get_metrics()) == {"lr/" + choice.cls.__name__.removeprefix("Fused")}


# State dict


def test_seed_bug_only_the_first_parameters_state_was_saved(same_training, parts, assert_same):
    container, plain = same_training(parts)
    assert_same(container.state_dict(), plain.state_dict())


def test_state_dict_before_the_first_backward(choice, parts, assert_same):
    copies = copy.deepcopy(parts)
    container, plain = in_backward(choice, parts), choice.container(copies)
    assert_same(container.state_dict(), plain.state_dict())
    for seed in range(2):
        backward(parts, seed)
        backward(copies, seed)
        plain.step()
        plain.zero_grad()
    for part, other in zip(parts, copies, strict=True):
        assert_same(part, other)


def test_seed_bug_only_the_first_parameters_state_was_loaded(choice, parts, train, assert_same):
    copies = copy.deepcopy(parts)
    plain = choice.container(copies)
    train(plain, copies, [0, 1])
    saved = copy.deepcopy(plain.state_dict())
    container = in_backward(choice, parts)
    container.load_state_dict(saved)
    assert_same(container.state_dict(), saved)
    # and on with both from the same place
    for part, other in zip(parts, copies, strict=True):
        part.load_state_dict(other.state_dict())
    backward(parts, 5)
    backward(copies, 5)
    plain.step()
    for part, other in zip(parts, copies, strict=True):
        assert_same(part, other)


def test_parameters_may_have_hyperparameters_of_their_own(choice, parts):
    container = in_backward(choice, parts)
    saved = container.state_dict()
    saved["param_groups.layers.0.0.weight.lr"] = 0.5
    container.load_state_dict(saved)
    assert sorted(group["lr"] for group in container.param_groups)[-2:] == [1e-2, 0.5]


# What it refuses


@pytest.mark.parametrize("kwargs", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}])
def test_a_global_norm_is_refused(parts, kwargs):
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))} needs every gradient before"):
        OptimizersInBackwardContainer(parts, FusedAdamW, {"lr": 1e-2, **kwargs})
    OptimizersInBackwardContainer(
        parts, FusedAdamW, {"lr": 1e-2, "max_grad_norm": None, "skip_nonfinite": False}
    )


def test_a_refused_container_leaves_no_hook_behind(parts, assert_same):
    with pytest.raises(ValueError, match="weight_decay"):
        OptimizersInBackwardContainer(parts, torch.optim.AdamW, {"weight_decay": -1.0})
    before = copy.deepcopy(parts)
    backward(parts, 0)
    for part, other in zip(parts, before, strict=True):
        assert_same(part, other)


def test_a_parameter_shared_by_two_parts_is_refused(choice, parts):
    parts[1].layers["2"][0].weight = parts[0].layers["1"][0].weight
    with pytest.raises(ValueError, match="two optimizers would step it"):
        in_backward(choice, parts)


def test_is_an_optimizers_container(choice, parts):
    container = in_backward(choice, parts)
    assert isinstance(container, OptimizersContainer)
    assert [p for group in container.param_groups for p in group["params"]] == [
        p for part in parts for p in part.parameters()
    ]
    with pytest.raises(NotImplementedError):
        container.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
