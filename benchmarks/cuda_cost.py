"""Estimates the cost of a step on a GPU from the tensors' shapes; needs neither GPU nor torch.

python benchmarks/cuda_cost.py [--json]

Bytes are the bytes of docs/numerics.md's two passes, which read or write each array once. A step's
time is its bytes divided by the bandwidth, plus the wait between two kernels of a stream for each
launch. If a set's bytes fit into the L2 cache, as 2,000 fp32 tensors of 1,000 do, a step that finds
them in the cache takes less.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass

from shapes import GPT2, SETS, SMALL, Shapes, parameters

from torchopt_ext.cli.terminal import table as columns

# Pass A (csrc/kernels/block_rule.h): a warp takes whole rows or a block of one row at a time, and
# rows shorter than SHORT_ROW as one stream. A thread block has WARPS warps, which loop.
SHORT_ROW, NORM_CHUNK, WARPS = 64, 4096, 8
MULTIPROCESSORS = 132  # of an H100 or H200
RESIDENT = {"A": 3, "B": 4}  # thread blocks a multiprocessor: .ci/sass.toml
BANDWIDTHS = (3.0, 4.3)  # TB/s of a copy, reads plus writes, on an H100 and an H200
GAP = 2.0  # microseconds between consecutive kernels
# A step that clips launches pass A, the decision, the scalars of each tensor, and pass B.
LAUNCHES = 4


@dataclass(frozen=True)
class Types:
    """Bytes a parameter that each pass reads and writes. Pass B has one thread block a chunk."""

    name: str
    norm: int
    update: int
    chunk: int = 2048


TYPES = [
    Types("fp32", 4, 28),  # g; g, p, m, v and p, m, v
    Types("bf16, fp32 masters", 2, 28),  # g; g, master, m, v and master, m, v, p
    Types("bf16, remainders", 2, 26),  # g; g, p, remainder, m, v and p, remainder, m, v
    Types("bf16 throughout", 2, 14, 4096),  # g; g, p, m, v and p, m, v
]
# torch: the norm reads g, clipping reads and writes g, and the fused step moves what pass B moves.
TORCH_FP32 = 4 + 8 + 28


def llama3(vocabulary: int, width: int, layers: int, keys: int, hidden: int) -> Shapes:
    """Returns Llama 3's parameter shapes in torchtitan's order. ``keys`` is the width of keys."""
    block: Shapes = [
        *[(width, width), (keys, width), (keys, width), (width, width)],  # q, k, v, o
        *[(hidden, width), (width, hidden), (hidden, width)],  # gate, down, up
        *[(width,), (width,)],  # norms
    ]
    return [(vocabulary, width), *block * layers, (width,), (vocabulary, width)]


MODELS: dict[str, Shapes] = {
    GPT2: SETS[GPT2],
    "Llama 3 8 B": llama3(128256, 4096, 32, 1024, 14336),
    SMALL: SETS[SMALL],
}


def norm_chunks(shape: tuple[int, ...]) -> int:
    """Counts the chunks of pass A: whole rows, or whole blocks of one row."""
    numel = math.prod(shape)
    row = numel // shape[0] if shape and numel else 1
    if row < SHORT_ROW:
        return -(-numel // NORM_CHUNK)
    if row <= NORM_CHUNK:
        return -(-numel // (NORM_CHUNK // row * row))
    return shape[0] * -(-row // NORM_CHUNK)


def update_chunks(numel: int, types: Types) -> int:
    """Counts the chunks of pass B."""
    return -(-numel // types.chunk)


@dataclass(frozen=True)
class Pass:
    """One kernel over all tensors. ``waves`` is how often its blocks fill all multiprocessors."""

    name: str
    bytes: int
    blocks: int
    waves: float


@dataclass(frozen=True)
class Step:
    """A step that clips: its passes, and its time in microseconds by bandwidth in TB/s."""

    model: str
    types: str
    parameters: int
    tensors: int
    passes: list[Pass]
    launches: int
    table_bytes: int  # the gradients' addresses, uploaded in each step
    microseconds: dict[float, float]
    torch_microseconds: dict[float, float] | None


def cost(model: str, shapes: Shapes, types: Types) -> Step:
    count = parameters(shapes)
    blocks = {
        "A": -(-sum(norm_chunks(shape) for shape in shapes) // WARPS),
        "B": sum(update_chunks(math.prod(shape), types) for shape in shapes),
    }
    moved = {"A": types.norm * count, "B": types.update * count}
    passes = [
        Pass(name, moved[name], blocks[name], blocks[name] / (MULTIPROCESSORS * RESIDENT[name]))
        for name in ("A", "B")
    ]
    total = sum(moved.values())
    return Step(
        model=model,
        types=types.name,
        parameters=count,
        tensors=len(shapes),
        passes=passes,
        launches=LAUNCHES,
        table_bytes=8 * len(shapes),
        microseconds={b: total / b / 1e6 + LAUNCHES * GAP for b in BANDWIDTHS},
        torch_microseconds={b: TORCH_FP32 * count / b / 1e6 for b in BANDWIDTHS}
        if types.name == "fp32"
        else None,
    )


def table(steps: list[Step]) -> str:
    header = ["tensors", "types", "MB, A", "MB, B", "blocks, A", "waves", "blocks, B", "waves"]
    header += ["launches", *[f"us at {b} TB/s" for b in BANDWIDTHS]]
    rows = []
    for step in steps:
        a, b = step.passes
        rows.append(
            [
                step.model,
                step.types,
                *[f"{p.bytes / 1e6:,.1f}" for p in (a, b)],
                *[text for p in (a, b) for text in (f"{p.blocks:,}", f"{p.waves:.1f}")],
                str(step.launches),
                *[f"{step.microseconds[bandwidth]:,.0f}" for bandwidth in BANDWIDTHS],
            ]
        )
    lines = [columns(header, rows, 2)]
    for step in steps:
        if step.torch_microseconds is not None:
            times = ", ".join(
                f"{t:,.0f} us at {b} TB/s" for b, t in step.torch_microseconds.items()
            )
            lines.append(f"torch's clip_grad_norm_ and fused AdamW, {step.model}: at least {times}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = [cost(model, shapes, types) for model, shapes in MODELS.items() for types in TYPES]
    print(json.dumps([asdict(step) for step in steps], indent=1) if options.json else table(steps))


if __name__ == "__main__":
    main()
