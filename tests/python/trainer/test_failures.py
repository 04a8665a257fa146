"""A rank's error file is complete or missing."""

import json
from pathlib import Path

import pytest

from torchopt_ext.trainer.process import record


@record
def _fail() -> None:
    raise ValueError("no loss")


def test_what_ends_while_it_writes_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(json, "dump", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _fail()
    assert not file.exists()
