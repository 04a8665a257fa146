"""Cases of test_workers.py: checkpoints move between world sizes, and what does not fit.

A world size loads the checkpoint of another, so all runs share a folder of checkpoints.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import difference, gathered, run_cases
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchopt_ext import FusedAdamW
from torchopt_ext.statedict.dcp import load
from torchopt_ext.zero import ZeroRedundancyOptimizer, load_sharded, sharded_state_dict
from torchopt_ext.zero import state as zero_state
from torchopt_ext.zero.state_shard import StateShard

# Rows long enough to be cut inside (2-D, 3-D, channels last), short rows, and tensors with fewer
# elements than ranks.
SHAPES = [
    (3, 10000), (70, 130), (2, 50, 200), (8, 16, 3, 3), (3, 64, 16, 15), (1000,), (3,), (), (5, 5),
    (1,), (6, 6),
]  # fmt: skip
IDLE, FROZEN = 8, 10  # without gradient, so without state

OPTIMIZERS: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "fused": (torch.float32, FusedAdamW, {"amsgrad": True}),
    "fp32": (torch.bfloat16, FusedAdamW, {"master_weights": "fp32"}),
    "remainder": (torch.bfloat16, FusedAdamW, {"master_weights": "remainder"}),
    "remainder8": (
        torch.bfloat16,
        FusedAdamW,
        {"master_weights": "remainder8", "stochastic_rounding": True},
    ),
    "adamw": (torch.float32, torch.optim.AdamW, {}),
    "sgd": (torch.float32, torch.optim.SGD, {"momentum": 0.9}),
}

# By world size: the checkpoint to load, and the partition.
CHAIN = {1: ("plain", "balanced"), 4: ("1", "balanced"), 3: ("4", "greedy"), 2: ("3", "balanced")}

folder = Path(sys.argv[1]).parent / "zero_checkpoints"


def make_params(dtype: torch.dtype, seed: int, shapes: Any = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params = []
    for number, shape in enumerate(shapes):
        weight = torch.randn(shape, generator=generator).to(dtype)
        if len(shape) == 4:
            weight = weight.to(memory_format=torch.channels_last)
        params.append(torch.nn.Parameter(weight, requires_grad=number != FROZEN))
    return params


def groups_of(params: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": params[::2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0},
    ]


def set_gradients(params: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number in (IDLE, FROZEN) else grad


def plain(name: str, seed: int, steps: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    dtype, optimizer_class, arguments = OPTIMIZERS[name]
    params = make_params(dtype, seed)
    optimizer = optimizer_class(groups_of(params), **arguments)
    if name == "fused":
        optimizer.set_schedule(warmup_steps=3, stable_steps=5, decay_steps=9)
    for step in range(steps):
        set_gradients(params, seed + step)
        optimizer.step()
    return params, optimizer


def sharded(
    name: str, seed: int, partition: str, shapes: Any = SHAPES, one_group: bool = False
) -> tuple[list[Tensor], ZeroRedundancyOptimizer]:
    dtype, optimizer_class, arguments = OPTIMIZERS[name]
    params = make_params(dtype, seed, shapes)
    zero = ZeroRedundancyOptimizer(
        params if one_group else groups_of(params),
        optimizer_class,
        partition=partition,
        bucket_elements=1 << 22 if partition == "balanced" else None,
        **({"lr": 1e-3} if one_group else {}),
        **arguments,
    )
    if name == "fused":
        zero.optim.set_schedule(warmup_steps=3, stable_steps=5, decay_steps=9)
    return params, zero


def stepped(name: str, partition: str = "balanced") -> tuple[list[Tensor], ZeroRedundancyOptimizer]:
    params, zero = sharded(name, 1, partition)
    set_gradients(params, 1)
    zero.step()
    return params, zero


def weights(params: list[Tensor]) -> dict[str, Tensor]:
    return {f"weight{number}": param.detach() for number, param in enumerate(params)}


def whole_state(zero: ZeroRedundancyOptimizer) -> Any:
    """Returns the unsharded state dict on rank 0, and None on other ranks."""
    zero.consolidate_state_dict(0)
    return copy.deepcopy(zero.state_dict()) if dist.get_rank() == 0 else None


def local_state(zero: ZeroRedundancyOptimizer) -> Any:
    return copy.deepcopy(zero.optim.state_dict())


def assert_refused(
    call: Callable[[], Any],
    zero: ZeroRedundancyOptimizer,
    params: list[Tensor],
    error: type[Exception],
    message: str,
) -> None:
    """Asserts that the call raises and changes nothing, and that the optimizer still steps."""
    before = copy.deepcopy([zero.optim.state_dict(), weights(params)])
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert difference([zero.optim.state_dict(), weights(params)], before) == ""
    set_gradients(params, 5)
    zero.step()
    assert difference(weights(params), before[1]) != ""


def keys_and_shapes(path: Path) -> dict[str, Any]:
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: list(md.size) if isinstance(md, TensorStorageMetadata) else "value"
        for key, md in found.items()
    }


def save(zero: ZeroRedundancyOptimizer, path: Path) -> Path:
    dcp.save({"optimizer": zero}, checkpoint_id=path)
    return path


# ---- from world size to world size ---------------------------------------------------------------


def start(name: str) -> None:
    """Saves an unsharded optimizer's checkpoint, with which the chain begins."""
    params, optimizer = plain(name, 1, 2)
    state = optimizer.state_dict()
    dcp.save({"optimizer": state, "model": weights(params)}, checkpoint_id=folder / f"{name}-plain")
    torch.save({"optimizer": state, "model": weights(params)}, folder / f"{name}.pt")


def chain(name: str) -> None:
    """State is the same at every world size, for sharded and unsharded optimizers that load it.

    Ranks write and read their parts only. Some of them are cut inside a row of memory.
    """
    size = dist.get_world_size()
    source, partition = CHAIN[size]
    expected = torch.load(folder / f"{name}.pt", weights_only=True)
    params, zero = sharded(name, 2, partition)
    source_path, path = folder / f"{name}-{source}", folder / f"{name}-{size}"
    allocated = 0
    buffers = zero_state.buffers

    def counted(zero: ZeroRedundancyOptimizer, ids: list[str]) -> Any:
        own = buffers(zero, ids)

        def buffer(path: Any, like: Tensor) -> Tensor:
            nonlocal allocated
            made = own(path, like)
            allocated += 0 if made is like else memory(made)
            return made

        return buffer

    zero_state.buffers = counted
    load({"optimizer": zero, "model": weights(params)}, checkpoint_id=source_path)
    zero_state.buffers = buffers
    state = sharded_state_dict(zero)
    held = sum(memory(v) for entry in state["state"].values() for v in entry.values())
    dcp.save({"optimizer": zero, "model": weights(params)}, checkpoint_id=path)

    state = whole_state(zero)
    entries = [v for entry in expected["optimizer"]["state"].values() for v in entry.values()]
    whole = sum(v.numel() for v in entries if isinstance(v, Tensor) and v.dim())
    for parts in (gathered(held), gathered(allocated)):
        assert sum(parts) == whole
        assert max(parts) <= 1.7 * whole / size
    set_gradients(params, 9)
    zero.step()
    same_params, optimizer = plain(name, 1, 0)
    for param, weight in zip(same_params, expected["model"].values(), strict=True):
        param.data.copy_(weight)
    optimizer.load_state_dict(copy.deepcopy(expected["optimizer"]))
    set_gradients(same_params, 9)
    optimizer.step()
    assert difference(weights(params), weights(same_params)) == ""
    if dist.get_rank() == 0:
        assert difference(state, expected["optimizer"]) == ""
        assert loaded_unsharded(name, path, expected) == ""
        keys, expected_keys = keys_and_shapes(path), keys_and_shapes(folder / f"{name}-plain")
        for key in keys.keys() - expected_keys.keys():
            # Every rank saves its control with its first parameter.
            if "torchopt_ext.control" in key:
                del keys[key]
        assert keys == expected_keys
        if size == 4:
            assert cut_inside_a_row(path) == [[2, 50, 200], [3, 64, 16, 15], [3, 10000]]


def memory(value: Any) -> int:
    """Returns the elements of a tensor on this rank, and 0 for a step."""
    if isinstance(value, StateShard):
        return sum(shard.numel() for shard in value.shards)
    return value.numel() if isinstance(value, Tensor) and value.dim() else 0


def loaded_unsharded(name: str, path: Path, expected: Any) -> str:
    """Loads our checkpoint into an unsharded optimizer by DCP, and returns the difference."""
    _, optimizer = plain(name, 3, 1)
    state = {"optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    optimizer.load_state_dict(state["optimizer"])
    return difference(optimizer.state_dict(), expected["optimizer"])


def cut_inside_a_row(path: Path) -> list[list[int]]:
    """Returns the shapes of which a rank's part begins or ends inside a row of memory."""
    found = []
    for key, md in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if not key.startswith("optimizer.state.") or not isinstance(md, TensorStorageMetadata):
            continue
        if any(list(c.sizes[1:]) != list(md.size[1:]) for c in md.chunks if md.size):
            found.append(list(md.size))
    return sorted(map(list, {tuple(shape) for shape in found}))


def tiny(partition: str) -> None:
    """Saves and loads a single tensor. Ranks without it still count the schedule's steps."""

    def build() -> tuple[list[Tensor], ZeroRedundancyOptimizer]:
        return sharded("fused", 1, partition, [(3,)], one_group=True)

    params, zero = build()
    set_gradients(params, 1)
    zero.step()
    path = save(zero, folder / f"tiny-{partition}-{dist.get_world_size()}")
    _, again = build()
    load_sharded(again, path)
    whole = whole_state(zero)
    assert difference(local_state(again)["state"], local_state(zero)["state"]) == ""
    assert again.control.steps == 1
    assert not whole or whole["state"][0]["torchopt_ext.control"]["steps"] == 1
    assert sorted(gathered(len(zero.optim.state))) == [0] * (dist.get_world_size() - 1) + [1]


def without_state() -> None:
    """Loads the checkpoint of an optimizer without steps into an optimizer that has stepped."""
    _, fresh = sharded("adamw", 1, "greedy")
    path = save(fresh, folder / f"fresh-{dist.get_world_size()}")
    _, zero = stepped("adamw")
    assert zero.optim.state
    load_sharded(zero, path)
    assert not zero.optim.state


def other_masters() -> None:
    """Loads fp32 masters into optimizers with remainders, sharded and unsharded, and steps."""
    expected = torch.load(folder / "fp32.pt", weights_only=True)
    same_params, optimizer = plain("remainder", 3, 0)
    optimizer.load_state_dict(expected["optimizer"])
    params, zero = sharded("remainder", 4, "balanced")
    load_sharded(zero, folder / "fp32-3")
    for both in (same_params, params):
        for param, weight in zip(both, expected["model"].values(), strict=True):
            param.data.copy_(weight)
        set_gradients(both, 9)
    optimizer.step()
    zero.step()
    whole = whole_state(zero)
    assert difference(weights(params), weights(same_params)) == ""
    assert not whole or difference(whole, optimizer.state_dict()) == ""


# ---- saving --------------------------------------------------------------------------------------


def consolidated(partition: str) -> None:
    """Saves when rank 0 holds all of the state, and so writes the other ranks' parts, too."""
    _, zero = stepped("adamw", partition)
    whole = whole_state(zero)
    path = save(zero, folder / f"consolidated-{partition}")
    _, other = sharded("adamw", 4, "greedy")
    load({"optimizer": other}, checkpoint_id=path)
    found = whole_state(other)
    _, same = stepped("adamw", partition)
    for tensor in (v for entry in same.optim.state.values() for v in entry.values()):
        if isinstance(tensor, Tensor):
            tensor.zero_()
    dcp.load({"optimizer": same}, checkpoint_id=path)  # torch's load, in place
    in_place = whole_state(same)
    assert difference(found, whole) == difference(in_place, whole) == ""


def part_of_state() -> None:
    """A rank's part loads with the same partition only, and torch.save rejects it."""
    _, zero = stepped("fused")
    state = zero.state_dict()
    with pytest.raises(RuntimeError, match=r"`consolidate_state_dict\(to=...\)` on all ranks"):
        torch.save(state, folder / f"part-{dist.get_rank()}")
    _, same = stepped("fused")
    before = local_state(same)
    same.load_state_dict(state)
    assert difference(local_state(same), before) == ""
    params, other = stepped("fused", "greedy")
    load = partial(other.load_state_dict, state)
    assert_refused(load, other, params, ValueError, "but this rank owns")


def asynchronous(writer: bool) -> None:
    """Steps after async_save, with an optimizer that updates its state in place."""
    params, zero = stepped("fused")
    path = folder / f"async-{writer}-{dist.get_world_size()}"
    expected = whole_state(zero)
    state = {"optimizer": zero}
    group = dist.new_group()  # the steps use the default group meanwhile
    if writer:  # a writer stages in another way
        storage = dcp.FileSystemWriter(path)
        future = dcp.async_save(state, storage_writer=storage, process_group=group)
    else:
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
    for step in range(3):
        set_gradients(params, 20 + step)
        zero.step()
    moved = whole_state(zero)
    future.result()
    _, other = sharded("fused", 4, "greedy")
    load_sharded(other, path)
    found = whole_state(other)
    assert difference(found, expected) == ""
    assert dist.get_rank() or difference(moved, expected) != ""


def unstorable(value: Any) -> None:
    """Saves while the last rank has a state entry that DCP would not load again."""
    _, zero = stepped("adamw")
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        next(iter(zero.optim.state.values()))["extra"] = value
    with pytest.raises(TypeError if last else ValueError) as error:
        sharded_state_dict(zero)
    first, found = gathered(str(error.value))
    assert first == f"rank 1: TypeError: {found}"
    assert found.startswith("state.1.extra")


# ---- loading what does not fit -------------------------------------------------------------------


def refused(error: type[Exception], message: str, name: str = "fused", **other: Any) -> None:
    """Loads a checkpoint of another model or of another optimizer."""
    _, zero = stepped("fused")
    path = save(zero, folder / f"refused-{dist.get_world_size()}")
    params, wrong = sharded(name, 2, "balanced", **other)
    set_gradients(params, 3)
    wrong.step()
    assert_refused(lambda: load_sharded(wrong, path), wrong, params, error, message)


def with_shape(index: int, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [*SHAPES[:index], shape, *SHAPES[index + 1 :]]


def other_key() -> None:
    params, zero = stepped("fused")
    path = save(zero, folder / f"key-{dist.get_world_size()}")
    load = partial(load_sharded, zero, path, key="optim")
    assert_refused(load, zero, params, ValueError, "no 'optim'; it has ['optimizer']")


def damaged(error: type[Exception], message: str, how: Callable[[Path], object]) -> None:
    """Loads a checkpoint after `how` damaged the last rank's file."""
    params, zero = stepped("fused")
    path = folder / f"damaged-{dist.get_world_size()}"
    shutil.rmtree(path, ignore_errors=True) if dist.get_rank() == 0 else None
    dist.barrier()
    save(zero, path)
    if dist.get_rank() == 0:
        how(sorted(path.glob("*.distcp"))[-1])
    dist.barrier()
    assert_refused(lambda: load_sharded(zero, path), zero, params, error, message)


def incomplete() -> None:
    """Loads a checkpoint that only the first rank wrote."""
    params, zero = stepped("fused")
    path = folder / f"incomplete-{dist.get_world_size()}"
    state = sharded_state_dict(zero)
    if dist.get_rank() == 0:
        dcp.save({"optimizer": state}, checkpoint_id=path, no_dist=True)
    dist.barrier()
    message = "of its 20000 elements, so not all ranks saved theirs"
    assert_refused(lambda: load_sharded(zero, path), zero, params, ValueError, message)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(folder / f"evil-{dist.get_rank()}"),)


def pickled_code() -> None:
    params, zero = stepped("fused")
    _, optimizer = plain("fused", 1, 1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = Evil()
    path = folder / f"pickled-{dist.get_world_size()}"
    dcp.save({"optimizer": state}, checkpoint_id=path)
    load = partial(load_sharded, zero, path)
    assert_refused(load, zero, params, RuntimeError, "Weights only load failed")
    assert not list(folder.glob("evil-*"))


def pickled_metadata() -> None:
    """Loads a checkpoint whose pickled metadata would run code."""
    params, zero = stepped("fused")
    path = folder / f"metadata-{dist.get_world_size()}"
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    dist.barrier()
    load = partial(load_sharded, zero, path)
    assert_refused(load, zero, params, RuntimeError, ".metadata refers to posix.mkdir")
    assert not list(folder.glob("evil-*"))


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    size = dist.get_world_size()
    for name in OPTIMIZERS:
        if size == 1:
            found[f"start {name}"] = lambda name=name: start(name)
        found[f"chain {name}"] = lambda name=name: chain(name)
    found |= {f"tiny {p}": lambda p=p: tiny(p) for p in ("greedy", "balanced")}
    if size == 2:
        moment = "exp_avg of parameter 6 has shape (70, 130), "
        reading = "reading the optimizer state: rank "
        found |= {
            "without state": without_state,
            "other masters": other_masters,
            "async": lambda: asynchronous(False),
            "async, writer": lambda: asynchronous(True),
            "consolidated greedy": lambda: consolidated("greedy"),
            "consolidated balanced": lambda: consolidated("balanced"),
            "part": part_of_state,
            "function": lambda: unstorable(lambda: None),
            "sparse": lambda: unstorable(torch.ones(3).to_sparse()),
            "number as key": lambda: unstorable({1: 2.0}),
            "other shape": lambda: refused(
                ValueError, f"{moment}expected (70, ", shapes=with_shape(1, (70, 131))
            ),
            "transposed": lambda: refused(
                ValueError, f"{moment}expected (130, ", "adamw", shapes=with_shape(1, (130, 70))
            ),
            "fewer parameters": lambda: refused(
                ValueError, "group 0 has 6 parameters, expected 5", shapes=SHAPES[:-2]
            ),
            "other groups": lambda: refused(
                ValueError, "2 parameter groups, expected 1", one_group=True
            ),
            "other key": other_key,
            "missing file": lambda: damaged(RuntimeError, reading, Path.unlink),
            "truncated file": lambda: damaged(
                RuntimeError, reading, lambda p: os.truncate(p, p.stat().st_size // 2)
            ),
            "no metadata": lambda: damaged(
                RuntimeError,
                "the checkpoint: ValueError: there is no checkpoint in",
                lambda p: p.with_name(".metadata").unlink(),
            ),
            "incomplete": incomplete,
            "pickled code": pickled_code,
            "pickled metadata": pickled_metadata,
        }
    return found


if __name__ == "__main__":
    folder.mkdir(exist_ok=True)
    run_cases(cases)
