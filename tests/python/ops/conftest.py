"""Puts tests/golden and exact_reference on the path, and restores global state."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1] / "golden"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def _one_thread_and_the_usual_float_mode() -> Iterator[None]:
    """Sets one thread; tests of threading set their own count."""
    torch.set_num_threads(1)
    yield
    torch.set_flush_denormal(False)
