"""Cases of zero_faults_worker.py about owners of parameters and agreement on parameters."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed.optim as stock
from rank_cases import gathered
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from zero_faults_common import (
    KINDS,
    PARTITIONS,
    Cases,
    Params,
    Traffic,
    assert_same,
    clones,
    layers,
    named_groups,
    parameters,
    place,
    plain_over,
    raises,
    snapshot,
    state_dict_of,
    train,
    zero_over,
)

from torchopt_ext.zero import ZeroRedundancyOptimizer

BF16 = torch.bfloat16


FREEZABLE = [(400,), (30, 10), (300,), (100,), (100,), (50,)]
FROZEN = (0, 5)


def frozen(**options: Any) -> None:
    """Trains with parameters that are frozen, thawed, and frozen again.

    Trainable elements are spread. torch's rule would give ranks 0, 300, 300 and 200.
    """
    _, size = place()
    params, plain_params = parameters(FREEZABLE), parameters(FREEZABLE)
    for of in (params, plain_params):
        for i in FROZEN:
            of[i].requires_grad_(False)
    zero, plain = zero_over(params, "AdamW", **options), plain_over(plain_params, "AdamW")
    loads = [0] * size
    for param, rank in zero.partition.owner.items():
        loads[rank] += param.numel() if param.requires_grad else 0
    owners = [zero.partition.owner[p] for p in params]
    with Traffic() as traffic:
        train(zero, params, range(2))
    train(plain, plain_params, range(2))
    for turn, thawed in ((2, True), (3, False), (4, True)):
        for of in (params, plain_params):
            of[0].requires_grad_(thawed)
        train(zero, params, range(turn, turn + 1))
        train(plain, plain_params, range(turn, turn + 1))
    assert sorted(loads) == [100, 100, 300, 300]
    assert gathered(owners) == [[zero.partition.owner[p] for p in params]] * size
    assert set(owners) <= set(range(size))
    # Two steps of 800 trainable elements. In each step the ranks agree twice on whether to
    # take it, by 16 bytes. A bucket adds less than 64 bytes per parameter.
    exact = 2 * (800 * 4 + 2 * 16)
    assert exact <= traffic.bytes.total() <= exact + (2 * 4 * 64 if options else 0)
    assert_same(params, plain_params)


PLANS: list[list[list[tuple[int, ...]]]] = [
    [[(400,), (300,), (300,), (100,), (100,)]],
    [[(3, 3)] * 9, [(5,), (0,), (7, 2)], [(1,)]],
    [[(i * 37 % 101,) for i in range(40)], [(i * 53 % 97, 2) for i in range(30)]],
    [[(2,)]],
]


def torch_plan() -> None:
    """The owners are those of torch's class."""
    for shapes in PLANS:
        params = [parameters(of) for of in shapes]
        groups = [{"params": of} for of in params]
        theirs: Any = stock.ZeroRedundancyOptimizer(copy.copy(groups), torch.optim.SGD, lr=0.1)
        ours = ZeroRedundancyOptimizer(copy.copy(groups), torch.optim.SGD, lr=0.1)
        index = {p: i for i, p in enumerate(p for of in params for p in of)}
        plan = [
            [[index[p] for p in group["params"]] for group in of_rank]
            for of_rank in theirs._partition_parameters()
        ]
        own = [
            [[index[p] for p in of_rank] for of_rank in group] for group in ours.partition.params
        ]
        assert [list(groups) for groups in zip(*own, strict=True)] == plan


def buckets() -> None:
    """Buckets keep strides. Each parameter begins at a multiple of 64 bytes in one of two."""
    for dtype in (torch.float32, BF16):
        params: Params = []
        plain_params: Params = []
        for of in (params, plain_params):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, 1), nn.Conv2d(7, 3, 3))
            of += model.to(dtype).to(memory_format=torch.channels_last).parameters()
        strides = [p.stride() for p in params]
        zero = zero_over(params, "FusedAdamW", parameters_as_bucket_view=True)
        plain = plain_over(plain_params, "FusedAdamW")
        train(zero, params, range(3))
        train(plain, plain_params, range(3))
        assert [p.stride() for p in params] == strides
        assert params[0].is_contiguous(memory_format=torch.channels_last)
        assert len({p.untyped_storage().data_ptr() for p in params}) == 2
        assert max(p.data_ptr() % 64 for p in params) == 0
        assert_same(params, plain_params)


def chosen_owners() -> None:
    rank, size = place()
    params, plain_params = parameters(), parameters()
    per_rank: list[list[Tensor]] = [[] for _ in range(size)]
    for i, param in enumerate(params):
        per_rank[(i // 2) % size].append(param)
    zero = zero_over(params, "AdamW", params_per_rank=per_rank)
    plain = plain_over(plain_params, "AdamW")
    train(zero, params, range(3))
    train(plain, plain_params, range(3))
    saved = state_dict_of(zero, rank, size)
    owners = [i // 2 % size for i in range(6)]
    assert [zero.partition.owner[p] for p in params] == owners
    assert [bool(zero.state.get(p)) for p in params] == [owner == rank for owner in owners]
    assert_same(params, plain_params)
    assert_same(saved, clones(plain.state_dict()))
    stranger = [*per_rank[:-1], [nn.Parameter(torch.ones(3))]]
    for wrong, part in (
        (per_rank[:-1], "world size"),
        (stranger, "not passed"),
        ([per_rank[0]] * size, "twice"),
    ):
        with raises(ValueError, part):
            zero_over(params, "AdamW", params_per_rank=wrong)
    with raises(RuntimeError, "single parameter group"):
        zero_over(named_groups(params), "AdamW", params_per_rank=per_rank)
    with raises(ValueError, "params_per_rank"):
        zero_over(params, "AdamW", params_per_rank=per_rank, partition="balanced")


def other_parameters(how: str, message: str = "", named: bool = True) -> None:
    """Builds an optimizer while the last rank has other parameters: all ranks raise."""
    rank, size = place()
    shapes = [(2, 3), (4,), (5,)]
    names = ["one", "two", "three"]
    params = parameters(shapes)
    if rank == size - 1:
        if how == "order":
            params[1], params[2] = params[2], params[1]
        elif how == "names":
            names[1], names[2] = names[2], names[1]
        elif how == "shape":
            params[1] = nn.Parameter(torch.ones(2, 2))
        elif how == "dtype":
            params = [nn.Parameter(p.detach().to(BF16)) for p in params]
        elif how == "count":
            del params[2]
        elif how == "frozen":
            params[1].requires_grad_(False)
        elif how == "mixed dtypes":
            params[1] = nn.Parameter(params[1].detach().to(BF16))
        elif how == "none":
            params.clear()
    given: Any = list(zip(names, params, strict=False)) if named else params
    ranks = [f"rank {r}" for r in range(size) if message]
    with raises(ValueError, message, *ranks):
        zero_over(given, "AdamW")


def other_group(how: str) -> None:
    """Adds a group while the last rank adds another group: all ranks raise, and nothing changes."""
    rank, size = place()
    params: list[Any] = [*parameters([(2, 3), (4,)])]
    zero = zero_over(parameters([(1,)]), "AdamW")
    before = snapshot(zero)
    if rank == size - 1:
        if how == "shape":
            params[1] = nn.Parameter(torch.ones(2, 2))
        elif how == "dtype":
            params = [nn.Parameter(p.detach().to(BF16)) for p in params]
        elif how == "known":
            params[1] = zero._all_params[0]
        elif how == "count":
            del params[1]
    with raises(ValueError):
        zero.add_param_group({"params": params})
    assert_same(snapshot(zero), before)


def torchs_state_dict(kind: str, **options: Any) -> None:
    """torch's functions get and set state of one parameter, of which most ranks own nothing.

    They step where they find no state: on all ranks, or on none.
    """
    twins = [nn.Linear(7, 3, bias=False) for _ in range(2)]
    for twin in twins:
        nn.init.ones_(twin.weight)
    zero, plain = (
        build(twin.parameters(), kind, **given)
        for build, twin, given in zip((zero_over, plain_over), twins, (options, {}), strict=True)
    )
    for turn in range(3):  # into a fresh optimizer, too
        for model, optimizer in zip(twins, (zero, plain), strict=True):
            if turn:
                model(torch.ones(2, 7)).square().mean().backward()
                if turn == 2:
                    get_optimizer_state_dict(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(2):
            found = get_optimizer_state_dict(twins[0], zero)
            expected = get_optimizer_state_dict(twins[1], plain)["state"]["weight"]
        zero = zero_over(twins[0].parameters(), kind, **options)
        set_optimizer_state_dict(twins[0], zero, found)
        get_optimizer_state_dict(twins[0], zero)
        for saved in gathered(state_dict_of(zero, *place())["state"]):
            assert_same(saved[0], expected)
    assert_same(list(twins[0].parameters()), list(twins[1].parameters()))


def torchs_state_dict_of_layers(kind: str, **options: Any) -> None:
    """torch's functions move what each rank has, or raise on all ranks and change nothing."""
    source, target = layers(3), layers(3)
    zero, loaded = (zero_over(m.parameters(), kind, **options) for m in (source, target))
    for step, model, optimizer in ((0, source, zero), (1, source, zero), (5, target, loaded)):
        train(optimizer, [*model.parameters()], range(step, step + 1))
        optimizer.zero_grad()
    before = snapshot(loaded)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    nested = StateDictOptions(strict=False)
    found = [get_optimizer_state_dict(source, zero, options=form) for form in (flat, nested)]
    less = {**found[1], "state": dict([*found[1]["state"].items()][1:])}
    for given, form in ((found[0], flat), (found[1], nested), (less, nested)):
        if given is less or (form is flat and "partition" in options):
            with raises(ValueError, "is missing", "strict=False"):
                set_optimizer_state_dict(target, loaded, given, options=form)
            assert_same(snapshot(loaded), before)
            continue
        set_optimizer_state_dict(target, loaded, given, options=form)
        before = snapshot(loaded)
        assert_same(before["state"], snapshot(zero)["state"])


# ---- all of them ---------------------------------------------------------------------------------

ODDITIES = {  # and what the message names
    "order": "'two'",
    "names": "'two'",
    "shape": "'two'",
    "dtype": "'one'",
    "count": "'three'",
    "frozen": "'two'",
    "mixed dtypes": "",
    "none": "",
}


def cases_of_two() -> Cases:
    found: Cases = {"buckets": buckets, "params_per_rank": chosen_owners}
    for how, message in ODDITIES.items():
        found[f"other {how}"] = partial(other_parameters, how, message)
    found["other shape, unnamed"] = partial(other_parameters, "shape", "(2, 2)", named=False)
    modes = {**PARTITIONS, "sharded": {**PARTITIONS["balanced"], "sharded_gradients": True}}
    for kind, (mode, options) in product(KINDS, modes.items()):
        found[f"torch's state dict, {kind}, {mode}"] = partial(torchs_state_dict, kind, **options)
        if kind != "SGD":
            case = partial(torchs_state_dict_of_layers, kind, **options)
            found[f"torch's state dict of layers, {kind}, {mode}"] = case
    for how in ("shape", "count", "dtype", "known"):
        found[f"added other {how}"] = partial(other_group, how)
    return found


def cases_of_four() -> Cases:
    found: Cases = {"plan": torch_plan, "params_per_rank": chosen_owners}
    for name, options in PARTITIONS.items():
        if name != "balanced":
            found[f"frozen {name}"] = partial(frozen, **options)
    return found
