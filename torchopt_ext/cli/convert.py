"""python -m torchopt_ext convert: changes how a checkpoint keeps weights and moments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
    WEIGHTS,
    Checkpoint,
    Entry,
    give_back_memory,
    is_control,
    open_checkpoint,
    quiet_dcp,
)
from torchopt_ext.cli.tensors import DTYPES, add_dtype
from torchopt_ext.cli.terminal import CommandError, Parser, Progress, size, written
from torchopt_ext.optim.quantized import CODES, SCALE, SCALES, can_quantize, scale_shape
from torchopt_ext.optim.storage import (
    MASTER,
    MASTER_WEIGHTS,
    SIXTEEN_BIT,
    join_master,
    split_master,
)
from torchopt_ext.statedict.dcp import Path as KeyPath
from torchopt_ext.statedict.entries import MASTERS, MOMENTS, REMAINDERS
from torchopt_ext.statedict.moments import dequantize, quantize

FORMATS = {"torch": FILE, "dcp": FOLDER}
MOMENT_DTYPES = ("float32", "bfloat16", "int8")
KINDS = {"none": None, **MASTER_WEIGHTS}


def parser() -> Parser:
    made = Parser(
        "convert",
        "Writes a checkpoint anew: as a file of torch.save or a folder of "
        "torch.distributed.checkpoint, with other master weights or moments. A folder is "
        "written one tensor at a time; for a file, what changes is in memory. Nothing is at "
        "OUTPUT before all of it is written. Layouts (by index, by name) stay as they are.",
        """
        ours.pt torch.pt --to-torch --save-weights fp32_weights.pt
        torch.pt ours.pt --master-weights remainder --weights fp32_model.pt
        step-1000 step-1000-small --state-dtype int8
        optimizer.pt folder --format dcp
        """,
        takes="INPUT OUTPUT",
    )
    made.add_argument("input", type=Path)
    made.add_argument("output", type=Path)
    made.add_argument("--format", choices=FORMATS, help="of OUTPUT, if not INPUT's")
    made.add_argument(
        "--to-torch", action="store_true",
        help="as torch.optim.AdamW over fp32 weights has it: fp32 moments, no master weights, no "
        "entries of this package",
    )  # fmt: skip
    made.add_argument("--master-weights", choices=KINDS, help="what to keep of each weight")
    add_dtype(made, "--state-dtype", MOMENT_DTYPES, "of the moments")
    made.add_argument(
        "--weights", type=Path, metavar="CHECKPOINT",
        help="of the model, by name: a remainder becomes a master weight with the bf16 weight, and "
        "where there is neither, either is made of the fp32 weight",
    )  # fmt: skip
    made.add_argument(
        "--save-weights", type=Path, metavar="FILE",
        help="write what the master weights are, by name, with all their bits",
    )  # fmt: skip
    made.add_argument("--force", action="store_true", help="replace what is there")
    return made


def main(args: list[str]) -> int:
    options = parser().parse_args(args)
    if options.to_torch:
        floats = options.state_dtype in (None, "float32")
        if options.master_weights not in (None, "none") or not floats:
            raise CommandError("--to-torch keeps no master weights, and fp32 moments")
        options.master_weights, options.state_dtype = "none", "float32"
    give_back_memory()
    source = open_checkpoint(options.input)
    if options.save_weights is not None and options.save_weights == options.output:
        raise CommandError(f"{options.output} is both the output and --save-weights")
    for path in (options.output, options.save_weights):
        if path is not None and path.exists():
            if path.samefile(options.input):
                raise CommandError(f"{path} is the input")
            if not options.force:
                raise CommandError(f"{path} exists; --force replaces it")
    weights = Weights(source, options.weights and open_checkpoint(options.weights))
    new = converted(source, weights, options)
    exact = []
    if options.save_weights is not None:
        exact = [e for e in map(source.entry, source.tensors) if e.kind in MASTERS]
        if not exact:
            raise CommandError(f"{options.input} has no master weights for --save-weights")
        for entry in exact:
            weights.check(entry, MASTER)
    chosen = FORMATS.get(options.format, source.format)
    with written(options.output, options.force, checkpoint=True) as path:
        (save_file if chosen == FILE else save_folder)(source, new, path, options.to_torch)
        if exact:  # first to be in place: the output may lack their bits
            with written(options.save_weights, options.force) as file:
                exact_weights = {weights.name(e): weights.as_kind(e, MASTER) for e in exact}
                torch_save(exact_weights, file)
            print(f"wrote {options.save_weights}: {len(exact):,} weights, float32")
    total = sum(tensor.bytes for tensor in new.values())
    print(f"wrote {options.output}: {chosen}, {len(new):,} tensors, {size(total)}")
    return 0


# ---- weights -------------------------------------------------------------------------------------


class Weights:
    """The weights of parameters, from master weights, remainders and a model's checkpoint.

    Args:
        source: the optimizer's checkpoint; a model in it will do.
        other: a model's checkpoint.
    """

    def __init__(self, source: Checkpoint, other: Checkpoint | None) -> None:
        self.source = source
        self._names: dict[tuple[str, str], str] = {}
        for group, options in source.options().items():
            part = f".{group}".rpartition(".param_groups.")[0][1:]
            pairs = zip(options.get("params", ()), options.get("param_names", ()), strict=False)
            self._names |= {(part, str(index)): name for index, name in pairs}
        self.given = other is not None
        self._found: dict[str, tuple[Checkpoint, str]] = {}
        for checkpoint in (source, other) if other else (source,):
            for entry in map(checkpoint.entry, checkpoint.tensors):
                if entry.kind == WEIGHTS:
                    self._found[entry.key] = checkpoint, entry.key

    def name(self, entry: Entry) -> str:
        """The name of an entry's parameter.

        Raises:
            CommandError: the checkpoint does not say it.
        """
        known = self._names.get((entry.part, entry.owner))
        if known is None and entry.owner.isdigit():
            raise CommandError(
                "the optimizer's state has no param_names, by which weights would be found: save "
                "it from an optimizer that was given model.named_parameters()"
            )
        return known or entry.owner

    def _place(self, entry: Entry) -> tuple[Checkpoint, str]:
        name = self.name(entry)
        keys = [key for key in self._found if key == name] or [
            key for key in self._found if key.endswith(f".{name}")
        ]
        if len(keys) != 1:
            found = f"{len(keys)} weights that end so" if keys else "no such weight"
            raise CommandError(f"there is {found}: {name}; name the model's by --weights")
        return self._found[keys[0]]

    def check(self, entry: Entry, wanted: str) -> None:
        """Raises CommandError if :meth:`as_kind` could not make what is wanted."""
        if entry.kind in (MASTER, wanted):
            return
        checkpoint, key = self._place(entry)
        weight, like = checkpoint.tensors[key], self.source.tensors[entry.key]
        expected = (torch.bfloat16,) if entry.kind in REMAINDERS else (torch.float32, *SIXTEEN_BIT)
        if weight.shape != like.shape or weight.dtype not in expected:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise CommandError(
                f"the weight {key} is {weight.dtype} {list(weight.shape)}, expected {names} "
                f"{list(like.shape)}"
            )

    def as_kind(self, entry: Entry, wanted: str) -> Tensor:
        """The master weight or remainder of the parameter that an entry belongs to.

        Args:
            entry: its master weight, its remainder, or another if it has neither.
        """
        if entry.kind == wanted:
            return self.source.tensor(entry.key)
        if entry.kind == MASTER:
            exact = self.source.tensor(entry.key)
        else:
            checkpoint, key = self._place(entry)
            exact = checkpoint.tensor(key)
            if entry.kind in REMAINDERS:
                exact = join_master(exact, self.source.tensor(entry.key))
        exact = exact.float()
        return exact if wanted == MASTER else split_master(exact, MASTERS[wanted])[1]


# ---- what is written -----------------------------------------------------------------------------


@dataclass(frozen=True)
class New:
    """A tensor of the output: where it goes, what it will be like, and what makes it."""

    path: KeyPath
    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def like(self) -> Tensor:
        """Of its shape and dtype, without its memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def converted(source: Checkpoint, weights: Weights, options: Any) -> dict[str, New]:
    """The output's tensors by key.

    Raises:
        CommandError: a weight that is needed is missing or does not fit.
    """
    new: dict[str, New] = {}
    owners: dict[tuple[str, str], dict[str, Entry]] = {}
    for key, like in source.tensors.items():
        entry = source.entry(key)
        if entry.owner:
            owners.setdefault((entry.part, entry.owner), {})[entry.kind] = entry
        if options.to_torch and entry.kind == CONTROL:
            continue
        if options.master_weights is not None and entry.kind in MASTERS:
            continue  # made below
        if entry.owner and options.state_dtype and entry.kind in (*MOMENTS, *SCALES):
            made = moments(source, entry, options.state_dtype)
        else:
            made = iter([kept(source, entry, like.dtype)])
        new |= {".".join(map(str, tensor.path)): tensor for tensor in made}
    if not owners:
        raise CommandError(f"{options.input} holds no optimizer's state")
    wanted = KINDS[options.master_weights or "none"]
    if wanted is None:
        return new
    mixed = any(MASTERS.keys() & own.keys() for own in owners.values())
    for own in owners.values():
        kinds = [kind for kind in (wanted, *MASTERS, "exp_avg") if kind in own]
        if not kinds or (kinds == ["exp_avg"] and mixed and not weights.given):
            continue  # no parameter of Adam's; or one of 32 bits beside those of 16
        entry = own[kinds[0]]
        weights.check(entry, wanted)
        path = source.paths[entry.key]
        path = (*path[:-1], str(path[-1]).removesuffix(entry.kind) + wanted)
        make = functools.partial(weights.as_kind, entry, wanted)
        shape = source.tensors[entry.key].shape
        new[".".join(map(str, path))] = New(path, shape, MASTERS[wanted], make)
    return new


def kept(source: Checkpoint, entry: Entry, dtype: torch.dtype) -> New:
    """A tensor as it is, or rounded to another dtype."""
    shape = source.tensors[entry.key].shape
    return New(source.paths[entry.key], shape, dtype, lambda: source.tensor(entry.key).to(dtype))


def moments(source: Checkpoint, entry: Entry, wanted: str) -> Iterator[New]:
    """A moment as FusedAdamW(state_dtype=...) holds it: codes with their scales, or floats.

    Raises:
        CommandError: it cannot be held so, or is of another format of 8-bit moments.
    """
    key, kind, like = entry.key, entry.kind, source.tensors[entry.key]
    coded = kind in CODES and f"{key}{SCALE}" in source.tensors
    if kind in CODES and like.dtype == CODES[kind] and not coded:
        raise CommandError(f"{key} is {like.dtype} without {key}{SCALE}: another format's")
    if wanted == "int8" and kind not in (*CODES, *SCALES):
        raise CommandError(f"{key} belongs to amsgrad, which 8-bit moments do not go with")
    if wanted == "int8" and (coded or kind in SCALES):
        yield kept(source, entry, like.dtype)
    elif wanted == "int8" and quantizes(source, like):
        path = source.paths[key]
        yield New(path, like.shape, CODES[kind], lambda: quantize(kind, source.tensor(key))[0])
        path = (*path[:-1], f"{path[-1]}{SCALE}")
        shape = scale_shape(like)
        yield New(path, shape, torch.float32, lambda: quantize(kind, source.tensor(key))[1])
    elif kind not in SCALES:  # which go into their moments
        held = like.dtype in (torch.float32, *SIXTEEN_BIT)
        dtype = DTYPES.get(wanted, torch.float32) if held or coded else like.dtype
        if coded:
            make = functools.partial(decoded, source, entry, dtype)
            yield New(source.paths[key], like.shape, dtype, make)
        else:
            yield kept(source, entry, dtype)


def quantizes(source: Checkpoint, like: Tensor) -> bool:
    """Whether a moment's parameter can have 8 bits, whatever its order in memory.

    A folder does not tell channels-last ones, of four dimensions or more, which cannot. FusedAdamW
    quantizes their float moments if it can.
    """
    known = source.format == FILE or like.dim() < 4
    return known and can_quantize(torch.empty_like(like, device="meta"))


def decoded(source: Checkpoint, entry: Entry, dtype: torch.dtype) -> Tensor:
    """A moment of 8 bits as floats."""
    scales = source.tensor(f"{entry.key}{SCALE}")
    return dequantize(entry.kind, source.tensor(entry.key), scales).to(dtype)


def kept_values(source: Checkpoint, to_torch: bool) -> dict[str, Any]:
    """What is no tensor."""
    return {key: v for key, v in source.values.items() if not (to_torch and is_control(key))}


def save_file(source: Checkpoint, new: dict[str, New], path: Path, to_torch: bool) -> None:
    """One file of torch.save, with parameters' indices as numbers again."""
    indices = {str(index) for o in source.options().values() for index in o.get("params", ())}
    nested: dict[str, Any] = {}
    with Progress("converting", sum(tensor.bytes for tensor in new.values())) as progress:
        for tensor in new.values():
            set_element(nested, tensor.path, tensor.make())
            progress.add(tensor.bytes)
    for key, value in kept_values(source, to_torch).items():
        set_element(nested, source.paths[key], value)
    torch_save(with_indices(nested, indices), path)


def torch_save(value: Any, path: Path) -> None:
    """torch.save, which makes a RuntimeError of what the disk says.

    Raises:
        OSError: it cannot be written.
    """
    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def with_indices(nested: Any, indices: set[str]) -> Any:
    """A state dict whose states have numbers as keys, which DCP makes text of."""
    if isinstance(nested, list):
        return [with_indices(value, indices) for value in nested]
    if not isinstance(nested, dict):
        return nested
    found = {key: with_indices(value, indices) for key, value in nested.items()}
    if "param_groups" in found:
        state = found.get("state", {})  # nothing is left of an empty one
        found["state"] = {int(k) if k in indices else k: value for k, value in state.items()}
    return found


class _Planner(DefaultSavePlanner):
    """Makes each tensor when it is written, and frees it when the next one is.

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
        self._progress.add(tensor.bytes)
        return self._last


def save_folder(source: Checkpoint, new: dict[str, New], path: Path, to_torch: bool) -> None:
    """A folder of torch.distributed.checkpoint."""
    nested: dict[str, Any] = {}
    for tensor in new.values():
        set_element(nested, tensor.path, tensor.like)
    for key, value in kept_values(source, to_torch).items():
        set_element(nested, source.paths[key], value)
    total = sum(tensor.bytes for tensor in new.values())
    with Progress("converting", total) as progress, quiet_dcp():
        # Without copies ahead, which would be of tensors that are freed by then.
        writer = FileSystemWriter(path, single_file_per_rank=True, per_thread_copy_ahead=0)
        try:
            save(nested, storage_writer=writer, planner=_Planner(new, progress), no_dist=True)
        except CheckpointException as error:  # of this process, the only one
            (cause, _), *_ = error.failures.values()
            raise cause from error
