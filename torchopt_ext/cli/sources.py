"""The model that a command's options name."""

from __future__ import annotations

from typing import Any

from torchopt_ext.cli.arguments import NAMED
from torchopt_ext.cli.model_files import from_path
from torchopt_ext.cli.tensors import Entry, Source, alike, as_dtype, from_function, from_text
from torchopt_ext.cli.terminal import CommandError


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
