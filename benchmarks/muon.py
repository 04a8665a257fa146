"""Times Muon with AdamW for the rest, and torch's two optimizers. See README.md.

python benchmarks/muon.py --out out/bench-muon
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Case, Group, find, target_line
from shapes import Shapes, parameters
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedMuon
from torchopt_ext.cli.tensors import gpt2_shapes

OURS, OURS_BF16, TORCH = "FusedMuon", "FusedMuon, bf16 products", "torch Muon + AdamW fused"
DION = "dion Muon + AdamW fused"
CLIP, NO_PRODUCTS = "clip+step", "clip+step, no products"
GPT2, LAYER = "GPT-2 124 M", "one layer of GPT-2"
HEADS, EXPERTS, TINY = "576 heads", "8 of 64 experts", "2,000 of 32 x 32"
# Times of torch's step over ours that the documentation promises.
BOUNDS = {GPT2: 2.5, LAYER: 2.5, HEADS: 8.0, EXPERTS: 8.0, TINY: 20.0}
MAX_NORM = 1.0
MUON = {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def sets(quick: bool) -> dict[str, tuple[Shapes, Shapes]]:
    """Returns the shapes of Muon's parameters and of the others, by set."""
    gpt2 = gpt2_shapes(500, 32, 48, 2) if quick else gpt2_shapes()
    embeddings = gpt2[:2]  # of tokens and places
    matrices = [shape for shape in gpt2[2:] if len(shape) == 2]
    vectors = [shape for shape in gpt2[2:] if len(shape) < 2]
    size, few = (64, 20) if quick else (768, 1)
    return {
        GPT2: (matrices, [*embeddings, *vectors]),
        LAYER: (matrices[:4], vectors[:8]),  # where torch's bf16 product takes minutes for GPT-2
        HEADS: ([(64, size)] * (432 // few) + [(size, 64)] * (144 // few), []),
        EXPERTS: ([(4 if quick else 64, 256, 128)] * 8, []),
        TINY: ([(32, 32)] * (100 if quick else 2000), []),
    }


def gradients_of(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def params_with(gradients: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.full_like(gradient, 0.02)) for gradient in gradients]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient.clone()
    return params


def fused(matrices: list[Tensor], rest: list[Tensor], **options: Any) -> Callable[[], object]:
    groups: list[dict[str, Any]] = [{"params": params_with(matrices)}]
    if rest:
        groups.append({"params": params_with(rest), "algorithm": "adamw"})
    return FusedMuon(groups, max_grad_norm=MAX_NORM, **MUON, **options).step


def two_optimizers(
    build: Callable[[list[nn.Parameter]], Any], matrices: list[Tensor], rest: list[Tensor]
) -> Callable[[], object]:
    """Clips by one norm and steps both; a stack of matrices is a parameter for each."""
    cut = [matrix for stack in matrices for matrix in (stack if stack.dim() == 3 else [stack])]
    params, others = params_with(cut), params_with(rest)
    optimizers = [build(params)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1, fused=True))

    def call() -> None:
        clip_grad_norm_([*params, *others], MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()

    return call


def dion(params: list[nn.Parameter]) -> Any:
    """Returns dion's Muon. Raises ImportError if it is not installed."""
    return importlib.import_module("dion").Muon(params, lr=1e-3, weight_decay=0.1)


def build(name: str, matrices: Shapes, rest: Shapes, bf16: bool) -> Group:
    mine, others = gradients_of(matrices), gradients_of(rest)
    torchs = partial(torch.optim.Muon, **MUON)
    cases = [
        Case(OURS, CLIP, fused(mine, others), 32),
        Case(OURS, NO_PRODUCTS, fused(mine, others, ns_steps=0), 32),
        Case(TORCH, CLIP, two_optimizers(torchs, mine, others), 66),
    ]
    if bf16:
        cases.append(Case(OURS_BF16, CLIP, with_bf16(mine, others)))
    return Group(name, [*matrices, *rest], cases, baseline=TORCH, rounds=5)


def with_bf16(matrices: list[Tensor], rest: list[Tensor]) -> Callable[[], object]:
    groups: list[dict[str, Any]] = [
        {"params": params_with(matrices), "orthogonalize_dtype": torch.bfloat16}
    ]
    if rest:
        groups.append({"params": params_with(rest), "algorithm": "adamw"})
    return FusedMuon(groups, max_grad_norm=MAX_NORM, **MUON).step


def build_dion(name: str, matrices: Shapes, rest: Shapes) -> Group:
    mine, others = gradients_of(matrices), gradients_of(rest)
    cases = [
        Case(DION, CLIP, two_optimizers(dion, mine, others)),
        Case(OURS, CLIP, fused(mine, others)),
    ]
    return Group(f"{name}, dion", [*matrices, *rest], cases, baseline=DION, rounds=3)


def product_rates(quick: bool) -> list[tuple[str, ...]]:
    """Returns GFLOP/s of torch's matrix product, by size and dtype: the fastest of several."""
    rows = []
    for n in (64, 128) if quick else (768, 3072):
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.randn(n, n).to(dtype)
            times = [harness.wall_milliseconds(lambda a=a: a @ a) for _ in range(5)]
            rows.append((f"{n}", str(dtype), f"{2 * n**3 / min(times) / 1e6:.0f}"))
    return rows


def main() -> None:
    parser = harness.parser(__doc__, "bench-muon", rounds=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="also with bf16 products")
    parser.add_argument("--sets", nargs="+", choices=sets(quick=True), help="all by default")
    options = parser.parse_args()
    about = harness.start(options, options.threads)
    shapes = {k: v for k, v in sets(options.quick).items() if k in (options.sets or [k])}
    builds = [partial(build, name, *its, options.bf16) for name, its in shapes.items()]
    builds += [partial(build_dion, name, *its) for name, its in shapes.items()]
    rows, missing = harness.measure(builds, options.rounds)
    targets = []
    for name, bound in BOUNDS.items():
        row = find(rows, name, CLIP, OURS)
        times = row and row["times_as_fast_as"][TORCH]
        targets.append(target_line(f"{name}: times as fast", times, bound))
    rates = harness.table(("n", "dtype", "GFLOP/s"), product_rates(options.quick), 2)
    counts = [(n, f"{parameters([*m, *r]):,}", f"{len(m):,}") for n, (m, r) in shapes.items()]
    sections = {
        "Sets": harness.table(("set", "parameters", "tensors of Muon"), counts, 1),
        f"torch's matrix product, {options.threads} threads": rates,
        "Other libraries": missing,
        "Targets": [] if options.quick else targets,
    }
    harness.write(options.out / "muon", about, rows, sections)


if __name__ == "__main__":
    main()
