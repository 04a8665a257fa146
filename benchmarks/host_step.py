"""Times the CPU's work in a step of states on the host. See README.md.

python benchmarks/host_step.py --out out/bench-host-step
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import harness
import peers
import torch
from bf16_cases import BYTES, INT8, MASTERS, OPTIONS, REMAINDER, UPDATE, streams_of
from cases import STEP, gradients_of, params_with
from harness import Call, Case, Group, Row, find, target_line
from roofline import loop_case
from shapes import GPT2, QUICK_SETS, SETS, Shapes
from torch import Tensor

from torchopt_ext import FusedAdamW

ZERO, CAST = "ZeRO-Offload", "ZeRO-Offload, gradients cast on the CPU"
STAND_IN = "torch.optim.AdamW(fused=True), in place of DeepSpeedCPUAdam"
FASTER, OF_LOOPS = {MASTERS: 1.4, INT8: 3.0}, 0.9
NORM = 2  # bytes of the gradient, which the GPU reads for it
CHUNK = 8 << 20

# Bytes per parameter of ZeRO-Offload's work on the CPU: scaling 8, Adam 28, cast of the weights 6;
# the gradients' 6 if they are not cast on the GPU.
ZERO_BYTES = {ZERO: 42, CAST: 48}


def cpu_adam(parameter: torch.nn.Parameter) -> tuple[str, torch.optim.Optimizer]:
    """Returns the optimizer of an fp32 master as DeepSpeed's or, where that is missing, torch's."""
    peer, *_ = peers.CPU
    with contextlib.suppress(ImportError, RuntimeError):  # its operator may not compile
        return str(peer), peer.load()([parameter], **peers.SETTINGS)
    return STAND_IN, torch.optim.AdamW([parameter], fused=True, **peers.SETTINGS)


def zero_offload(kind: str, gradients: list[Tensor], used: set[str]) -> Call:
    """Returns what ZeRO-Offload's CPU does in a step: DeepSpeed has a flat tensor of each kind."""
    arrived = torch.cat([gradient.flatten() for gradient in gradients])
    weights = torch.full_like(arrived, 0.02)
    master = torch.nn.Parameter(weights.float())
    master.grad = arrived.float()
    name, optimizer = cpu_adam(master)
    used.add(name)

    @torch.no_grad()
    def call(gradient: Tensor = master.grad) -> None:
        if kind == CAST:
            gradient.copy_(arrived)
        gradient.mul_(1.0)  # any other factor, applied repeatedly, would end in subnormals
        optimizer.step()
        weights.copy_(master)

    return call


def our_step(kind: str, gradients: list[Tensor]) -> list[Case]:
    """Returns pass B, which multiplies by the clip factor, also by 1, and its plain loop."""
    optimizer = FusedAdamW(params_with(gradients), **peers.SETTINGS, **OPTIONS[kind])
    optimizer.step()  # creates the state
    loop = loop_case(UPDATE[kind], *streams_of(kind, optimizer, gradients))
    bytes_moved = BYTES[kind] - NORM
    return [Case(kind, STEP, optimizer.step, bytes_moved, UPDATE[kind]), loop]


def build(name: str, shapes: Shapes, beside: bool, used: set[str]) -> Group:
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    cases = [case for kind in (MASTERS, REMAINDER, INT8) for case in our_step(kind, gradients)]
    if not beside:
        cases += [
            Case(kind, STEP, zero_offload(kind, gradients, used), moved)
            for kind, moved in ZERO_BYTES.items()
        ]
    return Group(name, shapes, cases, baseline=None if beside else ZERO)


def copy_at(rate: float, stop: Any, channel: Any) -> None:
    """Reads and writes memory, ``rate`` GB/s of each, as a link's copies do, and sends the rate."""
    count = 32
    source, target = (ctypes.create_string_buffer(count * CHUNK) for _ in range(2))
    ctypes.memset(source, 1, count * CHUNK)
    channel.send("ready")
    start, done = time.perf_counter(), 0
    while not stop.is_set():
        offset = done % count * CHUNK
        ctypes.memmove(ctypes.addressof(target) + offset, ctypes.addressof(source) + offset, CHUNK)
        done += 1
        time.sleep(max(0.0, start + done * CHUNK / (rate * 1e9) - time.perf_counter()))
    channel.send(done * CHUNK / (time.perf_counter() - start) / 1e9)


@contextlib.contextmanager
def copies(rate: float, reached: list[float]) -> Iterator[None]:
    """Copies in another process meanwhile."""
    context = multiprocessing.get_context("spawn")
    stop, (receiver, sender) = context.Event(), context.Pipe(duplex=False)
    process = context.Process(target=copy_at, args=(rate, stop, sender), daemon=True)
    process.start()
    receiver.recv()
    try:
        yield
    finally:
        stop.set()
        reached.append(receiver.recv())
        process.join()


def targets(rows: list[Row], alone: str, beside: str) -> list[str]:
    lines = []
    for kind, bound in FASTER.items():
        row = find(rows, alone, STEP, kind)
        for other in ZERO_BYTES:
            times = row and row["times_as_fast_as"][other]
            lines.append(target_line(f"{kind}: times as fast as {other}", times, bound))
    for kind in (MASTERS, REMAINDER, INT8):
        row = find(rows, beside, STEP, kind)
        share = row and row["roofline"] and 1 / row["roofline"]["ratio"]
        lines.append(target_line(f"{kind}: of plain loops, beside copies", share, OF_LOOPS))
    return lines


def main() -> None:
    parser = harness.parser(__doc__, "bench-host-step", rounds=15)
    parser.add_argument("--threads", type=int, default=2, help="of the steps; copies take one")
    parser.add_argument("--rate", type=float, default=6.0, help="GB/s of copies in each direction")
    options = parser.parse_args()
    about = harness.start(options, options.threads)
    shapes = (QUICK_SETS if options.quick else SETS)[GPT2]
    alone, beside = f"{GPT2}, bf16", f"{GPT2}, bf16, beside copies"
    used: set[str] = set()
    reached: list[float] = []
    rows, _ = harness.measure([partial(build, alone, shapes, False, used)], options.rounds)
    torch.set_num_threads(max(1, options.threads - 1))
    with copies(options.rate, reached):
        rows += harness.measure([partial(build, beside, shapes, True, used)], options.rounds)[0]
    sections: dict[str, str | list[str]] = {
        "ZeRO-Offload's Adam": [*used],
        f"Copies, GB/s in each direction, beside {torch.get_num_threads()} threads": [
            f"{rate:.2f} of {options.rate:g}" for rate in reached
        ],
        "Targets": [] if options.quick else targets(rows, alone, beside),
    }
    harness.write(options.out / "host-step", about, rows, sections, copies=reached)


if __name__ == "__main__":
    main()
