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

import torchopt_ext
from torchopt_ext.__main__ import main
from torchopt_ext.cli import terminal
from torchopt_ext.cli.arguments import PARSERS
from torchopt_ext.cli.terminal import written

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
        main(["plan", "7B"])
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


# ---- how long a command takes to start -----------------------------------------------------------


@pytest.fixture
def without_torch(tmp_path):
    """Returns a function that runs Python where torch cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")

    def call(*args):
        paths = os.pathsep.join([str(tmp_path), str(Path(torchopt_ext.__file__).parents[1])])
        command = [sys.executable, "-P", *map(str, args)]
        env = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)

    return call


def test_help_and_wrong_arguments_do_not_wait_for_torch(without_torch, tmp_path):
    """Importing it takes seconds."""
    script = tmp_path / "torchopt-ext"  # as pip writes it
    script.write_text("import sys; from torchopt_ext.__main__ import main; sys.exit(main())")
    (tmp_path / "a.pt").touch()
    assert "torch was imported" in without_torch("-c", "import torchopt_ext").stderr
    for start in (["-m", "torchopt_ext"], [script]):
        for args in ("--help", "--version", *(f"{name} --help" for name in PARSERS)):
            done = without_torch(*start, *args.split())
            assert done.returncode == 0, done
            assert done.stdout
        for args, problem in (
            ("plam", "did you mean 'plan'?"),
            ("plan", "give one of MODEL"),
            ("plan 7X", "no number of parameters such as 7B"),
            ("plan 7B --rest lion", "--rest needs --algorithm muon"),
            ("schedule", "give --steps"),
            ("inspect", "checkpoint"),
            ("inspect no.pt", "there is no no.pt"),
            ("convert no.pt b.pt", "there is no no.pt"),
            ("convert a.pt b.pt --weights no", "there is no no\n"),
            ("schedule --config no.toml", "there is no no.toml"),
            ("convert a.pt b.pt --to-torch --state-dtype int8", "fp32 moments"),
        ):
            done = without_torch(*start, *args.split())
            assert done.returncode == 2
            assert problem in done.stderr


def test_programs_get_the_operators_at_once(tmp_path):
    """Also one that is a module itself: only the command line waits."""
    (tmp_path / "mine").mkdir()
    text = "import sys, torchopt_ext; print('torchopt_ext.ops' in sys.modules)"
    (tmp_path / "mine" / "__init__.py").write_text(text)
    (tmp_path / "mine" / "__main__.py").touch()
    paths = [str(tmp_path), str(Path(torchopt_ext.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for args in (["mine"], ["mine", "torchopt_ext"]):
        command = [sys.executable, "-P", "-m", *args]
        assert subprocess.check_output(command, env=env, text=True) == "True\n"


def test_a_terminal_shows_that_torch_is_imported(capfd):
    """The line is gone when the output comes; other libraries' warnings are not shown."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "torchopt_ext", "plan", "--shapes", "2x3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed
            while part := os.read(ours, 1000):
                shown += part
        assert process.stdout.read().startswith("2x3\n")
    os.close(ours)
    first, blank, rest = shown.split(b"\r", 2)
    assert first == b"importing torch ..."
    assert blank == b" " * len(first)
    assert rest == b""


def test_warnings_and_logs_of_others_are_not_shown(run, monkeypatch, tmp_path):
    (tmp_path / "loud.py").write_text(
        "import logging, torch, warnings\n"
        "def build():\n"
        "    warnings.warn('loud'); logging.warning('loud'); logging.getLogger('a').warning('b')\n"
        "    return torch.nn.Linear(2, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run("plan", "--model", "loud:build")  # which checks that stderr is empty
