"""The tensor sets that are timed."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def gpt2(vocabulary: int, context: int, width: int, layers: int) -> Shapes:
    """Parameter shapes of GPT-2 with tied embeddings, in the order of the Hugging Face model."""
    block: Shapes = [
        *[(width,), (width,)],  # layer norm
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # layer norm
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],  # perceptron
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


SETS: dict[str, Shapes] = {
    "4 of 16 M": [(4096, 4096)] * 4,
    "GPT-2 124 M": gpt2(50257, 1024, 768, 12),
    "2,000 of 1,000": [(1000,)] * 2000,
}

QUICK_SETS: dict[str, Shapes] = {
    "4 of 64 k": [(256, 256)] * 4,
    "GPT-2 tiny": gpt2(500, 32, 48, 2),
    "200 of 100": [(100,)] * 200,
}
