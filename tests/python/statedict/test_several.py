"""Two optimizers of torch become one, and back; momentum of another definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedMuon
from torchopt_ext.statedict.several import from_classical, join, split

from ...support.compare import assert_same_bits
from ...support.problems import copy_params, make_params, params_of, set_gradients, train

MATRICES, REST = [(6, 10), (10, 6)], [(5,), (7, 3)]
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}


def of_torch(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(params[: len(MATRICES)], lr=0.01, momentum=0.9)
    return [muon, torch.optim.AdamW(params[len(MATRICES) :], **ADAMW)]


def test_torchs_two_optimizers_become_one_and_back() -> None:
    """Each has its groups' hyperparameters and moments; torch's directions are of bf16."""
    theirs = make_params([*MATRICES, *REST])
    optimizers = of_torch(theirs)
    for optimizer in optimizers:
        train(optimizer, range(2))
    ours = copy_params(theirs)
    groups = [{"params": ours[:2]}, {"params": ours[2:], "algorithm": "adamw"}]
    one = FusedMuon(groups, lr=1.0)
    one.load_state_dict(join(*(copy.deepcopy(o.state_dict()) for o in optimizers)))
    assert [g["lr"] for g in one.param_groups] == [0.01, 0.01]
    assert (one.param_groups[0]["momentum"], one.param_groups[1]["betas"]) == (0.9, (0.8, 0.9))
    back = of_torch(copy_params(ours))
    for optimizer, part in zip(back, split(copy.deepcopy(one.state_dict()), [1, 1]), strict=True):
        optimizer.load_state_dict(part)
    set_gradients(theirs, ours, params_of(back[0]) + params_of(back[1]), seed=5)
    for optimizer in (one, *optimizers, *back):
        optimizer.step()
    assert_same_bits(theirs, params_of(back[0]) + params_of(back[1]))
    torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=0.01 * 0.1)


def test_a_split_of_other_groups_is_rejected() -> None:
    optimizer = FusedMuon([{"params": make_params([shape])} for shape in MATRICES])
    with pytest.raises(ValueError, match="has 2 param groups, expected 3"):
        split(optimizer.state_dict(), [1, 2])


@pytest.mark.parametrize(
    ("group_key", "entry"), [("mu", "momentum"), ("momentum", "momentum_buffer")]
)
def test_classical_momentum(group_key: str, entry: str) -> None:
    """The step that follows is the one that the classical rule would make."""
    mu, params = 0.9, make_params(MATRICES)
    averaged = FusedMuon(params, lr=0.05, momentum=mu)
    sums = [torch.zeros_like(p) for p in params]
    for seed in range(3):
        train(averaged, [seed])
        for total, p in zip(sums, params, strict=True):
            total.mul_(mu).add_(p.grad)
    plain = {k: v for k, v in averaged.state_dict()["param_groups"][0].items() if k != "momentum"}
    saved = {
        "state": {i: {entry: total} for i, total in enumerate(sums)},
        "param_groups": [{**plain, group_key: mu}],
    }
    others = copy_params(params)
    loaded = FusedMuon(others, lr=1.0)
    loaded.load_state_dict(from_classical(saved))
    assert_same_bits([saved["state"][0][entry]], [sums[0]])  # the given dict is as it was
    for each in (averaged, loaded):
        train(each, [7])
    torch.testing.assert_close(params, others, rtol=0, atol=1e-5)
