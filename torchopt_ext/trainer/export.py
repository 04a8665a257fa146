"""Exports a checkpoint's model as safetensors, for programs without this package and DCP."""

import json
import math
import os
from pathlib import Path

import torch

from torchopt_ext.statedict import dcp
from torchopt_ext.statedict.safetensors import NAMES
from torchopt_ext.trainer.checkpoint_states import model_tensors

__all__ = ["export_safetensors"]


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a checkpoint's model into one safetensors file, in one process for any saved layout.

    The tensors are read into the mapped file, so the model does not have to fit into memory. An
    existing file is replaced when the output is complete.

    Args:
        checkpoint: a folder ``step-N`` of CheckpointManager or of torchtitan.
        dtype: the dtype to convert floating-point tensors to; None: no conversion.

    Raises:
        ValueError: The checkpoint is damaged, or the format lacks a tensor's dtype, which is named.
        OSError: The file cannot be written. No part of it is left.
    """
    reader = dcp.Reader(checkpoint)
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, stored in model_tensors(reader.read_metadata()).items():
        kind = stored.properties.dtype
        kind = dtype if dtype and kind.is_floating_point else kind
        if kind not in NAMES:
            raise ValueError(f"'{name}' is {kind}, which safetensors files cannot hold")
        tensors[name] = kind, tuple(stored.size)
    # The widest elements first, so that each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    entries, end = {}, 0
    for name in names:
        kind, shape = tensors[name]
        begin, end = end, end + math.prod(shape) * kind.itemsize
        entries[name] = {"dtype": NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    saving = Path(f"{output}.saving")
    try:
        with open(saving, "wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.flush()
            # Without reserved space, writing to a mapped file on a full disk kills the process.
            os.posix_fallocate(stream.fileno(), 0, 8 + len(header) + end)
        size = os.path.getsize(saving)
        mapped = torch.from_file(str(saving), shared=True, size=size, dtype=torch.uint8)
        data = mapped[8 + len(header) :]
        views = {
            name: data[slice(*entry["data_offsets"])].view(tensors[name][0]).view(tensors[name][1])
            for name, entry in entries.items()
        }
        with dcp.quiet():
            dcp.load(views, storage_reader=reader, no_dist=True)
        with open(saving, "rb") as stream:
            os.fsync(stream.fileno())
        os.rename(saving, output)
    except BaseException:
        saving.unlink(missing_ok=True)
        raise
