"""The command line: python -m torchopt_ext COMMAND ..."""

import contextlib
import importlib
import io
import os
import sys

from torchopt_ext._names import did_you_mean
from torchopt_ext.cli.arguments import PARSERS
from torchopt_ext.cli.terminal import CommandError, Terminated, quiet, shown_on_terminal

COMMANDS = {
    "info": ("torchopt_ext.cli.info", "Show what is installed and built, and test a step."),
    "plan": ("torchopt_ext.cli.plan", "Show what each rank will hold and move, before a run."),
    "schedule": ("torchopt_ext.cli.schedule", "Show learning-rate schedules."),
    "bench": ("torchopt_ext.cli.bench", "Time the step and torch's on this machine."),
    "inspect": ("torchopt_ext.cli.inspect", "Show what a checkpoint of an optimizer holds."),
    "convert": ("torchopt_ext.cli.convert", "Change how a checkpoint keeps weights and moments."),
    "train": ("torchopt_ext.cli.train", "Train a model, as a TOML file and the command line say."),
}
"""Each command's module, with a function `main(options) -> int`, and what the command does."""


def main(args: list[str] | None = None) -> int:
    """Runs a command; returns its exit code.

    Args:
        args: the command and its arguments; None for this process's arguments.
    """
    args = sys.argv[1:] if args is None else args
    name, *rest = args or ["--help"]
    for name_of in ("stdout", "stderr"):
        if getattr(sys, name_of) is None:  # closed: the next file would get its descriptor
            setattr(sys, name_of, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a path's characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(name, rest)
        finally:
            sys.stdout.flush()
    except CommandError as error:
        print(f"torchopt_ext {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        # The shell's exit codes for processes that SIGTERM or SIGINT ended.
        return 143 if isinstance(error, Terminated) else 130
    except OSError as error:
        quiet = isinstance(error, BrokenPipeError)  # for example, `| head` has ended
        if name == "train" and not quiet:
            raise  # training errors need their traceback
        if not quiet:
            print(f"torchopt_ext {name}: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):  # stdout may have no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141 if quiet else 2


def _run(name: str, args: list[str]) -> int:
    if name in ("-h", "--help"):
        print("usage: python -m torchopt_ext COMMAND ...\n\nCommands, each with --help:")
        for command, (_, does) in COMMANDS.items():
            print(f"  {command:10} {does}")
        return 0
    if name == "--version":
        print(importlib.import_module("torchopt_ext").__version__)
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, {}) or f"; expected one of {', '.join(COMMANDS)}"
        print(f"torchopt_ext: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # the current folder may be gone
        if os.getcwd() not in sys.path and "" not in sys.path:  # as with python -m
            sys.path.insert(0, os.getcwd())
    options = PARSERS[name](args) if name in PARSERS else args
    # A schedule logs what is odd about it, and a job warns of what concerns its training.
    with contextlib.nullcontext() if name == "train" else quiet(logs=name != "schedule"):
        with shown_on_terminal("importing torch"):
            importlib.import_module("torchopt_ext._library")  # which the package leaves to commands
            importlib.import_module("torchopt_ext.ops")
            module = importlib.import_module(COMMANDS[name][0])
        code: int = module.main(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
