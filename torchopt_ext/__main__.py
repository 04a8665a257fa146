"""python -m torchopt_ext COMMAND ..."""

import difflib
import importlib
import sys

COMMANDS = {
    "train": ("torchopt_ext.cli.train", "Train a model, as a TOML file and the command line say."),
}
"""Each command's module, with a function `main(args) -> int`, and what the command does."""


def main(args: list[str]) -> int:
    """Runs a command; returns its exit code."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m torchopt_ext COMMAND ...\n\nCommands, each with --help:")
        for name, (_, does) in COMMANDS.items():
            print(f"  {name:10} {does}")
        return 0
    name, *rest = args
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"torchopt_ext: there is no command {name}: {hint}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
