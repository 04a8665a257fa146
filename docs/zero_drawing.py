"""Draws docs/zero.png: which rank owns what of a small model, divided evenly and whole by whole.

PYTHONPATH=examples python docs/zero_drawing.py
"""

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from model import Transformer

from torchopt_ext import ops
from torchopt_ext.zero.balanced import row_length

RANKS = 4
COLORS = ("#f6c58f", "#9cc3e6", "#a5d6b0", "#e6a3a3")
BUCKET_ELEMENTS = 1 << 22  # half of the default, so that this model has three buckets
LABELLED = 90_000  # smaller boxes have no room for a name
ROOM = 25_000  # between a name and a cut


def short(name: str) -> str:
    """layers.3.attention.wq.weight -> 3.wq"""
    words = name.split(".")
    return f"{words[1]}.{words[-2]}" if words[0] == "layers" else words[0]


def strip(axis: Axes, bucket: int, start: int, end: int, color: str, edge: str = "none") -> None:
    place = (start, bucket - 0.4)
    axis.add_patch(Rectangle(place, end - start, 0.8, facecolor=color, edgecolor=edge, lw=0.7))


def label(axis: Axes, bucket: int, start: int, end: int, name: str, cuts: list[int]) -> None:
    """Names a tensor's box, beside a cut rather than on it."""
    if end - start >= LABELLED:
        places = [start + (end - start) * part for part in (0.5, 0.25, 0.75)]
        free = [x for x in places if all(abs(x - cut) > ROOM for cut in cuts)]
        axis.text(free[0], bucket, name, ha="center", va="center", fontsize=8, rotation=90)


def excess(loads: list[int]) -> str:
    return f"fullest rank {100 * (max(loads) * len(loads) / sum(loads) - 1):.2f} % above the mean"


def frame(axis: Axes, title: str, buckets: int, width: int) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_yticks(range(buckets), [f"bucket {b}" for b in range(buckets)])
    axis.set_ylim(buckets - 0.5, -0.5)
    axis.set_xlim(0, 1.005 * width)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x else "0")


def main() -> None:
    model = Transformer(dim=384, n_layers=6, n_heads=6, max_seq_len=64)
    params = [param for _, param in model.named_parameters()]
    numels = [param.numel() for param in params]
    plan = ops.partition_balanced(
        numels, [row_length(param) for param in params], RANKS, BUCKET_ELEMENTS
    )
    owners = ops.partition_greedy(numels, RANKS)

    figure, (balanced, greedy) = plt.subplots(2, figsize=(13, 7.6), layout="constrained")
    names = [short(name) for name, _ in model.named_parameters()]
    for name, numel, owner, b, start in zip(
        names, numels, owners, plan.buckets, plan.starts, strict=True
    ):
        strip(balanced, b, start, start + numel, "none", "#444444")
        label(balanced, b, start, start + numel, name, plan.cuts[b])
        strip(greedy, b, start, start + numel, COLORS[owner], "#444444")
        label(greedy, b, start, start + numel, name, [])
    for b, cuts in enumerate(plan.cuts):
        for (lo, hi), color in zip(itertools.pairwise(cuts), COLORS, strict=True):
            strip(balanced, b, lo, hi, color)
            balanced.patches[-1].set_zorder(0)
            balanced.plot([hi, hi], [b - 0.46, b + 0.46], color="black", linewidth=2.5)

    loads = [sum(cuts[r + 1] - cuts[r] for cuts in plan.cuts) for r in range(RANKS)]
    title = f'partition="balanced": each bucket is cut evenly, tensors included ({excess(loads)})'
    frame(balanced, title, len(plan.cuts), max(plan.lengths))
    loads = [sum(n for n, o in zip(numels, owners, strict=True) if o == r) for r in range(RANKS)]
    title = f'partition="greedy", the same tensors as torch gives them away ({excess(loads)})'
    frame(greedy, title, len(plan.cuts), max(plan.lengths))
    greedy.set_xlabel("elements, in forward order; 3.wq is layer 3's query projection")
    figure.legend(
        handles=[Patch(color=color, label=f"rank {r}") for r, color in enumerate(COLORS)],
        loc="outside lower center",
        ncols=RANKS,
        frameon=False,
    )
    figure.savefig(Path(__file__).with_name("zero.png"), dpi=100)


if __name__ == "__main__":
    main()
