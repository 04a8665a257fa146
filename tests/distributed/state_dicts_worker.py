"""Every state dict through every entry point of torch, between all ways to hold weights, moments.

Each load equals that of one process, also a step later, or raises on all ranks and changes nothing.

Usage: state_dicts_worker.py RESULTS [complete]
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from tests.python.statedict.jobs import train
from tests.support.compare import difference
from tests.support.ranks import full_tensor, gathered, run_cases
from torchopt_ext import FusedAdamW, FusedSGD
from torchopt_ext.statedict.dcp import load

KINDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "bf16": {},
    "fp32": {"master_weights": "fp32"},
    "fp32, bf16 moments": {"master_weights": "fp32", "state_dtype": torch.bfloat16},
    "remainder": {"master_weights": "remainder"},
    "remainder8, 8 bits": {"master_weights": "remainder8", "state_dtype": "int8"},
    "8 bits throughout": {"state_dtype": "int8", "fp32_moments": ()},
    "SGD": {"momentum": 0.9},
    "SGD, 8 bits": {"momentum": 0.9, "state_dtype": "int8"},
}
folder = Path(sys.argv[1]).parent / "state_dicts"


class Job:
    """A model with rows of two groups, an embedding and short rows; one rank has one row less."""

    def __init__(self, kind: str, seed: int, steps: int, *, sharded: bool) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(128, 3), nn.Embedding(3, 64), nn.Linear(5, 3)
        ).bfloat16()
        if sharded:
            fully_shard(self.model)
        ours = FusedSGD if kind.startswith("SGD") else FusedAdamW
        cls = torch.optim.AdamW if kind == "torch" else ours
        self.optimizer: Any = cls(self.model.parameters(), lr=0.1 * seed, **KINDS[kind])
        self.train(range(10 * seed, 10 * seed + steps))

    def train(self, seeds: Iterable[int]) -> None:
        train(self.model, self.optimizer, seeds)

    def values(self) -> Any:
        """Returns copies of weights, state and options, as full tensors."""
        states = [dict(sorted(self.optimizer.state[p].items())) for p in self.model.parameters()]
        options = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in sorted(group.items())}
            | {"params": len(group["params"])}
            for group in self.optimizer.param_groups
        ]
        held = {**self.model.state_dict()}, states, options
        return tree_map_only(Tensor, lambda tensor: full_tensor(tensor).clone(), held)

    def take_weights(self, source: Job) -> None:
        whole = {k: full_tensor(v) for k, v in source.model.state_dict().items()}
        set_model_state_dict(self.model, whole, options=StateDictOptions(full_state_dict=True))


def through_torch(source: Job, target: Job, *, sent: bool = False, **options: Any) -> None:
    """Calls get_optimizer_state_dict and set_optimizer_state_dict; ``sent`` broadcasts."""
    own = StateDictOptions(**options, cpu_offload=sent)
    found = get_optimizer_state_dict(source.model, source.optimizer, options=own)
    setting = StateDictOptions(**options, cpu_offload=sent, broadcast_from_rank0=sent)
    given = copy.deepcopy(found) if not sent or dist.get_rank() == 0 else {}
    set_optimizer_state_dict(target.model, target.optimizer, given, options=setting)


def by_index(source: Job, target: Job) -> None:
    """Gives torch's function the state dict of a process that does not shard."""
    options = StateDictOptions(full_state_dict=True)
    given = {**source.optimizer.state_dict()}
    given["state"] = {i: dict(entry) for i, entry in given["state"].items()}
    for entry in given["state"].values():
        entry.update({k: full_tensor(v) for k, v in entry.items()})
    set_optimizer_state_dict(target.model, target.optimizer, given, options=options)


def checkpoint_of(source: Job, kind: str) -> str:
    path = folder / kind
    if not path.exists():
        dist.barrier()
        nested = get_optimizer_state_dict(source.model, source.optimizer)
        dcp.save({"named": nested, "numbered": source.optimizer}, checkpoint_id=path)
    return str(path)


def accelerate_sharded(path: str, target: Job) -> None:
    """What Accelerate does with SHARDED_STATE_DICT."""
    states = {"named": get_optimizer_state_dict(target.model, target.optimizer)}
    dcp.load(states, checkpoint_id=path)
    set_optimizer_state_dict(target.model, target.optimizer, states["named"])


Way = Callable[[Job, Job, str], None]
FLAT = {"flatten_optimizer_state_dict": True}
WAYS: dict[str, Way] = {
    "plain": lambda s, t, _: t.optimizer.load_state_dict(s.optimizer.state_dict()),
    "sharded": lambda s, t, _: through_torch(s, t),
    "sharded, flat": lambda s, t, _: through_torch(s, t, **FLAT),
    "full": lambda s, t, _: through_torch(s, t, full_state_dict=True),
    "full, flat": lambda s, t, _: through_torch(s, t, full_state_dict=True, **FLAT),
    "sent": lambda s, t, _: through_torch(s, t, full_state_dict=True, sent=True),
    "sent, replicated": lambda s, t, _: through_torch(s, t, full_state_dict=True, sent=True),
    "one process": lambda s, t, _: through_torch(s, t, full_state_dict=True),
    "one process, sent": lambda s, t, _: through_torch(s, t, full_state_dict=True, sent=True),
    "by index": lambda s, t, _: by_index(s, t),
    "accelerate": lambda s, t, path: accelerate_sharded(path, t),
    "in place": lambda s, t, path: dcp.load({"numbered": t.optimizer}, checkpoint_id=path),
    "ours": lambda s, t, path: load({"numbered": t.optimizer}, checkpoint_id=path),
    "ours, named": lambda s, t, path: load({"named": t.optimizer}, checkpoint_id=path),
}


def rejected(way: str, saved: list[set[str]], held: list[set[str]]) -> bool:
    """Whether torch's function loses entries that the target needs, or rejects the dict itself."""
    pairs = [*zip(saved, held, strict=True)]
    if way in ("full, flat", "by index"):
        return True  # a KeyError of torch's
    if way in ("accelerate", "in place"):
        return any(h - s for s, h in pairs)
    if "flat" in way:
        return any(h - s for s, h in pairs)
    return False


def moves(kind: str, kept: str) -> None:
    alone, source = (Job(kind, 1, 2, sharded=sharded) for sharded in (False, True))
    expected = Job(kept, 2, 1, sharded=False)
    names = [[{*state} for state in job.optimizer.state.values()] for job in (alone, expected)]
    expected.optimizer.load_state_dict(alone.optimizer.state_dict())
    expected.take_weights(alone)
    expected.train([7])
    path, wrong = checkpoint_of(source, kind), []
    for name, way in WAYS.items():
        replicated, unsharded = name == "sent, replicated", name.startswith("one process")
        target = Job(kept, 2, 1, sharded=not replicated)
        before = target.values()
        error: BaseException | None = None
        try:
            way(alone if replicated or unsharded else source, target, path)
        except BaseException as problem:  # DCP raises CheckpointException, a BaseException
            error = problem
        raised = gathered(error is not None)
        if any(raised):
            found = "" if all(raised) else f"raised on ranks {raised} only"
            found = found or difference(target.values(), before)
            found = found or "" if rejected(name, *names) else f"raised {error!r}"
        else:
            target.take_weights(source)
            target.train([7])
            found = difference(target.values(), expected.values())
            found = found or ("was not rejected" if rejected(name, *names) else "")
        if found:
            wrong.append(f"{name}: {found}")
    assert not wrong, "\n".join(wrong)


def one_rank_fails() -> None:
    """A hook after the load raises on rank 1: both ranks raise, and nothing is changed."""
    source, target = (Job("fp32", seed, 3 - seed, sharded=True) for seed in (1, 2))
    before = target.values()

    def hook(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("short of memory")

    handle = target.optimizer.register_load_state_dict_post_hook(hook)
    with pytest.raises((MemoryError, ValueError), match="short of memory"):
        through_torch(source, target)
    assert not difference(target.values(), before)
    handle.remove()
    through_torch(source, target)
    assert difference(target.values(), before)


SOME = [
    ("torch", "8 bits throughout"),
    ("bf16", "fp32"),
    ("fp32", "remainder"),
    ("remainder", "remainder"),
    ("remainder8, 8 bits", "fp32, bf16 moments"),
    ("SGD", "SGD, 8 bits"),
    ("SGD, 8 bits", "SGD"),
]


def cases() -> dict[str, Callable[[], Any]]:
    folder.mkdir(exist_ok=True)
    ours = [kind for kind in KINDS if kind != "torch"]
    every = [(a, b) for a, b in product(KINDS, ours) if a.startswith("SGD") == b.startswith("SGD")]
    pairs = every if "complete" in sys.argv else SOME
    found: dict[str, Callable[[], Any]] = {"one rank fails": one_rank_fails}
    return found | {f"{a} as {b}": functools.partial(moves, a, b) for a, b in pairs}


if __name__ == "__main__":
    run_cases(cases)
