"""The tensor sets that are timed."""

from __future__ import annotations

import math

from torchopt_ext.cli.tensors import gpt2_shapes

Shapes = list[tuple[int, ...]]


LARGE, GPT2, SMALL, ONES = "4 of 16 M", "GPT-2 124 M", "2,000 of 1,000", "2,000 of 1"
FEWER = ("500 of 1,000", "1,000 of 1,000")  # 8 and 16 MB; SMALL has 32 MB
BILLION = "30 of 32 M"

SETS: dict[str, Shapes] = {
    LARGE: [(4096, 4096)] * 4,
    GPT2: gpt2_shapes(),
    SMALL: [(1000,)] * 2000,
    FEWER[0]: [(1000,)] * 500,
    FEWER[1]: [(1000,)] * 1000,
    ONES: [(1,)] * 2000,
    BILLION: [(4096, 8192)] * 30,
}

# Small versions of the sets, to try the program.
QUICK_SETS: dict[str, Shapes] = {
    LARGE: [(256, 256)] * 4,
    GPT2: gpt2_shapes(500, 32, 48, 2),
    SMALL: [(100,)] * 200,
    FEWER[0]: [(100,)] * 50,
    FEWER[1]: [(100,)] * 100,
    ONES: [(1,)] * 200,
    BILLION: [(256, 512)] * 3,
}


def parameters(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
