"""Shared parts of the commands: errors, arguments, tables, units, progress and files."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

WIDTH = 80
"""Maximum width of a line of output, in columns."""


class CommandError(Exception):
    """A command cannot do what it was asked to do. The message is one sentence that says why."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived while a file was written."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, with examples below the help and errors of one sentence.

    Args:
        examples: argument lists, one per line.
        listing: lines below the description.
        takes: names of the positional arguments.
    """

    def __init__(
        self, command: str, does: str, examples: str, listing: str = "", takes: str = ""
    ) -> None:
        prog = f"python -m torchopt_ext {command}"
        wrapped = [
            textwrap.wrap(f"{prog} {line.strip()}", WIDTH - 8, break_on_hyphens=False)
            for line in examples.strip().splitlines()
        ]
        shown = "\n".join("  " + " \\\n      ".join(lines) for lines in wrapped)
        does = textwrap.fill(does, WIDTH, break_on_hyphens=False)
        super().__init__(
            prog=prog,
            usage=" ".join(filter(None, (prog, takes, "[options]"))),
            description=f"{does}\n\n{listing}" if listing else does,
            epilog=f"examples:\n{shown}",
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH),
        )

    def switch(self, flag: str, does: str) -> None:
        self.add_argument(flag, action="store_true", help=does)

    def choice(
        self, flag: str, choices: Iterable[str], does: str, default: str | None = None
    ) -> None:
        self.add_argument(flag, choices=choices, help=does, default=default)

    def names(self, flag: str, does: str) -> None:
        self.add_argument(flag, type=listed, metavar="A,B,C", help=does)

    def file(self, flag: str, does: str, metavar: str = "FILE") -> None:
        self.add_argument(flag, type=Path, metavar=metavar, help=does)

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}; --help shows what there is")


def number(text: str) -> int:
    """Parses an argument that is a whole number of 1 or more, such as 8e9, 1_000, 350M or 7B."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    value = round(unit * float(text[:-1]), 3) if unit > 1 else float(text)
    if not (1 <= value < 2**62) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(value)


def positive(text: str) -> float:
    """Parses an argument that is a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def listed(text: str) -> list[str]:
    """Parses a comma-separated argument. An empty text gives an empty list."""
    return [item for item in text.split(",") if item]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Formats rows as columns: the first ``text`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n < text else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as a Markdown table."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, marks, *rows))


_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def unit_of(largest: float) -> tuple[str, float]:
    """Returns the unit in which the largest byte count is 1 or more, and the unit's bytes."""
    return next((unit for unit in _UNITS if largest >= unit[1]), _UNITS[-1])


def size(count: float) -> str:
    """Formats a number of bytes: "1.23 GB"."""
    name, scale = unit_of(count)
    return f"{count / scale:.0f} B" if scale == 1 else f"{figures(count / scale)} {name}"


def flops(count: float) -> str:
    """Formats a number of floating-point operations: "1.23 GFLOP"."""
    return size(count).removesuffix("B") + "FLOP"


def figures(value: float) -> str:
    """Formats three significant digits, without an exponent and up to three decimals."""
    if value == 0:
        return "0"
    limits = (99.95, 9.995, 0.9995)
    digits = sum(abs(value) < limit for limit in limits)
    return f"{value:,.{digits}f}"


class Progress:
    """Shows the progress of work that takes more than a second, on stderr.

    On a terminal it is a bar if tqdm is installed, otherwise a line, and one every few seconds. A
    thread shows it, so that a long unit of work is not silent.
    """

    first, every = 1.0, 5.0
    """Seconds before the first line, and from one line to the next."""

    def __init__(self, what: str, total: float) -> None:
        self.what, self.total, self.done = what, total, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._bar: Any = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                tqdm = importlib.import_module("tqdm").tqdm
                form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
                self._bar = tqdm(
                    total=total, desc=what, delay=1, leave=False, ncols=WIDTH, bar_format=form,
                    miniters=0,  # also shows the time where no unit has ended
                )  # fmt: skip

    def add(self, amount: float) -> None:
        self.done += amount

    def _show(self) -> None:
        wait = self.first
        while not self._ended.wait(wait):
            if self._bar is not None:
                self._bar.update(self.done - self._bar.n)
            else:
                share = 100 * self.done / (self.total or 1)
                print(f"{self.what}: {share:.0f}%", file=sys.stderr)
            wait = self.every if self._bar is None else 0.2

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def shown_on_terminal(text: str) -> Iterator[None]:
    """Shows a line on stderr while something takes time, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r" + " " * len(f"{text} ...") + "\r", end="", file=sys.stderr, flush=True)


def new_panel(width: float, height: float) -> Any:
    """Returns matplotlib's axes that fill a figure of this size in inches."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height))
    except ImportError as error:
        raise CommandError(
            f"a picture needs matplotlib ({error}): pip install 'torchopt_ext[cli]'"
        ) from error
    panel = figure.subplots()
    panel.spines[["top", "right"]].set_visible(False)
    return panel


def check_picture(path: Path) -> None:
    """Raises :func:`save_picture`'s errors early, before any long work."""
    formats = new_panel(1, 1).figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise CommandError(f"{path} does not end in a format of pictures, such as .png or .svg")
    check_output(path)


def save_picture(panel: Any, path: Path) -> None:
    check_picture(path)
    panel.figure.tight_layout()
    with written(path) as file:
        panel.figure.savefig(file, dpi=150)


def check_output(path: Path, force: bool = True, checkpoint: bool = False) -> None:
    """Raises CommandError if :func:`written` would not write to ``path``."""
    try:
        if path.exists() and not force and stream_of(path) is None:
            raise CommandError(f"{path} exists; --force replaces it")
        if path.is_dir():
            names = [file.name for file in path.iterdir()]
            others = [n for n in names if n != ".metadata" and not n.endswith(".distcp")]
            if not checkpoint or others:
                problem = f"also has {min(others)}" if checkpoint else "is a folder"
                raise CommandError(f"{path} {problem}: not replaced")
        folder = target_of(path).parent
        if not path.exists() and not folder.is_dir():
            raise CommandError(f"cannot write {path}: there is no folder {folder}")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def written(path: Path, force: bool = True, checkpoint: bool = False) -> Iterator[Path]:
    """Yields a temporary path to write to. The file replaces ``path`` when it is complete.

    If ``path`` is a link, its target is replaced. A pipe or a device receives a copy.

    Args:
        force: whether an existing file is replaced.
        checkpoint: whether an existing folder of a distributed checkpoint may be replaced.
    """
    check_output(path, force, checkpoint)
    try:
        target, stream = target_of(path), stream_of(path)
        # A rename does not cross disks, so the temporary file is next to the target.
        parent = target.parent if stream is None else None
        with (
            unwound_by_signals(),
            tempfile.TemporaryDirectory(
                prefix=".torchopt_ext-", dir=parent, ignore_cleanup_errors=True
            ) as beside,
        ):
            new = Path(beside, target.stem + path.suffix)  # its suffix is a picture's format
            yield new
            if stream is not None:
                with new.open("rb") as source, open(stream, "wb", closefd=stream != 1) as sink:
                    shutil.copyfileobj(source, sink)
            elif target.exists() and (target.is_dir() or new.is_dir()):
                replaced = Path(beside, ".replaced")  # removed with the temporary folder
                try:
                    target.rename(replaced)
                    new.rename(target)
                except BaseException:
                    if not target.exists():
                        replaced.rename(target)
                    raise
            else:
                new.replace(target)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error


def target_of(path: Path) -> Path:
    """Returns where a path leads; for a dangling link, the file that the link names."""
    return Path(os.path.realpath(path))  # Path.resolve() raises RuntimeError for circular links


def stream_of(path: Path) -> Path | int | None:
    """Returns what to open for a pipe, a device or this process's stdout, otherwise None."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    # If opened again, /dev/stdout would overwrite the file behind it from the start.
    if os.path.samestat(status, os.fstat(1)):
        return 1
    return None if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else path


@contextlib.contextmanager
def quiet(logs: bool = True) -> Iterator[None]:
    """Silences warnings, and what is logged as one, unless Python was told to show warnings.

    The commands say themselves what a user has to know.
    """
    if sys.warnoptions:
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read once, when torch is imported
    disabled = logging.root.manager.disable
    if logs:
        logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Lets SIGTERM raise as SIGINT does. The signal's exception replaces errors that it causes.

    torch's writers raise errors of their own when a signal interrupts them.
    """
    raised: list[KeyboardInterrupt] = []

    def end(number: int, _: object) -> NoReturn:
        raised.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise raised[-1]

    usual: dict[signal.Signals, Any] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    main = threading.current_thread() is threading.main_thread()  # others get no signals
    handled = [number for number in usual if main and signal.getsignal(number) == usual[number]]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    except Exception:
        if not raised:
            raise
    finally:
        for number in handled:
            signal.signal(number, usual[number])
    if raised:  # and replaced by another error, or swallowed, for example by a destructor
        raise raised[0]
