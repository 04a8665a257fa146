"""Runs commands as the entry point does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchopt_ext.__main__ import main
from torchopt_ext.cli import terminal

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command's output, which fits 80 columns; its exit code must be 0."""
    monkeypatch.setattr(terminal.Progress, "every", float("inf"))  # on machines that are slow

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
    """The one line that a command says when it cannot do what it was asked to; exit code 2."""

    def call(*args: object) -> str:
        assert main([str(arg) for arg in args]) == 2
        captured = capsys.readouterr()
        assert not captured.out
        assert captured.err.startswith(f"torchopt_ext {args[0]}: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call
