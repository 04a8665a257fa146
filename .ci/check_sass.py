"""Checks what the machine code of the CUDA kernels uses, without a GPU. Usage: check_sass.py BUILD

Reads from the objects of a build, for each architecture: registers, stack and shared memory, the
blocks that a multiprocessor holds at once and, from the disassembly, accesses of local memory
(spills) and the widths of the global accesses in a kernel's main loop. sass.toml in this folder
says what each kernel may use.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
THREADS = 256  # of a block
# Limits of a multiprocessor, the same on all these architectures (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"). A warp gets registers in units of 256.
REGISTERS, PARTITIONS, WARPS = 65536, 4, 64
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
BLOCK_SHARED_BYTES = 1 << 10  # reserved for the system in each block


@dataclass
class Kernel:
    """A kernel compiled for one architecture. ``loads`` and ``stores`` count the main loop's
    accesses by width in bits."""

    name: str
    arch: str
    registers: int = 0
    spill: int = 0  # bytes that instructions load from and store to local memory
    stack: int = 0
    shared: int = 0
    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)

    @property
    def blocks(self) -> int:
        """Blocks of ``THREADS`` that a multiprocessor holds at once."""
        warp = -(-self.registers * 32 // 256) * 256
        warps = min(WARPS, REGISTERS // PARTITIONS // warp * PARTITIONS)
        shared = self.shared + BLOCK_SHARED_BYTES
        return min(warps * 32 // THREADS, SHARED_BYTES[self.arch] // shared)


def short_name(demangled: str) -> str:
    """Returns ``Norm<8>`` for ``void torchopt_ext::run<torchopt_ext::Norm<8> >(...)``."""
    name = re.sub(r"\(anonymous namespace\)::|_INTERNAL_\w+::|torchopt_ext::|^void ", "", demangled)
    name = re.sub(r"^run<(.*?) ?>\(", r"\1(", name)
    depth = 0
    for i, character in enumerate(name):
        if character == "(" and depth == 0:
            return name[:i]
        depth += {"<": 1, ">": -1}.get(character, 0)
    return name


def read_resources(report: str, arch: str) -> dict[str, Kernel]:
    """Reads the demangled output of ``cuobjdump -res-usage``. Keys are the kernels' short names."""
    found = {}
    for name, usage in re.findall(r"^ Function (.*):\n\s*(REG:.*)", report, flags=re.M):
        used = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
        found[short_name(name)] = Kernel(
            *(short_name(name), arch),
            registers=used["REG"],
            stack=used["STACK"],
            shared=used["SHARED"],
        )
    return found


@dataclass
class Access:
    address: int
    store: bool
    bits: int


def main_loop(accesses: list[Access], branches: Iterable[tuple[int, int]]) -> list[Access]:
    """Returns the accesses of the loop that moves most bits in accesses of 128 bits and more, then
    in all accesses. Loops inside a loop count for themselves, code outside all loops as a loop."""
    loops = sorted({(to, at) for at, to in branches if to <= at}, key=lambda a: a[1] - a[0])
    parts: dict[tuple[int, int] | None, list[Access]] = {None: []}
    for x in accesses:
        shortest = next((a for a in loops if a[0] <= x.address <= a[1]), None)
        parts.setdefault(shortest, []).append(x)
    return max(
        parts.values(),
        key=lambda p: (sum(x.bits for x in p if x.bits >= 128), sum(x.bits for x in p)),
    )


def read_sass(listing: str, kernels: dict[str, Kernel]) -> None:
    """Adds the accesses in the demangled output of ``cuobjdump -sass`` to the kernels."""
    for part in re.split(r"^\s*Function : ", listing, flags=re.M)[1:]:
        name, _, code = part.partition("\n")
        accesses = []
        branches = []
        spill = 0
        for at, operation, rest in re.findall(
            r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", code
        ):
            address = int(at, 16)
            opcode, *suffixes = operation.split(".")
            width = 32
            for suffix in suffixes:
                if match := re.fullmatch(r"(?:[US]|ENL2)?(8|16|64|128|256)", suffix):
                    width = int(match[1])
            if opcode in ("LDG", "LD", "LDGSTS", "STG", "ST"):
                accesses.append(Access(address, opcode.startswith("ST"), width))
            elif opcode in ("LDL", "STL"):
                spill += width // 8
            elif opcode == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest)):
                branches.append((address, int(target[1], 16)))
        kernel = kernels[short_name(name)]
        kernel.spill = spill
        for access in main_loop(accesses, branches):
            (kernel.stores if access.store else kernel.loads)[access.bits] += 1


def problems(kernels: Iterable[Kernel], expected: dict[str, dict[str, int]]) -> list[str]:
    """Lists where kernels use more than ``expected``, limits by patterns of names, allows."""
    found = []
    unmatched = set(expected)
    for kernel in kernels:
        pattern = next((p for p in expected if fnmatchcase(kernel.name, p)), None)
        unmatched.discard(pattern or "")
        allowed = {"spill": 0, "stack": 0, "blocks": 0}
        allowed |= expected[pattern] if pattern else {}
        where = f"{kernel.name}, {kernel.arch}:"
        for what in ("spill", "stack"):
            if (used := getattr(kernel, what)) > allowed[what]:
                found.append(f"{where} {used} bytes of {what}, at most {allowed[what]} expected")
        if kernel.blocks < allowed["blocks"]:
            found.append(
                f"{where} {kernel.registers} registers and {kernel.shared} bytes of shared memory "
                f"leave {kernel.blocks} blocks a multiprocessor, {allowed['blocks']} expected"
            )
        if "narrow" in allowed:
            widths = kernel.loads + kernel.stores
            narrow = sum(n for bits, n in widths.items() if bits < 128)
            if narrow > allowed["narrow"] or narrow == widths.total():
                found.append(
                    f"{where} {narrow} of the main loop's {widths.total()} accesses are below 128 "
                    f"bits, at most {allowed['narrow']} and not all expected"
                )
    return found + [f"sass.toml: no kernel is called {pattern}" for pattern in sorted(unmatched)]


def table(kernels: Iterable[Kernel]) -> str:
    def accesses(counts: Counter[int]) -> str:
        return " ".join(f"{n}x{bits}" for bits, n in sorted(counts.items(), reverse=True)) or "-"

    header = ("kernel", "arch", "registers", "blocks", "spill", "stack", "loads", "stores")
    rows: list[tuple[str, ...]] = [header]
    for k in kernels:
        numbers = map(str, (k.registers, k.blocks, k.spill, k.stack))
        rows.append((k.name, k.arch, *numbers, accesses(k.loads), accesses(k.stores)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i in (0, 1, 6, 7) else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def find_disassembler() -> str | None:
    """Finds cuobjdump in the toolkit, or in Triton, which every CUDA build of torch requires."""
    places = [Path(place) for place in os.get_exec_path()]
    if home := os.environ.get("CUDA_HOME"):
        places.insert(0, Path(home) / "bin")
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return next((str(p / "cuobjdump") for p in places if (p / "cuobjdump").is_file()), None)


def run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main(build: str) -> int:
    objects = sorted(Path(build).glob("CMakeFiles/torchopt_ext_objects.dir/csrc/cuda/*.cu.o"))
    cuobjdump = find_disassembler()
    if cuobjdump is None:
        print("skipped: cuobjdump is neither in CUDA_HOME/bin nor in PATH, and there is no Triton")
        return 0

    def kernels_in(job: tuple[Path, str]) -> list[Kernel]:
        path, arch = job
        code = [cuobjdump, "-arch", arch, str(path)]
        kernels = read_resources(run(["c++filt"], run([*code, "-res-usage"])), arch)
        read_sass(run(["c++filt"], run([*code, "-sass"])), kernels)
        return list(kernels.values())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(path, arch) for path in objects for arch in ARCHITECTURES]
        kernels = [kernel for found in pool.map(kernels_in, jobs) for kernel in found]
    kernels.sort(key=lambda kernel: (kernel.name, ARCHITECTURES.index(kernel.arch)))
    print(table(kernels))
    found = problems(kernels, tomllib.loads(Path(__file__).with_name("sass.toml").read_text()))
    if missing := set(ARCHITECTURES) - {kernel.arch for kernel in kernels}:
        found.append(f"{build} has no kernels for {', '.join(sorted(missing))}")
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
