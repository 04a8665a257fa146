"""How every command handles its output: files, links, pipes, stdout and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchopt_ext.__main__ import main
from torchopt_ext.cli.terminal import written

from .conftest import Run

pytestmark = pytest.mark.newest_torch

CSV = "step,lr\n0,1.0\n1,0.5\n"
STEPS = ("schedule", "--steps", "2")


def test_links_stay_and_lead_to_what_is_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, folder = tmp_path / "there" / "lr.csv", tmp_path / "there" / "step-1"
    links = [tmp_path / "link.csv", tmp_path / "link"]
    for link, leads in zip(links, (file, folder), strict=True):
        link.symlink_to(leads)
    for _ in ("to nothing", "to what was written"):
        run(*STEPS, "--csv", links[0])
        assert file.read_text() == CSV
        with written(links[1], checkpoint=True) as new:
            new.mkdir()
            (new / ".metadata").touch()
        assert [found.name for found in folder.iterdir()] == [".metadata"]
    assert all(link.is_symlink() for link in links)
    assert {*tmp_path.iterdir()} == {tmp_path / "there", *links}
    assert {*file.parent.iterdir()} == {file, folder}


def test_pipes_receive_what_is_written(run: Run, tmp_path: Path) -> None:
    pipe, received = tmp_path / "pipe.csv", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    run(*STEPS, "--csv", pipe)
    assert pipe.is_fifo()
    reader.join(60)
    assert received == [CSV]


def test_the_file_that_is_stdout_is_added_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # like /dev/stdout
    os.write(1, b"before\n")
    with written(tmp_path / "stdout") as new:
        new.write_text(CSV)
    assert capfd.readouterr().out == f"before\n{CSV}"


def test_names_that_the_disk_does_not_take(run: Run, fails: Run, tmp_path: Path) -> None:
    longest, longer, loop = (tmp_path / name for name in ("n" * 255, "n" * 300, "loop"))
    loop.symlink_to(loop)
    run(*STEPS, "--csv", longest)
    assert longest.read_text() == CSV
    for path in (longer, loop):
        assert f"cannot write {path}: " in fails(*STEPS, "--csv", path)


def test_folders_that_may_not_be_entered(
    fails: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)  # root may enter any folder
    assert "lr.csv: Permission denied" in fails(*STEPS, "--csv", tmp_path / "lr.csv")


@pytest.mark.parametrize("csv", [[], ["--csv", "-"]])
def test_stdout_that_takes_nothing(
    fails: Run, monkeypatch: pytest.MonkeyPatch, csv: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    assert "No space left" in fails("schedule", "--steps", "5000", *csv)


def test_stdout_that_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main([*STEPS, "--csv", str(tmp_path / "lr.csv")]) == 0
    assert (tmp_path / "lr.csv").read_text() == CSV


def test_stderr_that_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["schedule", "--steps", "0"]) == 2
    monkeypatch.setattr(sys, "stderr", None)
    assert run("plan", "--shapes", "2x3").startswith("2x3\n")  # with progress


def test_characters_that_stdout_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchopt_ext.cli.plan.main", lambda _: print("\xf6 \udcff"))
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        main(["plan"])
    assert (tmp_path / "out").read_text() == "\\xf6 \\udcff\n"


def interruptible() -> None:
    """Restores SIGINT: shells let background processes and their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    """The signal arrives while the process waits for a reader of its pipe."""
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "torchopt_ext", *STEPS, "--csv", tmp_path / "pipe"]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
    ) as process:
        try:
            while not [*folder.glob("*/pipe")] and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(number)
            assert process.communicate(timeout=60) == (None, b"")
        finally:
            process.kill()
    assert process.returncode == code
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("ending", ["error", "swallowed"])
def test_a_signal_is_not_taken_for_an_error(tmp_path: Path, ending: str) -> None:
    """torch's writers raise other errors if interrupted, and destructors raise nothing."""

    def write() -> None:
        with written(tmp_path / "file"):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            if ending == "error":
                raise OSError("unexpected pos 704 vs 598")

    before = signal.getsignal(signal.SIGINT)
    interruptible()
    try:
        with pytest.raises(KeyboardInterrupt):
            write()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [*tmp_path.glob("[!.]*")] == []


def test_a_folder_stays_where_it_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / ".metadata").write_text("before")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if to == folder and self.name != ".replaced":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt), written(folder, checkpoint=True) as new:
        new.mkdir()
    assert (folder / ".metadata").read_text() == "before"
    assert [*tmp_path.iterdir()] == [folder]
