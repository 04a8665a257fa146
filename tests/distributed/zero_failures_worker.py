"""One rank of a training run that loses a rank; started by test_zero_failures.py.

Arguments: folder, event ("none", "killed", "late", "alone"), partition, steps. Each step saves a
sharded checkpoint. A run continues from the newest checkpoint in the folder.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchopt_ext import FusedAdamW
from torchopt_ext.zero import ZeroRedundancyOptimizer, load_sharded, sharded_state_dict

LOST_STEP = 3


def alone(folder: Path) -> None:
    """Rank 0 makes every call that waits for rank 1 and writes the errors. Rank 1 does nothing."""
    join_group(600)

    def built(call: Callable[[Any], Any] | None, **options: Any) -> Callable[[], Any]:
        params = [torch.nn.Parameter(torch.ones(200, 90)) for _ in range(2)]
        group = dist.new_group(timeout=datetime.timedelta(seconds=600))
        options["timeout"] = datetime.timedelta(seconds=4)
        build = partial(ZeroRedundancyOptimizer, params, FusedAdamW, group, **options)
        if call is None:
            return build
        zero = build()
        return lambda: [torch.stack(params).sum().backward(), call(zero)]

    group = {"params": [torch.nn.Parameter(torch.ones(3))]}
    plain = FusedAdamW([torch.ones(3), torch.ones(3)]).state_dict()
    balanced = {"partition": "balanced"}
    calls = {
        "constructor": built(None),
        "step with a norm": built(lambda zero: zero.step(), max_grad_norm=1.0),
        "step": built(lambda zero: zero.step()),
        "step, balanced": built(lambda zero: zero.step(), **balanced),
        "step, sharded": built(lambda zero: zero.step(), sharded_gradients=True, **balanced),
        "zero_grad": built(lambda zero: zero.zero_grad(), sharded_gradients=True, **balanced),
        "clip": built(lambda zero: zero.clip_grad_norm_(1.0)),
        "add_param_group": built(lambda zero: zero.add_param_group(group)),
        "consolidate": built(lambda zero: zero.consolidate_state_dict()),
        "load": built(lambda zero: zero.load_state_dict(plain)),
        "save shards": built(sharded_state_dict),
        "load shards": built(lambda zero: load_sharded(zero, folder)),
    }
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = {name: pool.submit(call) for name, call in calls.items()}
        errors = folder / "errors.json"
        errors.write_text(json.dumps({name: str(f.exception()) for name, f in futures.items()}))
        print("done", flush=True)
        os._exit(7)  # some collectives never end
    sys.stdin.read()


def join_group(seconds: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=datetime.timedelta(seconds=seconds),
    )


def main() -> None:
    folder, event, partition, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if event == "alone":
        alone(folder)
    join_group(5)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Linear(90, 30))
    sharded = partition == "sharded"
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        FusedAdamW,
        partition="greedy" if partition == "greedy" else "balanced",
        sharded_gradients=sharded,
        max_grad_norm=1.0,
        lr=1e-2,
    )
    first = 0
    saved = sorted(folder.glob("step*/.metadata"))
    if saved:
        first = int(saved[-1].parent.name[4:])
        dcp.load({"model": (weights := model.state_dict())}, checkpoint_id=saved[-1].parent)
        model.load_state_dict(weights)
        load_sharded(zero, saved[-1].parent)
    for step in range(first, steps):
        zero.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 70)).square().mean().backward()
        if rank == 1 and step == LOST_STEP and event == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and step == LOST_STEP and event == "late":
            sys.stdin.read()  # until it is killed
        try:
            zero.step()
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(7)  # a group that lost a rank cannot be destroyed cleanly
        content = {"optimizer": sharded_state_dict(zero), "model": model.state_dict()}
        dcp.save(content, checkpoint_id=folder / f"step{step + 1}")
    torch.save([p.detach() for p in model.parameters()], folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
