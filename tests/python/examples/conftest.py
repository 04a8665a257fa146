"""The examples are scripts that import one another by name from their own folder."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES
