"""Containers and torch.distributed.checkpoint on two ranks: int16 state, and what does not load."""

import copy
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from resharding_worker import Job
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.compare import assert_same
from tests.support.ranks import full_tensor, run_cases
from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.statedict.dcp import load

folder = Path(sys.argv[1])


def gathered_remainders():
    """Gathers and saves int16 remainders, which neither gloo nor NCCL sends, as int32."""
    job, options = Job("fsdp", "remainder"), StateDictOptions(full_state_dict=True)
    for seed in range(2):
        job.step(seed)
    (part,), (optimizer,) = job.parts, job.optimizer
    before = copy.deepcopy(optimizer.state_dict()["state"])
    full = get_optimizer_state_dict(part, optimizer, options=options)
    for param, (name, entry) in zip(part.parameters(), full["state"].items(), strict=True):
        shards = optimizer.state[param]["remainder"].to(torch.int32)
        assert torch.equal(entry["remainder"], shards.full_tensor()), name
        assert entry["remainder"].dtype == torch.int32
    if dist.get_rank() == 0:
        dcp.save({"optim": full}, checkpoint_id=folder / "full", no_dist=True)
    dist.barrier()
    optimizer.state.clear()
    load({"optim": optimizer}, checkpoint_id=folder / "full")
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in before[index].items():
            local, expected = (getattr(v, "_local_tensor", v) for v in (entry[name], value))
            assert torch.equal(local, expected), name


def plain_state():
    """A sharded job cuts its shards out of whole state, and rejects other plain tensors."""
    job, other = Job("fsdp", "fp32"), Job("fsdp", "fp32")
    job.step(1)
    saved = job.optimizer.state_dict()
    whole = {key: full_tensor(value) for key, value in saved.items()}
    other.optimizer.load_state_dict(whole)
    loaded = {key: full_tensor(value) for key, value in other.optimizer.state_dict().items()}
    assert_same(loaded, whole)
    shards = {key: getattr(value, "_local_tensor", value) for key, value in saved.items()}
    with pytest.raises(ValueError, match=r"has shape .*, expected"):
        job.optimizer.load_state_dict(shards)


def flat_parameters():
    """The first generation of FSDP is rejected."""
    part = FullyShardedDataParallel(nn.Linear(9, 7), device_id=torch.device("cpu"))
    container = OptimizersContainer([part], FusedAdamW, {"lr": 1e-2})
    for call in (container.state_dict, lambda: container.load_state_dict({})):
        with pytest.raises(NotImplementedError, match="fully_shard instead"):
            call()
    kinds = [{"master_weights": kind} for kind in ("remainder", "remainder8")]
    for use_orig_params, options in product((True, False), [*kinds, {"state_dtype": "int8"}]):
        part = FullyShardedDataParallel(
            nn.Linear(64, 64).bfloat16(),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        with pytest.raises(TypeError, match=r"no remainders and no 8-bit moments.*fully_shard"):
            FusedAdamW(part.parameters(), **options)


def missing_key():
    """Only rank 0's optimizer is in the checkpoint. Both ranks raise, neither waits."""
    optimizer = FusedAdamW([nn.Parameter(torch.ones(2))])
    optimizer.init_state()
    dcp.save({"stage0": optimizer}, checkpoint_id=folder / "stages")
    with pytest.raises((ValueError, RuntimeError), match="stage1"):
        load({f"stage{dist.get_rank()}": optimizer}, checkpoint_id=folder / "stages")


MAKERS = {
    "torch": lambda model: torch.optim.AdamW(model.parameters()),
    "fused": lambda model: FusedAdamW(model.parameters()),
    "adapted": lambda model: FSDPadaptOptimizer(torch.optim.SGD(model.parameters())),
    "container": lambda model: OptimizersContainer([model], FusedAdamW, {}),
    "in backward": lambda model: OptimizersInBackwardContainer([model], FusedAdamW, {}),
}


def fits_on_one_rank():
    """Rank 1 has another shape than the checkpoint. Both ranks raise, and neither loads."""
    stage = f"stage{dist.get_rank()}"
    for kind, make in MAKERS.items():
        saved, loaded = (make(nn.Linear(size, 2)) for size in (3 + dist.get_rank(), 3))
        for optimizer in (saved, loaded):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
            optimizer.step()
        dcp.save({stage: saved}, checkpoint_id=folder / kind)
        loaded.param_groups[0]["lr"] = 0.5
        before = str(loaded.state_dict())
        with pytest.raises(ValueError, match=r"has shape \(2, 4\), expected \(2, 3\)"):
            load({stage: loaded}, checkpoint_id=folder / kind)
        assert str(loaded.state_dict()) == before, kind


if __name__ == "__main__":
    checked = (gathered_remainders, plain_state, flat_parameters, missing_key, fits_on_one_rank)
    run_cases(lambda: {case.__name__: case for case in checked})
