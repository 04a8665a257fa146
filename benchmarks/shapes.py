"""The tensor sets that are timed."""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]


def gpt2(vocabulary: int, context: int, width: int, layers: int) -> Shapes:
    """Returns GPT-2's parameter shapes with tied embeddings, in the Hugging Face model's order."""
    block: Shapes = [
        *[(width,), (width,)],  # layer norm
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # layer norm
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],  # perceptron
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


LARGE, GPT2, SMALL, ONES = "4 of 16 M", "GPT-2 124 M", "2,000 of 1,000", "2,000 of 1"
FEWER = ("500 of 1,000", "1,000 of 1,000")  # 8 and 16 MB; SMALL has 32 MB
BILLION = "30 of 32 M"

SETS: dict[str, Shapes] = {
    LARGE: [(4096, 4096)] * 4,
    GPT2: gpt2(50257, 1024, 768, 12),
    SMALL: [(1000,)] * 2000,
    FEWER[0]: [(1000,)] * 500,
    FEWER[1]: [(1000,)] * 1000,
    ONES: [(1,)] * 2000,
    BILLION: [(4096, 8192)] * 30,
}

# Small versions of the sets, to try the program.
QUICK_SETS: dict[str, Shapes] = {
    LARGE: [(256, 256)] * 4,
    GPT2: gpt2(500, 32, 48, 2),
    SMALL: [(100,)] * 200,
    FEWER[0]: [(100,)] * 50,
    FEWER[1]: [(100,)] * 100,
    ONES: [(1,)] * 200,
    BILLION: [(256, 512)] * 3,
}


def parameters(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
