"""A model that is cast to 16 bits after its optimizer was built."""

import copy
import warnings

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedSGD
from torchopt_ext.containers import OptimizersContainer

BF16 = torch.bfloat16


def stepped(model, optimizer):
    """Makes a step, and returns what it warned of."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("before", [0, 1])
def test_a_cast_is_warned_of_once(dtype, before):
    """Before the first step nothing has been recorded but the parameters' dtypes."""
    model = nn.Linear(8, 8)
    optimizer = FusedAdamW(model.named_parameters())
    for _ in range(before):
        assert stepped(model, optimizer) == []
    model.to(dtype)
    (said,) = stepped(model, optimizer)
    assert "2 float32 parameters, such as 'weight', were cast to 16 bits after FusedAdamW" in said
    assert "updates that are small beside a weight are lost" in said
    assert "master_weights='remainder'" in said
    model.float().to(dtype)
    assert stepped(model, optimizer) == []


@pytest.mark.parametrize(
    "options", [{"master_weights": "remainder"}, {"stochastic_rounding": True}]
)
def test_masters_lack_the_low_bits_only(options):
    model = nn.Linear(8, 8)
    optimizer = FusedAdamW(model.parameters(), **options)
    model.to(BF16)
    (said,) = stepped(model, optimizer)
    assert "2 float32 parameters were cast" in said and "lost their low bits:" in said


def test_what_is_no_cast_of_the_users():
    """Models cast before, frozen ones, wider ones, replaced lists and copies are not warned of."""
    model = nn.Linear(8, 8).to(BF16)
    optimizer = FusedAdamW(model.parameters())
    assert stepped(model, optimizer) == []
    model.float()
    assert stepped(model, optimizer) == []
    model = nn.Linear(8, 8)
    optimizer = FusedAdamW(model.parameters())
    model.weight.requires_grad_(False)
    model.weight.data = model.weight.data.to(BF16)
    assert stepped(model, optimizer) == []
    model = nn.Linear(8, 8)
    optimizer = FusedAdamW(model.parameters())
    model.to(BF16)
    stepped(model, optimizer)
    assert stepped(model, copy.deepcopy(optimizer)) == []


def test_later_groups_and_containers():
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = FusedSGD(models[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": models[1].parameters()})
    models[1].to(BF16)
    (said,) = stepped(nn.ModuleList(models), optimizer)
    assert said.startswith("2 float32 parameters were cast to 16 bits after FusedSGD")
    model = nn.Linear(4, 4)
    container = OptimizersContainer([model], FusedAdamW, {"lr": 0.1})
    model.to(BF16)
    assert len(stepped(model, container)) == 1


def test_a_warning_that_is_an_error_changes_nothing():
    model = nn.Linear(8, 8)
    optimizer = FusedAdamW(model.parameters())
    model.to(BF16)
    before = copy.deepcopy(model.state_dict())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="were cast"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert stepped(model, optimizer) == []
