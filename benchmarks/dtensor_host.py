"""Times the host's work of clipping and stepping many small DTensors. See README.md.

python benchmarks/dtensor_host.py --out out/bench-dtensor-host
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from cases import CLIP, FOREACH, FUSED, OURS
from harness import Call, Case, Group, find, target_line
from mixed_precision import operators
from ranks import on_ranks, run_ranks, sample
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.deferred_clipping import defer_clipping

DEFERRED = f"{OURS}, deferred clipping"
IMPLEMENTATIONS = (FUSED, FOREACH, OURS, DEFERRED)


def clip_and_step(implementation: str, tensors: int, elements: int) -> Call:
    """Returns a call that clips and steps sharded parameters with gradients."""
    torch.manual_seed(0)
    model = nn.Module()
    model.tensors = nn.ParameterList(torch.randn(elements) for _ in range(tensors))
    fully_shard(model)
    params = list(model.parameters())
    for param in params:
        param.grad = 0.1 * param.detach()
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    if implementation in (FUSED, FOREACH):
        how = {implementation.removeprefix("torch "): True}
        optimizer = torch.optim.AdamW(params, **settings, **how)
        return lambda: (clip_grad_norm_(params, 1.0, foreach=True), optimizer.step())
    if implementation == OURS:
        return OptimizersContainer([model], FusedAdamW, settings | {"max_grad_norm": 1.0}).step
    container = OptimizersContainer([model], FusedAdamW, settings)
    clipping = defer_clipping(container)
    return lambda: (clipping.clip(1.0), container.step())


def on_rank(rounds: int, tensors: int, elements: int) -> dict[str, Any]:
    """Times the implementations on a rank, and counts operators over a tenth and all tensors."""
    dist.init_process_group("gloo")
    name = f"{tensors:,} of {elements}, {on_ranks(dist.get_world_size())}"
    cases = [Case(kind, CLIP, clip_and_step(kind, tensors, elements)) for kind in IMPLEMENTATIONS]
    group = Group(name, [(elements,)] * tensors, cases, baseline=FUSED)
    rows, _ = harness.measure([lambda: group], rounds, sample)
    counted = []
    for kind in IMPLEMENTATIONS:
        calls = [clip_and_step(kind, count, elements) for count in (tensors // 10, tensors)]
        counted.append([name, kind, [operators(call).total() for call in calls]])
    return {"rows": rows, "counted": counted}


def main() -> None:
    parser = harness.parser(__doc__, "bench-dtensor-host", rounds=31)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=64, help="of each tensor")
    options = parser.parse_args()
    about = harness.start(options)
    sizes = (options.rounds, options.tensors, options.elements)
    results = [run_ranks(on_rank, n, *sizes) for n in options.ranks]
    rows = [row for result in results for row in result["rows"]]
    counted = [line for result in results for line in result["counted"]]
    targets = []
    for name, kind, (few, many) in counted:
        if kind in (OURS, DEFERRED):
            row = find(rows, name, CLIP, kind)
            times = row and row["times_as_fast_as"][FUSED]
            targets += [
                target_line(f"{name}, {kind}: times as fast as {FUSED}", times, 5.0),
                target_line(f"{name}, {kind}: operators for more tensors", many - few, 0, False),
            ]
    header = ("tensors", "implementation", f"{options.tensors // 10:,}", f"{options.tensors:,}")
    sections = {
        "Operators that a step dispatches, by the number of tensors": harness.table(
            header, [(name, kind, *(f"{n:,}" for n in of)) for name, kind, of in counted], 2
        ),
        "Targets": [] if options.quick else targets,
    }
    harness.write(options.out / "dtensor_host", about, rows, sections, counted=counted)


if __name__ == "__main__":
    main()
