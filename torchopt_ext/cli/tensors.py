"""Tensors that stand for a model: from a function, a number, shapes or files."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchopt_ext.cli.arguments import ALIKE, NAMED
from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.optim.embeddings import embeddings_of

WIDTH = 1024
"""The length of the rows of the matrices that a number of parameters stands for."""
DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float64": torch.float64,
}  # fmt: skip
MASTERS_NAMED = {
    "fp32": "fp32 master weights", "remainder": "remainders", "remainder8": "8-bit remainders"
}  # fmt: skip
"""Descriptions of the values of ``master_weights``."""
MOST_TENSORS = 1_000_000
MOST_ELEMENTS = 2**53
"""The partitions' limit. Sizes must be below it, so that their bytes fit into 63 bits."""


class Entry(NamedTuple):
    """A tensor without memory that stands for a tensor of the model.

    Attributes:
        tensor: a meta tensor of the same shape and dtype.
        name: the tensor's name, or "".
        embedding: whether the tensor is known to be the weight of an embedding.
    """

    tensor: Tensor
    name: str = ""
    embedding: bool = False


class Source(NamedTuple):
    """A model's name, its tensors, and its modules if they are known."""

    name: str
    entries: list[Entry]
    model: nn.Module | None = None


def as_dtype(entries: list[Entry], name: str | None) -> list[Entry]:
    """Returns floating-point tensors in another dtype, if one is named, and the others as is."""
    if name is None:
        return entries
    return [
        entry._replace(tensor=meta(entry.tensor.shape, DTYPES[name], entry.tensor.requires_grad))
        if entry.tensor.is_floating_point()
        else entry
        for entry in entries
    ]


def meta(shape: Sequence[int], dtype: torch.dtype = torch.float32, trained: bool = True) -> Tensor:
    """Returns a parameter without memory. Integers and types of one byte are never trained."""
    trained = trained and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=trained)


def alike(count: int) -> list[Tensor]:
    """Returns matrices of equal size, up to a row, and a vector with what is left of `count`.

    Matrices, because vectors would have no 8-bit moments.
    """
    rows, rest = divmod(count, WIDTH)
    each, more = divmod(rows, ALIKE)
    shapes = [(each + (n < more), WIDTH) for n in range(ALIKE if each else more)]
    return [*map(meta, shapes), *([meta((rest,))] if rest else [])]


def gpt2_shapes(
    vocabulary: int = 50257, context: int = 1024, width: int = 768, layers: int = 12
) -> list[tuple[int, ...]]:
    """Returns GPT-2's shapes with tied embeddings, in the Hugging Face model's order."""
    block: list[tuple[int, ...]] = [
        *[(width,), (width,)],  # layer norm
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # layer norm
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],  # perceptron
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def gpt2_names(layers: int = 12) -> list[str]:
    """Returns the names of the tensors that :func:`gpt2_shapes` describes."""
    modules = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    hidden = [f"h.{n}.{module}" for n in range(layers) for module in modules]
    pairs = [f"{module}.{own}" for module in (*hidden, "ln_f") for own in ("weight", "bias")]
    return ["wte.weight", "wpe.weight", *pairs]


def from_text(text: str) -> list[Entry]:
    """Returns parameters of the shapes that the command line names."""
    entries: list[Entry] = []
    for item in text.split(","):
        if item == NAMED:
            named = zip(gpt2_names(), gpt2_shapes(), strict=True)
            entries += [
                Entry(meta(shape), name, embedding=name in ("wte.weight", "wpe.weight"))
                for name, shape in named
            ]
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", item):
            count, *shape = map(int, item.split("x"))
            if count > MOST_TENSORS or count * math.prod(shape) >= MOST_ELEMENTS:
                raise CommandError(
                    f"{item} is too large: expected {MOST_TENSORS:,} tensors and 2**53 elements "
                    f"at most"
                )
            entries += [Entry(meta(shape)) for _ in range(count)]
        else:
            raise CommandError(f"{item!r} names no shapes: expected {NAMED} or such as 2000x1000")
    return entries


# ---- models --------------------------------------------------------------------------------------


def from_function(text: str) -> tuple[nn.Module, list[Entry]]:
    """Returns the model that ``module:function`` builds, and its parameters, each once."""
    where, _, name = text.partition(":")
    if not where or not name:
        raise CommandError(f"--model is {text!r}, expected MODULE:FUNCTION")
    fails = "cannot be imported"
    try:
        build = getattr(importlib.import_module(where), name)
        fails = "fails on the meta device"
        with torch.device("meta"):
            model = build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"it returns {type(model).__name__}, expected a torch.nn.Module")
        return model, entries_of(model)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CommandError(f"--model {text} {fails}: {problem}") from error


def entries_of(model: nn.Module) -> list[Entry]:
    """Returns a model's parameters, each once."""
    embeddings = embeddings_of(model.modules())
    return [
        Entry(meta(p.shape, p.dtype, p.requires_grad), name, p in embeddings)
        for name, p in model.named_parameters()
    ]


def as_modules(entries: Iterable[Entry]) -> nn.Module:
    """Returns a tree of modules that has tensors by these names, and of which embeddings are known.

    The other modules are of no particular class.
    """
    modules: dict[tuple[str, ...], nn.Module] = {(): nn.Module()}
    for tensor, name, embedding in entries:
        *path, own = name.split(".")
        for depth, part in enumerate(path, 1):
            if (at := tuple(path[:depth])) not in modules:
                is_table = embedding and depth == len(path)
                modules[at] = nn.Embedding(1, 1, device="meta") if is_table else nn.Module()
                modules[at[:-1]]._modules[part] = modules[at]
        held = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        modules[tuple(path)]._parameters[own] = held
    return modules[()]
