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


# How many matrices yolo26n's convolutions are, by rows and columns: flattened as by ultralytics'
# MuSGD, with the end-to-end head and depthwise kernels (ultralytics/cfg/models/26/yolo26.yaml).
YOLO26N: dict[int, dict[int, int]] = {
    4: {16: 6},
    8: {144: 1},
    16: {27: 1, 32: 2, 72: 1, 144: 10, 288: 1, 576: 2, 1152: 2, 2304: 2},
    32: {32: 2, 64: 6, 144: 2, 288: 12},
    64: {9: 2, 48: 1, 64: 4, 96: 1, 128: 2, 256: 1, 576: 6, 1152: 1},
    80: {9: 6, 64: 2, 80: 12, 128: 2, 256: 2},
    128: {9: 4, 96: 1, 128: 4, 192: 4, 256: 3, 384: 1, 576: 1, 1152: 2},
    256: {9: 2, 128: 4, 256: 3, 384: 3, 512: 1, 1152: 1},
}


def yolo26n_shapes() -> Shapes:
    return [(m, n) for m, widths in YOLO26N.items() for n, k in widths.items() for _ in range(k)]


def parameters(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
