"""Folders of checkpoints: written under another name, published by one rename, checked by file.

A folder ``step-N`` is complete. It is called ``step-N.saving`` while it is written,
``step-N.replaced`` while another takes its place, and ``step-N.removing`` while it is removed. Its
``manifest.json`` lists size and CRC-32 of every file, so that truncated files and flipped bytes are
found before anything is read from them.
"""

import fcntl
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypedDict

from torch.distributed.checkpoint.metadata import Metadata

from torchopt_ext.statedict import folders
from torchopt_ext.statedict.dcp import Reader

logger = logging.getLogger(__name__)

MANIFEST, METADATA = "manifest.json", ".metadata"
ABANDONED = "abandoned"
"""A file that marks checkpoints which :func:`abandon` would rename, and which nothing writes."""
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+(\.safetensors)?\.(saving|replaced|removing)")


class File(TypedDict):
    size: int  # in bytes
    crc32: int


class Manifest(TypedDict):
    step: int
    contents: str  # "full", or "model" without the states that training needs to continue
    files: dict[str, File]  # all files except the manifest, by name


# ---- writing -------------------------------------------------------------------------------------


def saving_folder(folder: Path, step: int) -> Path:
    """Returns the folder that holds a checkpoint's files until it is complete."""
    return folder / f"step-{step}.saving"


def commit(folder: Path, manifest: Manifest) -> None:
    """Publishes the saved files as ``step-N``, in place of an existing ``step-N``."""
    saving = saving_folder(folder, manifest["step"])
    with open(saving / f"{MANIFEST}.tmp", "w") as stream:
        json.dump({"crc32": _crc32_of(manifest), "manifest": manifest}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(saving / f"{MANIFEST}.tmp", saving / MANIFEST)
    folders.sync(saving)
    folders.publish(saving, saving.with_suffix(""))


def _crc32_of(manifest: Manifest) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def set_aside_old(folder: Path, keep: int, refused: set[int]) -> Iterator[Path]:
    """Renames all but the newest `keep` checkpoints, which no longer look complete. Yields names.

    Seeds and checkpoints in `refused` do not count and stay. So does the newest full checkpoint.
    """
    usable = [step for step in steps(folder) if step > 0 and step not in refused]
    full = next((step for step in usable if _is_full(folder / f"step-{step}")), None)
    for step in usable[keep:]:
        if step != full:
            yield (folder / f"step-{step}").rename(folder / f"step-{step}.removing")


def _is_full(checkpoint: Path) -> bool:
    try:
        return contents_of(checkpoint) == "full"
    except (ValueError, OSError):
        return False


def abandon(folder: Path, step: int) -> None:
    """Renames the checkpoints after a step to ``abandoned-N``: training went back to the step.

    Warns of those that cannot be renamed, so that no save fails because of them.
    """
    for later in (saved for saved in steps(folder) if saved > step):
        abandoned = folder / f"abandoned-{later}"
        try:
            if _is_complete(abandoned):
                shutil.rmtree(abandoned, ignore_errors=True)
            os.rename(folder / f"step-{later}", abandoned)
        except OSError as error:
            text = "Training went back to step %d, but step %d cannot be renamed to %s: %s"
            logger.warning(text, step, later, abandoned, error)


def recover(folder: Path) -> IO[str] | None:
    """Cleans up after a process that was killed, unless another process has locked the folder.

    Returns the file that locks the folder until it is closed or this process ends.
    """
    lock = None
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = open(folder.with_name(f"{folder.name}.lock"), "a")  # noqa: SIM115 (returned)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = (
            "Another job saves in %s, so nothing is cleaned up there. Two jobs replace each "
            "other's checkpoints: give each its own job.dump_folder"
        )
        logger.warning(text, folder)
        return lock
    except OSError:
        pass  # the file system has no locks
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        final = path.with_suffix("")
        saving = final.with_name(f"{final.name}.saving")
        if path == saving and (path / MANIFEST).exists() and not final.exists():
            folders.publish(path, final)  # killed between two renames
        elif path.suffix == ".replaced" and not (saving / MANIFEST).exists():
            folders.recover(final)
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
    return lock


# ---- reading -------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Returns the steps of a folder's checkpoints, newest first, including damaged checkpoints.

    Checkpoints that torch's own writer left incomplete are excluded: it writes ``.metadata`` last.
    """
    complete = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and _is_complete(path) and not (path / ABANDONED).exists():
            complete.append(int(match[1]))
    return sorted(complete, reverse=True)


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / METADATA).exists() or (checkpoint / MANIFEST).exists()


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Returns a checkpoint's manifest, or None, as torchtitan's. ValueError: it is damaged."""
    path = checkpoint / MANIFEST
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_bytes())
        manifest: Manifest = body["manifest"]
        if _crc32_of(manifest) != body["crc32"]:
            raise ValueError("its CRC-32 is wrong")
        return manifest
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def problems(checkpoint: Path, step: int | None, rank: int, ranks: int) -> list[str]:
    """Describes what is wrong with a step's checkpoint. A rank reads only its share of the files.

    Raises ValueError or OSError if the manifest or the metadata cannot be read.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return too_short(checkpoint, Reader(checkpoint).read_metadata())
    wrong = [] if METADATA in manifest["files"] else [f"{METADATA} is not in its manifest"]
    if step is not None and manifest["step"] != step:
        wrong.append(f"its manifest is of step {manifest['step']}")
    share = sorted(manifest["files"])[rank::ranks]
    checked = (_file_problem(checkpoint / name, manifest["files"][name]) for name in share)
    return wrong + [problem for problem in checked if problem]


def contents_of(checkpoint: Path) -> str:
    """Returns "full" or "model". A checkpoint without a manifest is taken to be full."""
    manifest = read_manifest(checkpoint)
    return "full" if manifest is None else manifest["contents"]


def step_of(checkpoint: Path) -> int:
    """Returns a checkpoint's step, from its manifest or from its folder's name, or 0."""
    if manifest := read_manifest(checkpoint):
        return manifest["step"]
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def _file_problem(path: Path, expected: File) -> str:
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{path.name} has {size} bytes, expected {expected['size']}"
        crc32 = 0
        with open(path, "rb", buffering=0) as stream:
            while data := stream.read(1 << 22):
                crc32 = zlib.crc32(data, crc32)
        if crc32 != expected["crc32"]:
            return f"{path.name} has CRC-32 {crc32:08x}, expected {expected['crc32']:08x}"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return ""


def too_short(checkpoint: Path, metadata: Metadata) -> list[str]:
    """Describes files that are shorter than the metadata says, the only check without manifest."""
    ends: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        end = stored.offset + stored.length
        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    short = []
    for name, end in ends.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else math.nan
        if not size >= end:
            short.append(f"{name} has {size} bytes, expected {end} or more")
    return short
