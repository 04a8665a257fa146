"""Fixtures of the optimizer tests."""

from __future__ import annotations

from typing import Any

import pytest

from .subject import optimizer_inputs


@pytest.fixture
def kwargs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns a fresh copy of the keyword arguments of one of torch's configurations."""
    name, index = request.param
    return dict(optimizer_inputs(name)[index].kwargs)
