"""One rank of a training run that loses a rank; started by test_zero_failures.py.

Arguments: folder, what happens ("none", "killed", "late"), partition, steps. Each step is saved as
a sharded checkpoint; a checkpoint that is there is continued.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchopt_ext import FusedAdamW
from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.checkpoint import load_sharded, sharded_state_dict

LOST_STEP = 3


def main() -> None:
    folder, event, partition, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=5),
    )
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
            time.sleep(20)
        began = time.monotonic()
        try:
            zero.step()
        except RuntimeError as error:
            print(f"raised after {time.monotonic() - began:.1f} s: {error}", flush=True)
            os._exit(7)  # a group that lost a rank cannot be left in order
        content = {"optimizer": sharded_state_dict(zero), "model": model.state_dict()}
        dcp.save(content, checkpoint_id=folder / f"step{step + 1}")
    torch.save([p.detach() for p in model.parameters()], folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
