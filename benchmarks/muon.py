"""Times Muon with AdamW for the rest, and torch's two optimizers. See README.md.

python benchmarks/muon.py --out out/bench-muon
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import harness
import roofline
import torch
from harness import LOOP, Case, Group, find, target_line
from roofline import loop_case
from shapes import Shapes, parameters, yolo26n_shapes
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedMuon, orthogonalize
from torchopt_ext.cli.tensors import gpt2_shapes
from torchopt_ext.cli.timing import in_turn, paired

OURS, OURS_BF16, TORCH = "FusedMuon", "FusedMuon, bf16 products", "torch Muon + AdamW fused"
COMPILED = "compiled"
CLIP, NO_PRODUCTS = "clip+step", "clip+step, no products"
GPT2, LAYER, CONVOLUTIONS = "GPT-2 124 M", "one layer of GPT-2", "126 of yolo26n"
HEADS, EXPERTS, TINY = "576 heads", "8 of 64 experts", "2,000 of 32 x 32"
# Times of torch's step over ours that the documentation promises. Those of whole matrices depend on
# torch's product of bf16, which its Muon takes: see targets().
BOUNDS = {HEADS: 8.0, TINY: 20.0}
MOST_COMPILED = 50  # matrices: the compiler takes minutes, as the step calls each one's products
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
        CONVOLUTIONS: (yolo26n_shapes()[: 20 if quick else None], []),
        HEADS: ([(64, size)] * (432 // few) + [(size, 64)] * (144 // few), []),
        EXPERTS: ([(4, 32, 16) if quick else (64, 256, 128)] * 8, []),
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
    build: Callable[[list[nn.Parameter]], Any],
    matrices: list[Tensor],
    rest: list[Tensor],
    fused: bool = True,
) -> Callable[[], object]:
    """Clips by one norm and steps both; a stack of matrices is a parameter for each."""
    cut = [matrix for stack in matrices for matrix in (stack if stack.dim() == 3 else [stack])]
    params, others = params_with(cut), params_with(rest)
    optimizers = [build(params)]
    if others:
        way = {"fused": True} if fused else {"foreach": True}
        optimizers.append(torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1, **way))

    def call() -> None:
        clip_grad_norm_([*params, *others], MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()

    return call


def dion(params: list[nn.Parameter]) -> Any:
    """Returns dion's Muon. Raises ImportError if it is not installed."""
    return importlib.import_module("dion").Muon(params, lr=1e-3, weight_decay=0.1)


def pytorch_optimizers(params: list[nn.Parameter]) -> Any:
    """Returns pytorch-optimizer's Muon. Raises ImportError if it is not installed."""
    groups = [{"params": params, "use_muon": True}]
    kind = importlib.import_module("pytorch_optimizer").Muon
    return kind(groups, lr=1e-3, weight_decay=0.1, use_adjusted_lr=True)


PEERS = {"dion": dion, "pytorch-optimizer": pytorch_optimizers}


def unchanged(directions: Tensor) -> Tensor:
    """Stands in for the iterations, so that a step is its passes over memory."""
    return directions


def zeros_like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def plain_loops(matrices: list[Tensor], rest: list[Tensor]) -> Case:
    """Returns loops over the memory of the norm, of both passes around the products, and of AdamW.

    The directions lie in memory of their own, where ours reuses a buffer that the caches hold.
    """
    directions = zeros_like(matrices)
    loops = [
        loop_case("read_fp32", [*matrices, *rest]),
        loop_case("direction_fp32", matrices, zeros_like(matrices), directions),
        loop_case("update_fp32_0", directions, zeros_like(matrices)),
    ]
    if rest:
        loops.append(loop_case("update_fp32", rest, *(zeros_like(rest) for _ in range(3))))
    return Case(LOOP, NO_PRODUCTS, roofline.in_turn(*loops).call, 32)


def build_passes(name: str, matrices: Shapes, rest: Shapes) -> Group:
    mine, others = gradients_of(matrices), gradients_of(rest)
    passes = fused(mine, others, orthogonalize=unchanged)
    ours = Case(OURS, NO_PRODUCTS, passes, 32, roofline=NO_PRODUCTS)
    return Group(name, [*matrices, *rest], [ours, plain_loops(mine, others)], None)


def build(name: str, matrices: Shapes, rest: Shapes, bf16: bool) -> Group:
    mine, others = gradients_of(matrices), gradients_of(rest)
    torchs = partial(torch.optim.Muon, **MUON)
    cases = [
        Case(OURS, CLIP, fused(mine, others), 32),
        Case(TORCH, CLIP, two_optimizers(torchs, mine, others), 66),
    ]
    if bf16:
        of_bf16 = fused(mine, others, orthogonalize_dtype=torch.bfloat16)
        cases.append(Case(OURS_BF16, CLIP, of_bf16))
    return Group(name, [*matrices, *rest], cases, baseline=TORCH, rounds=5)


def build_beside(name: str, matrices: Shapes, rest: Shapes, bf16: bool, peer: str) -> Group:
    """Returns a group of our step and another library's, or torch's compiled.

    Raises:
        ImportError: the library is not installed.
    """
    mine, others = gradients_of(matrices), gradients_of(rest)
    if peer == COMPILED:
        torchs = partial(torch.optim.Muon, **MUON)
        call = torch.compile(two_optimizers(torchs, mine, others, fused=False))
    else:
        call = two_optimizers(PEERS[peer], mine, others)
    theirs = "torch Muon + AdamW compiled" if peer == COMPILED else f"{peer} Muon + AdamW fused"
    cases = [Case(theirs, CLIP, call), Case(OURS, CLIP, fused(mine, others))]
    if bf16:
        of_bf16 = fused(mine, others, orthogonalize_dtype=torch.bfloat16)
        cases.append(Case(OURS_BF16, CLIP, of_bf16))
    return Group(f"{name}, {peer}", [*matrices, *rest], cases, baseline=theirs, rounds=3)


def product_rates(quick: bool) -> dict[tuple[int, torch.dtype], float]:
    """Returns GFLOP/s of torch's matrix product, by size and dtype: the fastest of several."""
    rates = {}
    for n in (64, 128) if quick else (768, 3072):
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.randn(n, n).to(dtype)
            times = [harness.wall_milliseconds(lambda a=a: a @ a)]
            while len(times) < 5 and sum(times) < 5000:  # some CPUs take a minute in bfloat16
                times.append(harness.wall_milliseconds(lambda a=a: a @ a))
            rates[n, dtype] = 2 * n**3 / min(times) / 1e6
    return rates


def operations(m: int, n: int) -> float:
    """Returns what five steps of "jordan" compute for a matrix, a multiply-add counted as two.

    csrc/cpu/orthogonalize.cpp has the formula, tests/cpp/orthogonalize_test.cpp counts.
    """
    side, ratio = min(m, n), max(m, n) / min(m, n)
    segments = (1, 1, 1, 1, 1) if m == n else (2, 2, 1)
    return sum(3 * ratio + 4 * steps - 3 for steps in segments) * side**3


def newton_schulz_shares(quick: bool) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns by shape GFLOP/s of our iterations in fp32, and relative to torch's product."""
    shares = {}
    for m, n in ((32, 32), (32, 96)) if quick else ((768, 768), (768, 3072)):
        x = torch.randn(m, n)
        ours, torchs = partial(orthogonalize, x), partial(torch.mm, x, x.T)
        for call in (ours, torchs):
            call()
        turns = islice(in_turn((ours, torchs), harness.wall_milliseconds), 9)
        mine, theirs = (list(samples) for samples in zip(*turns, strict=True))
        relative = paired(theirs, mine) * operations(m, n) / (2 * m * m * n)
        shares[m, n] = (operations(m, n) / min(mine) / 1e6, relative)
    return shares


def targets(
    rows: list[harness.Row],
    rates: dict[tuple[int, torch.dtype], float],
    shares: dict[tuple[int, int], tuple[float, float]],
) -> list[str]:
    n = max(n for n, _ in rates)
    relative = rates[n, torch.bfloat16] / rates[n, torch.float32]
    implementation, bound = (OURS_BF16, 1.8) if relative > 1 else (OURS, 2.5)
    bound = 20.0 if relative < 0.1 else bound
    lines = []
    for name, least in {GPT2: bound, LAYER: bound, **BOUNDS}.items():
        what = implementation if name not in BOUNDS else OURS
        row = find(rows, name, CLIP, what)
        times = row and row["times_as_fast_as"][TORCH]
        lines.append(target_line(f"{name}, {what}: times as fast", times, least))
    row = find(rows, GPT2, NO_PRODUCTS, OURS)
    ratio = row and row["roofline"]["ratio"]
    lines.append(target_line(f"{GPT2}: passes of plain loops", ratio, 1.1, at_least=False))
    for (m, n), (_, share) in shares.items():
        lines.append(target_line(f"Newton-Schulz, {m} x {n}: rate of torch.mm's", share, 0.8))
    return lines


def main() -> None:
    parser = harness.parser(__doc__, "bench-muon", rounds=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-passes", action="store_true", help="not the products")
    parser.add_argument("--bf16", action="store_true", help="also with bf16 products")
    parser.add_argument("--sets", nargs="+", choices=sets(quick=True), help="all by default")
    beside = (COMPILED, *PEERS)
    parser.add_argument(
        "--beside", nargs="*", choices=beside, default=beside, help="all by default"
    )
    options = parser.parse_args()
    about = harness.start(options, options.threads)
    if options.quick:
        torch.compiler.set_stance("force_eager")
    torch._dynamo.config.recompile_limit = 1000  # dion compiles its iterations for each shape
    rates, shares = product_rates(options.quick), newton_schulz_shares(options.quick)
    n = max(n for n, _ in rates)
    bf16 = options.bf16 or rates[n, torch.bfloat16] > rates[n, torch.float32]
    shapes = {k: v for k, v in sets(options.quick).items() if k in (options.sets or [k])}
    builds = [partial(build_passes, name, *its) for name, its in shapes.items()]
    if not options.only_passes:
        builds += [partial(build, name, *its, bf16) for name, its in shapes.items()]
    for peer in () if options.only_passes else options.beside:
        builds += [
            partial(build_beside, name, *its, bf16, peer)
            for name, its in shapes.items()
            if peer != COMPILED
            or sum(shape[0] if shape[2:] else 1 for shape in its[0]) <= MOST_COMPILED
        ]
    rows, missing = harness.measure(builds, options.rounds)
    counts = [(n, f"{parameters([*m, *r]):,}", f"{len(m):,}") for n, (m, r) in shapes.items()]
    of_torch = [(str(n), str(dtype), f"{rate:.0f}") for (n, dtype), rate in rates.items()]
    of_ours = [
        (f"{m} x {n}", f"{rate / options.threads:.0f}", f"{share:.2f}")
        for (m, n), (rate, share) in shares.items()
    ]
    products = harness.table(("matrix", "GFLOP/s a thread", "of torch.mm's"), of_ours, 1)
    sections = {
        "Sets": harness.table(("set", "parameters", "tensors of Muon"), counts, 1),
        f"torch's matrix product, {options.threads} threads": harness.table(
            ("n", "dtype", "GFLOP/s"), of_torch, 2
        ),
        "Newton-Schulz in fp32": products,
        "Other libraries": missing,
        "Targets": [] if options.quick else targets(rows, rates, shares),
    }
    harness.write(options.out / "muon", about, rows, sections)


if __name__ == "__main__":
    main()
