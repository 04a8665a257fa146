"""Compares maps from Adam's moments to 8 bits. See README.md.

python benchmarks/quantization.py

Quantizes the moments of recorded and of synthetic gradients after every step, compares the updates
with exact updates, then trains a transformer with such moments. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from small_tasks import Task, held_out_loss, loss_of, text
from torch import Tensor

BETA1, EPS = 0.9, 1e-8
GROUP = 64
ROUNDINGS = {  # of exp_avg and of exp_avg_sq
    "nearest": ("nearest", "nearest"),
    "random": ("random", "random"),
    "dither": ("dither", "dither"),
}
# R2 sequence: increments per step and per place in a group for exp_avg_sq; swapped for exp_avg.
R2 = 0.7548776662466927, 0.5698402909980532
Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Map:
    """The magnitudes that codes represent, relative to a group's largest."""

    values: Tensor  # fp32 [codes], from 0 to 1
    encode: Callable[[Tensor], Tensor]  # magnitude to place among the values, a real number


def formula(
    codes: int, compand: Callable[[Tensor], Tensor], expand: Callable[[Tensor], Tensor]
) -> Map:
    return Map(expand(torch.arange(codes) / (codes - 1)), lambda x: compand(x) * (codes - 1))


def dynamic(codes: int) -> Map:
    """Dynamic tree quantization (arXiv:2110.02861, section 1.3).

    The number of leading zeros is the decimal exponent. The other bits divide [0.1, 1] evenly.
    """
    values = [0.0]
    for exponent in range(7):
        bins = (codes // 128) << (6 - exponent)
        values += [10.0**-exponent * (0.1 + 0.9 * (i + 0.5) / bins) for i in range(bins)]
    table = torch.tensor([*sorted(values)[: codes - 1], 1.0])

    def encode(x: Tensor) -> Tensor:
        low = (torch.searchsorted(table, x, right=True) - 1).clamp(0, len(table) - 2)
        return low + (x - table[low]) / (table[low + 1] - table[low])

    return Map(table, encode)


SIGNED, UNSIGNED = 128, 256  # codes of a magnitude; exp_avg's sign takes a bit
EXP_AVG = {
    "linear": formula(SIGNED, lambda x: x, lambda z: z),
    # arXiv:2602.23349
    "2x/(1+x)": formula(SIGNED, lambda x: 2 * x / (1 + x), lambda z: z / (2 - z)),
    "square root": formula(SIGNED, torch.sqrt, torch.square),
    "dynamic": dynamic(SIGNED),
}
EXP_AVG_SQ = {
    "linear": formula(UNSIGNED, lambda x: x, lambda z: z),
    # Code 0 stands for one step of the root, so no value becomes 0.
    "square root": Map(
        ((torch.arange(UNSIGNED) + 1) / UNSIGNED).square(), lambda x: x.sqrt() * UNSIGNED - 1
    ),
    "fourth root": formula(UNSIGNED, lambda x: x.sqrt().sqrt(), lambda z: z.square().square()),
    "dynamic": dynamic(UNSIGNED),
}
PAIRS = [
    ("linear", "linear"),
    ("linear", "square root"),
    ("2x/(1+x)", "square root"),
    ("square root", "square root"),
    ("2x/(1+x)", "fourth root"),
    ("dynamic", "dynamic"),
]


def quantized(x: Tensor, how: Map, group: int, rounding: str, step: int, positive: bool) -> Tensor:
    """Quantizes and decodes x [..., row] in groups of `group` elements with an fp32 scale each.

    Args:
        rounding: "nearest" rounds to the nearest code. "random" rounds up with the probability that
            the place between two codes gives. "dither" takes the numbers of a sequence that fills
            [0, 1] evenly over the steps instead of random numbers.
        positive: values above 0 never become 0.
    """
    groups = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    magnitude = groups.abs()
    scale = magnitude.amax(-1, keepdim=True)
    place = how.encode((magnitude / scale.clamp_min(torch.finfo().tiny)).clamp_max(1))
    threshold: Tensor | float = 0.5
    if rounding == "dither":
        by_step, by_place = R2 if positive else R2[::-1]
        lanes = torch.arange(group, dtype=torch.float64)
        threshold = ((by_step * step + by_place * lanes) % 1).float()
    elif rounding == "random":
        threshold = torch.rand(place.shape)
    code = place.floor().clamp(0, len(how.values) - 2).long()
    code += place - code > threshold
    if positive:
        code = torch.where(magnitude > 0, code.clamp_min(1), code)
    return (how.values[code] * scale).copysign(groups).flatten(-2)[..., : x.shape[-1]]


def held(moments: Moments, pair: tuple[str, str], group: int, rounding: str, step: int) -> Moments:
    (m, v), (of_m, of_v) = moments, ROUNDINGS[rounding]
    m = quantized(m, EXP_AVG[pair[0]], group, of_m, step, positive=False)
    return m, quantized(v, EXP_AVG_SQ[pair[1]], group, of_v, step, positive=True)


def averages(moments: Moments, grad: Tensor, beta2: float) -> Moments:
    return moments[0].lerp(grad, 1 - BETA1), moments[1].lerp(grad.square(), 1 - beta2)


def update(moments: Moments, beta2: float, step: int) -> Tensor:
    """Returns Adam's update before the learning rate is applied."""
    return moments[0] / (1 - BETA1**step) / ((moments[1] / (1 - beta2**step)).sqrt() + EPS)


def drift(
    gradients: list[Tensor], pair: tuple[str, str], group: int, rounding: str, beta2: float
) -> list[str]:
    """Measures the updates' error in the last quarter of the steps.

    Returns:
        The relative RMS error if the exact moments are quantized once, and if they are quantized
        after every step. For the second case also the updates' length along the exact updates, and
        the largest update, both relative to the exact ones.
    """
    torch.manual_seed(0)
    exact = moments = (torch.zeros_like(gradients[0]),) * 2
    once = error = size = along = most = largest = 0.0
    for step, grad in enumerate(gradients, 1):
        exact, moments = averages(exact, grad, beta2), averages(moments, grad, beta2)
        if step > len(gradients) * 3 // 4 and step % 10 == 0:
            right, wrong = update(exact, beta2, step), update(moments, beta2, step)
            at_once = update(held(exact, pair, group, rounding, step), beta2, step)
            once += (at_once - right).square().sum().item()
            error += (wrong - right).square().sum().item()
            size += right.square().sum().item()
            along += (wrong * right).sum().item()
            most = max(most, wrong.abs().max().item())
            largest = max(largest, right.abs().max().item())
        moments = held(moments, pair, group, rounding, step)
    percent = [f"{100 * math.sqrt(e / size):.2g} %" for e in (once, error)]
    return [*percent, f"{along / size:.3f}", f"{most / largest:.2g}"]


def train(
    task: Task,
    steps: int,
    seed: int,
    beta2: float,
    hold: Callable[..., Moments] | None = None,
    record: list[dict[str, Tensor]] | None = None,
) -> float:
    """Trains with AdamW, and returns the loss on held-out data.

    Args:
        hold: returns the moments that a matrix keeps after a step.
        record: gets some rows of every matrix's gradient.
    """
    model, batches = task.model(seed), task.batches(seed)
    torch.manual_seed(seed)
    state = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in model.named_parameters()}
    for step in range(1, steps + 1):
        model.zero_grad()
        loss_of(model, next(batches)).backward()
        lr = 3e-3 * min(1, step / 50, 2 * (1 + steps - step) / steps)
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if record is not None:
            rows = {n: g[:: len(g) // 32][:32].clone() for n, g in grads.items() if g.dim() > 1}
            record.append(rows)
        with torch.no_grad():
            for name, p in model.named_parameters():
                moments = averages(state[name], grads[name], beta2)
                p.mul_(1 - 0.1 * lr).sub_(update(moments, beta2, step), alpha=lr)
                state[name] = hold(moments, step=step) if hold and p.dim() > 1 else moments
    return held_out_loss(model, task)


def synthetic(steps: int) -> Iterator[Tensor]:
    """Yields Student's t of 3 degrees of freedom. The scales in a row span about four decades."""
    generator = torch.Generator().manual_seed(1)
    scale = 10 ** torch.randn(64, 256, generator=generator)
    for _ in range(steps):
        chi = torch.randn(3, 64, 256, generator=generator).square().sum(0)
        yield scale * torch.randn(64, 256, generator=generator) * (3 / chi).sqrt()


def show(title: str, head: list[str], lines: list[list[str]]) -> None:
    print(f"\n{title}\n")
    for line in [head, ["---"] * len(head), *lines]:
        print("| " + " | ".join(line) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--train-steps", type=int, default=500, help="of the last table's runs")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()

    recorded: list[dict[str, Tensor]] = []
    train(text(dim=128, length=128), args.steps, 1, 0.95, record=recorded)
    hidden = [n for n, g in recorded[0].items() if "embedding" not in n and g.shape[1] == 128]
    sets = {
        "hidden layers": [torch.cat([grads[n][::2] for n in hidden]) for grads in recorded],
        "embedding": [grads["embedding.weight"] for grads in recorded],
        "synthetic": list(synthetic(args.steps)),
    }
    head = ["gradients", "exp_avg", "exp_avg_sq", "rounding", "group"]
    head += ["once", "drift", "length", "largest"]
    for beta2 in (0.95, 0.999):
        lines = []
        for name, gradients in sets.items():
            cases = [(pair, rounding, GROUP) for pair in PAIRS for rounding in ROUNDINGS]
            cases += [(PAIRS[1], "dither", 32), (PAIRS[1], "dither", 128)]
            for pair, rounding, group in cases:
                found = drift(gradients, pair, group, rounding, beta2)
                lines.append([name, *pair, rounding, str(group), *found])
        show(f"beta2 {beta2}, {args.steps:,} steps", head, lines)

    lines = []
    task, beta2, seeds = text(), 0.999, range(1, args.seeds + 1)
    exact = [train(task, args.train_steps, seed, beta2) for seed in seeds]
    for pair in PAIRS:
        for rounding in ("nearest", "dither"):
            hold = partial(held, pair=pair, group=GROUP, rounding=rounding)
            losses = [train(task, args.train_steps, seed, beta2, hold) for seed in seeds]
            more = ", ".join(f"{a - b:+.3f}" for a, b in zip(losses, exact, strict=True))
            lines.append([*pair, rounding, more])
    in_fp32 = ", ".join(f"{loss:.3f}" for loss in exact)
    show(
        f"Loss by seed above fp32's {in_fp32}; beta2 {beta2}, {args.train_steps:,} steps",
        ["exp_avg", "exp_avg_sq", "rounding", "loss above fp32's"],
        lines,
    )


if __name__ == "__main__":
    main()
