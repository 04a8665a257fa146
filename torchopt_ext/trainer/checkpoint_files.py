"""Folders of checkpoints: written beside, checked file by file, made visible by one rename.

A folder ``step-N`` is complete. While it is written it is ``step-N.saving``, while it is removed
``step-N.removing``. ``manifest.json`` in it lists size and CRC-32 of every file, so that truncated
files and flipped bytes are found before anything is read from them.
"""

import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torchopt_ext.statedict.dcp import Reader

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METADATA = ".metadata"
ABANDONED = "abandoned"
"""A file in a checkpoint after which training does not go on: one before it was loaded."""
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+(\.safetensors)?\.(saving|removing)")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class File:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        contents: "full", or "model" without what training needs to go on.
        files: by name, all but the manifest.
    """

    step: int
    contents: str
    files: dict[str, File]

    @property
    def size(self) -> int:
        """All files' bytes."""
        return sum(file.size for file in self.files.values())


# ---- writing -------------------------------------------------------------------------------------


def saving_folder(folder: Path, step: int) -> Path:
    """Where the files of a checkpoint are until it is complete."""
    return folder / f"step-{step}.saving"


def commit(folder: Path, manifest: Manifest) -> None:
    """Makes the files that were saved ``step-N``, whose present files, if any, are removed."""
    saving, final = saving_folder(folder, manifest.step), folder / f"step-{manifest.step}"
    content = asdict(manifest)
    with open(saving / f"{MANIFEST}.tmp", "w") as stream:
        json.dump({"crc32": _crc32_of(content), "manifest": content}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(saving / f"{MANIFEST}.tmp", saving / MANIFEST)
    _sync(saving)
    _publish(saving, final)


def _crc32_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _publish(saving: Path, final: Path) -> None:
    removing = final.with_name(f"{final.name}.removing")
    if final.exists():
        shutil.rmtree(removing, ignore_errors=True)
        os.rename(final, removing)
    os.rename(saving, final)
    _sync(final.parent)
    shutil.rmtree(removing, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes renames in a folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a checkpoint; a crash meanwhile leaves none that seems complete."""
    removing = folder.with_name(f"{folder.name}.removing")
    os.rename(folder, removing)
    shutil.rmtree(removing)


def abandon(folder: Path, step: int) -> None:
    """Marks the checkpoints after a step, from which training goes on by another branch.

    Warns of what cannot be marked. No save fails for it.
    """
    for found in steps(folder):
        mark = folder / f"step-{found}" / ABANDONED
        try:
            if found == step:
                mark.unlink(missing_ok=True)
            elif found > step:
                mark.touch()
        except OSError as error:
            text = "Training went back to step %d, but step %d cannot be marked accordingly: %s"
            logger.warning(text, step, found, error)


def recover(folder: Path) -> None:
    """Clears away what a process left that was killed while it saved or removed."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        final = path.with_suffix("")
        if path.suffix == ".saving" and (path / MANIFEST).exists() and not final.exists():
            _publish(path, final)  # killed between two renames
        elif path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


# ---- reading -------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """The steps of a folder's checkpoints, newest first, damaged ones, too.

    Without what torch's own writer left incomplete: it writes ``.metadata`` last.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and ((path / METADATA).exists() or (path / MANIFEST).exists()):
            found.append(int(match[1]))
    return sorted(found, reverse=True)


def by_preference(folder: Path) -> list[int]:
    """The steps as :func:`steps` has them, but those of abandoned branches last."""
    return sorted(steps(folder), key=lambda step: (folder / f"step-{step}" / ABANDONED).exists())


def to_remove(folder: Path, keep: int, refused: set[int]) -> list[int]:
    """The steps of the checkpoints beyond the best `keep`, without seeds and damaged ones.

    One that training can go on from stays, whatever comes before it.
    """
    usable = [step for step in by_preference(folder) if step > 0 and step not in refused]
    full = next((n for n, step in enumerate(usable) if _is_full(folder / f"step-{step}")), 0)
    return [step for n, step in enumerate(usable) if n >= keep and n != full]


def _is_full(checkpoint: Path) -> bool:
    try:
        return contents_of(checkpoint) == "full"
    except (ValueError, OSError):
        return False


def read_manifest(checkpoint: Path) -> Manifest | None:
    """A checkpoint's manifest; None if it has none, as torchtitan's.

    Raises:
        ValueError: it is damaged.
    """
    path = checkpoint / MANIFEST
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_bytes())
        found = body["manifest"]
        if _crc32_of(found) != body["crc32"]:
            raise ValueError("its CRC-32 is wrong")
        files = {name: File(**file) for name, file in found["files"].items()}
        return Manifest(int(found["step"]), str(found["contents"]), files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def problems(checkpoint: Path, step: int | None, rank: int, ranks: int) -> list[str]:
    """What is wrong with a checkpoint, in words; of the files' contents a rank checks its share.

    Args:
        step: that it should be of; None: any.

    Raises:
        ValueError: manifest or metadata are damaged.
        OSError: the system cannot read.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return too_short(checkpoint, read_metadata(checkpoint))
    found = [f"{METADATA} is not in its manifest"] if METADATA not in manifest.files else []
    if step is not None and manifest.step != step:
        found.append(f"its manifest is of step {manifest.step}")
    return found + [
        problem
        for name, expected in share(manifest.files, rank, ranks).items()
        if (problem := _file_problem(checkpoint / name, expected))
    ]


def contents_of(checkpoint: Path) -> str:
    """ "full" or "model"; without manifest it is not known, and taken for full."""
    manifest = read_manifest(checkpoint)
    return "full" if manifest is None else manifest.contents


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint in any folder: its manifest's, or that of its name, or 0."""
    if manifest := read_manifest(checkpoint):
        return manifest.step
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def _file_problem(path: Path, expected: File) -> str:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes, expected {expected.size}"
        if (crc32 := _crc32(path)) != expected.crc32:
            return f"{path.name} has CRC-32 {crc32:08x}, expected {expected.crc32:08x}"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return ""


def _crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(_CHUNK):
            crc32 = zlib.crc32(data, crc32)
    return crc32


def share(files: Mapping[str, File], rank: int, ranks: int) -> dict[str, File]:
    """The files that a rank checks, so that all ranks check about as many bytes."""
    loads = [0] * ranks
    mine = {}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = loads.index(min(loads))
        loads[least] += files[name].size
        if least == rank:
            mine[name] = files[name]
    return mine


def too_short(checkpoint: Path, metadata: Metadata) -> list[str]:
    """Which files lack bytes that the metadata refers to: all that can be told without manifest."""
    ends: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        end = stored.offset + stored.length
        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    found = []
    for name, end in ends.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else math.nan
        if not size >= end:
            found.append(f"{name} has {size} bytes, expected {end} or more")
    return found


def read_metadata(checkpoint: Path) -> Metadata:
    """DCP's metadata, without running code of the file.

    Raises:
        ValueError: it is damaged or missing.
    """
    if not (checkpoint / METADATA).is_file():
        raise ValueError(f"{checkpoint / METADATA} is missing")
    return Reader(checkpoint).read_metadata()
