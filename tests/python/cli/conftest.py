"""Fixtures that run commands as the entry point does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from torchopt_ext.__main__ import main
from torchopt_ext.cli import terminal

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is not shown, also on slow machines."""
    monkeypatch.setattr(terminal.Progress, "first", threading.TIMEOUT_MAX)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Returns a command's output, after checks for exit code 0 and 80 columns."""

    def call(*args: object) -> str:
        assert main([str(arg) for arg in args]) == 0
        captured = capsys.readouterr()
        assert not captured.err
        if "--json" not in args and "--csv" not in args:
            lines = captured.out.replace(str(tmp_path), "").splitlines()
            assert max(map(len, lines)) <= 80, captured.out
        return captured.out

    return call


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns the one-line error of a command, after a check for exit code 2."""

    def call(*args: object) -> str:
        assert main([str(arg) for arg in args]) == 2
        captured = capsys.readouterr()
        assert not captured.out
        assert captured.err.startswith(f"torchopt_ext {args[0]}: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call
