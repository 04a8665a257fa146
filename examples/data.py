"""Real text found on every machine with Python: the standard library's own source, as bytes."""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MIN_BYTES = 5_000_000
# Not the standard library's own code: installed packages, test suites, and big generated tables.
SKIPPED = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
    }
)


def source_files(root: Path | None = None) -> list[Path]:
    """Returns the .py files under `root` (default: the standard library), by relative path."""
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = sorted((p.relative_to(base) for p in base.rglob("*.py")), key=Path.as_posix)
    return [base / p for p in paths if not SKIPPED.intersection(p.parts)]


def is_held_out(relative_path: str) -> bool:
    """Returns by the path alone whether a file, about one in sixteen, is for validation only."""
    return hashlib.sha256(relative_path.encode()).digest()[0] < 16


def load_text(root: Path | None = None, min_bytes: int = MIN_BYTES) -> tuple[Tensor, Tensor]:
    """Returns training and held-out text, uint8 [bytes]. Raises below `min_bytes` in total."""
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for path in source_files(base):
        parts[is_held_out(path.relative_to(base).as_posix())].extend(path.read_bytes())
    train, held_out = parts
    if len(train) + len(held_out) < min_bytes:
        raise RuntimeError(
            f"found {len(train) + len(held_out):,} bytes of Python source in {base}, "
            f"expected at least {min_bytes:,}"
        )
    return (
        torch.frombuffer(train, dtype=torch.uint8),
        torch.frombuffer(held_out, dtype=torch.uint8),
    )
