"""Times Muon over matrices cut by ranks, and torch's on gathered tensors. See README.md.

python benchmarks/muon_ranks.py --out out/bench-muon-ranks
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import target_line
from ranks import on_ranks, run_ranks, sample
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchopt_ext import FusedMuon
from torchopt_ext.cli.tensors import gpt2_shapes

OURS, OURS_BF16, GATHERED = "FusedMuon", "FusedMuon, bf16 products", "torch.optim.Muon, gathered"
MUON = {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
TARGETS = {2: 1.8, 4: 3.5}


def rows_of(tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def ours(shapes: list[list[int]], **options: Any) -> Callable[[], object]:
    params = [nn.Parameter(rows_of(torch.randn(shape))) for shape in shapes]
    for param in params:
        param.grad = rows_of(torch.randn(param.shape))
    return FusedMuon(params, **MUON, **options).step


def gathered(shapes: list[list[int]]) -> Callable[[], object]:
    """Every rank gathers the gradients and steps whole copies of all weights."""
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    gradients = [rows_of(torch.randn(shape)) for shape in shapes]
    optimizer = torch.optim.Muon(whole, **MUON)

    def call() -> None:
        for param, gradient in zip(whole, gradients, strict=True):
            param.grad = gradient.full_tensor()
        optimizer.step()

    return call


def measured(shapes: list[list[int]], rounds: int) -> dict[str, list[float]]:
    """Returns milliseconds of each implementation, in turn, until the slowest rank is done."""
    dist.init_process_group("gloo")
    calls = {
        OURS: ours(shapes),
        OURS_BF16: ours(shapes, orthogonalize_dtype=torch.bfloat16),
        GATHERED: gathered(shapes),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + rounds):
        for name, call in calls.items():
            spent = sample(call)
            times[name] += [spent] if turn else []
    return times


def main() -> None:
    parser = harness.parser(__doc__, "bench-muon-ranks", rounds=5)
    options = parser.parse_args()
    about = harness.start(options, 1)
    matrices = [shape for shape in gpt2_shapes()[2:] if len(shape) == 2]
    shapes = [(48, 32), (32, 48)] * 4 if options.quick else matrices
    rows, targets = [], []
    for ranks, bound in TARGETS.items():
        times = run_ranks(measured, ranks, shapes, options.rounds)
        medians = {name: statistics.median(spent) for name, spent in times.items()}
        for name, median in medians.items():
            spread = f"{min(times[name]):.0f} to {max(times[name]):.0f}"
            faster = medians[GATHERED] / median
            rows.append((on_ranks(ranks), name, f"{median:.1f}", spread, f"{faster:.2f}"))
        best = medians[GATHERED] / min(medians[OURS], medians[OURS_BF16])
        targets.append(target_line(f"{on_ranks(ranks)}: times as fast", best, bound))
    table = harness.table(("ranks", "", "ms", "range", "times as fast"), rows, 2)
    sections = {"Step, one thread a rank": table, "Targets": [] if options.quick else targets}
    harness.write(options.out / "muon-ranks", about, [], sections)


if __name__ == "__main__":
    main()
