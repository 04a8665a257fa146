"""ZeroRedundancyOptimizer: faults of torch's class, and parity with an unsharded optimizer.

Comparisons are bitwise, with an unsharded optimizer that had the same gradients.
"""

from __future__ import annotations

import io
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim as stock
import zero_faults_partition as partition
import zero_faults_training as training
from rank_cases import run_cases
from torch import Tensor
from zero_faults_common import (
    KINDS,
    PARTITIONS,
    Cases,
    Params,
    Traffic,
    assert_same,
    clones,
    named_groups,
    own_group,
    parameters,
    place,
    plain_over,
    raises,
    reachable_bytes,
    snapshot,
    state_dict_of,
    train,
    zero_over,
)

from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.local_optimizer import LocalOptimizer

BF16 = torch.bfloat16


# ---- loading -------------------------------------------------------------------------------------


def load_leaves_the_dict(kind: str, **options: Any) -> None:
    plain_params, params = parameters(), parameters()
    plain = plain_over(plain_params, kind)
    train(plain, plain_params, range(2))
    given = plain.state_dict()
    before = clones(given)
    zero = zero_over(params, kind, **options)
    zero.load_state_dict(given)
    assert_same(given, before)
    train(zero, params, range(2))
    assert_same(given, before)


def narrower_parameters(kind: str, **options: Any) -> None:
    """State of float32 parameters is cast to bfloat16, and training continues as unsharded."""
    wide, plain_params, params = parameters(), parameters(dtype=BF16), parameters(dtype=BF16)
    saved = plain_over(wide, kind)
    train(saved, wide, range(2))
    plain, zero = plain_over(plain_params, kind), zero_over(params, kind, **options)
    plain.load_state_dict(saved.state_dict())
    zero.load_state_dict(saved.state_dict())
    dtypes = {
        str(value.dtype)
        for entry in zero.state.values()
        for name, value in entry.items()
        if name != "step"
    }
    train(plain, plain_params, range(3))
    train(zero, params, range(3))
    assert dtypes == {"torch.bfloat16"}
    assert_same(params, plain_params)


def counted_steps() -> None:
    """Loads own state after ten steps, of which the ranks' parameters had another number each."""
    params = parameters([(10,), (10,)])
    zero = zero_over(params, "FusedAdamW")
    zero.optim.set_schedule(warmup_steps=10, stable_steps=10, decay_steps=10)
    for step in range(10):
        zero.zero_grad()
        params[step >= 6].grad = torch.ones(10)
        zero.step()
    zero.load_state_dict(state_dict_of(zero, *place()))
    assert zero.control.steps == 10


def held_once(kind: str) -> None:
    """After a load a rank holds only its half. A consolidated copy lasts until the next step."""
    shapes = [(128, 64)] * 8
    plain_params, params = parameters(shapes), parameters(shapes)
    plain = plain_over(plain_params, kind)
    train(plain, plain_params, range(1))
    saved = clones(plain.state_dict())
    total = sum(t.nbytes for entry in saved["state"].values() for t in entry.values())
    zero = zero_over(params, kind)
    spare = 4096  # control blocks
    assert reachable_bytes(zero, params) <= spare
    zero.load_state_dict(saved)
    del saved
    own = sum(t.nbytes for entry in zero.state.values() for t in entry.values())
    assert abs(own - total / 2) < 1e-6 * total
    assert own <= reachable_bytes(zero, params) <= own + spare
    zero.consolidate_state_dict(to=0)
    held = own + (total if place()[0] == 0 else 0)
    assert held <= reachable_bytes(zero, params) <= held + spare
    train(zero, params, range(1))
    assert own <= reachable_bytes(zero, params) <= own + spare


def damaged(saved: Any, how: str) -> Any:
    """Returns a copy of a state dict that does not fit."""
    bad = clones(saved)
    kind, _, number = how.partition(" ")
    if kind == "shape":
        entry = bad["state"][int(number)]
        name = next(name for name in entry if name != "step")
        entry[name] = torch.ones(2, *entry[name].shape)
    elif kind == "missing":
        del bad["state"][int(number)]["step"]
    elif kind == "sizes":
        bad["param_groups"][1]["params"].insert(0, bad["param_groups"][0]["params"].pop())
    elif kind == "fewer":
        bad["param_groups"].pop()
    elif kind == "more":
        bad["param_groups"].append({**bad["param_groups"][1], "params": [99]})
    return bad


def refused(kind: str, how: str, **options: Any) -> None:
    """All ranks raise, whichever rank owns the parameter, and nothing changes."""
    plain_params, params = parameters(), parameters()
    plain = plain_over(named_groups(plain_params), kind)
    train(plain, plain_params, range(3))
    saved = plain.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    zero = zero_over(named_groups(params), kind, **options)
    train(zero, params, range(2))
    before = snapshot(zero)
    what, _, number = how.partition(" ")
    parts = {"shape": (f"parameter {number}", "(2, "), "missing": ("step",)}.get(what, ("group",))
    with raises(ValueError, *parts):
        zero.load_state_dict(damaged(saved, how))
    assert_same(snapshot(zero), before)


def refused_by_one(kind: str, fault: str, **options: Any) -> None:
    """Rank 1 fails at the end of a load, or in a hook after it: both raise, nothing changes."""
    params = parameters()
    zero = zero_over(named_groups(params), kind, **options)
    if kind.startswith("Fused"):
        zero.optim.set_schedule(warmup_steps=2, stable_steps=2, decay_steps=2)
    train(zero, params, range(3))
    saved = state_dict_of(zero, *place())
    saved["param_groups"][0]["lr"] = 0.5
    train(zero, params, range(2))
    zero.consolidate_state_dict()
    before = snapshot(zero)
    fails = mock.Mock(side_effect=MemoryError("short of memory") if place()[0] else None)
    at_end = mock.patch.object(LocalOptimizer, "sync", fails) if fault == "end" else nullcontext()
    if fault == "hook":
        zero.register_load_state_dict_post_hook(fails)
    with pytest.raises((MemoryError, ValueError), match="short of memory"), at_end:
        zero.load_state_dict(saved)
    assert_same(snapshot(zero), before)
    assert fault == "end" or fails.called
    fails.side_effect = None
    zero.load_state_dict(saved)
    assert zero.param_groups[0]["lr"] == 0.5


def other_dtype(allow: bool, **options: Any) -> None:
    """A group of another dtype is added where it is allowed. Otherwise nothing changes."""
    params, plain_params = ([*parameters(), *parameters(dtype=BF16)] for _ in range(2))
    zero = zero_over(params[:6], "AdamW", allow_mixed_dtypes=allow, **options)
    plain = plain_over(plain_params[:6], "AdamW")
    train(zero, params, range(1))
    train(plain, plain_params, range(1))
    before = snapshot(zero)
    if allow:
        zero.add_param_group({"params": params[6:], "lr": 0.02})
        plain.add_param_group({"params": plain_params[6:], "lr": 0.02})
    else:
        with raises(ValueError, "bfloat16", "float32"):
            zero.add_param_group({"params": params[6:], "lr": 0.02})
        assert_same(snapshot(zero), before)
    train(zero, params, range(1, 4))
    train(plain, plain_params, range(1, 4))
    assert_same(params, plain_params)


# ---- state dicts ---------------------------------------------------------------------------------


def goes_on(optimizer: Any, params: Params, saved: Any, weights: list[Tensor]) -> list[Tensor]:
    """Returns the weights after three more steps from a state dict."""
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(clones(saved))
    train(optimizer, params, range(3, 6))
    return clones([p.detach() for p in params])


def assert_not_whole(zero: Any) -> None:
    """Asserts that torch.save, which does not write shards, raises."""
    with raises(RuntimeError, "consolidate_state_dict"):
        torch.save(zero.state_dict(), io.BytesIO())


def state_dicts(kind: str, named: bool, **options: Any) -> None:
    """State dicts have the keys, order, dtypes and bits of the unsharded optimizer's, and plain and
    sharded optimizers load them. Only a fresh consolidation gives a whole state dict.

    torch's class loads an unnamed dict. A sharded optimizer without names loads a named dict.
    """
    rank, size = place()
    optimizer_class, defaults = KINDS[kind]
    params, plain_params, stock_params = (parameters() for _ in range(3))
    zero = zero_over(named_groups(params, named), kind, **options)
    plain = plain_over(named_groups(plain_params, named), kind)
    train(zero, params, range(3))
    train(plain, plain_params, range(3))
    weights = clones([p.detach() for p in plain_params])

    assert_not_whole(zero)
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(zero.state_dict(), io.BytesIO())
    else:
        assert_not_whole(zero)
    saved = state_dict_of(zero, rank, size)
    assert_same(saved, clones(plain.state_dict()))

    def groups(of: Params) -> Any:
        return named_groups(of, named)

    into_plain, from_plain = parameters(), parameters()
    plain_after = goes_on(plain_over(groups(into_plain), kind), into_plain, saved, weights)
    fresh = zero_over(groups(from_plain), kind, **options)
    zero_after = goes_on(fresh, from_plain, plain.state_dict(), weights)
    train(plain, plain_params, range(3, 6))
    expected = [p.detach() for p in plain_params]
    assert_same(plain_after, expected)
    assert_same(zero_after, expected)
    if named:
        unnamed = parameters()
        fresh = zero_over(named_groups(unnamed, False), kind, **options)
        unnamed_after = goes_on(fresh, unnamed, saved, weights)
        assert_same(unnamed_after, plain_after)
    else:
        theirs = stock.ZeroRedundancyOptimizer(groups(stock_params), optimizer_class, **defaults)
        assert_same(goes_on(theirs, stock_params, saved, weights), expected)
        # torch's own state, after its own consolidation, loads into ours
        theirs_saved = state_dict_of(theirs, rank, size)
        again, ours = parameters(), parameters()
        reference = plain_over(groups(again), kind)
        mine = zero_over(groups(ours), kind, **options)
        assert_same(
            goes_on(mine, ours, theirs_saved, expected),
            goes_on(reference, again, plain.state_dict(), expected),
        )

    for to in range(size):
        zero.consolidate_state_dict(to)
    train(zero, params, range(3, 4))
    assert_not_whole(zero)
    zero.consolidate_state_dict(to=0)
    zero.load_state_dict(saved)
    assert_not_whole(zero)
    with raises(ValueError, f"to={size}"):
        zero.consolidate_state_dict(to=size)


def consolidation_traffic(to: int) -> None:
    """State is sent once, and only to the target. All ranks get the headers."""
    rank, _ = place()
    params = parameters([(256, 128)] * 8)
    zero = zero_over(params, "AdamW")
    train(zero, params, range(1))
    own = sum(t.nbytes for entry in zero.state.values() for t in entry.values())
    with Traffic() as traffic:
        zero.consolidate_state_dict(to)
    given = traffic.bytes.pop("send", 0)
    taken = traffic.bytes.total()
    assert own > 500_000
    if rank == to:
        assert given == 0
        assert 3 * own <= taken <= 3.03 * own
    else:
        assert own <= given <= 1.01 * own
        assert taken < 0.02 * own


class Peculiar(torch.optim.Optimizer):
    """An optimizer that keeps state of many kinds."""

    def __init__(self, params: Any, extra: Any = None) -> None:
        self.extra = extra
        super().__init__(params, {"lr": 1.0, "range": (0.5, 2)})

    def step(self, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"]):
            entry = self.state[param]
            entry["count"] = entry.get("count", 0) + 1
            entry["pair"] = (entry["count"], [0.5, None, True])
            entry["limits"] = {0: math.inf, -1: -math.inf, "n": math.nan, (1, 2): 2**70}
            entry[7] = torch.arange(3) * param.numel()
            entry["nested"] = {"a": {"b": torch.full((), float("nan"))}, "dtype": BF16}
            if self.extra is not None:
                entry["extra"] = self.extra


def peculiar_state() -> None:
    """State may have tuples, keys of all kinds, nested tensors, inf and nan."""
    rank, size = place()
    params, plain_params = parameters(), parameters()
    zero, plain = ZeroRedundancyOptimizer(params, Peculiar), Peculiar(plain_params)
    for _ in range(2):
        zero.step()
        plain.step()
    saved = state_dict_of(zero, rank, size)
    again, plain_again = ZeroRedundancyOptimizer(parameters(), Peculiar), Peculiar(parameters())
    again.load_state_dict(saved)
    plain_again.load_state_dict(clones(saved))
    assert_same(saved, plain.state_dict())
    assert_same(state_dict_of(again, rank, size), plain_again.state_dict())


def object_in_state() -> None:
    """All ranks raise if only the last rank's state has an object."""
    rank, size = place()
    zero = ZeroRedundancyOptimizer(parameters(), Peculiar)
    zero.optim.extra = object() if rank == size - 1 else None
    zero.step()
    with raises(RuntimeError, "'extra'", f"rank {size - 1}"):
        zero.consolidate_state_dict(to=0)
    with raises(TypeError, "expected strings as keys"):
        zero.state_dict()


def other_world_size(folder: Path, **options: Any) -> None:
    """Trains on four ranks, of which some own nothing of a group, then two, then four again."""
    rank, size = place()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    file = folder / f"saved{len(options)}.pt"
    params, plain_params = parameters(), parameters()
    plain = plain_over(named_groups(plain_params), "FusedAdamW")
    train(plain, plain_params, range(6))
    zero: Any = None
    for number, group in enumerate((None, pair, None)):
        zero = zero_over(named_groups(params), "FusedAdamW", process_group=group, **options)
        if number:
            zero.load_state_dict(torch.load(file, weights_only=True))
            dist.barrier()
        train(zero, params, range(2 * number, 2 * number + 2))
        zero.consolidate_state_dict(to=1)
        if rank == 1:
            torch.save(zero.state_dict(), file)
        dist.barrier()
    assert_same(params, plain_params)
    assert_same(state_dict_of(zero, rank, size), clones(plain.state_dict()))


# ---- all of them ---------------------------------------------------------------------------------

HOWS = ["shape 0", "shape 1", "shape 3", "shape 5", "sizes", "fewer", "more"]


def cases_of_two() -> Cases:
    found: Cases = {"peculiar": peculiar_state, "object": object_in_state}
    found["counted steps"] = counted_steps
    for kind in KINDS:
        found[f"held once {kind}"] = partial(held_once, kind)
        for how in HOWS:
            found[f"refused {kind}, {how}"] = partial(refused, kind, how)
        for number in range(6 if kind != "SGD" else 0):
            found[f"refused {kind}, missing {number}"] = partial(refused, kind, f"missing {number}")
        for fault in ("end", "hook"):
            found[f"refused {kind}, by one, {fault}"] = partial(refused_by_one, kind, fault)
        balanced = PARTITIONS["balanced"]
        found[f"refused {kind}, balanced"] = partial(refused, kind, "shape 3", **balanced)
        for name, options in PARTITIONS.items():
            where = f"{kind}, {name}"
            for case in (load_leaves_the_dict, narrower_parameters):
                found[f"{case.__name__} {where}"] = partial(case, kind, **options)
            found[f"state dict {where}"] = partial(state_dicts, kind, False, **options)
            found[f"state dict {where}, named"] = partial(state_dicts, kind, True, **options)
    for name, options in PARTITIONS.items():
        for allow in (True, False):
            found[f"other dtype {name}, {allow}"] = partial(other_dtype, allow, **options)
    return found | partition.cases_of_two() | training.cases_of_two()


def cases_of_four() -> Cases:
    folder = Path(sys.argv[1])
    found: Cases = {"peculiar": peculiar_state, "object": object_in_state}
    for to in range(4):
        found[f"traffic to {to}"] = partial(consolidation_traffic, to)
    for name, options in PARTITIONS.items():
        found[f"other world size {name}"] = partial(other_world_size, folder, **options)
    return found | partition.cases_of_four() | training.cases_of_four()


def cases() -> Cases:
    return cases_of_two() if dist.get_world_size() == 2 else cases_of_four()


if __name__ == "__main__":
    run_cases(cases, own_group)
