"""Compiles the CUDA kernels and checks what the machine code uses, without a GPU.

Reads for each architecture that nvcc knows: registers, spills and stack as ptxas reports them, the
blocks that a multiprocessor holds at once, and the widths of the global accesses in a kernel's main
loop, from its disassembly. sass.toml in this folder says what each kernel may use.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
THREADS = 256  # of a block
# Limits of a multiprocessor, the same on all these architectures (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"). A warp gets registers in units of 256.
REGISTERS, PARTITIONS, WARPS = 65536, 4, 64
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
BLOCK_SHARED_BYTES = 1 << 10  # reserved for the system in each block


@dataclass
class Kernel:
    """A function compiled for one architecture. ``loads`` and ``stores`` count the main loop's
    accesses by width in bits."""

    name: str
    arch: str
    registers: int = 0  # 0: not a kernel, but a function that kernels call
    spill: int = 0
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
    """Returns ``adam<float>`` for ``void torchopt_ext::(anonymous namespace)::adam<float>()``."""
    name = re.sub(r"\(anonymous namespace\)::|_INTERNAL_\w+::|torchopt_ext::|^void ", "", demangled)
    depth = 0
    for i, character in enumerate(name):
        if character == "(" and depth == 0:
            return name[:i]
        depth += {"<": 1, ">": -1}.get(character, 0)
    return name


def enumerators(sources: Iterable[str]) -> dict[str, str]:
    """Maps ``(Kind)1``, as in demangled names, to ``kB`` of ``enum class Kind { kA, kB };``."""
    names = {}
    for source in sources:
        code = re.sub(r"//.*", "", source)
        for enum, body in re.findall(r"enum class (\w+)[^{;]*\{([^}=]*)\}", code):
            listed = [name.strip() for name in body.split(",") if name.strip()]
            names |= {f"({enum}){value}": name for value, name in enumerate(listed)}
    return names


def with_names(kernel: str, names: dict[str, str]) -> str:
    """Returns ``adam_kernel<kB>`` for ``adam_kernel<(Kind)1>``."""
    return re.sub(r"\(\w+\)\d+", lambda found: names.get(found[0], found[0]), kernel)


def read_ptxas(report: str, arch: str) -> dict[str, Kernel]:
    """Reads the demangled output of ``ptxas -v``. Keys are the functions' short names."""
    found: dict[str, Kernel] = {}
    current = ""
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(.*)' for", line):
            entry = short_name(match[1])
        elif match := re.search(r"Function properties for (.*)", line):
            current = short_name(match[1])
            found.setdefault(current, Kernel(current, arch))
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) \D*stores, (\d+) \D*loads", line):
            kernel = found[current]  # a function that several kernels call is listed several times
            kernel.stack = max(kernel.stack, int(match[1]))
            kernel.spill = max(kernel.spill, int(match[2]) + int(match[3]))
        elif match := re.search(r"Used (\d+) registers", line):
            found[entry].registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            found[entry].shared = int(shared[1]) if shared else 0
    return found


@dataclass
class Access:
    address: int
    store: bool
    bits: int


def main_loop(accesses: list[Access], branches: Iterable[tuple[int, int]]) -> list[Access]:
    """Returns the accesses of the innermost loop that moves most bits in accesses of 128 bits and
    more, then in all accesses. Code outside all loops counts as a loop."""
    loops = sorted({(to, at) for at, to in branches if to <= at})
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    parts = [[x for x in accesses if first <= x.address <= last] for first, last in inner]
    parts.append(
        [x for x in accesses if not any(first <= x.address <= last for first, last in loops)]
    )
    return max(
        parts, key=lambda p: (sum(x.bits for x in p if x.bits >= 128), sum(x.bits for x in p))
    )


def read_sass(listing: str, kernels: dict[str, Kernel]) -> None:
    """Adds the accesses in the demangled output of ``cuobjdump -sass`` to the kernels."""
    for part in re.split(r"^\s*Function : ", listing, flags=re.M)[1:]:
        name, _, code = part.partition("\n")
        accesses = []
        branches = []
        for at, operation, rest in re.findall(
            r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", code
        ):
            address = int(at, 16)
            opcode, *suffixes = operation.split(".")
            if opcode in ("LDG", "LD", "LDGSTS", "STG", "ST"):
                width = 32
                for suffix in suffixes:
                    if match := re.fullmatch(r"(?:[US]|ENL2)?(8|16|64|128|256)", suffix):
                        width = int(match[1])
                accesses.append(Access(address, opcode.startswith("ST"), width))
            elif opcode == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest)):
                branches.append((address, int(target[1], 16)))
        kernel = kernels[short_name(name)]
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
        if kernel.registers and kernel.blocks < allowed["blocks"]:
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
    rows = [header]
    for k in kernels:
        used = (str(k.registers), str(k.blocks)) if k.registers else ("-", "-")
        rows.append(
            (
                k.name,
                k.arch,
                *used,
                str(k.spill),
                str(k.stack),
                accesses(k.loads),
                accesses(k.stores),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i in (0, 1, 6, 7) else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def flags() -> list[str]:
    """Returns the project's flags for CUDA, from CMakeLists.txt."""
    text = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(r"\$<\$<COMPILE_LANGUAGE:CUDA>:([^>]*)>", text)
    if match is None:
        raise SystemExit("CMakeLists.txt has no flags under $<$<COMPILE_LANGUAGE:CUDA>:...>")
    torch = importlib.util.find_spec("torch")
    includes = [f"-I{ROOT / 'csrc'}"]
    if torch is not None and torch.origin is not None:
        includes += ["-isystem", str(Path(torch.origin).parent / "include")]
    return [*match[1].split(), "-O3", "-DNDEBUG", "-std=c++20", *includes]


def find_disassembler(nvcc: str) -> str | None:
    """Finds cuobjdump in the toolkit, or in Triton, which every CUDA build of torch requires."""
    places = [Path(nvcc).resolve().parent, *map(Path, os.get_exec_path())]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return next((str(p / "cuobjdump") for p in places if (p / "cuobjdump").is_file()), None)


def run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    home = os.environ.get("CUDA_HOME")
    nvcc = os.environ.get("CUDACXX") or shutil.which(f"{home}/bin/nvcc" if home else "nvcc")
    if nvcc is None or not shutil.which(nvcc):
        print("skipped: nvcc is neither in PATH nor in CUDA_HOME/bin")
        return 0
    cuobjdump = find_disassembler(nvcc)
    if cuobjdump is None:
        print(f"skipped: cuobjdump is neither beside {nvcc} nor in PATH, and there is no Triton")
        return 0
    known = run([nvcc, "--list-gpu-code"]).split()
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    jobs = [(source, arch) for arch in ARCHITECTURES if arch in known for source in sources]

    def compiled(job: tuple[Path, str]) -> list[Kernel]:
        source, arch = job
        cubin = str(Path(folder) / f"{source.stem}.{arch}.cubin")
        report = run(
            [nvcc, *flags(), "-Xptxas=-v", f"-arch={arch}", "-cubin", "-o", cubin, str(source)]
        )
        kernels = read_ptxas(run(["c++filt"], report), arch)
        read_sass(run(["c++filt"], run([cuobjdump, "-sass", cubin])), kernels)
        return list(kernels.values())

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [kernel for found in pool.map(compiled, jobs) for kernel in found]
    names = enumerators(path.read_text() for path in (ROOT / "csrc").glob("*/*.h"))
    for kernel in kernels:
        kernel.name = with_names(kernel.name, names)
    kernels.sort(key=lambda kernel: (kernel.name, ARCHITECTURES.index(kernel.arch)))
    print(table(kernels))
    found = problems(kernels, tomllib.loads(Path(__file__).with_name("sass.toml").read_text()))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
