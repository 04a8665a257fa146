"""Folders that are replaced as a whole: whenever the job dies, the old or the new one exists."""

import os
import shutil
from pathlib import Path


def replaced_folder(final: Path) -> Path:
    """Returns the name of an old folder while another takes its place."""
    return final.with_name(f"{final.name}.replaced")


def publish(saving: Path, final: Path) -> None:
    """Renames a finished folder to its final name, in place of an old folder."""
    replaced = replaced_folder(final)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    try:
        os.rename(saving, final)
    except OSError:
        recover(final)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(final: Path) -> None:
    """Restores the old folder if the job died between the two renames of :func:`publish`."""
    replaced = replaced_folder(final)
    if replaced.exists() and not final.exists():
        os.rename(replaced, final)


def sync(folder: Path) -> None:
    """Makes renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
