"""The ranks of dtensor_host.py: dtensor_worker.py OUT ROUNDS TENSORS ELEMENTS"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import FOREACH, FUSED, OURS
from operators import Operators
from ranks import sample
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.timing import in_turn
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.deferred_clipping import defer_clipping

DEFERRED = f"{OURS}, deferred clipping"
IMPLEMENTATIONS = (FUSED, FOREACH, OURS, DEFERRED)


class Tensors(nn.Module):
    """A model of many small tensors."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(elements) for _ in range(tensors))


def clip_and_step(implementation: str, tensors: int, elements: int) -> Callable[[], object]:
    """Returns a call that clips and steps sharded parameters with gradients."""
    torch.manual_seed(0)
    model = fully_shard(Tensors(tensors, elements))
    params = list(model.parameters())
    for param in params:
        param.grad = 0.1 * param.detach()
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    if implementation in (FUSED, FOREACH):
        how = {"fused": True} if implementation == FUSED else {"foreach": True}
        optimizer = torch.optim.AdamW(params, **settings, **how)
        return lambda: (clip_grad_norm_(params, 1.0, foreach=True), optimizer.step())
    if implementation == OURS:
        return OptimizersContainer([model], FusedAdamW, settings | {"max_grad_norm": 1.0}).step
    container = OptimizersContainer([model], FusedAdamW, settings)
    clipping = defer_clipping(container)
    return lambda: (clipping.clip(1.0), container.step())


def operators(implementation: str, tensors: int, elements: int) -> int:
    """Counts the operators that a step dispatches, on DTensors and on plain tensors."""
    call = clip_and_step(implementation, tensors, elements)
    call()
    with Operators() as seen:
        call()
    return seen.count.total()


def main() -> None:
    out, rounds, tensors, elements = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    calls = [clip_and_step(name, tensors, elements) for name in IMPLEMENTATIONS]
    for call in calls:  # creates state and plans
        call()
    samples = zip(*islice(in_turn(calls, sample), rounds), strict=True)
    result = {
        "samples": dict(zip(IMPLEMENTATIONS, samples, strict=True)),
        "operators": {
            name: [operators(name, count, elements) for count in (tensors // 10, tensors)]
            for name in IMPLEMENTATIONS
        },
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
