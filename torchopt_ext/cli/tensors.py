"""Tensors that stand for a model: from a function, a count, or the headers of safetensors files."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_ext.cli.terminal import CommandError, Parser, number
from torchopt_ext.optim.embeddings import embeddings_of
from torchopt_ext.statedict import safetensors

NAMED = "gpt2"
ALIKE, WIDTH = 1024, 1024
"""The number of matrices that `--params` stands for, and the length of their rows."""
DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float64": torch.float64,
}  # fmt: skip
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
MASTERS_NAMED = {
    "fp32": "fp32 master weights", "remainder": "remainders", "remainder8": "8-bit remainders"
}  # fmt: skip
"""Descriptions of the values of ``master_weights``."""
MOST_TENSORS = 1_000_000
MOST_ELEMENTS = 2**53
"""The partitions' limit. Sizes must be below it, so that their bytes fit into 63 bits."""
_LARGEST_HEADER = 100_000_000  # the format's own limit


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
    """A model's name, its tensors, and its modules if a function makes them."""

    name: str
    entries: list[Entry]
    model: nn.Module | None = None


def add_source(parser: Parser) -> None:
    """Adds the options that select the tensors."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a torch.nn.Module; it is called on the "
        "meta device, where tensors take no memory",
    )
    source.add_argument(
        "--params",
        type=number,
        metavar="N",
        help=f"number of parameters, such as 8e9, in {ALIKE} matrices of equal size",
    )
    source.add_argument(
        "--shapes",
        metavar="SHAPES",
        help=f"{NAMED} (124 M parameters), or COUNTxSIZE[xSIZE], such as 2000x1000 for 2,000 "
        "vectors of 1,000; several with commas",
    )
    add_dtype(parser, "--dtype", DTYPES, "dtype of the parameters, instead of their own")


def add_dtype(parser: Parser, flag: str, choices: Iterable[str], what: str) -> None:
    """Adds an option that takes torch's names of dtypes, and short names such as bf16."""
    parser.add_argument(
        flag,
        type=lambda text: _SHORT.get(text, text),
        choices=tuple(choices),
        metavar="DTYPE",
        help=f"{what}: {', '.join(choices)}; short: bf16, fp32 and so on",
    )


def from_options(options: Any) -> Source:
    """Returns the model that :func:`add_source`'s options select."""
    model = None
    if options.model is not None:
        name = options.model
        model, entries = from_function(name)
    elif options.params is not None:
        name, entries = f"--params {options.params}", [*map(Entry, alike(options.params))]
    elif getattr(options, "file", None) is not None:
        name, entries = options.file, from_safetensors(Path(options.file))
    else:
        name = options.shapes or NAMED
        entries = from_text(name)
    if options.dtype is not None:
        dtype = DTYPES[options.dtype]
        entries = [
            entry._replace(tensor=meta(entry.tensor.shape, dtype, entry.tensor.requires_grad))
            if entry.tensor.is_floating_point()
            else entry
            for entry in entries
        ]
    if not any(entry.tensor.requires_grad for entry in entries):
        raise CommandError(f"{name} has no trainable parameter")
    return Source(name, entries, model)


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
        embeddings = embeddings_of(model.modules())
        return model, [
            Entry(meta(p.shape, p.dtype, p.requires_grad), name, p in embeddings)
            for name, p in model.named_parameters()
        ]
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CommandError(f"--model {text} {fails}: {problem}") from error


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


# ---- safetensors ---------------------------------------------------------------------------------


def from_safetensors(path: Path) -> list[Entry]:
    """Returns the tensors of a safetensors file, or of the files that an index names.

    Only headers are read (https://github.com/huggingface/safetensors, Format).
    """
    if path.suffix != ".json":
        return [Entry(tensor, name) for name, tensor in read_header(path).items()]
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({path.parent / file for file in names.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandError(
            f"{path} is not an index of safetensors files: it needs a weight_map of names and files"
        ) from error
    held: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise CommandError(
                f"{path} names {file.name}, which is not in the same folder: its header has the "
                f"shapes (or give --params)"
            )
        held |= read_header(file)
    if missing := sorted(names.keys() - held.keys()):
        raise CommandError(f"{path} names {missing[0]}, which is in none of its files")
    return [Entry(held[name], name) for name in names]


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads every tensor of a safetensors file, without memory, in the order of the file."""
    with path.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if not 2 <= length <= _LARGEST_HEADER:
            raise CommandError(f"{path} is not a safetensors file: it begins with {start!r}")
        text = stream.read(length)
    if len(text) < length:
        raise CommandError(f"{path} ends in its header, after {len(text)} of {length} bytes")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"][0])
        return {name: _described(f"{path}: {name}", entry) for name, entry in entries}
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError
    ) as error:  # fmt: skip
        raise CommandError(f"{path} has a damaged header: {error}") from error


def _described(name: str, entry: dict[str, Any]) -> Tensor:
    shape, kind = entry["shape"], entry["dtype"]
    if kind not in safetensors.DTYPES:
        raise CommandError(f"{name} has the dtype {kind}, expected {', '.join(safetensors.DTYPES)}")
    lengths = [length or 1 for length in shape]  # strides count a length of 0 as 1
    if any(type(n) is not int or n < 0 for n in shape) or math.prod(lengths) >= MOST_ELEMENTS:
        raise CommandError(f"{name} has the shape {shape}")
    return meta(shape, safetensors.DTYPES[kind])
