"""How every command handles its output: files, links, pipes, stdout and signals."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchopt_ext.__main__ import main
from torchopt_ext.cli import terminal
from torchopt_ext.cli.terminal import written

pytestmark = pytest.mark.newest_torch

CSV = "step,lr\n0,1.0\n1,0.5\n"
STEPS = ("schedule", "--steps", "2")


def test_links_stay_and_lead_to_what_is_written(run, tmp_path):
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


def test_pipes_receive_what_is_written(run, tmp_path):
    pipe, received = tmp_path / "pipe.csv", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    run(*STEPS, "--csv", pipe)
    assert pipe.is_fifo()
    reader.join(60)
    assert received == [CSV]


def test_the_file_that_is_stdout_is_added_to(tmp_path, capfd):
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # like /dev/stdout
    os.write(1, b"before\n")
    with written(tmp_path / "stdout") as new:
        new.write_text(CSV)
    assert capfd.readouterr().out == f"before\n{CSV}"


def test_names_that_the_disk_does_not_take(run, fails, tmp_path, monkeypatch):
    longest, longer, loop = (tmp_path / name for name in ("n" * 255, "n" * 300, "loop"))
    loop.symlink_to(loop)
    run(*STEPS, "--csv", longest)
    assert longest.read_text() == CSV
    for path in (longer, loop):
        assert f"cannot write {path}: " in fails(*STEPS, "--csv", path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)  # root may enter any folder
    assert "lr.csv: Permission denied" in fails(*STEPS, "--csv", tmp_path / "lr.csv")


def test_folders_and_unknown_formats_are_not_written_to(fails, tmp_path):
    keep = tmp_path / "folder.png" / "keep"
    keep.parent.mkdir()
    keep.write_text("mine")
    for option in ("--csv", "--plot"):
        assert "is a folder: not replaced" in fails(*STEPS, option, keep.parent)
    for name in ("picture", "picture.doc"):
        assert "a format of pictures" in fails(*STEPS, "--plot", tmp_path / name)
    assert keep.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [keep.parent]


@pytest.mark.parametrize("csv", [[], ["--csv", "-"]])
def test_stdout_that_takes_nothing(fails, monkeypatch, csv):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    assert "No space left" in fails("schedule", "--steps", "5000", *csv)


def test_streams_that_are_closed(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        assert main([*STEPS, "--csv", str(tmp_path / "lr.csv")]) == 0
    assert (tmp_path / "lr.csv").read_text() == CSV
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["schedule", "--steps", "0"]) == 2
    monkeypatch.setattr(sys, "stderr", None)
    assert run("plan", "--shapes", "2x3").startswith("2x3\n")  # with progress


def test_characters_that_stdout_has_not(tmp_path, monkeypatch):
    monkeypatch.setattr("torchopt_ext.cli.plan.main", lambda _: print("\xf6 \udcff"))
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        main(["plan"])
    assert (tmp_path / "out").read_text() == "\\xf6 \\udcff\n"


def test_the_entry_point_ends_quietly_when_its_reader_does():
    command = [sys.executable, "-m", "torchopt_ext", "schedule", "--steps", "20000", "--csv", "-"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_progress_is_lines_now_and_then_where_there_is_no_terminal(monkeypatch):
    """Lines come by time, also while one unit of work goes on."""
    lines = queue.Queue()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False, write=lines.put))
    monkeypatch.setattr(terminal.Progress, "first", 0.01)
    monkeypatch.setattr(terminal.Progress, "every", 0.01)
    with terminal.Progress("counting", 4) as progress:
        for amount, shown in ((0, "0%"), (1, "25%"), (3, "100%")):
            progress.add(amount)
            while lines.get(timeout=60) != f"counting: {shown}":
                pass


def interruptible():
    """Restores SIGINT: shells let background processes and their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing_behind(tmp_path, number, code):
    """The signal arrives while the process waits for the rest of what its pipe takes."""
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "temporary"
    folder.mkdir()
    steps = ("schedule", "--steps", "20000")  # more than a pipe holds
    command = [sys.executable, "-m", "torchopt_ext", *steps, "--csv", tmp_path / "pipe"]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
    ) as process:
        try:
            with (tmp_path / "pipe").open() as pipe:  # waits until the process opens it
                assert pipe.read(1) == "s"
                assert [*folder.glob("*/pipe")]
                process.send_signal(number)
                assert process.wait(60) == code
            assert process.stderr.read() == b""
        finally:
            process.kill()
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("ending", ["error", "swallowed"])
def test_a_signal_is_not_taken_for_an_error(tmp_path, ending):
    """torch's writers raise other errors if interrupted, and destructors raise nothing."""

    def write():
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


def test_a_folder_stays_where_it_cannot_be_replaced(tmp_path, monkeypatch):
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / ".metadata").write_text("before")
    rename = Path.rename

    def failing(self, to):
        if to == folder and self.name != ".replaced":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt), written(folder, checkpoint=True) as new:
        new.mkdir()
    assert (folder / ".metadata").read_text() == "before"
    assert [*tmp_path.iterdir()] == [folder]
