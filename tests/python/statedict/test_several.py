"""Two optimizers of torch become one, and back; state dicts of other implementations of Muon."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedMuon
from torchopt_ext.statedict.several import (
    from_classical,
    from_dion,
    from_keller_jordan,
    from_nanochat,
    join,
    split,
)

from ...support.compare import assert_same, assert_same_bits
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


# ---- other implementations -----------------------------------------------------------------------

SIZES: dict[str, list[tuple[int, ...]]] = {
    "tall": [(12, 6)] * 3, "wide": [(6, 12)] * 3, "rest": [(64, 32), (40, 30), (7,)],
}  # fmt: skip


def grouped(keys: dict[str, dict[str, Any]], **options: Any) -> FusedMuon:
    """Returns an optimizer with a group of matrices of each shape, and one of AdamW or Lion."""
    groups = [{"params": make_params(SIZES[name]), **keys[name]} for name in keys]
    return FusedMuon(groups, **options)


def with_weights_of(
    optimizer: FusedMuon, keys: dict[str, dict[str, Any]], adjust: str | None = "match_rms_adamw"
) -> FusedMuon:
    """Returns an optimizer with other hyperparameters and no state, as before a load."""
    other = grouped(keys, adjust_lr_fn=adjust)
    for p, q in zip(params_of(other), params_of(optimizer), strict=True):
        p.data.copy_(q.data)
    return other


def classical(optimizer: FusedMuon, seeds: range, mu: float) -> list[Tensor]:
    """Steps, and returns what momentum by ``m = mu*m + g`` is after it."""
    sums = [torch.zeros_like(p) for p in params_of(optimizer)]
    for seed in seeds:
        train(optimizer, [seed])
        for total, p in zip(sums, params_of(optimizer), strict=True):
            total.mul_(mu).add_(p.grad)
    return sums


def assert_next_step_is_near(ours: FusedMuon, theirs: FusedMuon, seed: int = 7) -> None:
    for each in (ours, theirs):
        train(each, [seed])
    torch.testing.assert_close(params_of(ours), params_of(theirs), rtol=0, atol=1e-5)


def test_classical_momentum_of_keller_jordans() -> None:
    """Before February 2025, with groups that had no weight decay; the given dict stays."""
    keys: dict[str, dict[str, Any]] = {"tall": {}, "wide": {}}
    optimizer = grouped(keys, lr=0.05, momentum=0.9, weight_decay=0.0)
    sums = classical(optimizer, range(3), 0.9)
    group = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "ns_steps": 5}
    saved = {
        "state": {i: {"momentum_buffer": total} for i, total in enumerate(sums)},
        "param_groups": [{**group, "params": [0, 1, 2]}, {**group, "params": [3, 4, 5]}],
    }
    before = copy.deepcopy(saved)
    loaded = with_weights_of(optimizer, keys)
    loaded.load_state_dict(from_classical(from_keller_jordan(saved)))
    assert_same(saved, before)
    assert_next_step_is_near(loaded, optimizer)


def test_keller_jordans_of_today() -> None:
    """``use_muon`` instead of "algorithm", averages, no "nesterov" (MuonWithAuxAdam)."""
    keys: dict[str, dict[str, Any]] = {"tall": {}, "rest": {"algorithm": "adamw", "eps": 1e-10}}
    optimizer = grouped(keys, lr=0.05, weight_decay=0.0)
    train(optimizer, range(3))
    state = {
        index: {
            name: int(value) if name == "step" else value
            for name, value in entry.items()
            if index > 2 or name != "step"
        }
        for index, entry in optimizer.state_dict()["state"].items()
    }
    adam = {"betas": (0.9, 0.999), "eps": 1e-10, "params": [3, 4, 5], "use_muon": False}
    groups = [{"momentum": 0.95, "params": [0, 1, 2], "use_muon": True}, adam]
    saved = {"state": state, "param_groups": [g | {"lr": 0.05, "weight_decay": 0} for g in groups]}
    loaded = with_weights_of(optimizer, keys)
    loaded.load_state_dict(from_keller_jordan(saved))
    for each in (loaded, optimizer):
        train(each, [7])
    assert_same_bits(params_of(loaded), params_of(optimizer))


NANOCHAT: dict[str, dict[str, Any]] = {
    "rest": {"kind": "adamw", "betas": (0.8, 0.96), "eps": 1e-10, "weight_decay": 0.01},
    "tall": {"kind": "muon", "momentum": 0.9, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.2},
    "wide": {"kind": "muon", "momentum": 0.9, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.2},
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_nanochats_stacks(world_size: int) -> None:
    """Each rank has ceil(3 / world_size) of a group's matrices, the last with padding."""
    ours = {"ns_coefficients": "polar_express", "cautious_weight_decay": True, "eps": 1e-6}
    keys = {n: g | (ours if g["kind"] == "muon" else {}) for n, g in NANOCHAT.items()}
    optimizer = grouped(keys, lr=0.05)
    train(optimizer, range(3))
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()
    for p in optimizer.param_groups[2]["params"]:  # the average of rows begins anew
        del optimizer.state[p]["second_momentum_buffer"]
    ranks: list[dict[str, Any]] = []
    for rank in range(world_size):
        state: dict[int, dict[str, Any]] = {}
        for index, p in enumerate(optimizer.param_groups[0]["params"]):
            rows = len(p) // world_size
            cut = slice(rank * rows, (rank + 1) * rows) if p.numel() >= 1024 else slice(None)
            held = optimizer.state[p]
            moments = {name: held[name][cut] for name in ("exp_avg", "exp_avg_sq")}
            state[index] = {"step": 3, **moments}
        count = -(-3 // world_size)
        for first, group in zip((3, 6), optimizer.param_groups[1:], strict=True):
            held = [optimizer.state[p] for p in group["params"]]
            state[first] = {
                name: torch.stack([*(s[name] for s in held), torch.zeros_like(held[0][name])])[
                    rank * count : (rank + 1) * count
                ][: 3 if world_size == 1 else None]
                for name in held[0]
                if name != "step"
            }
        state[6]["second_momentum_buffer"] = torch.rand(count, 1, 12)
        indices = zip(NANOCHAT.values(), ([0, 1, 2], [3, 4, 5], [6, 7, 8]), strict=True)
        groups = [{"lr": 0.05, "initial_lr": 0.1, "params": i} | g for g, i in indices]
        ranks.append({"state": state, "param_groups": groups})
    loaded = with_weights_of(optimizer, NANOCHAT)
    with pytest.warns(UserWarning, match="group 2: averages of columns are left out"):
        loaded.load_state_dict(from_nanochat(*ranks))
    assert loaded.param_groups[0]["initial_lr"] == 0.1
    for each in (loaded, optimizer):
        train(each, [7])
    assert_same_bits(params_of(loaded), params_of(optimizer))


@pytest.mark.parametrize("scalar", ["adamw", "lion"])
@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize("adjust", [None, "spectral_norm", "rms_norm"])
def test_dions_names(scalar: str, algorithm: str, adjust: str | None) -> None:
    """Every group has the keys of all algorithms; sums of matrices, averages of the rest."""
    factor = {"spectral_norm": "spectral_unclamped", "rms_norm": "match_rms_adamw", None: None}
    common = {"cautious_weight_decay": True, "weight_decay": 0.02}
    matrices = {"algorithm": algorithm, "nesterov": False, "eps": 1e-8, "momentum": 0.9}
    matrices |= {"beta2": 0.9} if algorithm == "normuon" else {}
    matrices |= {"adjust_lr_fn": factor[adjust], "num_heads": 2, **common}
    rest = {"algorithm": scalar, "betas": (0.8, 0.96), **common}
    keys = {"tall": matrices, "rest": rest | ({"eps": 1e-8} if scalar == "adamw" else {})}
    optimizer = grouped(keys, lr=0.05)
    sums = classical(optimizer, range(3), 0.9)
    state: dict[int, dict[str, Any]] = {}
    for index, (total, p) in enumerate(zip(sums, params_of(optimizer), strict=True)):
        held, of_matrix = optimizer.state[p], index < 3
        state[index] = {"momentum": total if of_matrix else held["exp_avg"]}
        if of_matrix and algorithm == "normuon":
            state[index]["variance_neuron"] = held["second_momentum_buffer"]
        if not of_matrix and scalar == "adamw":
            state[index] |= {"variance": held["exp_avg_sq"], "step_dev": torch.tensor(3.0)}
    options = {"lr": 0.05, "mu": 0.9, "beta1": 0.8, "beta2": 0.96, "weight_decay": 0.02,
               "cautious_wd": True, "step": 4, "epsilon": 1e-8, "nesterov": False,
               "flatten": False, "adjust_lr": adjust}  # fmt: skip
    options |= {"muon_beta2": 0.9} if algorithm == "normuon" else {}
    groups = [
        {**options, "algorithm": algorithm, "num_heads": 2, "params": [0, 1, 2]},
        {**options, "algorithm": scalar, "params": [3, 4, 5]},
    ]
    plain = {"tall": {"algorithm": algorithm}, "rest": {"algorithm": scalar}}
    kept = None if adjust is None else "original"  # dion's None says nothing
    loaded = with_weights_of(optimizer, plain, kept)
    loaded.load_state_dict(from_dion({"state": state, "param_groups": groups}))
    assert loaded.param_groups[1]["betas"] == (0.8, 0.96)
    for of_dion, group in zip(groups, loaded.param_groups, strict=True):
        assert ("nesterov" in group) == (of_dion["algorithm"] == algorithm)  # dion: all
    counts = [int(entry["step"]) for entry in loaded.state.values()]
    assert counts == [4] * 3 + [3 if scalar == "adamw" else 4] * 3  # AdamW's may lack a gradient
    assert_next_step_is_near(loaded, optimizer)


def test_dion_itself_is_rejected() -> None:
    with pytest.raises(ValueError, match="no algorithm 'dion2'"):
        from_dion({"state": {}, "param_groups": [{"algorithm": "dion2", "params": []}]})
