"""Times ZeroRedundancyOptimizer and torch's, on gloo ranks of one machine. See README.md.

python benchmarks/zero.py --out out/bench-zero
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Case, Group, Row, find, target_line
from ranks import on_ranks, run_ranks, sample
from shapes import SETS, SMALL, Shapes, parameters
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.tensors import gpt2_shapes
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

TORCH, TORCH_VIEW = "torch", "torch, bucket view"
GREEDY, GREEDY_VIEW, BALANCED = "greedy", "greedy, bucket view", "balanced"
IMPLEMENTATIONS = (TORCH, TORCH_VIEW, GREEDY, GREEDY_VIEW, BALANCED)
LOCAL, STEP, FULL = "clip + step", "clip + step, norm agreed on", "and parameters returned"


def zero_of(name: str, params: list[torch.nn.Parameter], **options: Any) -> Any:
    """Returns one implementation's optimizer."""
    options |= {"lr": 1e-4, "weight_decay": 0.1}
    options["parameters_as_bucket_view"] = name in (TORCH_VIEW, GREEDY_VIEW)
    if name in (TORCH, TORCH_VIEW):
        return TorchZero(params, torch.optim.AdamW, fused=True, **options)
    partition = "balanced" if name == BALANCED else "greedy"
    return ZeroRedundancyOptimizer(
        params, FusedAdamW, partition=partition, max_grad_norm=1.0, **options
    )


class Subject:
    """One implementation with its own parameters. All ranks have the same gradients."""

    def __init__(self, name: str, shapes: Shapes) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for param in self.params:
            param.grad = torch.randn_like(param)
        self.is_torchs = name in (TORCH, TORCH_VIEW)
        self.zero = zero_of(name, self.params)
        self.send = None if self.is_torchs else self.zero.local.send_updates

    def run(self, operation: str) -> None:
        if self.is_torchs:
            clip_grad_norm_(self.params, 1.0)
            self.zero.step() if operation == FULL else self.zero._local_step()
            return
        local = self.zero.local
        # LOCAL leaves out the small all-reduce in the middle of ours.
        local.fused.process_group = None if operation == LOCAL else self.zero.process_group
        local.send_updates = self.send if operation == FULL else lambda progress: None
        self.zero.step()

    def state_bytes(self) -> int:
        """Returns the bytes of the fullest rank's state."""
        states = [value for state in self.zero.optim.state.values() for value in state.values()]
        return most(sum(value.nbytes for value in states if isinstance(value, torch.Tensor)))


def most(value: int) -> int:
    """Returns the largest of the ranks' values."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def moved_bytes(implementation: str, operation: str) -> int | None:
    """Returns the bytes a parameter that all ranks together move in clipping and the local step.

    The ranks share the machine's memory, so the time depends on the sum over ranks. Torch's
    clip_grad_norm_ reads all gradients twice and writes them once on every rank.
    """
    if operation != LOCAL:
        return None
    return 12 * dist.get_world_size() + 28 if implementation.startswith(TORCH) else 4 + 28


def timed(name: str, shapes: Shapes, rounds: int) -> tuple[list[Row], list[float]]:
    """Returns the rows of the steps, and each implementation's state over an equal share."""
    subjects = {kind: Subject(kind, shapes) for kind in IMPLEMENTATIONS}
    name = f"{name}, {on_ranks(dist.get_world_size())}"
    cases = [
        Case(kind, operation, partial(subject.run, operation), moved_bytes(kind, operation))
        for operation in (LOCAL, STEP, FULL)
        for kind, subject in subjects.items()
    ]
    rows, _ = harness.measure([lambda: Group(name, shapes, cases, TORCH)], rounds, sample)
    share = 8 * parameters(shapes) / dist.get_world_size()
    return rows, [subject.state_bytes() / share for subject in subjects.values()]


class PeakMemory:
    """Measures how far the resident set rises above its size at construction (Linux)."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not be reused
        self.before = self._field("VmRSS")
        self.start()

    def start(self) -> None:
        """Resets the peak to the present resident set."""
        Path("/proc/self/clear_refs").write_text("5")

    def rise(self) -> int:
        """Returns the bytes from construction to the peak."""
        return self._field("VmHWM") - self.before

    @staticmethod
    def _field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def consolidated(elements: int) -> list[list[Any]]:
    """Times consolidation of ``elements`` parameters' state, in tensors of 2**20 elements.

    Returns a list per implementation: milliseconds, and the most that a sender's memory rose.
    """
    results: list[list[Any]] = []
    for name in (TORCH, GREEDY, BALANCED):
        subject = Subject(name, [(1024, 1024)] * (elements >> 20))
        subject.run(LOCAL)
        subject.zero.zero_grad()
        times, peaks = [], []
        for _ in range(1 if name == TORCH else 3):  # torch's takes a minute a gigabyte
            above = PeakMemory()
            times.append(sample(partial(subject.zero.consolidate_state_dict, to=0)))
            peaks.append(most(above.rise() if dist.get_rank() else 0))
            subject.zero._all_state_dicts = []
            if name != TORCH:
                subject.zero._consolidated = None
        results.append([name, statistics.median(times), max(peaks)])
        del subject
        gc.collect()
    return results


def loopback_bytes() -> int:
    """Returns the bytes that the loopback device sent, for all ranks of this machine (Linux)."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


# The implementation, how gradients arrive, and the gradients' and parameters' transfers of 4 bytes.
WAYS = {
    "torch, DDP": (TORCH, "ddp", 3),
    "greedy, DDP": (GREEDY, "ddp", 3),
    "balanced, DDP": (BALANCED, "ddp", 3),
    "balanced, DDP hook": (BALANCED, "hook", 2),
    "balanced, sharded_gradients": (BALANCED, "sharded", 2),
}


def trained(width: int, depth: int, rounds: int) -> list[list[Any]]:
    """Times training steps of a perceptron.

    Returns a list per way: milliseconds, the bytes a parameter that a rank sent, and how far its
    memory rose above the model.
    """
    results: list[list[Any]] = []
    for name, (kind, how, _) in WAYS.items():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        params = list(model.parameters())
        count = parameters([param.shape for param in params])
        above = PeakMemory()
        zero = zero_of(kind, params, **({"sharded_gradients": True} if how == "sharded" else {}))
        run = model
        if how != "sharded":
            run = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if how == "hook":
            run.register_comm_hook(None, reduce_scatter_hook(zero))
        data = torch.randn(4, width)

        def step(zero: Any = zero, run: Any = run, kind: str = kind, data: Any = data) -> None:
            zero.zero_grad()
            run(data).square().mean().backward()
            if kind == TORCH:
                clip_grad_norm_(zero._all_params, 1.0)
            zero.step()

        above.start()
        for _ in range(3):  # DDP rebuilds its buckets in the second step
            step()
        peak = most(above.rise())
        times, sent = [], []
        for _ in range(rounds):
            dist.barrier()
            before = loopback_bytes()
            times.append(sample(step))
            sent.append((loopback_bytes() - before) / count / dist.get_world_size())
        results.append([name, statistics.median(times), statistics.median(sent), peak / count])
        del zero, run, model, params, layers, step
        gc.collect()
    return results


def on_rank(rounds: int, width: int, state_mib: int) -> dict[str, Any]:
    """Measures everything on a rank."""
    dist.init_process_group("gloo")
    sets = {f"GPT-2 of width {width}": gpt2_shapes(width=width), SMALL: SETS[SMALL]}
    rows, shares = zip(*[timed(*each, rounds) for each in sets.items()], strict=True)
    return {
        "rows": [row for some in rows for row in some],
        "state over an equal share": dict(zip(sets, shares, strict=True)),
        "training": trained(width * 4, 12, min(rounds, 5)),
        "consolidation": consolidated(state_mib << 17),
    }


def target_lines(ranks: int, result: dict[str, Any]) -> list[str]:
    """Formats ZeRO's targets, and whether this run met them."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in result["rows"]):
        small = not name.startswith("GPT-2")
        targets = [(LOCAL, BALANCED, TORCH, 8.0 if small else (1.8 if ranks == 2 else 2.5))]
        targets += [(FULL, kind, TORCH, 3.0 if small else 1.0) for kind in (GREEDY, BALANCED)]
        for operation, kind, other, bound in [*targets, (FULL, GREEDY_VIEW, TORCH_VIEW, 1.0)]:
            row = find(result["rows"], name, operation, kind)
            times = row and row["times_as_fast_as"][other]
            lines.append(target_line(f"{name}, {operation}, {kind}", times, bound))
    ways = {name: sent for name, _, sent, _ in result["training"]}
    share = ways["balanced, sharded_gradients"] / ways["torch, DDP"]
    lines.append(target_line(f"{on_ranks(ranks)}, bytes sent, of torch's", share, 0.68, False))
    (_, theirs, _), *ours = result["consolidation"]
    for kind, spent, peak in ours:
        what = f"{on_ranks(ranks)}, consolidation, {kind}"
        lines.append(target_line(f"{what}: times as fast", theirs / spent, 3.0))
        lines.append(target_line(f"{what}: senders' MB", peak / 1e6, 64.0, False))
    return lines


def main() -> None:
    parser = harness.parser(__doc__, "bench-zero", rounds=11)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=512, help="of the GPT-2-like model")
    parser.add_argument("--state-mib", type=int, default=1024, help="state to consolidate")
    options = parser.parse_args()
    about = harness.start(options)
    if options.quick:
        options.width, options.state_mib = 16, 16
    runs = {
        n: run_ranks(on_rank, n, options.rounds, options.width, options.state_mib)
        for n in options.ranks
    }
    rows = [row for result in runs.values() for row in result["rows"]]
    view = [
        (row["set"], row["operation"], row["implementation"], f"{times[TORCH_VIEW]:.2f}")
        for row in rows
        if TORCH_VIEW in (times := row["times_as_fast_as"])
    ]
    held = [
        (on_ranks(n), name, kind, f"{share:.4f}")
        for n, result in runs.items()
        for name, shares in result["state over an equal share"].items()
        for kind, share in zip(IMPLEMENTATIONS, shares, strict=True)
    ]
    consolidation = [
        (on_ranks(n), kind, f"{spent:.0f}", f"{peak / 1e6:.1f}")
        for n, result in runs.items()
        for kind, spent, peak in result["consolidation"]
    ]
    training = [
        (
            *(on_ranks(n), way),
            *map("{:.2f}".format, (spent, sent, WAYS[way][2] * 4 * (n - 1) / n, peak)),
        )
        for n, result in runs.items()
        for way, spent, sent, peak in result["training"]
    ]
    tables = harness.table
    sections = {
        "Times as fast as torch's class with parameters_as_bucket_view": tables(
            ("tensors", "operation", "implementation", "x view"), view, 3
        ),
        "The fullest rank's state, of an equal share": tables(
            ("ranks", "tensors", "implementation", "of a share"), held, 3
        ),
        "Consolidation of the state on rank 0": tables(
            ("ranks", "implementation", "ms", "sender + MB"), consolidation, 2
        ),
        "Training steps: traffic and memory above the model's own": tables(
            ("ranks", "way", "ms", "B/param sent", "computed", "peak B/param"), training, 2
        ),
        "Targets": []
        if options.quick
        else [line for n, result in runs.items() for line in target_lines(n, result)],
    }
    harness.write(options.out / "zero", about, rows, sections, runs=runs)


if __name__ == "__main__":
    main()
