"""Trains a replica group of one process with torchft until the test asks it to stop.

Usage: fault_tolerance_worker.py FOLDER REPLICA KIND. Appends a line of JSON to FOLDER/REPLICA.steps
for each committed step. Some steps after FOLDER/stop exists, all groups end after the same step and
save their state in FOLDER/REPLICA.pt.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

socket.gethostname = lambda: "localhost"  # torchft's addresses stay on this host

import torchft  # noqa: E402

from torchopt_ext import FusedAdamW  # noqa: E402
from torchopt_ext.containers import FTOptimizersContainer, LRSchedulersContainer  # noqa: E402
from torchopt_ext.containers.deferred_clipping import defer_clipping  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "deferred clipping": {},
    "bf16 with remainders": {"master_weights": "remainder", "max_grad_norm": 0.5},
}
TIMEOUT = timedelta(seconds=20)


def main(folder: Path, replica: int, kind: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # all groups except the first load a peer's weights
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        replica_id=f"replica_{replica}",
        hostname="localhost",
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float32
    model.to(dtype)
    optimizers = FTOptimizersContainer([model], FusedAdamW, {"lr": 1e-2} | KINDS[kind], manager)
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (1 + 0.1 * step))
    states = {"model": model, "optimizer": optimizers, "schedule": schedulers}
    for name, stateful in states.items():
        manager.register_state_dict_fn(name, stateful.load_state_dict, stateful.state_dict)
    optimizers.init_cache_state_dict()
    hooks: list[Any] = []
    optimizers.register_step_post_hook(lambda *_: hooks.append(1))
    clipping = defer_clipping(optimizers) if kind == "deferred clipping" else None

    committed, asked_to_stop = 0, 0.0
    while not asked_to_stop:
        step = manager.current_step()
        optimizers.zero_grad()  # starts a quorum
        generator = torch.Generator().manual_seed(1000 * step + replica)
        batch = torch.randn(4, 8, generator=generator).to(dtype)
        (model(batch).float() - 1).square().mean().backward()
        votes = torch.full((), float((folder / "stop").exists()))
        # torchft's DistributedDataParallel raises AssertionError if a peer ends in backward.
        for tensor in (*(param.grad for param in model.parameters()), votes):
            manager.allreduce(tensor).wait()
        if clipping is not None:
            clipping.clip(0.5)
        batches = manager.batches_committed()
        optimizers.step()
        if manager.batches_committed() == batches:
            continue  # the step was not committed
        schedulers.step()
        committed, asked_to_stop = committed + 1, votes.item()
        line = {"step": manager.current_step(), "groups": manager.num_participants()}
        line |= {"committed": committed, "hooks": len(hooks)}
        with open(folder / f"{replica}.steps", "a") as file:
            print(json.dumps(line), file=file)
    torch.save({name: each.state_dict() for name, each in states.items()}, folder / f"{replica}.pt")
    del store  # the manager needs the store until here
    os._exit(0)  # torchft's threads may wait for other groups


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
