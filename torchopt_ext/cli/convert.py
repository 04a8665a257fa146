"""python -m torchopt_ext convert: changes how a checkpoint keeps weights and moments."""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from torchopt_ext._torch import set_element
from torchopt_ext.cli.checkpoints import (
    CONTROL,
    FILE,
    FOLDER,
    Checkpoint,
    Entry,
    give_back_memory,
    is_control,
    open_checkpoint,
)
from torchopt_ext.cli.tensors import DTYPES
from torchopt_ext.cli.terminal import CommandError, Progress, check_output, size, written
from torchopt_ext.cli.weights import Weights
from torchopt_ext.optim.groups import params_matching
from torchopt_ext.state.algorithms import STATES
from torchopt_ext.state.by_row import BY_ROW
from torchopt_ext.state.entries import MASTERS, MOMENTS
from torchopt_ext.state.quantized import (
    CODES,
    CODES_OF,
    OTHER_FORM,
    SCALES,
    can_quantize,
    dequantize,
    quantize,
    scale_shape,
)
from torchopt_ext.state.storage import MASTER, MASTER_WEIGHTS, REMAINDER, SIXTEEN_BIT
from torchopt_ext.statedict.dcp import Path as KeyPath
from torchopt_ext.statedict.dcp import quiet

FORMATS = {"torch": FILE, "dcp": FOLDER}
KINDS = {"none": None, **MASTER_WEIGHTS}


def main(options: Any) -> int:
    give_back_memory()
    source = open_checkpoint(options.input)
    model = options.weights and open_checkpoint(options.weights, weights=True)
    outputs = [path for path in (options.output, options.save_weights) if path is not None]
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise CommandError(f"{options.output} is both the output and --save-weights")
    for path in outputs:
        for read, what in ((source, "the input"), (model, "--weights")):
            if read is not None and os.path.exists(path) and path.samefile(read.path):
                raise CommandError(f"{path} is {what}")
        check_output(path, options.force, checkpoint=path == options.output)
    weights = Weights(source, model)
    new = converted(source, weights, options)
    held = [entry for entry in map(source.entry, source.tensors) if entry.kind in MASTERS]
    exact = held if options.save_weights is not None else []
    if options.save_weights is not None and not exact:
        raise CommandError(f"{options.input} has no master weights for --save-weights")
    weights.find(exact, MASTER)
    is_file = source.format != FOLDER or options.output.suffix in (".pt", ".pth")
    chosen = FORMATS.get(options.format, FILE if is_file else FOLDER)
    with written(options.output, options.force, checkpoint=True) as path:
        (save_file if chosen == FILE else save_folder)(source, new, path, options.to_torch)
        if exact:  # first to be in place: the output may lack their bits
            with written(options.save_weights, options.force) as file:
                save_weights(exact_weights(weights, exact), file)
    if weights.by_order:
        (first, name), *_, (last, its) = 2 * sorted(
            weights.by_order.items(), key=lambda pair: int(pair[0])
        )
        print(
            f"paired {len(weights.by_order):,} parameters with weights by order and shape, from\n"
            f"{first} with {name} to {last} with {its}"
        )
    if weights.beside:
        print(f"took {len({*weights.beside}):,} weights such as {weights.beside[0]}")
    if options.state_dtype == "int8" and options.fp32_moments is None:
        print("8-bit moments of embeddings, too, if there are any: see --fp32-moments")
    if held and not exact and options.master_weights == "none":
        print(f"without the low bits of {len(held):,} weights, which --save-weights writes")
    if exact:
        print(f"wrote {options.save_weights}: {len(exact):,} weights, float32")
    total = sum(tensor.like.nbytes for tensor in new.values())
    print(f"wrote {options.output}: {chosen}, {len(new):,} tensors, {size(total)}")
    return 0


def exact_weights(weights: Weights, masters: list[Entry]) -> dict[str, Any]:
    """Returns the master weights by name; for several optimizers, one dict for each."""
    parts: dict[str, Any] = {}
    for entry in masters:
        parts.setdefault(entry.part, {})[weights.name(entry)] = weights.as_kind(entry, MASTER)
    return parts if len(parts) > 1 else next(iter(parts.values()))


# ---- what is written -----------------------------------------------------------------------------


@dataclass(frozen=True)
class New:
    """A tensor of the output: its path, shape and dtype, and the function that makes it."""

    path: KeyPath
    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def like(self) -> Tensor:
        """A tensor of the same shape and dtype that takes no memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)


def converted(source: Checkpoint, weights: Weights, options: Any) -> dict[str, New]:
    """Returns the output's tensors by key."""
    entries = [source.entry(key) for key in source.tensors]
    owners: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries:
        if entry.owner:
            owners.setdefault((entry.part, entry.owner), {})[entry.kind] = entry
    if not owners:
        raise CommandError(f"{options.input} holds no optimizer's state")
    changes = not options.to_torch and (options.state_dtype or options.master_weights)
    if changes and all({*OTHER_FORM, *MASTERS}.isdisjoint(kinds) for kinds in owners.values()):
        raise CommandError(f"{options.input} has no moments: there is nothing to convert")
    keep_fp32 = chosen_by_name(owners, weights, options.fp32_moments or ())
    tensors: list[New] = []
    for entry in entries:
        if entry.kind in MASTERS and options.master_weights is not None:
            continue
        if entry.owner and options.state_dtype and entry.kind in (*MOMENTS, *CODES, *SCALES):
            kept_fp32 = (entry.part, entry.owner) in keep_fp32
            tensors += moments(source, entry, "float32" if kept_fp32 else options.state_dtype)
        elif not (options.to_torch and entry.kind == CONTROL):
            tensors.append(kept(source, entry, source.tensors[entry.key].dtype))
    if kind := KINDS[options.master_weights or "none"]:
        tensors += masters(source, weights, [*owners.values()], kind)
    return {".".join(map(str, tensor.path)): tensor for tensor in tensors}


def chosen_by_name(
    owners: dict[tuple[str, str], dict[str, Entry]], weights: Weights, patterns: Sequence[str]
) -> set[tuple[str, str]]:
    """Returns part and owner of the parameters whose names match one of the patterns."""
    if not patterns:
        return set()  # names may be missing
    names = {owner: [weights.name(next(iter(kinds.values())))] for owner, kinds in owners.items()}
    every: set[Any] = set()
    for pattern in patterns:
        try:
            matching: set[Any] = params_matching(pattern, names)
        except ValueError as error:
            raise CommandError(f"--fp32-moments: {error}") from error
        if not matching:
            raise CommandError(f"--fp32-moments: no parameter has a name with {pattern!r}")
        every |= matching
    return every


def masters(
    source: Checkpoint, weights: Weights, owners: list[dict[str, Entry]], kind: str
) -> Iterator[New]:
    """Yields each parameter's master weight or remainder, made from what the checkpoints hold."""
    entries = []
    mixed = any(MASTERS.keys() & held.keys() for held in owners)
    for held in owners:
        kinds = [each for each in (kind, *MASTERS, *OTHER_FORM) if each in held]
        if not kinds or (kinds[0] in OTHER_FORM and mixed and not weights.are_separate):
            continue  # without moments, or a 32-bit parameter next to 16-bit parameters
        entries.append(held[kinds[0]])
    weights.find(entries, kind)
    for entry in entries:
        path, dtype = beside(source, entry, kind), MASTERS[kind]
        if path[-1] == REMAINDER and not str(path[-2]).isdigit():
            dtype = torch.int32  # torch's set_optimizer_state_dict cannot scatter int16
        make = functools.partial(weights.as_kind, entry, kind, dtype)
        yield New(path, source.tensors[entry.key].shape, dtype, make)


def beside(source: Checkpoint, entry: Entry, kind: str) -> KeyPath:
    """Returns the path of an entry of another kind, beside the given entry."""
    path = source.paths[entry.key]
    return (*path[:-1], str(path[-1]).removesuffix(entry.kind) + kind)


def kept(source: Checkpoint, entry: Entry, dtype: torch.dtype) -> New:
    """Returns a tensor as it is, or rounded to another dtype."""
    shape = source.tensors[entry.key].shape
    return New(source.paths[entry.key], shape, dtype, lambda: source.tensor(entry.key).to(dtype))


def moments(source: Checkpoint, entry: Entry, kept_as: str) -> Iterator[New]:
    """Yields a moment in the form of FusedAdamW(state_dtype=...): codes and scales, or floats."""
    key, kind, like = entry.key, entry.kind, source.tensors[entry.key]
    if kind in BY_ROW:  # float32 whatever the moments have
        yield kept(source, entry, torch.float32)
        return
    coded, moment = kind in CODES, OTHER_FORM[kind] if kind in CODES else kind
    scales = f"{key.removesuffix(kind)}{STATES[moment].scale}" if coded else key
    if scales not in source.tensors or (kind in CODES_OF and like.dtype in CODES.values()):
        raise CommandError(f"{key} is {like.dtype} without scales: another format's")
    if kept_as == "int8" and kind not in (*OTHER_FORM, *SCALES):
        raise CommandError(f"{key} belongs to amsgrad, which 8-bit moments do not support")
    if kept_as == "int8" and (coded or kind in SCALES):
        yield kept(source, entry, like.dtype)
    elif kept_as == "int8" and quantizes(source, like):
        codes, shape = CODES_OF[kind], scale_shape(like)
        path = beside(source, entry, codes)
        yield New(path, like.shape, CODES[codes], lambda: quantize(kind, source.tensor(key))[0])
        path = beside(source, entry, STATES[kind].scale)
        yield New(path, shape, torch.float32, lambda: quantize(kind, source.tensor(key))[1])
    elif kind not in SCALES:  # scales go into their moments
        held = like.dtype in (torch.float32, *SIXTEEN_BIT)
        dtype = DTYPES.get(kept_as, torch.float32) if held or coded else like.dtype
        if not coded:
            yield kept(source, entry, dtype)
            return

        def decoded() -> Tensor:
            return dequantize(moment, source.tensor(key), source.tensor(scales)).to(dtype)

        yield New(beside(source, entry, moment), like.shape, dtype, decoded)


def quantizes(source: Checkpoint, like: Tensor) -> bool:
    """Returns whether a moment can have 8 bits, whatever its parameter's order in memory.

    Channels-last moments, of four or more dimensions, cannot, and a folder does not tell them from
    others. FusedAdamW quantizes their float moments if it can.
    """
    order_is_known = source.format == FILE or like.dim() < 4
    return order_is_known and can_quantize(torch.empty_like(like, device="meta"))


def nested_in(
    source: Checkpoint, new: dict[str, New], tensors: dict[str, Tensor], to_torch: bool
) -> dict[str, Any]:
    """Returns a nested state dict of the tensors and of the source's other values."""
    nested: dict[str, Any] = {}
    for key, tensor in new.items():
        set_element(nested, tensor.path, tensors[key])
    for key, value in source.values.items():
        if not (to_torch and is_control(key)):
            set_element(nested, source.paths[key], value)
    return nested


def save_file(source: Checkpoint, new: dict[str, New], path: Path, to_torch: bool) -> None:
    """Writes a file of torch.save. Parameters' indices become numbers again."""
    tensors = {}
    with Progress("converting", sum(tensor.like.nbytes for tensor in new.values())) as progress:
        for key, tensor in new.items():
            tensors[key] = tensor.make()
            progress.add(tensor.like.nbytes)
    if source.nested is not None:
        torch_save(with_tensors(source, new, tensors, to_torch), path)
        return
    groups = [group for part in source.options().values() for group in part.values()]
    indices = {str(index) for group in groups for index in group.get("params", ())}
    torch_save(with_indices(nested_in(source, new, tensors, to_torch), indices), path)


def with_tensors(
    source: Checkpoint, new: dict[str, New], tensors: dict[str, Tensor], to_torch: bool
) -> Any:
    """Returns a file's state dict with new tensors. Keys, types and empty values stay."""
    replaced = {id(old): tensors.get(key, old) for key, old in source.tensors.items()}
    nested = copy.deepcopy(source.nested, replaced)
    for key, path in source.paths.items():
        if to_torch and is_control(key):
            first = next(n for n, part in enumerate(path) if is_control(str(part)))
            holder, name = found_at(nested, path[: first + 1])
            holder.pop(name, None)  # at once, with all counts
        elif key in source.tensors and key not in tensors:
            holder, name = found_at(nested, path)
            del holder[name]
    for key in new.keys() - source.tensors.keys():
        holder, name = found_at(nested, new[key].path)
        holder[name] = tensors[key]
    return nested


def found_at(nested: Any, path: KeyPath) -> tuple[Any, Any]:
    """Returns the holder of a path's last element and its key. DCP turns numbers into text."""
    for depth, part in enumerate(path, 1):
        is_number = isinstance(nested, dict) and part not in nested and str(part).isdigit()
        key = int(part) if is_number else part
        if depth == len(path):
            break
        nested = nested[key]
    return nested, key


def torch_save(value: Any, path: Path) -> None:
    """Calls torch.save, and turns its RuntimeError for a disk's error into OSError."""
    try:
        with Progress("writing", 1):
            torch.save(value, path)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def save_weights(weights: dict[str, Any], path: Path) -> None:
    """Writes weights by name, as safetensors if the path says so."""
    if path.suffix != ".safetensors":
        torch_save(weights, path)
        return
    if not all(isinstance(value, Tensor) for value in weights.values()):
        raise CommandError("safetensors hold one model: name --save-weights such as weights.pt")
    try:
        save_file = importlib.import_module("safetensors.torch").save_file
    except ImportError as error:
        raise CommandError(f"{path.name} needs safetensors ({error}): pip install it") from error
    save_file({name: value.contiguous() for name, value in weights.items()}, path)


def with_indices(nested: Any, indices: set[str]) -> Any:
    """Returns a state dict whose states have numbers as keys again, which DCP turns into text."""
    if isinstance(nested, list):
        return [with_indices(value, indices) for value in nested]
    if not isinstance(nested, dict):
        return nested
    copied = {key: with_indices(value, indices) for key, value in nested.items()}
    if "param_groups" in copied:
        state = copied.get("state", {})  # DCP drops an empty state
        copied["state"] = {int(k) if k in indices else k: value for k, value in state.items()}
    return copied


class _Planner(DefaultSavePlanner):
    """Makes each tensor when it is written, and frees it when the next tensor is written.

    The writer keeps every tensor object until its file is complete (torch's filesystem.py), but
    reads it only once.
    """

    def __init__(self, new: dict[str, New], progress: Progress) -> None:
        super().__init__()
        self._new, self._progress = new, progress
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        tensor = self._new.get(write_item.index.fqn)
        if tensor is None:
            return super().resolve_data(write_item)
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        self._last = tensor.make().clone(memory_format=torch.contiguous_format)
        self._progress.add(tensor.like.nbytes)
        return self._last


def save_folder(source: Checkpoint, new: dict[str, New], path: Path, to_torch: bool) -> None:
    """Writes a folder of torch.distributed.checkpoint."""
    likes = {key: tensor.like for key, tensor in new.items()}
    nested = nested_in(source, new, likes, to_torch)
    total = sum(like.nbytes for like in likes.values())
    with Progress("converting", total) as progress, quiet():
        # No copy-ahead: it would copy tensors that are freed by then.
        writer = FileSystemWriter(path, single_file_per_rank=True, per_thread_copy_ahead=0)
        try:
            save(nested, storage_writer=writer, planner=_Planner(new, progress), no_dist=True)
        except CheckpointException as error:  # of the only process
            (cause, _), *_ = error.failures.values()
            if isinstance(cause, RuntimeError):  # torch's, for a disk's error
                raise OSError(str(cause).splitlines()[0]) from error
            raise cause from error
