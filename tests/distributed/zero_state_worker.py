"""Cases of test_workers.py: the state of ZeRO moves between optimizers, numbers of ranks and files.

Ranks of a smaller world are the last of four; the others wait.
"""

from __future__ import annotations

import copy
import gc
import io
import math
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.optim as stock
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from zero_common import (
    KINDS,
    PARTITIONS,
    SHARDED,
    Cases,
    Traffic,
    groups_of,
    own_group,
    parameters,
    plain_over,
    raises,
    whole_state,
    zero_over,
)

from tests.support.compare import assert_same, unchanged
from tests.support.problems import make_params, params_of, set_gradients, train
from tests.support.ranks import gathered, run_cases
from tests.support.tiers import in_tier
from torchopt_ext import FusedAdamW
from torchopt_ext.statedict.dcp import load
from torchopt_ext.zero import ZeroRedundancyOptimizer, load_sharded, sharded_state_dict
from torchopt_ext.zero import state as zero_state
from torchopt_ext.zero.state_shard import StateShard

BF16 = torch.bfloat16
# Rows long enough to be cut inside (2-D, 3-D, channels last), short rows, and tensors with fewer
# elements than ranks.
SHAPES = [
    (3, 10000), (70, 130), (2, 50, 200), (8, 16, 3, 3), (3, 64, 16, 15), (1000,), (3,), (), (5, 5),
    (1,), (6, 6),
]  # fmt: skip
IDLE, FROZEN = 8, 10  # without gradient, so without state
WAYS: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "fused": (torch.float32, FusedAdamW, {"amsgrad": True}),
    "fp32": (BF16, FusedAdamW, {"master_weights": "fp32"}),
    "remainder": (BF16, FusedAdamW, {"master_weights": "remainder"}),
    "remainder8": (BF16, FusedAdamW, {"master_weights": "remainder8", "stochastic_rounding": True}),
    "int8": (torch.float32, FusedAdamW, {"state_dtype": "int8"}),
    "adamw": (torch.float32, torch.optim.AdamW, {}),
    "sgd": (torch.float32, torch.optim.SGD, {"momentum": 0.9}),
}
CHAIN = ((1, "balanced"), (4, "balanced"), (3, "greedy"), (2, "balanced"))

folder = Path(sys.argv[1]) / "checkpoints"


def make(seed: int, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Any]:
    params = make_params(shapes, dtype, seed)
    for param in params:
        if param.dim() == 4:
            param.data = param.data.to(memory_format=torch.channels_last)
    for param in params[FROZEN:]:
        param.requires_grad_(False)
    return params


def halves(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[::2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0},
    ]


def step(optimizer: Any, params: list[Any], seeds: Sequence[int]) -> None:
    for seed in seeds:
        set_gradients(params, seed=seed)
        for param in (*params[IDLE : IDLE + 1], *params[FROZEN:]):
            param.grad = None
        optimizer.step()


def plain(name: str, seed: int, seeds: Sequence[int]) -> tuple[list[Any], Any]:
    dtype, cls, options = WAYS[name]
    params = make(seed, dtype)
    optimizer = cls(halves(params), **options)
    if name == "fused":
        optimizer.set_schedule(warmup_steps=3, stable_steps=5, decay_steps=9)
    step(optimizer, params, seeds)
    return params, optimizer


def sharded(
    name: str,
    partition: str,
    seeds: Sequence[int] = (),
    shapes: Any = SHAPES,
    group: Any = None,
    one_group: bool = False,
) -> tuple[list[Any], Any]:
    dtype, cls, options = WAYS[name]
    params = make(1, dtype, shapes)
    if partition == "balanced":
        options = {**options, "bucket_elements": 1 << 22}
    groups = [{"params": params, "lr": 1e-3}] if one_group else halves(params)
    zero: Any = ZeroRedundancyOptimizer(groups, cls, group, partition=partition, **options)
    if name == "fused":
        zero.optim.set_schedule(warmup_steps=3, stable_steps=5, decay_steps=9)
    step(zero, params, seeds)
    return params, zero


def weights(params: list[Any]) -> dict[str, Tensor]:
    return {f"weight{number}": param.detach() for number, param in enumerate(params)}


def local_state(zero: Any) -> Any:
    return copy.deepcopy(zero.optim.state_dict())


def save(zero: Any, name: str) -> Path:
    dcp.save({"optimizer": zero}, checkpoint_id=folder / name)
    return folder / name


# ---- round trips ---------------------------------------------------------------------------------


def chain(name: str, by_files: bool) -> None:
    """Each world loads what the one before has saved, in files or in a whole state dict. All have
    the state of an unsharded optimizer, which loads it, too, and make its next step.

    Ranks write and read their parts only. Some of them are cut inside a row of memory.
    """
    params, optimizer = plain(name, 1, [1, 2])
    expected = copy.deepcopy([optimizer.state_dict(), weights(params)])
    step(optimizer, params, [9])
    path, saved = folder / f"{name} plain", expected[0]
    if dist.get_rank() == 0:
        content = {"optimizer": expected[0], "model": expected[1]}
        dcp.save(content, checkpoint_id=path, no_dist=True)
    for size, partition in CHAIN:
        dist.barrier()
        group = dist.new_group(range(4 - size, 4))
        if dist.get_rank() < 4 - size:
            continue
        mine, zero = sharded(name, partition, [5], group=group)
        if by_files:
            read = elements_read(zero, mine, path, group)
            path = folder / f"{name} {size} {partition}"
            content = {"optimizer": zero, "model": weights(mine)}
            dcp.save(content, checkpoint_id=path, process_group=group)
            assert_shared([read, elements_of(zero)], expected[0], group)
        else:
            zero.load_state_dict(saved)
            for param, weight in zip(mine, expected[1].values(), strict=True):
                param.data.copy_(weight)
        saved = whole_state(zero)
        assert_same(saved, expected[0])
        if zero.rank == 0:
            assert_loads_unsharded(name, path if by_files else None, saved, expected[0])
            if by_files and (size, partition) == (4, "balanced"):
                assert shapes_cut_inside_a_row(path) == [(2, 50, 200), (3, 64, 16, 15), (3, 10000)]
        step(zero, mine, [9])
        assert_same(weights(mine), weights(params))
    dist.barrier()


def elements_read(zero: Any, params: list[Any], path: Path, group: Any) -> int:
    """Loads a checkpoint. Returns the elements of state for which this rank had memory."""
    count, buffers = 0, zero_state.buffers

    def counted(zero: Any, ids: list[str]) -> Any:
        of_zero = buffers(zero, ids)

        def buffer(path: Any, like: Tensor) -> Any:
            nonlocal count
            target = of_zero(path, like)
            count += 0 if target is like else elements(target)
            return target

        return buffer

    with mock.patch.object(zero_state, "buffers", counted):
        content = {"optimizer": zero, "model": weights(params)}
        load(content, checkpoint_id=path, process_group=group)
    return count


def elements(value: Any) -> int:
    """Returns the elements of a tensor on this rank, and 0 for a step."""
    if isinstance(value, StateShard):
        return sum(shard.numel() for shard in value.shards)
    return value.numel() if isinstance(value, Tensor) and value.dim() else 0


def elements_of(zero: Any) -> int:
    state = sharded_state_dict(zero)["state"]
    return sum(elements(value) for entry in state.values() for value in entry.values())


def assert_shared(counts: list[int], expected: Any, group: Any) -> None:
    """Asserts that ranks have all elements together, and no rank many more than its share."""
    whole = sum(elements(v) for entry in expected["state"].values() for v in entry.values())
    for of_ranks in zip(*gathered(counts, group), strict=True):
        assert sum(of_ranks) == whole
        assert max(of_ranks) <= 1.7 * whole / len(of_ranks)


def assert_loads_unsharded(name: str, path: Path | None, saved: Any, expected: Any) -> None:
    """Loads a whole dict, or a checkpoint by torch's function, whose keys are the unsharded's."""
    _, optimizer = plain(name, 3, [4])
    if path is None:
        optimizer.load_state_dict(saved)
    else:
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        optimizer.load_state_dict(state["optimizer"])
        keys, of_plain = keys_and_shapes(path), keys_and_shapes(folder / f"{name} plain")
        # Every rank saves its control with its first parameter.
        added = {key for key in keys.keys() - of_plain.keys() if "torchopt_ext.control" not in key}
        assert not added and of_plain.items() <= keys.items()
    assert_same(optimizer.state_dict(), expected)


def keys_and_shapes(path: Path) -> dict[str, Any]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {k: list(md.size) if hasattr(md, "size") else "value" for k, md in metadata.items()}


def shapes_cut_inside_a_row(path: Path) -> list[tuple[int, ...]]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = [md for k, md in metadata.items() if k.startswith("optimizer.state.")
               and isinstance(md, TensorStorageMetadata) and md.size]  # fmt: skip
    cut = {tuple(t.size) for t in tensors if any(c.sizes[1:] != t.size[1:] for c in t.chunks)}
    return sorted(cut & {*SHAPES})


def torchs_class(kind: str, **options: Any) -> None:
    """torch's class and ours load each other's consolidated state."""
    cls, defaults = KINDS[kind]
    zeros: list[Any] = [
        stock.ZeroRedundancyOptimizer(groups_of(parameters()), cls, **defaults),
        zero_over(groups_of(parameters()), kind, process_group=None, **options),
    ]
    reference = plain_over(groups_of(parameters()), kind)
    for optimizer in (*zeros, reference):
        train(optimizer, range(3))
    states = []
    for zero in zeros:
        for to in range(4):
            zero.consolidate_state_dict(to)
            if to == dist.get_rank():
                states.append(copy.deepcopy(zero.state_dict()))
    for zero, state in zip(zeros, reversed(states), strict=True):
        train(zero, range(5))
        zero.load_state_dict(state)
        for param, other in zip(params_of(zero), params_of(reference), strict=True):
            param.data.copy_(other)
    for optimizer in (*zeros, reference):
        train(optimizer, range(3, 6))
    for zero in zeros:
        assert_same(params_of(zero), params_of(reference))


def torchs_functions(kind: str, **options: Any) -> None:
    """torch's functions get and set state of one parameter, of which most ranks own nothing.

    They step where they find no state: on all ranks, or on none.
    """
    twins = [nn.Linear(7, 3, bias=False) for _ in range(2)]
    for twin in twins:
        nn.init.ones_(twin.weight)
    zero, plain = zero_over(twins[0].parameters(), kind, **options), plain_over(
        twins[1].parameters(), kind
    )  # fmt: skip
    for turn in range(3):  # into a fresh optimizer, too
        for model, optimizer in zip(twins, (zero, plain), strict=True):
            if turn:
                model(torch.ones(2, 7)).square().mean().backward()
                if turn == 2:
                    get_optimizer_state_dict(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        saved = [get_optimizer_state_dict(twins[0], zero) for _ in range(2)][1]
        expected = [get_optimizer_state_dict(twins[1], plain) for _ in range(2)][1]
        zero = zero_over(twins[0].parameters(), kind, **options)
        set_optimizer_state_dict(twins[0], zero, saved)
        get_optimizer_state_dict(twins[0], zero)
        assert_same(whole_state(zero)["state"][0], expected["state"]["weight"])
    assert_same(*([*twin.parameters()] for twin in twins))


# ---- special states ------------------------------------------------------------------------------


def narrower(kind: str, **options: Any) -> None:
    """State of float32 parameters is cast to bfloat16, and training continues as unsharded."""
    wide = plain_over(parameters(), kind)
    train(wide, range(2))
    plain, zero = (
        plain_over(parameters(dtype=BF16), kind),
        zero_over(parameters(dtype=BF16), kind, **options),
    )
    for optimizer in (plain, zero):
        optimizer.load_state_dict(copy.deepcopy(wide.state_dict()))
        entries = [value for entry in optimizer.state.values() for value in entry.items()]
        assert {value.dtype for name, value in entries if name != "step"} <= {BF16}
        train(optimizer, range(3))
    assert_same(params_of(zero), params_of(plain))


def counted_steps() -> None:
    """Loads own state after ten steps, of which the ranks' parameters had another number each."""
    params = parameters([(10,), (10,)])
    zero = zero_over(params)
    zero.optim.set_schedule(warmup_steps=10, stable_steps=10, decay_steps=10)
    for number in range(10):
        zero.zero_grad()
        params[number >= 6].grad = torch.ones(10)
        zero.step()
    zero.load_state_dict(whole_state(zero))
    assert zero.control.steps == 10


def tiny(partition: str) -> None:
    """Saves and loads a single tensor. Ranks without it still count the schedule's steps."""
    _, zero = sharded("fused", partition, [1], [(3,)], one_group=True)
    path = save(zero, f"tiny-{partition}")
    _, again = sharded("fused", partition, (), [(3,)], one_group=True)
    load_sharded(again, path)
    assert_same(local_state(again)["state"], local_state(zero)["state"])
    assert again.control.steps == 1
    assert whole_state(zero)["state"][0]["torchopt_ext.control"]["steps"] == 1
    assert sorted(gathered(len(zero.optim.state))) == [0, 0, 0, 1]


def without_state() -> None:
    """Loads the checkpoint of an optimizer without steps into an optimizer that has stepped."""
    path = save(sharded("adamw", "greedy")[1], "fresh")
    _, zero = sharded("adamw", "balanced", [1])
    assert zero.optim.state
    load_sharded(zero, path)
    assert not zero.optim.state


def other_masters() -> None:
    """Loads fp32 masters into optimizers with remainders, sharded and unsharded, and steps."""
    source, saved = sharded("fp32", "greedy", [1])
    path, state = save(saved, "masters"), whole_state(saved)
    same, optimizer = plain("remainder", 3, ())
    optimizer.load_state_dict(state)
    params, zero = sharded("remainder", "balanced")
    load_sharded(zero, path)
    for of, each in ((same, optimizer), (params, zero)):
        for param, weight in zip(of, source, strict=True):
            param.data.copy_(weight.detach())
        step(each, of, [9])
    assert_same(weights(params), weights(same))
    assert_same(whole_state(zero), optimizer.state_dict())


def codes_of_other_layouts(kind: str, **options: Any) -> None:
    """Loads codes for parts of parameters that cannot hold codes and get floats instead."""
    module: Any = nn.Conv2d(70, 6, 3, bias=False)
    set_gradients([module.weight], scale=100.0)
    codes = FusedAdamW(module.parameters(), state_dtype="int8")
    codes.step()
    floats = FusedAdamW(module.parameters())
    floats.load_state_dict(codes.state_dict())
    other: Any = copy.deepcopy(module)
    other.double() if kind == "double" else other.to(memory_format=torch.channels_last)
    zero = zero_over(other.parameters(), **options)
    zero.load_state_dict(codes.state_dict())
    state = whole_state(zero)["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same(state[name].float(), floats.state[module.weight][name])


class Peculiar(torch.optim.Optimizer):
    """An optimizer that keeps state of many kinds."""

    extra: Any = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "range": (0.5, 2)})

    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            entry = self.state[param]
            entry["count"] = entry.get("count", 0) + 1
            entry["pair"] = (entry["count"], [0.5, None, True])
            entry["limits"] = {0: math.inf, -1: -math.inf, "n": math.nan, (1, 2): 2**70}
            entry[7] = torch.arange(3) * param.numel()
            entry["nested"] = {"a": {"b": torch.full((), float("nan"))}, "dtype": BF16}
            if self.extra is not None:
                entry["extra"] = self.extra


def peculiar() -> None:
    """State may have tuples, keys of all kinds, nested tensors, inf and nan, but no objects."""
    zero, plain = ZeroRedundancyOptimizer(parameters(), Peculiar), Peculiar(parameters())
    for _ in range(2):
        zero.step()
        plain.step()
    saved = whole_state(zero)
    assert_same(saved, plain.state_dict())
    again, plain_again = ZeroRedundancyOptimizer(parameters(), Peculiar), Peculiar(parameters())
    for optimizer in (again, plain_again):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same(whole_state(again), plain_again.state_dict())
    zero.optim.extra = object() if dist.get_rank() == 3 else None
    zero.step()
    with raises(RuntimeError, "'extra'", "rank 3"):
        zero.consolidate_state_dict(to=0)
    with raises(TypeError, "expected strings as keys"):
        zero.state_dict()


def foreign() -> None:
    """Reading the state of other ranks' parameters changes nothing."""
    zero = zero_over(parameters(), "SGD")
    train(zero, [0])
    before = whole_state(zero)
    for param in params_of(zero):
        _ = zero.state[param]
    zero.state["count"] = 0  # not by parameter
    assert_same(whole_state(zero), before)
    assert zero.state["count"] == 0


# ---- memory, traffic, parts ----------------------------------------------------------------------


def bytes_of_tensors() -> int:
    """Returns the bytes of all tensors that Python holds."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_once(kind: str) -> None:
    """After a load a rank holds only its share. A consolidated copy lasts until the next step."""
    shapes = [(128, 64)] * 8
    plain, zero = plain_over(parameters(shapes), kind), zero_over(parameters(shapes), kind)
    train(plain, [0])
    set_gradients(params_of(zero))
    before, saved = bytes_of_tensors(), plain.state_dict()
    total = sum(t.nbytes for entry in saved["state"].values() for t in entry.values())
    mine, spare = total / 4, 4096  # control blocks

    def check(expected: float) -> None:
        assert abs(bytes_of_tensors() - before - expected) <= spare

    zero.load_state_dict(saved)
    check(mine)
    zero.consolidate_state_dict(to=0)
    check(mine + (total if dist.get_rank() == 0 else 0))
    zero.step()
    check(mine)


def consolidation_traffic(to: int) -> None:
    """State is sent once, and only to the target. All ranks get the headers."""
    zero = zero_over(parameters([(256, 128)] * 8), "AdamW")
    train(zero, [0])
    own = sum(t.nbytes for entry in zero.state.values() for t in entry.values())
    with Traffic() as traffic:
        zero.consolidate_state_dict(to)
    sent = traffic.bytes.pop("send", 0)
    others, least, most = traffic.bytes.total(), own, 1.01 * own
    if dist.get_rank() == to:
        sent, others, least, most = others, sent, 3 * own, 3.03 * own
    assert own > 500_000
    assert least <= sent <= most and others < 0.02 * own


def parts() -> None:
    """A rank's part loads with the same partition only, and torch.save rejects it.

    It is what state_dict() has before consolidation, and after the next step or load.
    """
    _, zero = sharded("fused", "balanced", [1])
    state, whole = zero.state_dict(), whole_state(zero)
    for change in (lambda: None, zero.step, partial(zero.load_state_dict, whole)):
        zero.consolidate_state_dict(to=2)
        if dist.get_rank() == 2:
            assert_same(list(torch.load(saved(zero))["state"]), list(whole["state"]))
        change()
        if dist.get_rank() != 2 or change is zero.step:
            with raises(RuntimeError, "`consolidate_state_dict(to=...)` on all ranks"):
                saved(zero)
        whole = whole_state(zero)
    _, same = sharded("fused", "balanced", [1, 2])
    same.load_state_dict(state)
    with raises(ValueError, "to=4"):
        same.consolidate_state_dict(to=4)
    _, other = sharded("fused", "greedy", [1])
    with unchanged(other), raises(ValueError, "but this rank owns"):
        other.load_state_dict(state)


def saved(zero: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(zero.state_dict(), buffer)
    buffer.seek(0)
    return buffer


def cases() -> Cases:
    table: Cases = {
        f"chain {name}, {'files' if by_files else 'dicts'}": partial(chain, name, by_files)
        for name, by_files in in_tier(product(WAYS, (True, False)))
    }
    for function in (counted_steps, without_state, other_masters, peculiar, foreign, parts):
        table[function.__name__] = function
    table |= {f"held once {kind}": partial(held_once, kind) for kind in ("AdamW", "FusedAdamW")}
    for kind in KINDS:
        table[f"torchs_functions {kind}, sharded"] = partial(torchs_functions, kind, **SHARDED)
    table |= {f"tiny {partition}": partial(tiny, partition) for partition in ("greedy", "balanced")}
    functions = (torchs_class, torchs_functions, narrower)
    for function, kind, name in in_tier(product(functions, KINDS, PARTITIONS)):
        case = partial(function, kind, **PARTITIONS[name])
        table[f"{function.__name__} {kind}, {name}"] = case
    for layout, (name, options) in product(("channels_last", "double"), PARTITIONS.items()):
        case = partial(codes_of_other_layouts, layout, **options)
        table[f"codes of other layouts, {layout}, {name}"] = case
    table |= {f"traffic to {to}": partial(consolidation_traffic, to) for to in (0, 3)}
    return table


if __name__ == "__main__":
    run_cases(cases, own_group)
