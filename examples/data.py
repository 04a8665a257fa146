"""Real text found on every machine with Python: the standard library's own source, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from config import Training

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
    """The .py files under `root` (default: the standard library), by relative path."""
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = sorted((p.relative_to(base) for p in base.rglob("*.py")), key=Path.as_posix)
    return [base / p for p in paths if not SKIPPED.intersection(p.parts)]


def is_held_out(relative_path: str) -> bool:
    """About one file in sixteen is for validation only; the path alone decides which."""
    return hashlib.sha256(relative_path.encode()).digest()[0] < 16


def load_text(root: Path | None = None, min_bytes: int = MIN_BYTES) -> tuple[Tensor, Tensor]:
    """Training and held-out text, uint8 [bytes] each. Fails below `min_bytes` in total."""
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


def windows(text: Tensor, seq_len: int) -> Tensor:
    """Non-overlapping windows of `seq_len` inputs and one more byte: uint8 [n, seq_len + 1]."""
    n = text.numel() // (seq_len + 1)
    return text[: n * (seq_len + 1)].view(n, seq_len + 1)


class TrainingData:
    """Shuffled windows of the training text, dealt to the ranks without overlap.

    `position`, the number of batches drawn, is all the state there is: the order is a function of
    the seed, so a checkpoint that holds the position resumes on exactly the next batch.
    """

    def __init__(
        self, text: Tensor, *, batch_size: int, seq_len: int, seed: int, rank: int, world_size: int
    ) -> None:
        self.windows = windows(text, seq_len)
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(self.windows), generator=generator)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.position = 0

    def next_batch(self) -> Tensor:
        """The next int64 [batch_size, seq_len + 1] of this rank."""
        start = (self.position * self.world_size + self.rank) * self.batch_size
        picks = torch.arange(start, start + self.batch_size) % len(self.order)
        self.position += 1
        return self.windows[self.order[picks]].long()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def training_data(text: Tensor, job: Training) -> TrainingData:
    """This rank's share of the training text."""
    return TrainingData(
        text,
        batch_size=job.batch_size,
        seq_len=job.seq_len,
        seed=job.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
