"""Imports torchtitan 0.2 for the ranks that a rank server forks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cpu_shim

cpu_shim.install()

import torchtitan.models.llama3  # noqa: E402
import torchtitan.train  # noqa: E402, F401
