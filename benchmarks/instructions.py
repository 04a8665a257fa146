"""Counts a step's instructions over many small tensors with valgrind: exact, not timed.

python benchmarks/instructions.py --out out/bench        # several minutes; needs valgrind

The program runs with some steps and with twice as many. The difference is the steps' share.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import report
import torch
from cases import CLIP, FUSED, OURS, fp32_cases, gradients_of

ELEMENTS = 1000  # of each tensor
KERNELS = "avx2"  # valgrind does not support AVX-512


def run_steps(implementation: str, tensors: int, steps: int) -> None:
    """Clips and steps on one thread: valgrind also counts waiting threads."""
    torch.set_num_threads(1)
    gradients = gradients_of([(ELEMENTS,)] * tensors, torch.float32, "cpu")
    (case,) = fp32_cases(implementation, gradients, "cpu", (CLIP,), loops=False)
    for _ in range(2 + steps):
        case.call()


def count(implementation: str, tensors: int, steps: int) -> int:
    """Counts the instructions of the whole process."""
    valgrind = [
        "valgrind",
        "--tool=cachegrind",
        "--cache-sim=no",
        "--cachegrind-out-file=/dev/null",
    ]
    program = [sys.executable, __file__, "--child", implementation]
    sizes = ["--tensors", str(tensors), "--steps", str(steps)]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": KERNELS,
    }
    done = subprocess.run(
        [*valgrind, *program, *sizes], env=environment, capture_output=True, text=True, check=False
    )
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"valgrind failed:\n{done.stderr}")
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for results")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--child", choices=(OURS, FUSED), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_steps(options.child, options.tensors, options.steps)
        return
    if shutil.which("valgrind") is None:
        parser.error("needs valgrind, which is not installed")
    about = report.environment()
    about |= {
        "torch_cpu_capability": KERNELS.upper(),
        "torchopt_ext_kernels": KERNELS,
        "threads": 1,
    }
    rows = []
    for implementation in (OURS, FUSED):
        once, twice = (count(implementation, options.tensors, options.steps * n) for n in (1, 2))
        each = (twice - once) / (options.steps * options.tensors)
        rows.append(
            {
                "implementation": implementation,
                "operation": CLIP,
                "tensors": options.tensors,
                "elements": ELEMENTS,
                "steps": options.steps,
                "instructions_per_tensor_and_step": each,
            }
        )
    lines = [f"{key}: {value}" for key, value in about.items()]
    lines += ["", f"instructions for each tensor of {ELEMENTS:,} elements and step, {CLIP}"]
    lines += [
        f"  {r['implementation']}: {r['instructions_per_tensor_and_step']:,.0f}" for r in rows
    ]
    text = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "instructions.txt").write_text(text)
    content = {"environment": about, "results": rows}
    (options.out / "instructions.json").write_text(json.dumps(content, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
