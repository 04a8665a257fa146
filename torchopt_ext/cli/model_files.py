"""The model that options name; headers of safetensors, and configurations of transformers."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext.cli.arguments import NAMED
from torchopt_ext.cli.tensors import (
    MOST_ELEMENTS,
    Entry,
    Source,
    alike,
    as_dtype,
    entries_of,
    from_function,
    from_text,
    meta,
)
from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.statedict import safetensors

_LARGEST_HEADER = 100_000_000  # the format's own limit
CONFIG = "config.json"


def from_options(options: Any) -> Source:
    """Returns the model that :func:`add_source`'s options select."""
    model = None
    if options.model is not None:
        name = options.model
        model, entries = from_function(name)
    elif options.params is not None:
        name, entries = f"--params {options.params}", [*map(Entry, alike(options.params))]
    elif getattr(options, "file", None) is not None:
        name, (model, entries) = str(options.file), from_path(options.file)
    else:
        name = options.shapes or NAMED
        entries = from_text(name)
    entries = as_dtype(entries, options.dtype)
    if not any(entry.tensor.requires_grad for entry in entries):
        raise CommandError(f"{name} has no trainable parameter")
    return Source(name, entries, model)


def from_path(path: Path) -> tuple[nn.Module | None, list[Entry]]:
    """Returns the model of a file or folder, and its modules if a configuration describes them.

    Of a folder, headers come first: they have the weights as they are, and need no other library.
    """
    if path.is_dir():
        path = _inside(path)
    if path.suffix == ".json" and not _is_index(path):
        return from_config(path)
    return None, from_safetensors(path)


def _inside(folder: Path) -> Path:
    """Returns the file of a folder that describes its model."""
    patterns = ("*.safetensors.index.json", "*.safetensors", CONFIG)
    if (found := only_file(folder, patterns, "models")) is None:
        raise CommandError(
            f"{folder} has no model: expected *.safetensors, *.safetensors.index.json or {CONFIG}"
        )
    return found


def only_file(
    folder: Path,
    patterns: Iterable[str],
    what: str,
    counts: Callable[[Path], bool] = lambda file: True,
) -> Path | None:
    """Returns the file of the first pattern that any file matches; raises if several do."""
    for pattern in patterns:
        found = [file for file in sorted(folder.glob(pattern)) if counts(file)]
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:4])
            raise CommandError(f"{folder} has {len(found)} {what}: name one of {names}")
        if found:
            return found[0]
    return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} cannot be read as JSON: {error}") from error


def _is_index(path: Path) -> bool:
    """Returns whether a JSON file is an index of safetensors files, and not a configuration."""
    held = _read_json(path)
    if isinstance(held, dict) and ("model_type" in held or "architectures" in held):
        return False
    if isinstance(held, dict) and isinstance(held.get("weight_map"), dict):
        return True
    raise CommandError(
        f"{path} is neither an index of safetensors files, with a weight_map of names and files, "
        f"nor a configuration of transformers, with a model_type"
    )


# ---- Hugging Face --------------------------------------------------------------------------------


def from_config(path: Path) -> tuple[nn.Module, list[Entry]]:
    """Returns the model that transformers builds from a configuration, on the meta device."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise CommandError(
            f"{path} needs Hugging Face's transformers, which cannot be imported ({error}): "
            f"pip install transformers, or name safetensors files or a number such as 7B"
        ) from error
    try:
        # Not the code that a repository may bring along.
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        names = [name for name in config.architectures or () if hasattr(transformers, name)]
        build = getattr(transformers, names[0]) if names else transformers.AutoModel.from_config
        with torch.device("meta"):
            model: nn.Module = build(config)
        model.to(getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None))
        return model, entries_of(model)
    except Exception as error:  # whatever the model's code raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CommandError(f"transformers cannot build the model of {path}: {problem}") from error


# ---- safetensors ---------------------------------------------------------------------------------


def from_safetensors(path: Path) -> list[Entry]:
    """Returns the tensors of a safetensors file, or of the files that an index names.

    Only headers are read (https://github.com/huggingface/safetensors, Format).
    """
    held: dict[str, Tensor] = {}
    for file in files_of(path):
        held |= read_header(file)
    names = _read_json(path)["weight_map"] if path.suffix == ".json" else held
    if missing := sorted(names.keys() - held.keys()):
        raise CommandError(f"{path} names {missing[0]}, which is in none of its files")
    return [Entry(held[name], name) for name in names]


def files_of(path: Path) -> list[Path]:
    """Returns a safetensors file, or the files that an index names."""
    if path.suffix != ".json":
        return [path]
    names = _read_json(path)["weight_map"]
    if not all(isinstance(file, str) for file in names.values()):
        raise CommandError(f"{path} has a weight_map whose values are not the names of files")
    files = sorted({path.parent / file for file in names.values()})
    for file in files:
        if not file.is_file():
            raise CommandError(
                f"{path} names {file.name}, which is not in the same folder: its header has the "
                f"shapes"
            )
    return files


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
