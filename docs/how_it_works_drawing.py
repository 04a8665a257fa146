"""Draws docs/passes.png, what a step moves, and docs/exact_sum.png, how squares are added.

python docs/how_it_works_drawing.py
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
PASS_A, PASS_B = "#5aa2d6", "#1b6ca8"
NORM, OTHER, ADAMW = "#f3c79a", "#d8d8d8", "#e08e45"

# Bytes a parameter that each operation reads and writes: benchmarks/README.md has the sums.
STEPS = (
    (
        "fp32, clipped",
        [("norm", 4, NORM), ("clip", 8, OTHER), ("AdamW", 28, ADAMW)],
        [("pass A", 4, PASS_A), ("pass B", 28, PASS_B)],
    ),
    (
        "fp32, under a gradient scaler",
        [("unscale", 8, OTHER), ("norm", 4, NORM), ("clip", 8, OTHER), ("AdamW", 28, ADAMW)],
        [("pass A", 4, PASS_A), ("pass B", 28, PASS_B)],
    ),
    (
        "bf16 with fp32 masters",
        [
            ("cast", 6, OTHER),
            ("norm", 4, NORM),
            ("scale", 8, OTHER),
            ("AdamW", 28, ADAMW),
            ("copy", 6, OTHER),
        ],
        [("A", 2, PASS_A), ("pass B", 28, PASS_B)],
    ),
)


def stack(axis: Axes, y: float, who: str, parts: list[tuple[str, int, str]]) -> None:
    at = 0
    for name, size, color in parts:
        axis.barh(y, size, left=at, height=0.8, color=color, edgecolor="white", linewidth=1.5)
        dark = color in (PASS_A, PASS_B)
        text = f"{name}\n{size}"
        white = "white" if dark else "black"
        axis.text(at + size / 2, y, text, ha="center", va="center", fontsize=8, color=white)
        at += size
    axis.text(at + 0.5, y, f"{at} bytes", va="center", fontsize=9)
    axis.text(-0.6, y, who, ha="right", va="center", fontsize=9)


def draw_passes() -> None:
    figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
    for i, (title, torchs, ours) in enumerate(STEPS):
        y = 3.0 * i
        axis.text(0, y - 0.75, title, fontsize=10, weight="bold")
        stack(axis, y, "torch", torchs)
        stack(axis, y + 0.95, "torchopt_ext", ours)
    axis.set_xlim(-8, 58)
    axis.set_ylim(3.0 * len(STEPS) - 1.3, -1.3)
    axis.axis("off")
    axis.set_title("Bytes a parameter that one step reads and writes", fontsize=11)
    figure.savefig(HERE / "passes.png", dpi=110)


LIMB = 32
FIRST, LAST = -96, 96  # the bits that are drawn, of -1088 to 1087
VALUES = ((math.ldexp(1.7, 70), "#f6c58f"), (math.ldexp(1.3, 12), "#9cc3e6"), (0.3, "#a5d6b0"))
LOST = math.ldexp(1.1, -38)


def bit_range(value: float) -> tuple[int, int]:
    """The places of a double's last and first bit."""
    _, exponent = math.frexp(value)
    return exponent - 53, exponent


def draw_exact_sum() -> None:
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    values = [*VALUES, (LOST, "#e6a3a3")]
    for row, (value, color) in enumerate(values):
        low, high = bit_range(value)
        low = max(low, FIRST)
        axis.add_patch(Rectangle((-high, row + 0.15), high - low, 0.7, facecolor=color))
        axis.text(-(low + high) / 2, row + 0.5, f"{value:.3g}", ha="center", va="center")
    below = len(values) + 0.3
    for limb in range(FIRST, LAST, LIMB):
        box = (-(limb + LIMB), below)
        axis.add_patch(Rectangle(box, LIMB, 0.9, facecolor="#f2f2f2", edgecolor="#444444"))
        axis.text(-(limb + LIMB / 2), below + 0.45, f"limb {(limb + 1088) // 32}", ha="center",
                  va="center", fontsize=9)  # fmt: skip
        axis.plot([-limb, -limb], [0, below], color="#bbbbbb", linewidth=0.8, linestyle=":")
    axis.plot([-LAST, -LAST], [0, below], color="#bbbbbb", linewidth=0.8, linestyle=":")
    axis.text(-LAST - 2, below + 0.45, "...", ha="right", va="center")
    axis.text(-FIRST + 2, below + 0.45, "...", ha="left", va="center")
    axis.set_xlim(-LAST - 10, -FIRST + 10)
    axis.set_ylim(below + 1.1, -0.1)
    axis.axis("off")
    total = sum(value for value, _ in VALUES)
    assert total + LOST == total  # what the caption in how_it_works.md says
    axis.set_title("Each square's 53 bits are added where they belong, as integers", fontsize=11)
    figure.savefig(HERE / "exact_sum.png", dpi=110)


def main() -> None:
    draw_passes()
    draw_exact_sum()


if __name__ == "__main__":
    main()
