"""Fixtures that run commands as the entry point does."""

import threading

import pytest
import torch

from torchopt_ext import FusedAdamW
from torchopt_ext.__main__ import main
from torchopt_ext.cli import terminal


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """Work is not shown, also on slow machines."""
    monkeypatch.setattr(terminal.Progress, "first", threading.TIMEOUT_MAX)


@pytest.fixture
def run(capsys, tmp_path):
    """Returns a command's output, after checks for exit code 0 and 80 columns."""

    def call(*args):
        assert main([str(arg) for arg in args]) == 0
        captured = capsys.readouterr()
        assert not captured.err
        if "--json" not in args and "--csv" not in args:
            lines = captured.out.replace(str(tmp_path), "").splitlines()
            assert max(map(len, lines)) <= 80, captured.out
        return captured.out

    return call


@pytest.fixture
def fails(capsys):
    """Returns the one-line error of a command, after a check for exit code 2."""

    def call(*args):
        assert main([str(arg) for arg in args]) == 2
        captured = capsys.readouterr()
        assert not captured.out
        assert captured.err.startswith(f"torchopt_ext {args[0]}: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call


def stepped(model, kind=FusedAdamW, named=None, steps=2, **options):
    """Returns an optimizer of a model after some steps with random gradients."""
    torch.manual_seed(1)
    optimizer = kind(named or model.named_parameters(), lr=1e-2, **options)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()
    return optimizer
