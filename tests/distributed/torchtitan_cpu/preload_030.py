"""Imports torchtitan 0.3 for the ranks that a rank server forks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cpu_shim

cpu_shim.install()

import torchtitan.train  # noqa: E402, F401
from torchtitan.models.llama3 import config_registry  # noqa: E402, F401
