"""Times Muon over matrices cut by ranks, and torch's on gathered tensors. See README.md.

python benchmarks/muon_ranks.py --out out/bench-muon-ranks
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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
DION = "dion's Muon, bf16 products"
MUON = {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
TARGETS = {2: 1.8, 4: 3.5}
Row = tuple[str, ...]


def rows_of(tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def rows_with_gradients(shapes: list[list[int]]) -> list[nn.Parameter]:
    params = [nn.Parameter(rows_of(torch.randn(shape))) for shape in shapes]
    for param in params:
        param.grad = rows_of(torch.randn(param.shape))
    return params


def ours(shapes: list[list[int]], **options: Any) -> Callable[[], object]:
    return FusedMuon(rows_with_gradients(shapes), **MUON, **options).step


def dions(shapes: list[list[int]]) -> Callable[[], object]:
    """Returns a step of dion's Muon without products."""
    params = rows_with_gradients(shapes)
    optimizer = import_module("dion").Muon(
        params, params[0].device_mesh, newton_schulz_func=lambda directions, epsilon: directions
    )
    step: Callable[[], object] = torch.compiler.set_stance("force_eager")(optimizer.step)
    return step


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


def sent_bytes() -> int:
    """Returns what the loopback interface has sent: of all ranks, with the headers of packets."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line]
    return int(line.split(":")[1].split()[8])


def sent(shapes: list[list[int]], steps: int) -> dict[str, list[float]]:
    """Returns bytes sent in a step by all ranks, each by itself with nothing else on loopback."""
    dist.init_process_group("gloo")
    without_products = {
        OURS: partial(ours, shapes, ns_steps=0),
        OURS_BF16: partial(ours, shapes, ns_steps=0, orthogonalize_dtype=torch.bfloat16),
    }
    if find_spec("dion"):
        without_products[DION] = partial(dions, shapes)
    found = {}
    for name, build in without_products.items():
        step, counts = build(), []
        for _ in range(1 + steps):  # the first connects
            dist.barrier()
            before = sent_bytes()
            step()
            dist.barrier()
            counts.append(float(sent_bytes() - before))
        found[name] = counts[1:]
    return found


def bytes_of(ranks: int, shapes: list[list[int]], steps: int) -> tuple[list[Row], list[str]]:
    """Returns rows and targets of the bytes that ranks send, beside the formula's."""
    elements = sum(rows * cols for rows, cols in shapes)
    rows, targets = [], []
    for name, counts in run_ranks(sent, ranks, shapes, steps).items():
        formula = 2 * (4 if name == OURS else 2) * elements * (ranks - 1) / ranks
        most = max(counts)
        ratio = most / formula
        figures = (f"{most / ranks / 1e6:.1f}", f"{formula / ranks / 1e6:.1f}", f"{ratio:.4f}")
        rows.append((on_ranks(ranks), name, *figures))
        if name != DION:
            what = f"{on_ranks(ranks)}, {name}: bytes of the formula's"
            targets.append(target_line(what, ratio, 1.02, at_least=False))
    return rows, targets


def main() -> None:
    parser = harness.parser(__doc__, "bench-muon-ranks", rounds=5)
    parser.add_argument("--width", type=int, default=768, help="of GPT-2; less where bf16 is slow")
    parser.add_argument("--only-bytes", action="store_true", help="count bytes, measure no times")
    options = parser.parse_args()
    about = harness.start(options, 1)
    gpt2 = gpt2_shapes(width=options.width)
    matrices = [shape for shape in gpt2[2:] if len(shape) == 2]
    shapes = [(48, 32), (32, 48)] * 4 if options.quick else matrices
    rows: list[Row] = []
    of_bytes: list[Row] = []
    targets: list[str] = []
    for ranks in TARGETS:
        its_rows, its_targets = bytes_of(ranks, shapes, options.rounds)
        of_bytes += its_rows
        targets += its_targets
    for ranks, bound in () if options.only_bytes else TARGETS.items():
        times = run_ranks(measured, ranks, shapes, options.rounds)
        medians = {name: statistics.median(spent) for name, spent in times.items()}
        for name, median in medians.items():
            spread = f"{min(times[name]):.0f} to {max(times[name]):.0f}"
            faster = medians[GATHERED] / median
            rows.append((on_ranks(ranks), name, f"{median:.1f}", spread, f"{faster:.2f}"))
        best = medians[GATHERED] / min(medians[OURS], medians[OURS_BF16])
        targets.append(target_line(f"{on_ranks(ranks)}: times as fast", best, bound))
    header = ("ranks", "", "MB a rank", "formula", "ratio")
    sections = {
        "Bytes sent in a step, counted by the interface": harness.table(header, of_bytes, 2)
    }
    if rows:
        header = ("ranks", "", "ms", "range", "times as fast")
        sections["Step, one thread a rank"] = harness.table(header, rows, 2)
    sections["Targets"] = [] if options.quick else targets
    harness.write(options.out / "muon-ranks", about, [], sections)


if __name__ == "__main__":
    main()
