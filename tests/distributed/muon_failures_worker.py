"""One of three ranks that share matrices; rank 1 dies or stops in a phase of the second step.

Started by test_muon_failures.py with a folder, a phase and a signal. The others write what they
raised, after how many seconds, and which parameters have other weights and another momentum.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchopt_ext import FusedMuon
from torchopt_ext.optim import exchange
from torchopt_ext.optim import step as step_module

PHASES = {
    "agreement": (step_module, "agree_on_matrices"),
    "norm": (step_module, "accumulated_norm"),
    "average": (exchange._Stages, "__init__"),
    "products": (exchange._Stages, "orthogonalize"),
    "return": (exchange._Stages, "take_back"),
    "apply": (exchange.Exchanger, "run"),
}
ONCE = ("agreement", "norm")
TIMEOUT = 8  # seconds


def lose(phase: str, number: int) -> None:
    """Lets this process get the signal in a phase, in the second exchange."""
    owner, name = PHASES[phase]
    call, calls = getattr(owner, name), []

    def counted() -> None:
        calls.append(1)
        if len(calls) == (1 if phase in ONCE else 2):
            os.kill(os.getpid(), number)

    def fail(*args: Any, **more: Any) -> Any:
        if phase == "apply":
            *first, apply = args
            return call(*first, lambda k: (counted(), apply(k)))
        counted()
        return call(*args, **more)

    setattr(owner, name, fail)


def main() -> None:
    folder, phase, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=3,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (3,))

    def place(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    shapes = [(8 * n, 12) for n in range(1, 7)]
    params = [nn.Parameter(place(n, shape)) for n, shape in enumerate(shapes)]
    optimizer = FusedMuon(params, max_grad_norm=1.0)
    for step in range(2):
        for p, shape in zip(params, shapes, strict=True):
            p.grad = place(10 + step, shape)
        if step == 0:
            optimizer.step()
            before = [[t._local_tensor.clone() for t in (p, state["momentum_buffer"])]
                      for p, state in optimizer.state.items()]  # fmt: skip
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), mesh.get_group())
    if rank == 1:
        lose(phase, number)
    began = time.monotonic()
    try:
        optimizer.step()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - began
    changed: list[list[int]] = [[], []]
    for position, ((p, state), held) in enumerate(
        zip(optimizer.state.items(), before, strict=True)
    ):
        for which, (now, was) in enumerate(zip((p, state["momentum_buffer"]), held, strict=True)):
            if not torch.equal(now._local_tensor, was):
                changed[which].append(position)
    result = {"error": error, "seconds": seconds, "weights": changed[0], "momentum": changed[1]}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # some collectives never end


if __name__ == "__main__":
    main()
