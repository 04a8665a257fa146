"""8-bit moments and remainders with FSDP2 and ZeRO have one process's bits, also resumed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchopt_ext
from tests.python.statedict.jobs import train
from tests.support.ranks import full_tensor, run_cases
from tests.support.tiers import in_tier
from torchopt_ext import FusedAdamW, ZeroRedundancyOptimizer
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.state.quantized import can_quantize, scale_shape
from torchopt_ext.statedict.dcp import load

CODES = {m.codes: torch.uint8 if m.as_root else torch.int8 for m in ADAM.moments}
CODES_OF = {m.name: m.codes for m in ADAM.moments}
SCALES = {m.scale: m.name for m in ADAM.moments}

EIGHT_BITS = {"master_weights": "remainder8", "state_dtype": "int8"}
KINDS: dict[str, dict[str, Any]] = {
    "nearest": EIGHT_BITS,
    "stochastic": {**EIGHT_BITS, "stochastic_rounding": True, "rounding_seed": 5},
    "fp32": {"master_weights": "fp32"},
    "every matrix": {**EIGHT_BITS, "fp32_moments": ()},
    "by name": {**EIGHT_BITS, "fp32_moments": ["0.weight"]},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32 weights": {"state_dtype": "int8"},
    "bf16 weights": {"state_dtype": "int8", "stochastic_rounding": True, "track": True},
    "remainders": {"master_weights": "remainder", "state_dtype": "int8"},
}
BUCKET = 20_000
folder = Path(sys.argv[1]).parent / "quantized"


class Run:
    """A model with rows of three groups and a remainder, rows of one group, and an embedding. The
    ranks' shards are uneven or empty."""

    def __init__(self, kind: str, sharded: bool) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(200, 7), nn.Linear(64, 2), nn.Embedding(5, 70)
        ).bfloat16()
        if sharded:
            fully_shard(self.model)
        options = {"lr": 1e-2, "max_grad_norm": 1.0, **KINDS[kind]}
        self.optimizer: Any = OptimizersContainer([self.model], FusedAdamW, options)
        self.saved = {"model": self.model, "optimizer": self.optimizer}

    def step(self, seed: int) -> None:
        train(self.model, self.optimizer, [seed])

    def values(self) -> dict[str, Any]:
        found = {**self.model.state_dict(), **self.optimizer.state_dict()}
        return {k: full_tensor(v) for k, v in found.items()}


class Greedy(Run):
    """ZeRO over whole parameters, each stepped by one rank.

    The model has rows (and a single row) of two blocks and a part of a group, short rows, rows of a
    group and a remainder, and a convolution whose memory has other rows than its shape.
    """

    partition = "greedy"

    def __init__(self, kind: str, sharded: bool) -> None:
        torch.manual_seed(1)
        options = {"lr": 1e-2, **(KINDS | WEIGHTS)[kind]}
        self.model = nn.Sequential(
            *(nn.Linear(9000, 3), nn.Linear(9, 9)),
            nn.Conv2d(8, 200, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            *(nn.Linear(9010, 1), nn.Linear(100, 40), nn.Embedding(5, 70)),
        ).to(torch.float32 if kind == "float32 weights" else torch.bfloat16)
        params = list(self.model.named_parameters())
        if sharded:
            cut = {"bucket_elements": BUCKET} if self.partition == "balanced" else {}
            self.optimizer = ZeroRedundancyOptimizer(
                params, FusedAdamW, partition=self.partition, max_grad_norm=1.0, **cut, **options
            )
        else:
            self.optimizer = FusedAdamW(params, max_grad_norm=1.0, **options)
        self.saved = {"model": self.model, "optimizer": self.optimizer}
        self.tracked, self.digests = "track" in options, dict[str, torch.Tensor]()

    def step(self, seed: int) -> None:
        super().step(seed)
        if self.tracked:
            self.digests["digest"] = total = torchopt_ext.digest(self.optimizer).sum().reshape(1)
            if isinstance(self.optimizer, ZeroRedundancyOptimizer):
                dist.all_reduce(total)

    def values(self) -> dict[str, Any]:
        found = self.model.state_dict() | self.digests
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() != 0:
            return found
        state = self.optimizer.state_dict()["state"]
        return found | {f"{p}.{k}": v for p, entry in state.items() for k, v in entry.items()}


class Balanced(Greedy):
    """ZeRO over parts of parameters. A part may begin and end within a row."""

    partition = "balanced"


WAYS: dict[str, type[Run]] = {"FSDP2": Run, "greedy": Greedy, "balanced": Balanced}


def assert_same(run: Run, expected: Run) -> None:
    ours, theirs = run.values(), expected.values()
    assert ours.keys() == theirs.keys()
    tensors = [name for name, value in ours.items() if isinstance(value, torch.Tensor)]
    assert [name for name in tensors if not torch.equal(ours[name], theirs[name])] == []


def save(kind: str, way: str) -> None:
    run, whole = WAYS[way](kind, True), WAYS[way](kind, False)
    for seed in (1, 2):
        run.step(seed)
        whole.step(seed)
    dcp.save(run.saved, checkpoint_id=folder / way / kind)
    assert_same(run, whole)


def resume(saved: str, kept: str, saved_way: str, way: str) -> None:
    made = WAYS[way]
    source, whole, run = made(saved, False), made(kept, False), made(kept, True)
    for seed in (1, 2):
        source.step(seed)
    for name in whole.saved:
        whole.saved[name].load_state_dict(source.saved[name].state_dict())
    load(run.saved, checkpoint_id=folder / saved_way / saved)
    assert_same(run, whole)
    run.step(3)
    whole.step(3)
    assert_same(run, whole)


def take_state_dicts(kind: str) -> None:
    """Loads the whole state dict of one process, then a state dict of this rank's own part."""
    source, first, again = Balanced("nearest", False), Balanced(kind, True), Balanced(kind, True)
    whole = Balanced(kind, False)
    source.step(1)
    for run in (first, whole):
        for name in run.saved:
            run.saved[name].load_state_dict(source.saved[name].state_dict())
    for name in again.saved:
        again.saved[name].load_state_dict(first.saved[name].state_dict())
    for run in (again, whole):
        run.step(2)
    assert_same(again, whole)


def held() -> None:
    """Compares the moments that a rank keeps, and reads from a checkpoint, with the estimate."""
    run = Balanced("nearest", True)
    run.step(1)
    zero, names = run.optimizer, (*CODES, *CODES_OF, *SCALES)
    states = zero.optim.state.values()
    kept = sum(state[name].nbytes for state in states for name in names if name in state)
    params = [param.detach().to("meta").requires_grad_() for param in zero._all_params]
    shape = {"sharding": "zero2", "world_size": dist.get_world_size(), "bucket_elements": BUCKET}
    *_, embedding = params
    options = {**shape, **EIGHT_BITS, "fp32_moments": [embedding]}
    expected = estimate(params, **options)[dist.get_rank()].moments  # type: ignore[arg-type]
    buffer, read = zero._checkpoint_buffers([str(number) for number in range(len(params))]), 0
    for number, param in enumerate(params):
        dtypes: dict[str, Any] = dict.fromkeys(CODES_OF, torch.float32)
        if can_quantize(param) and param is not embedding:
            dtypes = CODES | dict.fromkeys(SCALES, torch.float32)
        for name, dtype in dtypes.items():
            shape_of = scale_shape(param) if name in SCALES else param.shape
            like = torch.zeros((), dtype=dtype).expand(shape_of)
            own = buffer(("state", str(number), name), like)
            read += sum(shard.nbytes for shard in own.shards) if own is not like else 0
    assert kept == read == expected


def wrong_scales() -> None:
    """Loads scales that do not fit some rank's part. All ranks raise, and nothing changes."""
    run, source = Balanced("nearest", True), Balanced("nearest", False)
    for one in (run, source):
        one.step(1)
    before, saved = run.values(), source.optimizer.state_dict()
    scale = next(iter(SCALES))
    for wrong in (torch.zeros(3, 140), torch.zeros(141, 3), torch.zeros(3, 141).int()):
        state = {**saved["state"], 0: {**saved["state"][0], scale: wrong}}
        with pytest.raises(ValueError, match=f"{scale} of parameter 0"):
            run.optimizer.load_state_dict({**saved, "state": state})
    after = run.values()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# Shapes and the dimension that tensor parallelism cuts: inside groups, unevenly, experts, and
# between groups, where moments stay codes.
CUTS = [((6, 192), 1), ((5, 201), 1), ((4, 6, 50), 1), ((3, 7, 128), 2), ((70, 200), 0)]
CUTS += [((4, 256), 1)]
MAKERS: dict[str, Callable[..., Any]] = {
    "optimizer": lambda model, **options: FusedAdamW(model.named_parameters(), **options),
    "container": lambda model, **options: OptimizersContainer([model], FusedAdamW, options),
}


class Rows(Run):
    """Parameters that tensor parallelism cuts, by default in one process."""

    def __init__(self, kind: str, sharded: bool = False, fp32_moments: Any = ()) -> None:
        self.model, mesh = nn.ParameterList(), init_device_mesh("cpu", (2,))
        for seed, (shape, dimension) in enumerate(CUTS):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            if sharded:
                value = distribute_tensor(value, mesh, [Shard(dimension)], src_data_rank=None)
            self.model.append(nn.Parameter(value))
        options = {"state_dtype": "int8", "fp32_moments": fp32_moments, "lr": 1e-2}
        self.optimizer = MAKERS[kind](self.model, **options)

    def values(self) -> dict[str, Any]:
        states = enumerate(map(self.optimizer.state.__getitem__, self.model))
        found = {f"{number}.{k}": v for number, state in states for k, v in state.items()}
        found |= dict(self.model.named_parameters())
        return {k: full_tensor(v) for k, v in found.items()}


def columns(kind: str) -> None:
    """Where a rank's rows begin or end inside a group, codes load as float moments, and a
    checkpoint of these loads in one process as codes."""
    whole, cut = Rows(kind), Rows(kind, True)
    floats, again = Rows(kind, fp32_moments=["^[0-3]$"]), Rows(kind)
    whole.step(1)
    path = folder / f"columns {kind}"
    dcp.save({"optim": whole.optimizer}, checkpoint_id=path / "whole")  # of replicas, one is saved
    load({"optim": cut.optimizer}, checkpoint_id=path / "whole")
    floats.optimizer.load_state_dict(whole.optimizer.state_dict())
    for run in (cut, floats):
        run.step(2)
    assert_same(cut, floats)
    dcp.save({"optim": cut.optimizer}, checkpoint_id=path / "cut")
    load({"optim": again.optimizer}, checkpoint_id=path / "cut")
    whole.optimizer.load_state_dict(floats.optimizer.state_dict())
    for run in (again, whole):
        run.model.load_state_dict(floats.model.state_dict())
        run.step(3)
    assert_same(again, whole)


def channels_last() -> None:
    """ZeRO loads codes of contiguous rows as float moments if memory has other rows."""
    plain = nn.Conv2d(8, 20, 3)
    params = [*plain.parameters()]
    source = FusedAdamW(params, state_dtype="int8")
    for param in params:
        param.grad = torch.rand(param.shape, generator=torch.Generator().manual_seed(7))
    source.step()
    dcp.save({"optim": source}, checkpoint_id=folder / "channels")
    expected = FusedAdamW(params, state_dtype=torch.float32)
    expected.load_state_dict(source.state_dict())
    model = nn.Conv2d(8, 20, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for partition in ("greedy", "balanced"):
        zero = ZeroRedundancyOptimizer(
            model.parameters(), FusedAdamW, partition=partition, state_dtype="int8"
        )
        load({"optim": zero}, checkpoint_id=folder / "channels")
        zero.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            found, wanted = zero.state_dict()["state"][0], expected.state[params[0]]
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), partition


def cases() -> dict[str, Callable[[], None]]:
    if dist.get_world_size() == 2:
        pairs = [*product(KINDS, WAYS), *product(WEIGHTS, ("balanced",))]
        made = {f"{way} {kind}": partial(save, kind, way) for kind, way in pairs}
        made |= {f"columns {kind}": partial(columns, kind) for kind in MAKERS}
        return made | {"channels_last": channels_last}
    kinds = [(kind, kind) for kind in KINDS]
    moves = [("FSDP2", "FSDP2"), ("greedy", "greedy"), ("balanced", "balanced")]
    other = [("greedy", "balanced"), ("balanced", "greedy")]
    pairs = in_tier(product(kinds, moves + other))
    for kind in ("fp32", "every matrix"):
        pairs += product([(kind, "nearest"), ("nearest", kind)], [moves[0], *other])
    made = {
        f"{s_way} {s} as {way} {k}": partial(resume, s, k, s_way, way)
        for (s, k), (s_way, way) in pairs
    }
    for kind in WEIGHTS:
        made[f"balanced {kind}"] = partial(resume, kind, kind, "balanced", "balanced")
    for kind in KINDS:
        made[f"state dicts as {kind}"] = partial(take_state_dicts, kind)
    return made | {"held": held, "wrong scales": wrong_scales}


if __name__ == "__main__":
    run_cases(cases)
