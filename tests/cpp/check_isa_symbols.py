"""Checks that an object file compiled for one instruction set keeps its code to itself.

An inline function or template compiled with -mavx512f is a weak symbol, and the linker keeps one
copy for the whole library: were it this one, a machine without AVX-512 would run it and stop with
an illegal instruction. So such an object may define one global symbol, the getter of its table,
and no weak one.
"""

import argparse
import subprocess
import sys

WEAK = set("WwVvu")
# A pointer to the runtime's unwinder, the same in every object: data, no code.
HARMLESS = {"DW.ref.__gxx_personality_v0"}


def problems(nm_output: str, export: str) -> list[str]:
    """What is wrong with the symbols that `nm -C --defined-only` printed, a line each."""
    found = []
    exports = []
    for line in nm_output.splitlines():
        fields = line.split(maxsplit=2)
        if len(fields) < 3:
            continue
        _, kind, name = fields
        if name in HARMLESS:
            continue
        if kind in WEAK:
            found.append(f"weak symbol: {name}")
        elif kind.isupper():
            exports.append(name)
    found += [f"global symbol: {name}" for name in exports if name != export]
    if export not in exports:
        found.append(f"missing: {export}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--export", required=True, help="the one symbol that may be global")
    args = parser.parse_args()
    failed = False
    for path in args.objects:
        command = [args.nm, "-C", "--defined-only", path]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for problem in problems(output, args.export):
            print(f"{path}: {problem}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
