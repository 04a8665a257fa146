"""Cases of test_workers.py: ZeRO's state in files, and files that do not fit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from zero_common import Cases, own_group, raises, whole_state
from zero_state_worker import SHAPES, folder, plain, save, sharded, step

from tests.support.compare import assert_same, unchanged
from tests.support.ranks import run_cases
from torchopt_ext.statedict.dcp import load
from torchopt_ext.zero import load_sharded, sharded_state_dict


def consolidated(partition: str) -> None:
    """Saves when rank 0 holds all of the state, and so writes the other ranks' parts, too."""
    _, zero = sharded("adamw", partition, [1])
    whole = whole_state(zero)
    path = save(zero, f"consolidated-{partition}")
    _, other = sharded("adamw", "greedy")
    load({"optimizer": other}, checkpoint_id=path)
    _, same = sharded("adamw", partition, [2])
    dcp.load({"optimizer": same}, checkpoint_id=path)  # torch's load, in place
    for each in (other, same):
        assert_same(whole_state(each), whole)


def asynchronous(writer: bool) -> None:
    """Steps after async_save, with an optimizer that updates its state in place."""
    params, zero = sharded("fused", "balanced", [1])
    path, expected = folder / f"async-{writer}", whole_state(zero)
    # A writer stages in another way. The steps use the default group meanwhile.
    where = {"storage_writer": dcp.FileSystemWriter(path)} if writer else {"checkpoint_id": path}
    saving: Any = dcp.async_save({"optimizer": zero}, process_group=dist.new_group(), **where)
    step(zero, params, range(20, 23))
    saving.result()
    _, other = sharded("fused", "greedy")
    load_sharded(other, path)
    assert_same(whole_state(other), expected)


def unstorable(value: Any) -> None:
    """Saves while the last rank has a state entry that DCP would not load again."""
    _, zero = sharded("adamw", "balanced", [1])
    last = dist.get_rank() == 3
    if last:
        next(iter(zero.optim.state.values()))["extra"] = value
    with raises(TypeError if last else ValueError, "state.", ".extra"):
        sharded_state_dict(zero)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(folder / "evil"),)


def save_evil(path: Path) -> None:
    state = plain("fused", 1, [1])[1].state_dict()
    state["param_groups"][0]["lr"] = Evil()
    dcp.save({"optimizer": state}, checkpoint_id=path, no_dist=True)


def save_one_rank(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for key, md in metadata.state_dict_metadata.items():
        if key == "optimizer.state.1.exp_avg":
            del md.chunks[1:]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def last_file(path: Path) -> Path:
    return sorted(path.glob("*.distcp"))[-1]


MOMENT, READING = (
    "exp_avg of parameter 6 has shape (70, 130), ",
    "reading the optimizer state: rank ",
)
REFUSED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "other shape": (
        ValueError, f"{MOMENT}expected (70, ",
        {"shapes": [SHAPES[0], (70, 131), *SHAPES[2:]]},
    ),
    "transposed": (
        ValueError, f"{MOMENT}expected (130, ",
        {"name": "adamw", "shapes": [SHAPES[0], (130, 70), *SHAPES[2:]]},
    ),
    "fewer parameters": (
        ValueError, "group 0 has 6 parameters, expected 5", {"shapes": SHAPES[:-2]}
    ),
    "other groups": (ValueError, "2 parameter groups, expected 1", {"one_group": True}),
    "other key": (ValueError, "no 'optim'; it has ['optimizer']", {"key": "optim"}),
    "missing file": (RuntimeError, READING, {"how": lambda path: last_file(path).unlink()}),
    "truncated file": (
        RuntimeError, READING, {"how": lambda path: os.truncate(last_file(path), 1000)}
    ),
    "no metadata": (
        RuntimeError, "the checkpoint: ValueError: there is no checkpoint in",
        {"how": lambda path: (path / ".metadata").unlink()},
    ),
    "incomplete": (ValueError, "elements, so not all ranks saved theirs", {"how": save_one_rank}),
    "pickled code": (RuntimeError, "Weights only load failed", {"how": save_evil}),
    "pickled metadata": (
        RuntimeError, ".metadata refers to posix.mkdir",
        {"how": lambda path: (path / ".metadata").write_bytes(pickle.dumps(Evil()))},
    ),
}  # fmt: skip


def refused(
    what: str,
    error: type[Exception],
    message: str,
    name: str = "fused",
    key: str = "optimizer",
    how: Callable[[Path], Any] = lambda path: None,
    **other: Any,
) -> None:
    """Loads a damaged checkpoint, or that of another model or of another optimizer."""
    path = save(sharded("fused", "balanced", [1])[1], what)
    if dist.get_rank() == 0:
        how(path)
    dist.barrier()
    params, zero = sharded(name, "balanced", [3], **other)
    with unchanged(zero), raises(error, message):
        load_sharded(zero, path, key=key)
    step(zero, params, [5])
    assert not (folder / "evil").exists()


def cases() -> Cases:
    table: Cases = {}
    for partition in ("greedy", "balanced"):
        table[f"consolidated {partition}"] = partial(consolidated, partition)
    table |= {f"async {writer}": partial(asynchronous, writer) for writer in (False, True)}
    for value in (torch.ones(3).to_sparse(), {1: 2.0}, print):
        table[f"unstorable {type(value).__name__}"] = partial(unstorable, value)
    for what, (error, message, change) in REFUSED.items():
        table[what] = partial(refused, what, error, message, **change)
    return table


if __name__ == "__main__":
    run_cases(cases, own_group)
